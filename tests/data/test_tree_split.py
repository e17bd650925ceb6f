# SPDX-License-Identifier: BSD-3-Clause
"""Prefix trees within a token budget, and balanced over ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from core_time import least_time
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BOUNDARIES, Lists, forests, paths, rows_of

from flash_attn_dualkv import (
    PrefixTree,
    SharedPromptError,
    balance,
    group_by_prefix,
    pack_prefix_tree,
    split_by_token_budget,
)
from flash_attn_dualkv.data.balance import _costs
from flash_attn_dualkv.data.prefix_tree import Spans

Forest = tuple[Lists, Lists, list[int]]


def pack(chosen: list[int], sequences: Lists, tree: PrefixTree, boundary: Any = "gather") -> Any:
    """A micro-batch, as a user packs it."""
    return pack_prefix_tree(sequences, tree=tree, chosen=chosen, boundary=boundary)


@settings(deadline=None, max_examples=100)
@given(forests(), st.sampled_from(BOUNDARIES), st.sampled_from([1, 2, 5]), st.integers(0, 15))
def test_split(forest: Forest, boundary: Any, min_shared: int, slack: int) -> None:
    sequences = forest[0]
    budget = max(1, *map(len, sequences)) + slack
    tree = group_by_prefix(sequences, boundary=boundary, min_shared=min_shared)
    micro_batches = split_by_token_budget(tree, max_tokens=budget)
    assert sorted(itertools.chain(*micro_batches)) == [*range(len(sequences))]
    packed = [pack(one, sequences, tree, boundary) for one in micro_batches]
    assert all(one.layout.num_tokens <= budget for one in packed)
    # No two of them could be one.
    for one, other in itertools.combinations(micro_batches, 2):
        assert pack([*one, *other], sequences, tree, boundary).layout.num_tokens > budget // 2
    if sum(tree.node_lens) <= budget:
        assert len(micro_batches) == 1
    # Trees that fit are whole.
    whole = pack_prefix_tree(sequences, boundary=boundary, min_shared=min_shared)
    all_paths = paths(whole)
    roots = [all_paths[leaf][0] if leaf >= 0 else None for leaf in tree.leaves]
    rows = rows_of(whole)
    for root in {*roots} - {None}:
        members = {i for i, one in enumerate(roots) if one == root}
        if len({row for i in members for row in rows[i]}) <= budget:
            assert any(members <= {*one} for one in micro_batches), "a tree that fits was split"


@settings(deadline=None, max_examples=100)
@given(forests(), st.sampled_from(BOUNDARIES), st.sampled_from([1, 3]), st.data())
def test_a_part_of_a_tree(forest: Forest, boundary: Any, min_shared: int, data: st.DataObject) -> None:
    """What is packed: with the tokens of the chosen sequences, and with the tree's borders."""
    sequences = forest[0]
    tree = group_by_prefix(sequences, boundary=boundary, min_shared=min_shared)
    every = st.sampled_from(range(len(sequences)))
    chosen = data.draw(st.lists(every, min_size=1, unique=True))
    part, found = tree.take(chosen), pack(chosen, sequences, tree, boundary).tree
    ids = torch.tensor([token for index in chosen for token in sequences[index]], dtype=torch.int64)
    rows = Spans.of(part).rows(torch.arange(len(ids)))
    row_ids = torch.full((sum(part.node_lens),), -1).index_copy(0, rows, ids)
    assert row_ids[rows].equal(ids) and row_ids.ge(0).all()
    assert (part.sequence_lens, part.boundary) == (found.sequence_lens, found.boundary)
    assert found == part
    assert tree.take(range(len(sequences))).node_lens == tree.node_lens


def test_rows_of_tokens() -> None:
    """Of a sequence that ends within another's node, of equal ones, and of tokens in any order."""
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9], [7]]
    batch = pack_prefix_tree(sequences, min_shared=1, pad_to_multiple_of=4)
    tokens = torch.tensor([11, 4, 7, 5, 4])
    assert torch.equal(batch.rows_of(tokens), batch.row_index[tokens])
    assert batch.input_ids[batch.last_rows].tolist() == [5, 3, 9, 9, 7]
    assert batch.last_rows.tolist() == [rows[-1] for rows in rows_of(batch)]
    with pytest.raises(SharedPromptError, match="sequence 1 without any"):
        _ = pack_prefix_tree([[1], []]).last_rows


