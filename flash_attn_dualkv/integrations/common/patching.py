# SPDX-License-Identifier: BSD-3-Clause
"""Functions of other libraries, looked into, and replaced once: what takes their place knows them as `dualkv_stock`.

A replacement says by its own signature which calls it was written for; another version may have others.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import Parameter
from types import FunctionType, ModuleType
from typing import Any

from ...errors import SharedPromptUnsupportedError

Make = Callable[[Any], Callable[..., Any]]  # a replacement, of what it replaces

_REST = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def in_place_of(stock: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """The function under the name and signature of `stock`, which it knows."""
    made: Any = functools.wraps(stock)(function)
    made.dualkv_stock = stock
    return made


def stock_of(function: Any) -> Any:
    """The function that a replacement stands for; other functions themselves."""
    return getattr(function, "dualkv_stock", function)


def in_front_of(function: Callable[..., Any]) -> Make:
    """Replacement by function(stock, ...): it takes the calls that `function` takes after `stock`."""

    def make(stock: Any) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        signature = inspect.signature(function)
        parameters = [*signature.parameters.values()][1:]
        replacement.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return replacement

    return make


def replace_once(owner: Any, name: str, make: Make) -> None:
    """Put make(stock) in the place of an attribute, if nothing stands in its place yet, by `replace_all`."""
    replace_all([(owner, name, make)])


def replace_all(seams: Iterable[tuple[Any, str, Make]]) -> None:
    """Replace attributes of owners, all or none; those that are replacements stay.

    Raises:
        SharedPromptUnsupportedError: an attribute is missing, or called in other ways than its replacement takes.
    """
    made: list[tuple[Any, str, Any, Callable[..., Any]]] = []
    for owner, name, make in seams:
        stock = getattr(owner, name, None)
        if not hasattr(stock, "dualkv_stock"):
            made.append((owner, name, stock, make(stock)))
            check_signature(f"{getattr(owner, '__name__', owner)}.{name}", *made[-1][2:])
    for owner, name, stock, function in made:
        setattr(owner, name, in_place_of(stock, function))


def check_signature(name: str, stock: Any, made: Callable[..., Any]) -> None:
    """SharedPromptUnsupportedError unless `made` takes the calls of `stock`, and means the same by each argument.

    It has the same parameters and defaults; or the first of them, and hands on the others as *args or **kwargs.
    """
    expected = _bare(inspect.signature(made))
    if stock is None:
        raise SharedPromptUnsupportedError(name, f"a function {expected}", "none")
    got = _bare(inspect.signature(stock))
    rest, their_rest = ({arg.kind for arg in found.parameters.values()} & _REST for found in (expected, got))
    ours, theirs = ([arg for arg in found.parameters.values() if arg.kind not in _REST] for found in (expected, got))
    if their_rest == _REST and len(theirs) <= 1:
        return  # a wrapper, which does not tell
    options = {arg.name: arg for arg in ours if arg.kind is Parameter.KEYWORD_ONLY}  # ours may have more
    places = ours[: len(ours) - len(options)]
    pairs = [*zip(places, theirs), *((arg, got.parameters.get(option, arg)) for option, arg in options.items())]
    others = [arg.kind for arg in theirs[len(places) :] if arg.name not in options]
    is_handed_on = their_rest < rest if Parameter.POSITIONAL_OR_KEYWORD in others else Parameter.VAR_KEYWORD in rest
    is_taken = len(places) <= len(theirs) and their_rest <= rest and (not others or is_handed_on)
    if not is_taken or not all(_is_like(*pair) for pair in pairs):
        raise SharedPromptUnsupportedError(name, f"the signature {expected}", got)


def _is_like(ours: Parameter, theirs: Parameter) -> bool:
    """True if a parameter takes what another takes; `self` may have any name."""
    is_named = theirs.name in (ours.name, "self")
    return is_named and (theirs.default is Parameter.empty or theirs.default == ours.default)


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """A signature without annotations."""
    parameters = [arg.replace(annotation=Parameter.empty) for arg in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=Parameter.empty)


def closure_of(function: Any) -> dict[str, Any]:
    """Variables in the closure of a Python function, by name."""
    # getattr() with a default always returns the default in TorchDynamo of PyTorch 2.11.
    if not isinstance(function, FunctionType):
        return {}
    return dict(zip(function.__code__.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()]))


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Calls change(module) as soon as a module has been imported: now, or when it is."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, change))


class _After(MetaPathFinder):
    """Finds one module, as others do, and calls a function after its code.

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
                self.change(module)  # which may raise: the import fails, and so does the next one
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
        return spec
