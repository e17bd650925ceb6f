"""Shapes for the tests of the benchmarks, and dense attention on them."""

from __future__ import annotations

import packing
import shapes
import torch
from peers import Implementation
from shapes import Group, Shape

CPU = torch.device("cpu")
RAGGED = Shape("ragged", (Group(70, (33, 1, 90)),), 4, 2, 16)
SMALL = (
    RAGGED,
    shapes.parse("4x96x24-H4-Hk2-d16"),
    Shape("two groups", (Group(50, (20, 31)), Group(64, (64,))), 4, 1, 16),
    Shape("no prompt", (Group(0, (70, 3, 128)),), 4, 4, 16),
    Shape("one token", (Group(1, (1,)),), 2, 1, 8),
    Shape("mqa", (Group(130, (2, 2, 2)),), 6, 1, 8),
)


def dense_mask(shape: Shape) -> torch.Tensor:
    """Visibility in the packed layout, token by token from what each token is."""
    owners: list[tuple[int, int | None, int]] = []  # (group, response or None, position in the sequence)
    for number, group in enumerate(shape.groups):
        owners += [(number, None, position) for position in range(group.prompt)]
        for response, length in enumerate(group.responses):
            owners += [(number, response, group.prompt + position) for position in range(length)]
    rows = [
        [key[0] == query[0] and key[1] in (None, query[1]) and key[2] <= query[2] for key in owners] for query in owners
    ]
    return torch.tensor(rows)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def outcome(impl: Implementation, prepared: packing.Prepared, shape: Shape) -> list[torch.Tensor]:
    """Output and gradients of the packed rows, then gradients of what has no rows."""
    out, rows = prepared.run(), torch.arange(shape.packed_tokens)
    assert prepared.dout.shape == out.shape and len(out) == impl.executed(shape)[0]
    if "backward" not in impl.directions:
        return [prepared.take(out, rows)]
    gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout)
    folded = prepared.fold(gradients, rows)
    return [prepared.take(out, rows), *folded, *gradients[len(folded) :]]
