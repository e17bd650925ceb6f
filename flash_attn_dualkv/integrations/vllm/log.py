# SPDX-License-Identifier: BSD-3-Clause
"""Messages in vLLM's log."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.flash_attn_dualkv")  # under vLLM's, whose handlers print it
_SAID = "_dualkv_said"  # of an engine's configuration


def say_once(message: str, engine: Any) -> None:
    """A warning, once in an engine, for which its configuration stands: a process may make several."""
    said = vars(engine).setdefault(_SAID, set())
    if message not in said:
        said.add(message)
        logger.warning("flash_attn_dualkv: %s", message)
