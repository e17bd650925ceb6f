# SPDX-License-Identifier: BSD-3-Clause
"""Functions of other libraries, looked into, and replaced once: what takes their place knows them as `dualkv_stock`."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


def in_place_of(stock: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """The function under the name and signature of `stock`, which it knows."""
    made: Any = functools.wraps(stock)(function)
    made.dualkv_stock = stock
    return made


def stock_of(function: Any) -> Any:
    """What a function stands for; itself if it is no replacement."""
    return getattr(function, "dualkv_stock", function)


def replace_once(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Put make(stock) in the place of an attribute, if it is there and nothing stands in its place yet."""
    stock = getattr(owner, name, None)
    if stock is not None and not hasattr(stock, "dualkv_stock"):
        setattr(owner, name, in_place_of(stock, make(stock)))


def closure_of(function: Any) -> dict[str, Any]:
    """Variables in the closure of a Python function, by name."""
    # getattr() with a default always returns the default in TorchDynamo of PyTorch 2.11.
    if not isinstance(function, FunctionType):
        return {}
    return dict(zip(function.__code__.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()]))


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call change(module) as soon as a module has been imported: now, or when somebody does."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, change))


class _After(MetaPathFinder):
    """Finds one module, as others do, and calls a function behind its code.

    It stays until that has run: others may only look for the module, and an import may fail.
    """

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change
        self.state = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or getattr(self.state, "looks", False):
            return None
        self.state.looks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.state.looks = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.change(module)

        loader.exec_module = exec_module
        return spec