def test_a_tree_over_the_budget_is_cut_at_its_nodes() -> None:
    """Two turns with two ends each: the paths are repeated, and what shares most stays together."""
    first, second = [1] * 10, ([2] * 10, [3] * 10)
    sequences = [[*first, *turn, *[end] * 5] for turn in second for end in (4, 5)]
    tree = group_by_prefix(sequences, min_shared=1, boundary="gather")
    assert sum(tree.node_lens) == 50
    for budget, expected in ((50, [[0, 1, 2, 3]]), (49, [[0, 1], [2, 3]]), (29, [[0], [1], [2], [3]])):
        assert split_by_token_budget(tree, max_tokens=budget) == expected
    assert [pack(one, sequences, tree).layout.num_tokens for one in ([0, 1], [2, 3])] == [30, 30]


# --- balance ----------------------------------------------------------------------------------------------------------


def cost_of(chosen: list[int], sequences: Lists, tree: PrefixTree, token_cost: float) -> float:
    batch = pack(chosen, sequences, tree)
    return sum(position + 1 + token_cost for position in batch.position_ids.tolist())


@settings(deadline=None, max_examples=100)
@given(forests(), st.integers(1, 4), st.sampled_from([0.0, 7.5]))
def test_balance(forest: Forest, num_ranks: int, token_cost: float) -> None:
    """Equal counts; the costs that decide are those of the rows and pairs that are packed."""
    sequences = forest[0]
    sequences += [[5] * 9] * (-len(sequences) % num_ranks)
    tree = group_by_prefix(sequences, min_shared=1, boundary="gather")
    ranks = balance(tree, num_ranks=num_ranks, token_cost=token_cost)
    assert sorted(itertools.chain(*ranks)) == [*range(len(sequences))]
    assert {len(one) for one in ranks} == {len(sequences) // num_ranks}
    assert sum(_costs(tree, token_cost)) == cost_of([*range(len(sequences))], sequences, tree, token_cost)


def test_balance_keeps_together_what_shares() -> None:
    """Below one system prompt: four prompts of two tasks, each with four responses of which pairs begin alike."""
    sequences = [
        [1] * 20 + [task] * 30 + [prompt] * (10 + prompt) + [end // 2] * 10 + [100 + end] * 5
        for task, prompt in ((2, 3), (2, 4), (5, 6), (5, 7))
        for end in range(40, 44)
    ]
    order = [*range(16)]
    random.Random(0).shuffle(order)
    shuffled = [sequences[i] for i in order]
    tree = group_by_prefix(shuffled, min_shared=1, boundary="gather")
    for num_ranks, size in ((4, 4), (2, 8), (8, 2)):
        ranks = balance(tree, num_ranks=num_ranks)
        blocks = sorted(sorted(order[i] for i in one) for one in ranks)
        if num_ranks == 2:
            assert blocks == [[*range(8)], [*range(8, 16)]]
        assert all(len({i // min(size, 4) for i in one}) == size // min(size, 4) for one in blocks)


def test_balance_is_even() -> None:
    draw = random.Random(0)
    system = [1] * 200
    sequences = []
    for prompt in range(64):
        stem = [*system, *[10 + prompt] * draw.randint(100, 600)]
        sequences += [[*stem, *[1000 + end] * draw.randint(50, 1000)] for end in range(8)]
    tree = group_by_prefix(sequences, boundary="gather")
    ranks = balance(tree, num_ranks=8, token_cost=10000.0)
    costs = [cost_of(one, sequences, tree, 10000.0) for one in ranks]
    assert max(costs) <= 1.08 * sum(costs) / 8
    assert all(len({i // 8 for i in one}) == 8 for one in ranks)  # whole prompts
    assert least_time(1.0, balance, tree, None, None, 64) < 1.0
