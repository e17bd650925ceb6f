# SPDX-License-Identifier: BSD-3-Clause
"""Versions of vLLM."""

from __future__ import annotations

import importlib

from ...checks import explain
from ...errors import SharedPromptUnsupportedError

SUPPORTED = ("0.26", "0.33")


def check_version() -> None:
    """Refuse a vLLM that this package does not know.

    Raises:
        SharedPromptUnsupportedError: names the versions that are supported.
    """
    version = str(importlib.import_module("vllm").__version__)
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        expected = " or ".join(f"{one}.x" for one in SUPPORTED)
        raise SharedPromptUnsupportedError(explain("vllm", f"{expected} for the attention backend CUSTOM", version))
