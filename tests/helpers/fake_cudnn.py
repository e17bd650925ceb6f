# SPDX-License-Identifier: BSD-3-Clause
"""Stands for cudnn.flex_attention, cuDNN Flex Attention, on the CPU: its signatures, in plain PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from tree_cases import dense


class Plan(NamedTuple):
    visible: Tensor  # (T, T) bool
    sizes: list[torch.Size]
    builds_backward: bool


def visible(endpoints: Tensor) -> Tensor:
    """(T, T) bool of endpoints (1, n, T) int32, n odd: a row sees keys [0, F0), [F1, F2), [F3, F4) and so on."""
    batch, count, rows = endpoints.shape
    assert endpoints.dtype == torch.int32 and endpoints.is_contiguous()
    assert batch == 1 and count % 2 == 1 and (endpoints[0].diff(dim=0) >= 0).all()
    keys = torch.arange(rows)
    found = keys < endpoints[0, 0][:, None]
    for begin, end in zip(endpoints[0, 1::2], endpoints[0, 2::2]):
        found |= (keys >= begin[:, None]) & (keys < end[:, None])
    return found


def create_mask_plan(endpoints: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> Plan:
    assert endpoints.shape[2] == q.shape[1]
    return Plan(visible(endpoints), [q.shape, k.shape, v.shape], build_backward)


def flex_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask_plan: Plan,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """(1, T, H, d) each, and (1, H, T)."""
    assert [one.shape for one in (q, k, v)] == mask_plan.sizes and all(one.is_contiguous() for one in (q, k, v))
    assert mask_plan.builds_backward or not (torch.is_grad_enabled() and q.requires_grad)
    out, lse = dense(q[0], k[0], v[0], mask_plan.visible, softmax_scale or q.shape[3] ** -0.5)
    return (out[None], lse[None]) if return_lse else out[None]
