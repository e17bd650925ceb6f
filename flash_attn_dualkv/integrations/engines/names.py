# SPDX-License-Identifier: BSD-3-Clause
"""An installed engine: its release, and whether it has the names and signatures that a plug-in was written for."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from ...errors import SharedPromptUnsupportedError
from ..common.patching import check_signature


def release_of(engine: str, numbers: int = 2) -> tuple[int, ...]:
    """The first numbers of an installed engine's version; of one that has none, a build from source, (1 << 30,)."""
    version = str(importlib.import_module(engine).__version__)
    found = re.match(r"\.".join([r"(\d+)"] * numbers), version)
    return tuple(map(int, found.groups())) if found else (1 << 30,)


Differences = TypeVar("Differences")


def known_version(
    engine: str, backend: str, release: tuple[int, ...], known: Mapping[Any, Differences],
    newest: tuple[int, ...],
) -> Differences:  # fmt: skip
    """Differences of the installed engine, by its number alone; one that is newer than `newest` is taken for that.

    Args:
        engine, backend: by their names, for errors.
        release: of the installed engine.
        known: by the first release with them, oldest first.

    Raises:
        SharedPromptUnsupportedError: it is older than all that are known.
    """
    found = [differences for first, differences in known.items() if first <= release]
    if not found:
        oldest, last = (".".join(map(str, numbers)) for numbers in (min(known), newest))
        expected = f"{oldest} to {last}, or newer, for the attention backend {backend}"
        raise SharedPromptUnsupportedError(engine, expected, importlib.import_module(engine).__version__)
    return found[-1]


def check_names(names: Mapping[str, str]) -> None:
    """Look for attributes of an engine's classes, by the class: names with spaces between them.

    Raises:
        SharedPromptUnsupportedError: this engine lacks one; names it.
        ImportError: or a module.
    """
    for place, wanted in names.items():
        module, _, owner = place.rpartition(".")
        found = getattr(importlib.import_module(module), owner, None)
        code = getattr(getattr(found, "__init__", None), "__code__", None)  # which gives objects their attributes
        known = {*dir(found), *getattr(found, "__dataclass_fields__", ()), *(code.co_names if code else ())}
        lacking = ", ".join(name for name in wanted.split() if name not in known)
        if lacking:
            raise SharedPromptUnsupportedError(place, f"one with {lacking}", "none")


def check_overrides(*kinds: type) -> None:
    """SharedPromptUnsupportedError unless methods of classes take the calls of those that they stand for."""
    for kind in kinds:
        stock = kind.__mro__[1]
        for name, function in vars(kind).items():
            if inspect.isfunction(function) and hasattr(stock, name):
                check_signature(f"{stock.__name__}.{name}", getattr(stock, name), function)
