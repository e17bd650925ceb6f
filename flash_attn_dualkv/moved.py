# SPDX-License-Identifier: BSD-3-Clause
"""Old places of public modules, which go on working for one release."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def names_of(new: str, old: str) -> Callable[[str], Any]:
    """The `__getattr__` of an old module: names of the new one, with a warning.

    Args:
        new: the module that has them now, which is imported for the first of them only.
        old: the module that had them.
    """

    def getattr_of_module(name: str) -> Any:
        # Python asks every module for other names of this kind, to find out what it is.
        is_special = name.startswith("__") and name != "__all__"
        if is_special or not hasattr(module := importlib.import_module(new), name):
            raise AttributeError(f"module {old!r} has no attribute {name!r}", name=name)
        message = f"{old} has moved to {new}; its old place goes with the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(module, name)

    return getattr_of_module
