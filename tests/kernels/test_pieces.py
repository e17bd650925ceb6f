# SPDX-License-Identifier: BSD-3-Clause
"""Pieces of a row, whose keys lie in two tensors: the bits of the kernels over the whole row."""

from __future__ import annotations

import pytest
import torch
from cuts import attend_in_pieces
from launches import DEVICE, GPU_MARKS

from flash_attn_dualkv import SharedPromptLayout, shared_prompt_attention
from flash_attn_dualkv.data.parts import Cut, Piece

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]

# A prompt with responses, one of them without rows; a path whose tails share tiles on Hopper, in two levels; a forest
# whose second root stands beside kept rows.
CUTS = {
    "prompt": Cut((450, 130, 90, 0, 300), (-1, 0, 0, 0, 0), (Piece((0,), (Piece((1, 2)), Piece((3, 4)))),)),
    "path": Cut(
        (130, 130, 70, 200, 33, 90),
        (-1, 0, 1, 2, 2, 1),
        (Piece((0, 1), (Piece((2,), (Piece((3,)), Piece((4,)))), Piece((5,)))),),
    ),
    "forest": Cut((140, 90, 33, 70), (-1, 0, -1, 2), (Piece((0,), (Piece((1, 2, 3)),)),)),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize(("head_dim", "heads", "window"), [(64, (4, 1), None), (64, (4, 1), 70), (128, (2, 1), None)])
def test_bits_of_the_whole_row(head_dim: int, heads: tuple[int, int], window: int | None, name: str) -> None:
    cut = CUTS[name]
    layout = SharedPromptLayout.from_tree(cut.node_lens, cut.node_parents, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(layout.num_tokens, count, head_dim, generator=generator).to(DEVICE, torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = shared_prompt_attention(*leaves, layout, sliding_window=window)
    expected.backward(dout)
    out, totals, keys = attend_in_pieces(cut, (q, k, v), dout, softmax_scale=None, sliding_window=window, softcap=None)
    assert torch.equal(out, expected)
    assert keys.differs is not None and not keys.differs
    for total, leaf in zip(totals, leaves):
        assert leaf.grad is not None
        assert (total - leaf.grad.double()).norm() <= 5e-3 * leaf.grad.double().norm()
