# SPDX-License-Identifier: BSD-3-Clause
"""Messages in vLLM's log."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

from ..engines.messages import Engine

logger = logging.getLogger("vllm.flash_attn_dualkv")
VLLM = Engine("vLLM", logger)
_process = SimpleNamespace()  # stands for the engine where vLLM does not say which it makes


def say_once(message: str, engine: Any = None, level: int = logging.WARNING) -> None:
    """A message, once in an engine, for which its configuration stands.

    Without one, once in the engine that is being made.
    """
    if engine is None:
        config: Any = importlib.import_module("vllm.config")
        engine = config.get_current_vllm_config_or_none() or _process
    VLLM.say_once(message, engine, level)
