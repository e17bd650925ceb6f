# SPDX-License-Identifier: BSD-3-Clause
"""Attention of pieces of a row, on equal inputs: the bits of the whole row, and gradients that add up to its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cuts import attend_in_pieces, random_cut
from tree_cases import random_tree

from flash_attn_dualkv import SharedPromptLayout, SharedPromptLayoutError, shared_prompt_attention
from flash_attn_dualkv.data.parts import Cut, Piece, walk
from flash_attn_dualkv.nodes import checked_nodes, piece_table
from flash_attn_dualkv.pieces import KeptKeys, Layer, PieceLayout

LAYER = Layer("own", "own", True)


def piece_of(own: tuple[int, ...], above: dict[int, int], kept: int, **options: Any) -> PieceLayout:
    return PieceLayout.of([4, 3, 5, 2], [-1, 0, -1, 2], own, above, kept, **options)


# Two trunks, one after the other below a third: the rows of the second's keys are those of the first's.
TWO_INNER = Cut(
    (10, 6, 4, 9, 7, 3),
    (-1, 0, 1, 0, 3, 3),
    (Piece((0,), (Piece((1,), (Piece((2,)),)), Piece((3,), (Piece((4,)), Piece((5,)))))),),
)


def cut_of(seed: int) -> Cut:
    draw = random.Random(seed)
    lens, parents = random_tree(seed, draw.randint(3, 14), 20, 0.3)
    return random_cut(draw, lens, parents, 3) if seed else TWO_INNER


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_bits_and_gradients(seed: int, dtype: torch.dtype) -> None:
    draw, cut = random.Random(seed), cut_of(seed)
    whole = SharedPromptLayout.from_tree(cut.node_lens, cut.node_parents)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(whole.num_tokens, heads, 8, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (4, 2, 2, 4)
    )
    options = dict(
        sliding_window=draw.choice([None, 7, 25, 1000]), softcap=draw.choice([0.0, 3.0]), softmax_scale=None,
        sinks=torch.randn(4, generator=generator).to(dtype), backend="reference",
    )  # fmt: skip
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = shared_prompt_attention(*leaves, whole, **options)  # type: ignore[arg-type]
    expected.backward(dout)
    out, totals, keys = attend_in_pieces(cut, (q, k, v), dout, **options)
    assert torch.equal(out, expected)
    assert keys.differs is None or not keys.differs
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for total, leaf in zip(totals, leaves):
        assert leaf.grad is not None
        assert (total - leaf.grad.double()).norm() <= tolerance * leaf.grad.double().norm()


def test_cuts_have_levels() -> None:
    """Those of the test above: what it tries."""
    levels = [0] * 3
    for seed in range(20):
        pieces = walk(cut_of(seed).pieces)
        levels[min(2, sum(bool(piece.parts) for piece in pieces))] += 1
    assert min(levels) >= 3


def test_an_own_root_beside_kept_rows() -> None:
    """Its keys begin at the first row of k_decoded, where a root without keys of `k` would be one of `k`."""
    table, longest, mean = piece_table([4, 3, 5, 2], [-1, 0, -1, 2], [2, 3], {0: 0}, 4)
    assert table.tolist() == [[0, 5, 0, 4, 5, 0, -1, 2], [5, 2, 5, 9, 2, 5, 0, 2]]
    assert (longest, mean) == (7, 4)
    checked_nodes(table, 7, 4, 7)
    layout = piece_of((1, 2), {0: 0}, 4)
    assert [row[:4] for row in layout.nodes.tolist()] == [[0, 0, 0, 0], [0, 3, 4, 4], [3, 5, 0, 7]]


def test_what_is_refused() -> None:
    keys = KeptKeys()
    q = torch.zeros(3, 2, 8)
    options: dict[str, Any] = dict(layer=LAYER, softmax_scale=None, sliding_window=None, softcap=None)
    with pytest.raises(SharedPromptLayoutError, match="packed_row"):
        piece_of((1,), {0: 0}, 4).attention(q, q, q, **options)
    part = piece_of((1,), {0: 0}, 4, keys=keys)
    with pytest.raises(SharedPromptLayoutError, match="whose pass has kept the keys of all layers"):
        part.attention(q, q, q, **options)
    trunk = piece_of((0,), {}, 0, stage="keep", number=1, keys=keys)
    above = torch.zeros(4, 2, 8)
    trunk.attention(above, above, above, **options)
    with pytest.raises(ValueError, match="layers that run once"):
        trunk.attention(above, above, above, **options)
    q = q.bfloat16()
    with pytest.raises(ValueError, match="all passes under one autocast"):
        part.attention(q, q, q, **options)


def test_sums_of_many_parts() -> None:
    """64 responses of bfloat16, a part each: as exact as in one row, where 16-bit sums would be 6 times further off."""
    lens, parents = [40, *[6] * 64], [-1, *[0] * 64]
    cut = Cut(tuple(lens), tuple(parents), (Piece((0,), tuple(Piece((node,)) for node in range(1, 65))),))
    layout = SharedPromptLayout.from_tree(lens, parents)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(layout.num_tokens, 2, 8, generator=generator).bfloat16() for _ in range(4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    shared_prompt_attention(*exact, layout).backward(dout.double())
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    shared_prompt_attention(*whole, layout).backward(dout)
    _, totals, _ = attend_in_pieces(cut, (q, k, v), dout, softmax_scale=None, sliding_window=None, softcap=None)
    for total, one, reference in zip(totals, whole, exact):
        assert one.grad is not None and reference.grad is not None
        errors = [(found[:40].double() - reference.grad[:40]).norm() for found in (total, one.grad)]
        assert errors[0] <= 2 * errors[1]
