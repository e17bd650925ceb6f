# SPDX-License-Identifier: BSD-3-Clause
"""The norm after a residual in vLLM's batch-invariant mode, so that its bits depend only on its row.

vLLM 0.26 gives a row 1024 threads among fewer than 256 rows and 256 among more, in that mode, too: its sum
then has another order, and so do the bits of everything after it. 0.24 and 0.33 call the same operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import vllm.envs as envs
from torch import Tensor

from ..common.patching import replace_once

_MODULE, _NORM = "vllm.model_executor.layers.layernorm", "rms_norm_batch_invariant"


def install() -> None:
    """In batch-invariant mode: adds first, then takes the kernel of only norms, with a program for each row."""
    if envs.VLLM_BATCH_INVARIANT:
        replace_once(importlib.import_module(_MODULE), _NORM, _by_rows)


def _by_rows(stock: Callable[..., Any]) -> Callable[..., Any]:
    def norm(input: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        if residual is None:
            return stock(input, weight, eps)
        assert input.shape == residual.shape, f"residual: expected {input.shape}, as input has, got {residual.shape}"
        total = residual.add_(input)
        return stock(total, weight, eps), total

    return norm
