# SPDX-License-Identifier: BSD-3-Clause
"""Micro-batches that are given, as parts of cuts: what their trunks have, and what stays as it is."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_dualkv import group_by_prefix
from flash_attn_dualkv.data.batch import pack
from flash_attn_dualkv.data.divided import DividedTrees, Trunks, divided_trees, linked, split_with_trunks
from flash_attn_dualkv.data.parts import Cut, Piece, passes_of, walk
from flash_attn_dualkv.data.plan import checked_tree
from flash_attn_dualkv.data.prefix_tree import PrefixTree
from flash_attn_dualkv.data.samples import read_sequences
from flash_attn_dualkv.data.split import split_by_token_budget
from flash_attn_dualkv.errors import SharedPromptError


def sequences(seed: int, count: int) -> list[Tensor]:
    """Of few different tokens, so that they share beginnings of many lengths, and some are those of others."""
    source = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(count):
        known = source.choice(found) if found and source.random() < 0.8 else []
        begin = known[: source.randint(0, len(known))]
        found.append(begin + [source.randrange(50) for _ in range(source.randint(not begin, 20))])
    return [torch.tensor(tokens) for tokens in found]


def most_rows(cut: Cut, kept: float, state: float = 0.0) -> float:
    """Rows of the largest pass, with what is kept above it and of its own."""

    def kept_of(piece: Piece) -> float:
        states = sum(cut.node_lens[node] > 0 for node in piece.nodes)
        return bool(piece.parts) * (kept * cut.rows_of(piece) + state * states)

    def most(pieces: tuple[Piece, ...], above: float) -> float:
        own = [cut.rows_of(piece) + kept_of(piece) + above for piece in pieces]
        return max([*own, *(most(piece.parts, above + kept_of(piece)) for piece in pieces if piece.parts)])

    return most(cut.pieces, 0) if cut.pieces else 0


def check(divided: DividedTrees, tokens: list[Tensor], micro_batches: list[list[int]]) -> None:
    assert sorted([*divided.lonely, *divided.numbers]) == [*range(len(micro_batches))]
    assert [sorted(chosen) for chosen in divided.sequences] == [sorted(micro_batches[at]) for at in divided.numbers]
    order = [index for chosen in divided.sequences for index in chosen]
    samples = read_sequences([tokens[index] for index in order], loss_mask=None)
    batch = pack(samples, checked_tree(divided.tree, samples))
    assert batch.input_ids[batch.row_index].equal(samples.ids)
    assert batch.multiplicity.min() > 0  # no row without a sequence
    cut = divided.cut
    assert sum(cut.node_lens) == sum(divided.tree.node_lens) == batch.layout.num_tokens
    pieces = [*walk(cut.pieces)]
    assert sorted(node for piece in pieces for node in piece.nodes) == [*range(len(cut.node_lens))]
    parts = [piece for piece in pieces if not piece.parts]
    assert len(parts) == len(divided.numbers)
    paths = paths_of(cut.pieces, [])
    ends = torch.tensor(cut.node_lens).cumsum(0)
    begin = 0
    for piece, chosen in zip(parts, divided.sequences):
        rows = batch.row_index.split([len(tokens[index]) for index in order])[begin : begin + len(chosen)]
        nodes = {*torch.searchsorted(ends, torch.cat(rows), right=True).tolist()}
        # Each row of a part's sequences is its own or that of a trunk above, and it has some of its own.
        assert nodes <= {*piece.nodes, *paths[id(piece)]} and nodes & {*piece.nodes}
        begin += len(chosen)
    for piece in pieces:
        above = {*paths[id(piece)], -1}
        assert all(cut.node_parents[node] in {*above, *piece.nodes} for node in piece.nodes)
        assert not piece.parts or passes_of([piece]).count("P") > 1


def paths_of(pieces: tuple[Piece, ...], above: list[int]) -> dict[int, list[int]]:
    """The nodes of the trunks above each piece."""
    found = {}
    for piece in pieces:
        found[id(piece)] = above
        found |= paths_of(piece.parts, [*above, *piece.nodes])
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.sampled_from([1.0, 1.02, 1.3]),
    st.sampled_from([1.0, 1.25]), st.sampled_from(["replicate", "gather"]),
)  # fmt: skip
def test_micro_batches(seed: int, count: int, size: int, ratio: float, passes: float, boundary: str) -> None:
    tokens = sequences(seed, count)
    tree = group_by_prefix(tokens, boundary=boundary, min_shared=1)  # type: ignore[arg-type]
    order = [*range(count)]
    random.Random(seed).shuffle(order)
    micro_batches = [order[at : at + size] for at in range(0, count, size)]
    in_order = bool(seed % 2)
    divided = divided_trees(tree, micro_batches, Trunks(least_ratio=ratio, passes=passes, in_order=in_order))
    if not divided.numbers:
        assert divided.cut == Cut((), (), ())
        return
    check(divided, tokens, micro_batches)
    before = sum(sum(tree.take(micro_batches[number]).node_lens) for number in divided.numbers)
    assert sum(divided.tree.node_lens) + (passes - 1) * divided.cut.trunk_rows < before
    parts = [passes_of([piece]).count("P") for piece in divided.cut.pieces]
    if in_order:
        assert [*divided.numbers] == sorted(divided.numbers) and "FF" not in divided.cut.passes
    else:
        assert parts == sorted(parts, reverse=True)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 12), st.integers(10, 120), st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0.0, 25.0]),
)  # fmt: skip
def test_budgets(seed: int, count: int, budget: int, kept: float, state: float) -> None:
    tokens = sequences(seed, count)
    tree = group_by_prefix(tokens, boundary="replicate", min_shared=1)
    longest = max(map(len, tokens))
    try:
        micro_batches = split_with_trunks(tree, budget, Trunks(kept, state))
    except SharedPromptError:
        assert longest > budget
        return
    assert sorted(index for chosen in micro_batches for index in chosen) == [*range(count)]
    divided = divided_trees(tree, micro_batches, Trunks(kept, state), budget)
    rows = [sum(tree.take(micro_batches[number]).node_lens) for number in divided.lonely]
    assert max([*rows, most_rows(divided.cut, kept, state)]) <= budget + 1e-6
    if divided.numbers:
        check(divided, tokens, micro_batches)
    if longest <= budget:
        stock = sum(sum(tree.take(chosen).node_lens) for chosen in split_by_token_budget(tree, max_tokens=budget))
        assert sum(rows) + sum(divided.tree.node_lens) + divided.cut.trunk_rows / 4 <= stock + 1e-6


def group(prompt: int, *responses: int) -> PrefixTree:
    return PrefixTree.of_prompts([[*range(len(responses))]], [prompt] * len(responses), responses)


def test_a_group_of_equal_parts() -> None:
    divided = divided_trees(group(1001, *[99] * 8), [[0, 1, 2, 3], [4, 5, 6, 7]], Trunks())
    assert divided.lonely == () and divided.cut.node_lens == (1000, *[100] * 8)
    (trunk,) = divided.cut.pieces
    assert trunk == Piece((0,), (Piece((1, 2, 3, 4)), Piece((5, 6, 7, 8))))
    assert divided.cut.trunk_rows == 1000 and most_rows(divided.cut, 2.0) == 3000


def test_samples_of_others_stay_apart() -> None:
    """A micro-batch with samples of two prompts computes both; a prompt of two others' is kept."""
    tree = PrefixTree.of_prompts([[0, 1, 2, 3, 4], [5, 6, 7]], [100] * 8, [10] * 8)
    divided = divided_trees(tree, [[0, 1], [2, 3], [4, 5], [6, 7]], Trunks())
    assert divided.lonely == (2, 3) and divided.numbers == (0, 1)


