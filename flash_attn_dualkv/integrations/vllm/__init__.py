# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on decoding over shared prefixes: rollouts read each prompt once.

    vllm serve MODEL --attention-backend CUSTOM
    LLM(MODEL, attention_backend="CUSTOM")

are all, as vLLM loads this plug-in where the package is installed. DUALKV_VLLM=1 in the environment
is the same for trainers that make their own engine. docs/rollouts.md: options, metrics, and limits.

DUALKV is another name of CUSTOM. Made for vLLM 0.22 to 0.33: versions.py says what differs.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import SharedPromptUnsupportedError
from ..engines.names import check_names, check_overrides
from .log import say_once
from .selection import install as install_selection
from .versions import NAMES, installed

__all__ = ["SharedPrefixBackend", "register"]

NAME = "DUALKV"
_BACKENDS = "vllm.v1.attention.backends"


def register() -> None:
    """The entry point: makes this package vLLM's backend CUSTOM, unless another plug-in has taken that.

    It may run in every process, and again. Under a vLLM that is too old it registers the backend,
    too: taking it raises, and says so.
    """
    try:
        registry: Any = importlib.import_module(f"{_BACKENDS}.registry")
    except ImportError:  # a vLLM that has no such backends
        return
    custom = registry.AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        registry.register_backend(custom, f"{__name__}.SharedPrefixBackend")
        # An alias of the enumeration: a member of its own, as vLLM from 0.32 on makes them, is not
        # known yet where an engine's process reads its configuration.
        registry.AttentionBackendEnum._member_map_[NAME] = custom
    install_selection(custom)


def __getattr__(name: str) -> Any:
    """The backend, which imports vLLM's: an engine takes it before the first forward, which may be compiled.

    Under a vLLM that lacks a name which the backend uses it is vLLM's own FlashAttention backend,
    and the log says which.
    """
    if name != "SharedPrefixBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed()
    try:
        check_names(NAMES)
        backend = importlib.import_module(f"{__name__}.backend")
        check_overrides(backend.SharedPrefixMetadataBuilder, backend.SharedPrefixImpl)
        for module in ("norms", "prompts"):
            importlib.import_module(f"{__name__}.{module}").install()
    except (ImportError, SharedPromptUnsupportedError) as error:
        say_once(f"all layers run on vLLM's own FlashAttention backend, as this vLLM is another: {error}")
        return importlib.import_module(f"{_BACKENDS}.flash_attn").FlashAttentionBackend
    return backend.SharedPrefixBackend
