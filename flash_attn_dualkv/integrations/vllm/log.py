# SPDX-License-Identifier: BSD-3-Clause
"""What is said in vLLM's log."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.flash_attn_dualkv")  # under vLLM's, whose handlers print it
_said: set[str] = set()


def say_once(message: str) -> None:
    """A warning, once in a process."""
    if message not in _said:
        _said.add(message)
        logger.warning("flash_attn_dualkv: %s", message)
