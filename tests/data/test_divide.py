# SPDX-License-Identifier: BSD-3-Clause
"""Rows of a packed row for each rank: all of them once, balanced, and queries that see what they see in the whole."""

from __future__ import annotations

import random
from itertools import accumulate, chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import Tree, paths_of, random_tree, visible

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.nodes import Node, checked_nodes, part_table, visible_pairs
from flash_attn_dualkv.parallel.divide import ROW_TILE, Runs, divide_rows


def shapes() -> st.SearchStrategy[Tree]:
    """Random trees, empty nodes included."""
    return st.builds(random_tree, st.integers(0, 999), st.integers(1, 14), st.integers(1, 40))


def seen_by_table(table: list[Node]) -> dict[int, list[int]]:
    """For each row of q the rows of k that it sees, by logical positions."""
    found: dict[int, list[int]] = {}
    for node in table:
        path = [node]
        while path[0].parent >= 0:
            path.insert(0, table[path[0].parent])
        keys = [(one.kv_pos0 + index, one.kv_begin + index) for one in path for index in range(one.kv_len)]
        for query in range(node.q_len):
            found[node.q_begin + query] = [row for position, row in keys if position <= node.q_pos0 + query]
    return found


def positions_of(table: list[Node]) -> dict[int, int]:
    return {node.q_begin + index: node.q_pos0 + index for node in table for index in range(node.q_len)}


@settings(deadline=None, max_examples=100)
@given(shapes(), st.integers(1, 6), st.integers(1, 9), st.sampled_from([1, 4, 16]))
def test_queries_see_what_they_see_in_the_whole(shape: Tree, ranks: int, chunks: int, tile: int) -> None:
    lens, parents = shape
    total = sum(lens)
    divided = divide_rows(lens, parents, ranks, chunks=chunks, tile=tile)
    rows = [[row for begin, end in runs for row in range(begin, end)] for runs in divided]
    assert len(rows) == ranks
    assert all(begin < end for runs in divided for begin, end in runs)
    assert all(end < begin for runs in divided for (_, end), (begin, _) in pairwise(runs))
    assert sorted(chain(*rows)) == [*range(total)]
    seen = [own.nonzero()[:, 0].tolist() for own in visible(shape, total)[0]]
    for runs, own in zip(divided, rows):
        table = checked_nodes(part_table(lens, parents, runs), len(own), total, None)
        assert seen_by_table(table) == {local: seen[row] for local, row in enumerate(own)}
        # Windows count positions.
        assert positions_of(table) == {local: len(seen[row]) - 1 for local, row in enumerate(own)}


@settings(deadline=None, max_examples=100)
@given(shapes(), st.integers(2, 4), st.sampled_from([1, 4, 16]))
def test_nodes_are_cut_at_tiles(shape: Tree, ranks: int, tile: int) -> None:
    lens, parents = shape
    starts = [*accumulate(lens, initial=0)]
    for begin, _ in chain(*divide_rows(lens, parents, ranks, tile=tile)):
        node = next(index for index in range(len(lens)) if starts[index] <= begin < starts[index + 1])
        assert (begin - starts[node]) % tile == 0


def grpo(groups: int, prompt: int, responses: int, least: int, most: int) -> Tree:
    generator = random.Random(0)
    lens: list[int] = []
    parents: list[int] = []
    for _ in range(groups):
        root = len(lens)
        lens += [prompt, *(generator.randint(least, most) for _ in range(responses))]
        parents += [-1, *[root] * responses]
    return lens, parents


LOADS = {
    "one group": grpo(1, 8192, 16, 2048, 2048),
    "groups": grpo(4, 4096, 8, 1024, 8192),
    "many groups": grpo(16, 256, 8, 131, 2048),
    "a long prompt": grpo(1, 65536, 4, 16384, 16384),
    "one sequence": ([131072], [-1]),
    "a long tree": random_tree(7, 50, 8192, 0.45),
    "short nodes": random_tree(0, 500, 400, 0.45),
}


def loads(shape: Tree, divided: list[Runs]) -> tuple[float, float]:
    """Of the fullest rank, over the mean: rows and visible pairs."""
    lens = shape[0]
    starts, begins = [*accumulate(lens, initial=0)], [len(path) - size for path, size in zip(paths_of(shape), lens)]
    seen = (begin + place + 1 for begin, length in zip(begins, lens) for place in range(length))
    before = [*accumulate(seen, initial=0)]
    rows = [sum(end - begin for begin, end in runs) for runs in divided]
    pairs = [sum(before[end] - before[begin] for begin, end in runs) for runs in divided]
    assert sum(rows) == starts[-1]
    assert sum(pairs) == sum(map(visible_pairs, begins, lens))
    return max(rows) * len(rows) / sum(rows), max(pairs) * len(pairs) / sum(pairs)


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_balance(name: str, ranks: int) -> None:
    shape = LOADS[name]
    rows, pairs = loads(shape, divide_rows(*shape, ranks))
    # A cut lies up to a tile from its place, where rows may have twice the mean's keys.
    of_tile = ROW_TILE * ranks / sum(shape[0])
    assert rows <= 1 + of_tile
    assert pairs <= 1.02 + 2 * of_tile


def test_a_zigzag_is_not_enough() -> None:
    """What the number of chunks is for."""
    shape = LOADS["a long tree"]
    assert loads(shape, divide_rows(*shape, 4, chunks=2))[1] > 1.2
    assert loads(shape, divide_rows(*shape, 4))[1] < 1.02


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], [-1], 0), "ranks: expected an int >= 1, got 0"),
        (([3], [-1, 0], 2), "parents: expected 1 of them"),
        (([-3], [-1], 2), r"node_lens\[0\]: expected"),
    ],
)
def test_errors(arguments: tuple[list[int], list[int], int], message: str) -> None:
    with pytest.raises(SharedPromptError, match=message):
        divide_rows(*arguments)
