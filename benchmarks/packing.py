"""The deduplicated micro-batch that every implementation starts from, and the row bookkeeping between packed layouts.

Packed means ``[P][R_1]...[R_N]``, group after group. A row is an index into a packed tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from shapes import Shape
from torch import Tensor

Gradients = Sequence[Tensor]


@dataclass
class Source:
    """q, dout: (T, H, d); k, v: (T, H_k, d), rows packed ``[P][R_1]...[R_N]`` for each group."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def device(self) -> torch.device:
        return self.q.device


@dataclass
class Prepared:
    """One implementation, ready to be called on one source.

    ``run`` computes the output from ``leaves``; ``dout`` has the output's shape. ``take`` reads packed rows of the
    output as (rows, H, d). ``fold`` sums gradients of the leaves into (dq, dk, dv) of the packed layout, at least in
    fp32. For a decoder layer the leaves are its input and its weights: rows are (rows, hidden), and ``fold`` gives the
    gradients of both.
    """

    leaves: tuple[Tensor, ...]
    dout: Tensor
    run: Callable[[], Tensor]
    take: Callable[[Tensor, Tensor], Tensor]
    fold: Callable[[Gradients], tuple[Tensor, ...]]


def make_source(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Source:
    """Random normal data (zeros would draw less power and run faster)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int) -> Tensor:
        size = (shape.packed_tokens, heads, shape.head_dim)
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    return Source(shape, normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads), normal(shape.heads))


@dataclass(frozen=True)
class Span:
    """Packed rows [begin, end) of one prompt or response; ``prompt`` is the index of its group's prompt span."""

    begin: int
    end: int
    prompt: int

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


def replicated_rows(shape: Shape) -> Tensor:
    """Packed row of every token of ``[P R_1][P R_2]...``, (sum of P + R_i,) int64."""
    all_spans = spans(shape)
    pieces = [
        torch.cat([all_spans[span.prompt].rows(), span.rows()])
        for index, span in enumerate(all_spans)
        if index != span.prompt
    ]
    return torch.cat(pieces)


def gathered_rows(shape: Shape) -> Tensor:
    """Packed row of every key when each sequence gets keys of its own: ``[P][P R_1][P R_2]...``, int64."""
    prompts = [span.rows() for index, span in enumerate(spans(shape)) if index == span.prompt]
    if len(prompts) > 1:
        raise ValueError(f"{shape.name}: gathering is written for one group, got {len(prompts)}")
    return torch.cat([prompts[0], replicated_rows(shape)])


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


def scatter_sum(rows: Tensor, gradient: Tensor, total: int) -> Tensor:
    """Sum of the gradient's rows that stand for each of ``total`` packed rows."""
    gradient = wide(gradient)
    return gradient.new_zeros((total, *gradient.shape[1:])).index_add_(0, rows, gradient)


def first_copy(rows: Tensor, total: int) -> Tensor:
    """For each packed row one position of it in ``rows``."""
    position = torch.zeros(total, dtype=torch.int64, device=rows.device)
    position[rows] = torch.arange(rows.numel(), device=rows.device)
    return position


def shared_dout(shape: Shape, dout: Tensor) -> Tensor:
    """dout with a prompt's rows divided by its responses: the copies of a replicated prompt then add up to ``dout``."""
    dout = dout.clone()
    all_spans = spans(shape)
    for index, span in enumerate(all_spans):
        if index == span.prompt:
            dout[span.begin : span.end] /= sum(other.prompt == index for other in all_spans) - 1
    return dout


def fold_packed(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (wide(gradient) for gradient in gradients)
    return dq, dk, dv
