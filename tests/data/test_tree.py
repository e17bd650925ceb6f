# SPDX-License-Identifier: BSD-3-Clause
"""Packing sequences as a prefix tree: every row, label and index against the sequences, the way back, and borders."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BOUNDARIES, SEQUENCES, Lists, assert_same_batch, check, forests, rows_of, tensors

from flash_attn_dualkv import (
    PackedBatch,
    group_by_prefix,
    pack_prefix_tree,
    pack_shared_prompts,
)

Forest = tuple[Lists, Lists, list[int]]


def savings(batch: PackedBatch) -> list[int]:
    """What each inner node saves."""
    children = Counter(batch.layout.node_parents)
    return [(children[i] - 1) * size for i, size in enumerate(batch.layout.node_lens) if children[i]]


def distinct_prefixes(sequences: Lists, groups: list[int] | None) -> int:
    """Rows of a tree that shares whatever is equal."""
    ids = groups or [0] * len(sequences)
    return len({(g, *one[:end]) for g, one in zip(ids, sequences) for end in range(1, len(one) + 1)})


@settings(deadline=None, max_examples=100)
@given(
    forests(),
    st.sampled_from(BOUNDARIES),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 3, 5, 100]),
    st.sampled_from([None, 8]),
)
def test_round_trip(
    forest: Forest,
    boundary: Any,
    has_mask: bool,
    has_groups: bool,
    min_shared: int,
    multiple: int | None,
) -> None:
    sequences, masks, ids = forest
    given_masks, groups = masks if has_mask else None, ids if has_groups else None
    batch = pack_prefix_tree(
        sequences,
        loss_mask=given_masks,
        boundary=boundary,
        min_shared=min_shared,
        group_ids=groups,
        pad_to_multiple_of=multiple,
    )
    check(batch, sequences, given_masks, groups)
    children = Counter(batch.layout.node_parents)
    assert all(children[index] != 1 for index in range(batch.layout.num_nodes))  # chains are merged
    assert group_by_prefix(sequences, boundary=boundary, group_ids=groups, min_shared=min_shared) == batch.tree
    assert all(saved >= min_shared for saved in savings(batch))
    assert multiple is None or (batch.layout.num_tokens % multiple == 0 and batch.layout.pad < multiple)
    own = batch.rows_of(batch.jagged_index + 1)  # of the scored tokens themselves
    distinct = batch.distinct
    assert len(distinct.pick(own)) == len(own.unique())
    for values in (own, batch.token_index, batch.targets):
        assert distinct.expand(distinct.pick(values)).equal(values)
    if boundary == "gather" and min_shared == 1:
        assert batch.layout.num_tokens - batch.layout.pad == distinct_prefixes(sequences, groups)
    if boundary == "replicate":
        assert len({*zip(batch.token_index.tolist(), batch.targets.tolist())}) == len(set(batch.token_index.tolist()))


def fewest(sequences: Lists, least: int) -> int:
    """Rows of all nodes and `least` for each inner one, the fewest of all choices of inner nodes."""
    prefixes = {tuple(one[:end]) for one in sequences for end in range(len(one) + 1)}
    children = Counter(one[:-1] for one in prefixes if one)
    leaves = [one for one in prefixes if not children[one]]
    branches = [one for one in prefixes if one and children[one] > 1]
    sums = []
    for size in range(len(branches) + 1):
        for kept in combinations(branches, size):
            nodes = [*leaves, *kept]
            above = [max((len(p) for p in kept if p != one and one[: len(p)] == p), default=0) for one in nodes]
            sums.append(sum(map(len, nodes)) - sum(above) + least * size)
    return min(sums)


@settings(deadline=None, max_examples=100)
@given(forests(), st.integers(1, 20))
def test_no_other_nodes_save_more(forest: Forest, min_shared: int) -> None:
    """Among all choices of nodes, where each costs as much as min_shared tokens."""
    # Runs of equal tokens make nodes of all lengths.
    sequences = [[token for token in one for _ in range(1 + 3 * token)] for one in forest[0][:7]]
    batch = pack_prefix_tree(sequences, min_shared=min_shared, boundary="gather")
    assert batch.layout.num_tokens + min_shared * len(savings(batch)) == fewest(sequences, min_shared)


@settings(deadline=None, max_examples=50)
@given(forests(), st.sampled_from(BOUNDARIES), st.randoms(use_true_random=False))
def test_the_row_does_not_depend_on_the_order_of_the_sequences(
    forest: Forest, boundary: Any, shuffler: random.Random
) -> None:
    sequences, masks, _ = forest
    order = [*range(len(sequences))]
    shuffler.shuffle(order)
    batch = pack_prefix_tree(sequences, loss_mask=masks, boundary=boundary, min_shared=2)
    taken = [[given[i] for i in order] for given in (sequences, masks)]
    other = pack_prefix_tree(taken[0], loss_mask=taken[1], boundary=boundary, min_shared=2)
    for name in ("input_ids", "position_ids", "cu_seqlens", "parents", "multiplicity"):
        assert getattr(batch, name).equal(getattr(other, name)), name


def test_the_default_of_min_shared() -> None:
    """A short beginning is no reason for a node."""
    system, tail = [*range(64)], [[100], [101]]
    assert pack_prefix_tree([system[:63] + one for one in tail], boundary="gather").layout.num_nodes == 2
    assert pack_prefix_tree([system + one for one in tail], boundary="gather").layout.num_nodes == 3


def test_deep_and_wide_trees() -> None:
    """A comb of 1,000 turns, and 5,000 leaves below one node."""
    comb = [[*range(turn), 5000] for turn in range(1, 1001)]
    batch = pack_prefix_tree(comb, min_shared=1, boundary="gather")
    assert batch.layout.depth == 1000 and batch.layout.num_tokens == 2000
    bush = pack_prefix_tree([[1, 2, 3, end] for end in range(5000)], boundary="gather")
    assert bush.layout.node_lens == (3, *[1] * 5000) and bush.layout.depth == 2


# --- borders that are given ------------------------------------------------------------------------------------------


def borders_in(batch: PackedBatch) -> list[list[int]]:
    """Of each sequence the positions at which its rows pass from one node to the next."""
    node_of = [index for index, size in enumerate(batch.layout.node_lens) for _ in range(size)]
    return [[at for at in range(1, len(own)) if node_of[own[at]] != node_of[own[at - 1]]] for own in rows_of(batch)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_tree_of_prompts_of_one_token(boundary: Any) -> None:
    """With "replicate" its root has no rows, and a node below begins where the sequences do."""
    prompts, responses = [[5], [5]], [[1, 2], [3]]
    batch = pack_shared_prompts(prompts, responses, boundary=boundary)
    whole = [one + other for one, other in zip(prompts, responses)]
    for options in (dict(tree=batch.tree), dict(borders=batch.tree.borders, boundary=boundary)):
        again = pack_prefix_tree(whole, **options)
        assert borders_in(again) == borders_in(batch) and again.layout.num_tokens == batch.layout.num_tokens


def shared(one: list[int], other: list[int], borders: tuple[list[int], list[int]], shift: int) -> int:
    """Up to where two sequences, neither of which begins with the other, have the same nodes."""
    common = next(at for at, (a, b) in enumerate(zip(one, other)) if a != b)
    ends = [0]
    for a, b in zip(*borders):
        if a != b:
            break
        ends.append(a)
    return max(end for end in ends if end == 0 or end + shift <= common)


@settings(deadline=None, max_examples=100)
@given(forests(), st.sampled_from(BOUNDARIES), st.data())
def test_any_borders(forest: Forest, boundary: Any, data: st.DataObject) -> None:
    """They are kept, and nodes are shared that agree in tokens and borders up to their end."""
    sequences, masks, _ = forest
    places = max(map(len, sequences)) + 1
    flags = data.draw(st.lists(st.integers(0, 2), min_size=places, max_size=places))  # for most sequences the same
    own = [data.draw(st.booleans()) and data.draw(st.integers(1, 12)) for _ in sequences]
    borders = [
        [at for at in range(1, len(one) + 1) if flags[at] == 0 or at == extra] for one, extra in zip(sequences, own)
    ]
    batch = pack_prefix_tree(sequences, loss_mask=masks, boundary=boundary, borders=borders)
    check(batch, sequences, masks, None)
    assert borders_in(batch) == [[at for at in one if at < len(s)] for one, s in zip(borders, sequences)]
    rows = rows_of(batch)
    for i, one in enumerate(sequences):
        for j, other in enumerate(sequences):
            size = min(len(one), len(other))
            if one[:size] != other[:size]:
                count = shared(one, other, (borders[i], borders[j]), 1 if boundary == "replicate" else 0)
                assert len({*rows[i]} & {*rows[j]}) == count


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("origin", ["cpu", "cuda"])
def test_packing_for_a_gpu(origin: str) -> None:
    masks = [[0, *[at % 2 for at in range(1, len(one))]] if one else [] for one in SEQUENCES]
    expected = pack_prefix_tree(SEQUENCES, loss_mask=masks, min_shared=1)
    given = [[one.to(origin) for one in tensors(lists)] for lists in (SEQUENCES, masks)]
    batch = pack_prefix_tree(given[0], loss_mask=given[1], min_shared=1, device="cuda")
    assert batch.input_ids.is_cuda and batch.parents.is_cuda
    assert_same_batch(batch.to("cpu"), expected)
    assert_same_batch(expected.to("cuda").to("cpu"), expected)
