"""The deduplicated micro-batch that every implementation starts from, and the rows that each computes of it.

Packed means ``[P][R_1]...[R_N]``, group after group. A row is an index into a packed tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from shapes import Shape
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (T, H, d), k and v (T, H_k, d) -> (T, H, d)
Gradients = Sequence[Tensor]


@dataclass(frozen=True)
class Arrangement:
    """How an implementation lays out a micro-batch: the packed row of each of its tokens, and attention over those.

    What has to be done in every layer of a model (gathering keys, for one) is part of ``attention``.
    """

    rows: Tensor
    attention: Attention


@dataclass
class Prepared:
    """One implementation, ready to be called on one source.

    ``run`` computes the output from ``leaves``; ``dout`` has the output's shape. ``take`` reads packed rows of the
    output. ``fold`` gives packed rows of the gradients of those leaves that have rows, summed over their copies.
    """

    leaves: tuple[Tensor, ...]
    dout: Tensor
    run: Callable[[], Tensor]
    take: Callable[[Tensor, Tensor], Tensor]
    fold: Callable[[Gradients, Tensor], tuple[Tensor, ...]]


def prepare_attention(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, how: Arrangement) -> Prepared:
    """Attention alone, on random normal data (zeros would draw less power and run faster). Leaves are q, k and v."""
    source = make_source(shape, dtype, device, seed)
    rows = how.rows.to(device)
    q, k, v = (leaf(one[rows]) for one in source[:3])
    copies = first_copy(rows, shape.packed_tokens)
    return Prepared(
        (q, k, v),
        shared_dout(source[3], rows),
        lambda: how.attention(q, k, v),
        lambda out, which: out[copies[which]],
        lambda gradients, which: tuple(folded(one, rows, which, shape.packed_tokens) for one in gradients),
    )


def make_source(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v and dout of the packed rows."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.packed_tokens, one, shape.head_dim) for one in heads]
    return tuple(torch.randn(size, dtype=dtype, device=device, generator=generator) for size in sizes)


@dataclass(frozen=True)
class Span:
    """Packed rows [begin, end) of one prompt or response; ``prompt`` is the index of its group's prompt span."""

    begin: int
    end: int
    prompt: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def rows(self) -> Tensor:
        return torch.arange(self.begin, self.end)


def spans(shape: Shape) -> list[Span]:
    """All prompts and responses in packed order; a prompt's span names itself."""
    out: list[Span] = []
    begin = 0
    for group in shape.groups:
        prompt = len(out)
        for length in (group.prompt, *group.responses):
            out.append(Span(begin, begin + length, prompt))
            begin += length
    return out


def response_spans(shape: Shape) -> list[tuple[Span, Span]]:
    """The prompt and the response of every sample."""
    found = spans(shape)
    return [(found[one.prompt], one) for index, one in enumerate(found) if index != one.prompt]


def packed_rows(shape: Shape) -> Tensor:
    return torch.arange(shape.packed_tokens)


def replicated_rows(shape: Shape) -> Tensor:
    """Packed row of every token of ``[P R_1][P R_2]...``, (sum of P + R_i,) int64."""
    return torch.cat([one.rows() for pair in response_spans(shape) for one in pair])


def contexts_first_rows(shape: Shape) -> Tensor:
    """Packed row of each row of this library's layout: all prompts, then all responses."""
    prompts = [one.rows() for index, one in enumerate(spans(shape)) if index == one.prompt]
    return torch.cat([*prompts, *(response.rows() for _, response in response_spans(shape))])


def packed_positions(shape: Shape) -> Tensor:
    """Position of every packed row in its sequence: responses count on from the end of their prompt."""
    found = spans(shape)
    starts = [0 if index == one.prompt else found[one.prompt].length for index, one in enumerate(found)]
    return torch.cat([torch.arange(start, start + one.length) for start, one in zip(starts, found)])


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


def shared_dout(dout: Tensor, rows: Tensor) -> Tensor:
    """``dout`` of the packed rows for ``rows``, so that the copies of a row add up to it."""
    copies = rows.bincount(minlength=len(dout)).to(dout.dtype)
    return (dout / copies.view(-1, *[1] * (dout.dim() - 1)))[rows]
