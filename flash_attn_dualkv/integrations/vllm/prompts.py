# SPDX-License-Identifier: BSD-3-Clause
"""Lengths of the prompts of a step, from vLLM's model runners.

The metadata of a step that vLLM hands to attention backends has no lengths of prompts; its runners
do, in the order of the step's requests, after preemption and reordering, and where steps are
scheduled ahead. Both runners are listened to when they make a step's metadata.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ..replacing import replace_once


class Noted(NamedTuple):
    """Lengths of the prompts of the newest step's requests, a NumPy array; rows behind them mean nothing."""

    lengths: Any


_newest: Noted | None = None


def newest() -> Noted | None:
    """The last step's; None before the first, or where an unknown runner makes the steps."""
    return _newest


def note(lengths: Any) -> None:
    """Keep the lengths of the step that begins."""
    global _newest
    _newest = Noted(lengths)


def _of_first_runner(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _build_attention_metadata(runner: Any, *args: Any, **kwargs: Any) -> Any:
        note(runner.input_batch.num_prompt_tokens)
        return stock(runner, *args, **kwargs)

    return _build_attention_metadata


def _of_second_runner(stock: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_attn(runner: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        note(runner.req_states.prompt_len.np[input_batch.idx_mapping_np])
        return stock(runner, input_batch, *args, **kwargs)

    return prepare_attn


# vLLM's runners: module, method, and what makes the replacement.
SEAMS = (
    ("vllm.v1.worker.gpu_model_runner", "_build_attention_metadata", _of_first_runner),
    ("vllm.v1.worker.gpu.model_runner", "prepare_attn", _of_second_runner),
)


def install() -> None:
    """Listen to the runners of this process: to those that it has imported."""
    for module, method, make in SEAMS:
        if module in sys.modules:
            replace_once(sys.modules[module].GPUModelRunner, method, make)
