# SPDX-License-Identifier: BSD-3-Clause
"""Combinations of packages whose kernels are known to compute wrong gradients."""

from __future__ import annotations

import functools
import importlib.util
import os
from importlib import metadata

import torch
from packaging.version import Version

from ...errors import SharedPromptError

_HOPPER = 9
# Triton versions that compile them wrongly: the first, and the first that is right again.
_BROKEN = (Version("3.4.0"), Version("3.7.1"))
# First flash-linear-attention that computes these gradients with TileLang, if installed.
_WITH_TILELANG = Version("0.6.0")


@functools.lru_cache(maxsize=8)
def check_gated_backward(device: torch.device) -> None:
    """Refuse to train a gated delta rule on a GPU and with versions for which its gradients are wrong.

    Raises:
        SharedPromptError: flash-linear-attention on a Hopper GPU with Triton 3.4.0 to 3.7.0, without TileLang.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return
    triton = _version("triton")
    if triton is None or not _BROKEN[0] <= triton < _BROKEN[1]:
        return
    fla = _version("fla-core") or _version("flash-linear-attention")
    is_off = os.environ.get("FLA_TILELANG") == "0"  # flash-linear-attention's own switch
    if fla is not None and fla >= _WITH_TILELANG and not is_off and importlib.util.find_spec("tilelang") is not None:
        return
    expected = "Triton 3.7.1 or newer, or tilelang beside fla-core 0.6.0 or newer, to train on a Hopper GPU"
    got = f"Triton {triton}, whose gradients of the gated delta rule are wrong there"
    raise SharedPromptError("flash-linear-attention", expected, got)


def _version(distribution: str) -> Version | None:
    """The installed version; None if there is none."""
    try:
        return Version(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
