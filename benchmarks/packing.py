# SPDX-License-Identifier: BSD-3-Clause
"""The micro-batch that every implementation starts from, and the rows that each computes of it.

Packed means the nodes depth first: ``[P][R_1]...[R_N]``, group after group. A row is an index into a packed tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from shapes import Shape
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (T, H, d), k and v (T, H_k, d) -> (T, H, d)


@dataclass(frozen=True)
class Arrangement:
    """How an implementation lays out a micro-batch: the packed row of each of its tokens, and attention over those.

    What has to be done in every layer of a model (gathering keys, for one) is part of ``attention``.

    Attributes:
        copies: (packed rows,) how many rows stand for each packed row, where this is one of several micro-batches; None
            to count ``rows``.
    """

    rows: Tensor
    attention: Attention
    copies: Tensor | None = None

    def counted(self, total: int) -> Tensor:
        """``copies`` of ``total`` packed rows."""
        return self.rows.bincount(minlength=total) if self.copies is None else self.copies


@dataclass
class Prepared:
    """One implementation, ready to be called on one source.

    ``run`` computes the output from ``leaves``; ``dout`` has the output's shape. ``take`` gives packed rows of the
    output, the mean of their copies. ``fold`` gives packed rows of the gradients of those leaves that have rows, summed
    over their copies. One of several micro-batches gives its share of both.
    """

    leaves: tuple[Tensor, ...]
    dout: Tensor
    run: Callable[[], Tensor]
    take: Callable[[Tensor, Tensor], Tensor]
    fold: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, ...]]

    def backward(self, out: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
        """Gradients of the leaves. Only to be called again does it need ``retain_graph``."""
        return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=retain_graph)


def prepare_attention(shape: Shape, dtype: torch.dtype, device: torch.device, how: Arrangement) -> Prepared:
    """Attention alone, on random normal data (zeros would draw less power and run faster). Leaves are q, k and v."""
    source, total = make_source(shape, dtype, device), shape.packed_tokens
    rows, copies = how.rows.to(device), how.counted(total).to(device)
    q, k, v = (leaf(one[rows]) for one in source[:3])
    return Prepared(
        (q, k, v),
        shared(source[3], copies)[rows],
        lambda: how.attention(q, k, v),
        lambda out, which: shared(folded(out, rows, which, total), copies[which]),
        lambda gradients, which: tuple(folded(one, rows, which, total) for one in gradients),
    )


def make_source(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and dout of the packed rows."""
    generator = torch.Generator(device).manual_seed(0)
    of_qk, of_v = shape.head_dim, shape.head_dim_v or shape.head_dim
    heads = ((shape.heads, of_qk), (shape.kv_heads, of_qk), (shape.kv_heads, of_v), (shape.heads, of_v))
    sizes = [(shape.packed_tokens, *one) for one in heads]
    return tuple(torch.randn(size, dtype=dtype, device=device, generator=generator) for size in sizes)


def path_rows(shape: Shape, nodes: Sequence[int]) -> list[Tensor]:
    """Packed rows of each node's path: every token from its root to its own end."""
    rows = node_rows(shape)
    return [torch.cat([rows[index] for index in shape.paths[node]]) for node in nodes]


def node_rows(shape: Shape) -> tuple[Tensor, ...]:
    """Packed rows of each node."""
    return packed_rows(shape).split([length for length, _ in shape.nodes])


def response_rows(shape: Shape) -> list[tuple[Tensor, Tensor]]:
    """Packed rows of all that is above each leaf, and of the leaf."""
    paths = zip(shape.responses, path_rows(shape, shape.leaves))
    return [(rows[: len(rows) - length], rows[len(rows) - length :]) for length, rows in paths]


def packed_rows(shape: Shape) -> Tensor:
    return torch.arange(shape.packed_tokens)


def packed_positions(shape: Shape) -> Tensor:
    """Position of every packed row in its sequence: responses count on from the end of their prompt."""
    return torch.cat([torch.arange(end - length, end) for end, (length, _) in zip(shape.ends, shape.nodes)])


def cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(len + 1,) int32 prefix sums."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def heads_first(tensor: Tensor) -> Tensor:
    """(T, H, d) -> view of (1, H, T, d)."""
    return tensor.transpose(0, 1)[None]


def wide(tensor: Tensor) -> Tensor:
    """At least fp32, so that sums over copies of a prompt do not lose what a test looks for."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def folded(gradient: Tensor, rows: Tensor, which: Tensor, total: int) -> Tensor:
    """Sums, at least in fp32, of the gradient's rows that stand for each of the packed rows ``which``."""
    place = torch.full((total,), -1, device=rows.device)
    place[which] = torch.arange(len(which), device=rows.device)
    at = place[rows]
    chosen = wide(gradient[at >= 0])
    return chosen.new_zeros((len(which), *chosen.shape[1:])).index_add_(0, at[at >= 0], chosen)


def first_copy(rows: Tensor, total: int) -> Tensor:
    """For each packed row one position of it in ``rows``."""
    position = torch.zeros(total, dtype=torch.int64, device=rows.device)
    position[rows] = torch.arange(rows.numel(), device=rows.device)
    return position


def shared(values: Tensor, copies: Tensor) -> Tensor:
    """What each of the copies of a row gets of its value, so that they add up to it."""
    return values / copies.to(values.dtype).view(-1, *[1] * (values.dim() - 1))
