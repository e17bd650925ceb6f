# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on decoding over shared prefixes: rollouts read each prompt once.

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

are all, as vLLM loads this plug-in where the package is installed. DUALKV_VLLM=1 in the environment
is the same for trainers that make their own engine. docs/rollouts.md: options, metrics, and limits.

Made for vLLM 0.24, 0.26 and 0.33: versions.py says what differs.
"""

from __future__ import annotations

import importlib
from typing import Any

from .selection import install as install_selection
from .versions import installed

__all__ = ["SharedPrefixBackend", "register"]

_REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """The entry point: makes this package vLLM's backend CUSTOM, unless another plug-in has taken that.

    It may run in every process, and again. Under a vLLM that is not supported it registers the
    backend, too: taking it raises, and says so.
    """
    try:
        registry: Any = importlib.import_module(_REGISTRY)
    except ImportError:  # a vLLM that has no such backends
        return
    custom = registry.AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        registry.register_backend(custom, f"{__name__}.SharedPrefixBackend")
    install_selection(custom)


def __getattr__(name: str) -> Any:
    """The backend, which imports vLLM's: an engine takes it before the first forward, which may be compiled."""
    if name != "SharedPrefixBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed()
    importlib.import_module(f"{__name__}.norms").install()
    return importlib.import_module(f"{__name__}.backend").SharedPrefixBackend
