# SPDX-License-Identifier: BSD-3-Clause
"""Versions of vLLM, and all that differs between them for this plug-in."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from torch import Tensor

from ...checks import explain
from ...errors import SharedPromptUnsupportedError


class Version(NamedTuple):
    """Differences between versions of vLLM.

    packs_halves: whether a layer's cache is (pages, heads, rows, K and V side by side); else it is
        (pages, K and V, rows, heads, head_dim).
    has_rswa: whether models may have reference sliding windows.
    keeps_captures: whether the second model runner captures a draft model with metadata of steps
        that it has captured before. A plan is then another step's.
    wakes_by: module, class and method by which a worker takes back the memory that an engine which
        sleeps has given up: with other contents, at the same addresses.
    """

    packs_halves: bool = True
    has_rswa: bool = True
    keeps_captures: bool = False
    wakes_by: tuple[str, str, str] = ("vllm.v1.worker.gpu_worker", "Worker", "wake_up")

    def keys_and_values(self, cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer's cache, views of (pages, rows, heads, head_dim)."""
        k, v = cache.transpose(1, 2).split(head_dim, dim=-1) if self.packs_halves else cache.unbind(1)
        return k, v


SUPPORTED = {
    "0.24": Version(packs_halves=False, has_rswa=False, keeps_captures=True),
    "0.26": Version(),
    "0.33": Version(),
}


def installed() -> Version:
    """Version of the installed vLLM.

    Raises:
        SharedPromptUnsupportedError: this package does not know it; names the versions that are supported.
    """
    version = str(importlib.import_module("vllm").__version__)
    found = SUPPORTED.get(".".join(version.split(".")[:2]))
    if found is None:
        expected = " or ".join(f"{release}.x" for release in SUPPORTED)
        raise SharedPromptUnsupportedError(explain("vllm", f"{expected} for the attention backend CUSTOM", version))
    return found
