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
from flash_attn_dualkv.data.divided import DividedTree, divided_trees, split_with_trunks
from flash_attn_dualkv.data.parts import Piece, walk
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


def check(divided: DividedTree, tokens: list[Tensor], micro_batches: list[list[int]]) -> None:
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
        if piece.parts:
            assert len(numbers_below(piece)) > 1


def paths_of(pieces: tuple[Piece, ...], above: list[int]) -> dict[int, list[int]]:
    """The nodes of the trunks above each piece."""
    found = {}
    for piece in pieces:
        found[id(piece)] = above
        found |= paths_of(piece.parts, [*above, *piece.nodes])
    return found


def numbers_below(piece: Piece) -> list[Piece]:
    return [part for part in walk(piece.parts) if not part.parts]


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
    lonely, found = divided_trees(tree, micro_batches, least_ratio=ratio, passes=passes)
    assert sorted([*lonely, *(number for divided in found for number in divided.numbers)]) == [
        *range(len(micro_batches))
    ]
    assert [len(divided.numbers) for divided in found] == sorted((len(other.numbers) for other in found), reverse=True)
    stock = [sum(tree.take(chosen).node_lens) for chosen in micro_batches]
    for divided in found:
        check(divided, tokens, micro_batches)
        rows, before = sum(divided.tree.node_lens), sum(stock[number] for number in divided.numbers)
        assert (rows + (passes - 1) * divided.trunk_rows) < before


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(10, 120), st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_budgets(seed: int, count: int, budget: int, kept: float) -> None:
    tokens = sequences(seed, count)
    tree = group_by_prefix(tokens, boundary="replicate", min_shared=1)
    longest = max(map(len, tokens))
    try:
        micro_batches = split_with_trunks(tree, budget, kept)
    except SharedPromptError:
        assert longest > budget
        return
    assert sorted(index for chosen in micro_batches for index in chosen) == [*range(count)]
    lonely, found = divided_trees(tree, micro_batches, max_tokens=budget, kept=kept)
    rows = [sum(tree.take(micro_batches[number]).node_lens) for number in lonely]
    assert max([*rows, *(divided.most_rows(kept) for divided in found)]) <= budget
    for divided in found:
        check(divided, tokens, micro_batches)
    if longest <= budget:
        stock = sum(sum(tree.take(chosen).node_lens) for chosen in split_by_token_budget(tree, max_tokens=budget))
        trees = sum(sum(divided.tree.node_lens) + divided.trunk_rows / 4 for divided in found)
        assert sum(rows) + trees <= stock + 1e-6


def group(prompt: int, *responses: int) -> PrefixTree:
    return PrefixTree.of_prompts([[*range(len(responses))]], [prompt] * len(responses), responses)


def test_a_group_of_equal_parts() -> None:
    lonely, (divided,) = divided_trees(group(1001, *[99] * 8), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert lonely == [] and divided.cut.node_lens == (1000, *[100] * 8)
    (trunk,) = divided.cut.pieces
    assert trunk == Piece((0,), (Piece((1, 2, 3, 4)), Piece((5, 6, 7, 8))))
    assert divided.trunk_rows == 1000 and divided.most_rows(2.0) == 3000


def test_samples_of_others_stay_apart() -> None:
    """A micro-batch with samples of two prompts computes both; a prompt of two others' is kept."""
    tree = PrefixTree.of_prompts([[0, 1, 2, 3, 4], [5, 6, 7]], [100] * 8, [10] * 8)
    lonely, (divided,) = divided_trees(tree, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert lonely == [2, 3] and divided.numbers == (0, 1)


def test_prompts_below_a_common_beginning() -> None:
    """A trunk in a trunk where both pay; else the upper one's rows are copied."""
    system = PrefixTree((400, *[300, 10, 10] * 2), (-1, 0, 1, 1, 0, 4, 4), (2, 3, 5, 6), (710,) * 4)
    singles = [[0], [1], [2], [3]]
    _, (divided,) = divided_trees(system, singles)
    assert [piece.nodes for piece in walk(divided.cut.pieces) if piece.parts] == [(0,), (1,), (4,)]
    short = PrefixTree((10, *[300, 10, 10] * 2), (-1, 0, 1, 1, 0, 4, 4), (2, 3, 5, 6), (320,) * 4)
    _, trees = divided_trees(short, singles, least_ratio=1.1)
    assert [divided.cut.node_lens for divided in trees] == [(10, 300, 10, 10)] * 2
    assert divided_trees(short, singles, least_ratio=2.0)[1] == []


def test_a_long_prompt_in_several_passes() -> None:
    _, (divided,) = divided_trees(group(1001, 50, 50), [[0], [1]], max_tokens=1200, kept=0.5)
    assert divided.cut.node_lens == (768, 232, 51, 51) and divided.cut.node_parents == (-1, 0, 1, 1)
    assert [piece.nodes for piece in walk(divided.cut.pieces)] == [(0,), (1,), (2,), (3,)]
    assert divided.most_rows(0.5) == 1152 and divided_trees(group(1001, 50, 50), [[0], [1]], max_tokens=500)[1] == []


@pytest.mark.parametrize(("kept", "parts"), [(0.5, 4), (1.0, 4), (1.5, 11), (2.0, 4)])
def test_what_is_kept_counts(kept: float, parts: int) -> None:
    """1000 rows of a prompt beside responses of 100, in 1800: where nothing is saved, its copies are as before."""
    tree = group(1001, *[99] * 32)
    assert len(split_with_trunks(tree, 1800, kept)) == parts
    assert len(split_by_token_budget(tree, max_tokens=1800)) == 4
