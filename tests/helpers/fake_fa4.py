# SPDX-License-Identifier: BSD-3-Clause
"""Stands for flash_attn.cute, the package of FlashAttention-4, on the CPU: its signatures, in plain PyTorch.

Arguments that nobody here passes are left out, so that one more is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tree_cases import dense

Window = tuple[int | None, int | None]


def one_sequence(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window, sink: Tensor | None, softcap: float
) -> Tensor:
    """(length, H, d) each; a causal window ends at the diagonal, whatever its right side says."""
    left, right = (None if side is None or side < 0 else side for side in window)
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = behind < -(0 if causal else len(k) if right is None else right)
    if left is not None:
        hidden = hidden | (behind > left)
    return dense(q, k, v, ~hidden, scale, softcap, sink)[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[Tensor, None]:
    sizes = [cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    assert [max(one) for one in sizes] == [max_seqlen_q, max_seqlen_k] and not deterministic
    assert learnable_sink is None or learnable_sink.shape == (q.shape[1],)
    sink = None if learnable_sink is None else learnable_sink.to(q.dtype)  # its gradient is rounded once
    options = softmax_scale or q.shape[2] ** -0.5, causal, window_size, sink, softcap
    parts = zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]))
    return torch.cat([one_sequence(*part, *options) for part in parts]), None
