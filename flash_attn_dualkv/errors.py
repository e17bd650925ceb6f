# SPDX-License-Identifier: BSD-3-Clause
"""What the shared-prompt functions raise."""

from __future__ import annotations


class SharedPromptError(ValueError):
    """An argument is not as described; the message says what was expected and got."""


class SharedPromptTypeError(SharedPromptError, TypeError):
    """An argument of the shared-prompt functions has another type than described."""


class SharedPromptLayoutError(SharedPromptError):
    """A layout does not fit the tensors, the positions or the model that it was passed with."""


class SharedPromptUnsupportedError(SharedPromptError, NotImplementedError):
    """What cannot be computed with a shared prompt, such as a head dimension above 512."""
