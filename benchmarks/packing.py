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
        every: the packed rows of all micro-batches, where this is one of several.
        sinks: what ``attention`` depends on beside its arguments; a leaf, or None.
    """

    rows: Tensor
    attention: Attention
    every: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def copies(self) -> Tensor:
        """How many rows stand for each packed row."""
        return (self.rows if self.every is None else self.every).bincount()


@dataclass
class Prepared:
    """One implementation, ready to be called on one source.

    Attributes:
        leaves: what ``run`` computes the output from; the first ``with_rows`` have rows as the output, the next
            ``whole`` none: all of their gradients is compared.
        dout: the gradient of the output.
        rows: the row of the source that each row of the output stands for.
        copies: how many stand for each row of the source.
        base: part of the output that is the same for all implementations, and not compared.
    """

    leaves: tuple[Tensor, ...]
    dout: Tensor
    run: Callable[[], Tensor]
    rows: Tensor
    copies: Tensor
    with_rows: int = 0
    whole: int = 0
    base: Tensor | None = None

    def backward(self, out: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
        """Gradients of the leaves. Only to be called again does it need ``retain_graph``."""
        return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=retain_graph)

    def sampled(self, out: Tensor, gradients: Sequence[Tensor], which: Tensor) -> list[Tensor]:
        """Rows of the source: of the output the mean of their copies, of gradients the sum. Then gradients as they are.

        One of several micro-batches gives its share of all.
        """
        out = out.detach() if self.base is None else out.detach() - self.base
        sums = [self.folded(one, which) for one in (out, *gradients[: self.with_rows])]
        whole = gradients[self.with_rows : self.with_rows + self.whole]
        return [shared(sums[0], self.copies[which]), *sums[1:], *map(wide, whole)]

    def folded(self, values: Tensor, which: Tensor) -> Tensor:
        """Sums, at least in fp32, of the values' rows that stand for each of the rows ``which`` of the source."""
        place = torch.full_like(self.copies, -1)
        place[which] = torch.arange(len(which), device=which.device)
        at = place[self.rows]
        chosen = wide(values[at >= 0])
        return chosen.new_zeros((len(which), *chosen.shape[1:])).index_add_(0, at[at >= 0], chosen)


def prepare_attention(shape: Shape, dtype: torch.dtype, device: torch.device, how: Arrangement) -> Prepared:
    """Attention alone, on random normal data (zeros would draw less power and run faster).

    Leaves are q, k, v and, where there are any, sinks, which a trainer trains.
    """
    source, rows, copies = make_source(shape, dtype, device), how.rows.to(device), how.copies.to(device)
    q, k, v = (leaf(one[rows]) for one in source[:3])
    dout = shared(source[3], copies)[rows]
    leaves = (q, k, v) if how.sinks is None else (q, k, v, how.sinks)
    return Prepared(leaves, dout, lambda: how.attention(q, k, v), rows, copies, with_rows=3, whole=len(leaves) - 3)


def make_source(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and dout of the packed rows."""
    generator = torch.Generator(device).manual_seed(0)
    of_qk, of_v = shape.head_dim, shape.value_dim
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


def first_copy(rows: Tensor, total: int) -> Tensor:
    """For each packed row one position of it in ``rows``."""
    position = torch.zeros(total, dtype=torch.int64, device=rows.device)
    position[rows] = torch.arange(rows.numel(), device=rows.device)
    return position


def shared(values: Tensor, copies: Tensor) -> Tensor:
    """What each of the copies of a row gets of its value, so that they add up to it."""
    return values / copies.to(values.dtype).view(-1, *[1] * (values.dim() - 1))