def test_prompts_below_a_common_beginning() -> None:
    """A trunk in a trunk where both pay; else the upper one's rows are copied."""
    system = PrefixTree((400, *[300, 10, 10] * 2), (-1, 0, 1, 1, 0, 4, 4), (2, 3, 5, 6), (710,) * 4)
    singles = [[0], [1], [2], [3]]
    cut = divided_trees(system, singles, Trunks()).cut
    assert [piece.nodes for piece in cut.trunks] == [(0,), (1,), (4,)]
    short = PrefixTree((10, *[300, 10, 10] * 2), (-1, 0, 1, 1, 0, 4, 4), (2, 3, 5, 6), (320,) * 4)
    cut = divided_trees(short, singles, Trunks(least_ratio=1.1)).cut
    assert cut.node_lens == (10, 300, 10, 10) * 2 and [piece.nodes for piece in cut.trunks] == [(0, 1), (4, 5)]
    assert divided_trees(short, singles, Trunks(least_ratio=2.0)).numbers == ()


def test_a_long_prompt_in_several_passes() -> None:
    cut = divided_trees(group(1001, 50, 50), [[0], [1]], Trunks(0.5), 1200).cut
    assert cut.node_lens == (768, 232, 51, 51) and cut.node_parents == (-1, 0, 1, 1)
    assert [piece.nodes for piece in walk(cut.pieces)] == [(0,), (1,), (2,), (3,)]
    assert most_rows(cut, 0.5) == 1152 and divided_trees(group(1001, 50, 50), [[0], [1]], Trunks(), 500).lonely == (
        0,
        1,
    )


