# SPDX-License-Identifier: BSD-3-Clause
"""Packages that are imported by others and needed by nothing that is tested: what is taken from them is a mock."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str], contents: dict[str, dict[str, Any]]) -> None:
        self.names, self.contents = names, contents

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        made = {"__file__": "stand-in", **self.contents.get(module.__name__, {})}
        module.__dict__.update(made)

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        module.__dict__["__getattr__"] = get


@contextmanager
def stand_ins(*names: str, **contents: dict[str, Any]) -> Iterator[None]:
    """Inside, imports of these packages succeed; afterwards they are missing as before.

    `contents` are of modules, by their names with "__" for each dot.
    """
    finder = _Finder(names, {name.replace("__", "."): one for name, one in contents.items()})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [one for one in sys.modules if one.split(".")[0] in names]:
            del sys.modules[name]
