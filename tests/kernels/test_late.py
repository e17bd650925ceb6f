# SPDX-License-Identifier: BSD-3-Clause
"""Some rows of a packed row as queries, with the keys of all: nodes without queries, at the root and amid a path."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import oracle
import pytest
import torch
from launches import DEVICE, GPU_MARKS, configurations
from torch import Tensor

from flash_attn_dualkv import SharedPromptLayout, shared_prompt_attention

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]

# Lengths and parents of nodes, and the runs of rows that are read, within their nodes.
Rows = tuple[list[int], list[int], dict[int, list[tuple[int, int]]]]
ROWS: dict[str, Rows] = {
    "prompts": ([300, 70, 131, 1, 200, 90], [-1, 0, 0, 0, -1, 4], {1: [(0, 69)], 2: [(0, 130)], 5: [(0, 89)]}),
    # Tool output between what a model writes, and a branch below one; the last node has two runs.
    "turns": (
        [130, 80, 200, 66, 150, 70, 300],
        [-1, 0, 1, 2, 3, 2, 5],
        {1: [(0, 80)], 4: [(10, 150)], 6: [(0, 64), (170, 299)]},
    ),
    "one row": ([500, 90], [-1, 0], {1: [(40, 41)]}),
}


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("name", ROWS)
@configurations
def test_some_queries_of_a_row(options: dict[str, Any], name: str, window: int | None) -> None:
    """As attention of all rows, whose other rows have no gradient; bit by bit where dK and dV are summed in order."""
    lengths, parents, read = ROWS[name]
    layout = SharedPromptLayout.from_tree(lengths, parents, pad=3, device=DEVICE)
    starts = [*accumulate(lengths, initial=0)]
    rows = torch.cat([torch.arange(starts[node] + a, starts[node] + b) for node in read for a, b in read[node]])
    late = layout.reading(rows.to(DEVICE))
    assert late is not None and (late.nodes[:, 1] == 0).any()
    index = late.query_rows
    assert index is not None and len(index) < sum(lengths) - 63 and torch.isin(rows.to(DEVICE), index).all()

    heads, kv_heads = options["heads"]
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        values = torch.randn(layout.num_tokens, heads, options["head_dim"], generator=generator)
        return values.to(DEVICE, options["dtype"])

    q, k, v, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
    for deterministic in (False, True):
        found = []
        for own, queries, upstream in ((layout, q, torch.zeros_like(dout).index_copy(0, index, dout[index])),
                                       (late, q[index], dout[index])):  # fmt: skip
            leaves = [one.clone().requires_grad_() for one in (queries, k, v)]
            more: dict[str, Any] = dict(sliding_window=window, deterministic=deterministic)
            out = shared_prompt_attention(*leaves, own, **more)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
        (out, dq, dk, dv), got = found
        for one, right in zip(got, (out[index], dq[index], dk, dv), strict=True):
            assert (one.double() - right.double()).norm() <= oracle.FROBENIUS_BOUND[q.dtype] * right.double().norm()
