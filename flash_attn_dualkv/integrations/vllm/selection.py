# SPDX-License-Identifier: BSD-3-Clause
"""Which attention backend vLLM takes for a layer: where this one cannot serve, vLLM's own choice."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ...checks import environment_flag
from ...errors import SharedPromptError
from ..common.patching import replace_once
from .log import say_once

FLAG = "DUALKV_VLLM"


def install(custom: Any) -> None:
    """Let vLLM's choice of a backend know this one, `custom` of vLLM's enumeration if no other plug-in has that."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform

    def choosing(stock: Callable[..., str]) -> Callable[..., str]:
        def get_attn_backend_cls(selected_backend: Any, *args: Any, **kwargs: Any) -> str:
            path = custom.get_path() if custom.is_overridden() else "none"
            is_ours = path.startswith(f"{__package__}.")
            if selected_backend is None and environment_flag(FLAG):
                if is_ours:
                    selected_backend = custom
                else:
                    remedy = "VLLM_PLUGINS=flash_attn_dualkv loads this one alone"
                    say_once(f"{FLAG}=1 has no effect: vLLM's backend CUSTOM is another plug-in's, {path}. {remedy}")
            if selected_backend is not custom or not is_ours:
                return stock(selected_backend, *args, **kwargs)
            try:
                return stock(custom, *args, **kwargs)
            except SharedPromptError:
                raise
            except ValueError as error:  # vLLM's: MLA, sparse attention, and so on
                say_once(f"layers run on vLLM's own attention backend: {error}")
                return stock(None, *args, **kwargs)

        return get_attn_backend_cls

    replace_once(platform, "get_attn_backend_cls", choosing)
