# SPDX-License-Identifier: BSD-3-Clause
"""Switches in the environment of the process."""

from __future__ import annotations

import os

from .checks import explain

_SPELLINGS = {
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
    **dict.fromkeys(("1", "true", "yes", "on"), True),
}


def environment_flag(name: str) -> bool:
    """A switch in the environment, off where it is not set."""
    text = os.environ.get(name)
    return False if text is None else spelled_flag(f"the environment's {name}", text)


def spelled_flag(name: str, text: str) -> bool:
    """A bool in one of its usual spellings."""
    value = _SPELLINGS.get(text.strip().lower())
    if value is None:
        raise ValueError(explain(name, "1 or 0 (true, false, yes, no, on, off)", repr(text)))
    return value
