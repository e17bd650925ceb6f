# SPDX-License-Identifier: BSD-3-Clause
"""Errors of the shared-prompt functions, and warnings that are given once."""

from __future__ import annotations

import sys
import warnings
from typing import Any

_said: set[str] = set()


def explain(name: str, expected: object, got: object) -> str:
    """The wording of every argument error."""
    return f"{name}: expected {expected}, got {got}"


class SharedPromptError(ValueError):
    """An argument is not as described: its name, what was expected and what was got; or a message that says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*([explain(*args)] if len(args) == 3 else args))


class SharedPromptTypeError(SharedPromptError, TypeError):
    """An argument of the shared-prompt functions has another type than described."""


class SharedPromptLayoutError(SharedPromptError):
    """A layout does not fit the tensors, the positions or the model that it was passed with."""


class SharedPromptUnsupportedError(SharedPromptError, NotImplementedError):
    """Something that cannot be computed with a shared prompt, such as a head dimension above 512."""


def say_once(text: str, about: str | None = None) -> None:
    """Warn of what may be a mistake, the first time that it comes up: a text, or any text about something."""
    about = about or text
    if about not in _said:
        _said.add(about)
        level, frame = 1, sys._getframe()
        # The caller's line: outside of this package.
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
            level, frame = level + 1, frame.f_back
        warnings.warn(f"flash_attn_dualkv: {text}", stacklevel=level)
