# SPDX-License-Identifier: BSD-3-Clause
"""Layouts whose queries are some of their rows: which rows these are, and attention of them in float64."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch import Tensor
from tree_cases import random_tree

from flash_attn_dualkv import SharedPromptLayout, layout, nodes, shared_prompt_attention
from flash_attn_dualkv.errors import SharedPromptLayoutError


def rows_of(*runs: tuple[int, int]) -> list[int]:
    return [row for run in runs for row in range(*run)]


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        ([(0, 200)], None),
        ([], None),
        ([(63, 100), (163, 137 + 63)], None),  # 63 rows before, between and none behind
        ([(64, 100), (150, 200)], [(64, 200)]),
        ([(0, 20), (84, 100)], [(0, 20), (84, 100)]),
        ([(199, 200)], [(199, 200)]),
        ([(0, 137)], None),
        ([(0, 136)], [(0, 136)]),
    ],
)
def test_rows_that_stay(read: list[tuple[int, int]], kept: list[tuple[int, int]] | None) -> None:
    whole = SharedPromptLayout.from_tree([150, 47], [-1, 0], pad=3)
    rows = torch.tensor(rows_of(*read) * 2, dtype=torch.int64)
    late = whole.reading(rows[torch.randperm(len(rows))])
    assert (late is None) == (kept is None)
    if late is not None and kept is not None:
        assert late.query_rows is not None and late.query_rows.tolist() == rows_of(*kept)
        assert late.num_queries == len(late.query_rows) and late.num_tokens == whole.num_tokens == 200
        assert late.is_like(whole) and late.late is None


def test_attention_of_random_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forests with empty nodes and padding: outputs, and all gradients of a loss of these rows."""
    monkeypatch.setattr(layout, "MIN_LEAVING", 1)
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, 8, generator=generator, dtype=torch.float64)

    split = 0
    for seed in range(40):
        lengths, parents = random_tree(seed, draw.randint(1, 7), 12, 0.4)
        whole = SharedPromptLayout.from_tree(lengths, parents, pad=draw.randint(0, 3))
        rows = torch.tensor([row for row in range(sum(lengths)) if draw.random() < 0.5], dtype=torch.int64)
        late = whole.reading(rows)
        if late is None:
            continue
        assert torch.equal(late.query_rows, rows)
        split += int((late.nodes[:, 4] == 0).sum())
        nodes.checked_nodes(late.nodes, len(rows), whole.num_tokens, None)
        late = pickle.loads(pickle.dumps(late))
        q, k, v, dout = normal(whole.num_tokens, 4), *(normal(whole.num_tokens, 2) for _ in "kv"), normal(len(rows), 4)
        found, window = [], draw.choice([None, 5])
        for own, queries in ((whole, q), (late, q[rows])):
            leaves = [one.clone().requires_grad_() for one in (queries, k, v)]
            out = shared_prompt_attention(*leaves, own, sliding_window=window)
            out = out[rows] if own is whole else out
            gradients = torch.autograd.grad(out, leaves, dout)
            found.append([out, gradients[0][rows] if own is whole else gradients[0], *gradients[1:]])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert split > 20


def test_other_numbers_of_rows_are_refused() -> None:
    late = SharedPromptLayout.from_tree([100, 20], [-1, 0]).reading(torch.arange(100, 120))
    assert late is not None
    q, k = torch.randn(20, 2, 8), torch.randn(120, 2, 8)
    assert shared_prompt_attention(q, k, k, late).shape == q.shape
    for wrong in ((k, k), (q, q), (q[:-1], k)):
        with pytest.raises(SharedPromptLayoutError, match="20 rows, its query_rows, in q and 120 in k"):
            shared_prompt_attention(wrong[0], wrong[1], wrong[1], late)


def test_rows_on_the_host_are_found_without_waiting() -> None:
    """A layout whose values nobody can read gets those of rows that are on the host."""
    whole, rows = SharedPromptLayout.from_tree([100, 20], [-1, 0]), torch.arange(100, 120)
    expected, late = whole.reading(rows), whole.to("meta").reading(rows)
    assert expected is not None and late is not None and late.query_rows is not None
    assert late.num_queries == 20 and late.mean_keys == expected.mean_keys
    assert late.nodes.shape == expected.nodes.shape and late.nodes.is_meta and late.query_rows.is_meta


def test_a_copy_elsewhere_has_the_late_rows() -> None:
    whole = SharedPromptLayout.from_tree([100, 20], [-1, 0])
    late = whole.reading(torch.arange(100, 120))
    copy = SharedPromptLayout(**{**vars(whole), "late": late}).to("meta")
    assert copy.late is not None and copy.late.query_rows is not None
    assert copy.num_unread == 100 and copy.late.query_rows.device.type == copy.late.nodes.device.type == "meta"
