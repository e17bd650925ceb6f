# SPDX-License-Identifier: BSD-3-Clause
"""Rows and states on their way to and from the layers, with gradients that are summed in float32 in a fixed order.

PyTorch's own gradients of these gathers add with atomics on a GPU, in the type of the activations: of a prompt's last
rows, which every response reads, that would be a sum of 16-bit numbers in random order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .levels import Tails


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """(n, ...), rows (m,) int64, each at most once -> (m, ...)."""
    return _TakeRows.apply(values, rows)


def put_rows(values: Tensor, rows: Tensor, total: int) -> Tensor:
    """(m, ...), rows (m,) int64, each at most once -> (total, ...), zero in all other rows."""
    return values.new_zeros(total, *values.shape[1:]).index_copy(0, rows, values)


def insert_tails(values: Tensor, tails: Tails) -> Tensor:
    """Rows (T, C) of a packed row, and given ones behind it -> (E, C), each segment behind the last inputs of its path.

    Zeros stand where there are none.
    """
    return _InsertTails.apply(values, tails)


def hand_on(states: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    """States (p, ...) of parents -> (n, ...), one for each child.

    Args:
        parents: (n,) int64, which state each child continues, in ascending order.
        children: (p,) int64, how many children each state has.
    """
    return _HandOn.apply(states, parents, children)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.total = values.shape[0]
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return put_rows(gradient, rows, ctx.total), None


class _InsertTails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, tails: Tails) -> Tensor:
        ctx.tails, ctx.given = tails, len(values) - len(tails.own)
        out = values.new_zeros(tails.total, values.shape[1]).index_copy_(0, tails.own, values[: len(tails.own)])
        return out.index_copy_(0, tails.copies, values.index_select(0, tails.copied))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        tails = ctx.tails
        out = functional.pad(gradient.index_select(0, tails.own), (0, 0, 0, ctx.given))
        if tails.sources.numel():
            copies = sum_runs(gradient.index_select(0, tails.copies), tails.counts)
            together = copies + out.index_select(0, tails.sources)
            out.index_copy_(0, tails.sources, together.to(out.dtype))
        return out, None


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, parents: Tensor, children: Tensor) -> Tensor:
        ctx.save_for_backward(children)
        return states.index_select(0, parents)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (children,) = ctx.saved_tensors
        sums = sum_runs(gradient.flatten(1), children).unflatten(1, gradient.shape[1:])
        return sums.to(gradient.dtype), None, None


def sum_runs(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums (p, C) of runs of rows of (n, C), lengths (p,) of them, in float32 or wider, one after the other."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32)).contiguous()
    return torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=True)
