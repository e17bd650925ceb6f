# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the queries of a row, with all of its keys: what context parallelism asks of the kernels."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from launches import DEVICE, GPU_MARKS
from torch import Tensor

from flash_attn_dualkv import SharedPromptLayout, ops
from flash_attn_dualkv.nodes import part_table
from flash_attn_dualkv.packed_attention import packed_options
from flash_attn_dualkv.parallel.divide import ROW_TILE, Runs

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]

# Prompts with responses; a path whose tails share tiles on Hopper; nodes without own queries amid a
# path.
ROWS = {
    "prompts": ([850, 300, 400, 90], [-1, 0, 0, -1]),
    "path": ([*[130] * 5, 2 * ROW_TILE + 100], [-1, 0, 1, 2, 3, 4]),
    "tree": ([430, 150, 3, 800, 90, 1, 70, 136], [-1, 0, 1, 2, 1, 0, 5, 6]),
}
PARTS = 2


def dealt(lens: list[int], tile: int) -> list[Runs]:
    """Each tile of each node to the next part: as many cuts as there may be."""
    found: list[Runs] = [[] for _ in range(PARTS)]
    for start, length in zip(accumulate(lens, initial=0), lens):
        for row in range(start, start + length, tile):
            found[sum(map(len, found)) % PARTS].append((row, min(row + tile, start + length)))
    return found


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    ("head_dim", "heads", "tile", "window"),
    [
        (64, (4, 1), ROW_TILE, None),
        (64, (4, 1), ROW_TILE, 70),
        (64, (4, 1), 100, 70),
        (128, (1, 1), ROW_TILE, 700),
        (128, (1, 1), 100, None),
    ],
)
def test_parts(head_dim: int, heads: tuple[int, int], tile: int, window: int | None, name: str) -> None:
    lens, parents = ROWS[name]
    layout = SharedPromptLayout.from_tree(lens, parents, device=DEVICE)
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        values = torch.randn(layout.num_tokens, heads, head_dim, generator=generator)
        return values.to(DEVICE, torch.bfloat16)

    q, k, v, dout = normal(heads[0]), normal(heads[1]), normal(heads[1]), normal(heads[0])
    options = packed_options(
        q, layout, softmax_scale=None, sliding_window=window, softcap=None, backend="auto", deterministic=False
    )

    def attend(nodes: Tensor, rows: Tensor) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in (q[rows], k, v)]
        out, lse = ops.attend(*leaves, nodes, options)
        out.backward(dout[rows])
        return [out.detach(), lse.detach(), *(one.grad for one in leaves if one.grad is not None)]

    out, lse, *gradients = attend(layout.nodes, torch.arange(layout.num_tokens, device=DEVICE))
    dq, dk, dv = (torch.zeros(one.shape, device=DEVICE) for one in (q, k, v))
    for runs in dealt(lens, tile):
        rows = torch.cat([torch.arange(*run, device=DEVICE) for run in runs])
        part = attend(part_table(lens, parents, runs).to(DEVICE), rows)
        # Query tiles of all kernels divide ROW_TILE. At other cuts query tiles lie elsewhere, and
        # with them the first key of a window, from which tiles of keys are counted.
        if tile == ROW_TILE or window is None:
            assert torch.equal(part[0], out[rows])
            assert torch.equal(part[1], lse[:, rows])
        torch.testing.assert_close(part[0].float(), out[rows].float(), rtol=0, atol=0.02)
        dq[rows] = part[2].float()
        dk += part[3]
        dv += part[4]
    for total, whole in zip((dq, dk, dv), gradients, strict=True):
        assert (total - whole.float()).norm() <= 5e-3 * whole.float().norm()