@pytest.mark.parametrize(("kept", "parts"), [(0.5, 4), (1.0, 4), (1.5, 11), (2.0, 4)])
def test_what_is_kept_counts(kept: float, parts: int) -> None:
    """1000 rows of a prompt beside responses of 100, in 1800: where nothing is saved, its copies are as before."""
    tree = group(1001, *[99] * 32)
    assert len(split_with_trunks(tree, 1800, Trunks(kept))) == parts
    assert len(split_by_token_budget(tree, max_tokens=1800)) == 4


def test_sets_that_are_linked() -> None:
    assert linked([{1}, {2}, {1, 3}, {4}, {2, 3}, {5}]) == [[0, 1, 2, 4], [3], [5]]
    assert linked([{1, 2}, {2, 3}, {1, 4}]) == [[0, 1, 2]]
    assert linked([]) == []


def test_parts_in_order() -> None:
    """Prompts of several micro-batches are kept, those of a single one run in it; not where they are longer than it."""
    # The first prompt is in 0 and 2, the second in 1 and 2, the third in 3.
    groups, order = [[0, 1, 4], [2, 3, 5], [6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
    trunks = Trunks(0.0, is_bounded=True, in_order=True)

    def divided(first: int) -> DividedTrees:
        return divided_trees(PrefixTree.of_prompts(groups, [first] * 8, [3, 4, 5, 6, 3, 3, 2, 2]), order, trunks)

    assert divided(9).numbers == (0, 1, 2) and divided(9).lonely == (3,)
    assert divided(9).cut.pieces == (Piece((0, 4), (Piece((1, 2)), Piece((5, 6)), Piece((3, 7)))),)
    assert divided(9).cut.node_lens == (8, 4, 5, 4, 8, 6, 7, 4)
    assert divided(1).numbers == ()  # without rows there is nothing to keep
    # Three micro-batches, each with a prompt and a response of the next: all prompts are longer.
    ring, pairs = PrefixTree.of_prompts([[0, 5], [1, 2], [3, 4]], [50] * 6, [3] * 6), [[0, 1], [2, 3], [4, 5]]
    found = divided_trees(ring, pairs, trunks)
    assert found.numbers == (0, 1, 2) and [piece.nodes for piece in found.cut.trunks] == [(0, 3), (6,)]
    assert most_rows(found.cut, 0.0) == 98
    assert len(divided_trees(ring, pairs, trunks._replace(is_bounded=False)).cut.trunks) == 1
    assert divided_trees(ring, pairs, trunks._replace(kept=1.0)).numbers == ()
