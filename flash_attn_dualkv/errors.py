# SPDX-License-Identifier: BSD-3-Clause
"""Errors of the shared-prompt functions, and warnings that are given once."""

from __future__ import annotations

import sys
import warnings

_said: set[str] = set()


class SharedPromptError(ValueError):
    """An argument is not as described; the message says what was expected and got."""


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
