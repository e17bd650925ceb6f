# SPDX-License-Identifier: BSD-3-Clause
"""The kernels that write tables of nodes, run on the host, against loops that write the same."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from geometry import load_shim
from node_tables import HOSTILE_VALUES, Ints, all_forests, random_parents, tree_tables
from work_lists import UNTOUCHED, pointers


@pytest.fixture(scope="module")
def shim() -> ctypes.CDLL:
    return load_shim("work_list")


def offsets(lengths: Sequence[int], begin: int = 0) -> Ints:
    return np.concatenate([[begin], begin + np.cumsum(lengths)]).astype(np.int32)


def tree_nodes(shim: ctypes.CDLL, cu_seqlens: Ints, parents: Sequence[int]) -> Ints:
    nodes = np.full((len(parents) + 1, 8), UNTOUCHED, np.int32)
    above = np.array(parents, np.int32)
    first, second, third = pointers(cu_seqlens, above, nodes)
    shim.make_tree_nodes(first, second, len(parents), third)
    assert (nodes[-1] == UNTOUCHED).all()
    return nodes[:-1]


def test_trees(shim: ctypes.CDLL) -> None:
    """Every forest of up to 5 nodes, random ones, chains and bushes; more nodes than threads."""
    rng = np.random.default_rng(0)
    shapes = [parents for count in range(1, 6) for parents in all_forests(count)]
    shapes += [random_parents(rng, count, climb) for count in (40, 300) for climb in (0.02, 0.3, 0.6, 0.9)]
    shapes += [list(range(-1, 1499)), [-1, *[0] * 2500], [-1] * 1100, random_parents(rng, 3000, 0.4)]
    for parents in shapes:
        lengths = rng.integers(0, 9, len(parents)).tolist()
        np.testing.assert_array_equal(tree_nodes(shim, offsets(lengths), parents), tree_tables(lengths, parents).nodes)


def test_hostile_parents_end(shim: ctypes.CDLL) -> None:
    """Loops and parents behind their children are cut; lengths may be any numbers."""
    rng = np.random.default_rng(1)
    for count in (1, 2, 5, 40, 1500):
        for _ in range(4):
            parents = np.where(
                rng.random(count) < 0.5, rng.choice(HOSTILE_VALUES, count), rng.integers(-2, count + 2, count)
            )
            cu_seqlens = rng.integers(-(2**31), 2**31, count + 1).astype(np.int32)
            nodes = tree_nodes(shim, cu_seqlens, parents.tolist())
            index = np.arange(count)
            assert np.array_equal(nodes[:, 6], np.where(parents < index, parents.clip(-1), -1))
            assert (nodes[:, 7] > index).all() and (nodes[:, 7] <= count).all()


def sequence_nodes(
    shim: ctypes.CDLL, cu_q: Ints, cu_k: Ints, cu_context: Ints | None, cu_seqs: Ints | None, groups: int, rows: int
) -> Ints:
    nodes = np.full((groups + len(cu_q), 8), UNTOUCHED, np.int32)
    optional = [None if array is None else ctypes.c_void_p(array.ctypes.data) for array in (cu_context, cu_seqs)]
    shim.make_sequence_nodes(*pointers(cu_q, cu_k), *optional, len(cu_q) - 1, groups, rows, *pointers(nodes))
    assert (nodes[-1] == UNTOUCHED).all()
    return nodes[:-1]


def test_sequences_without_contexts(shim: ctypes.CDLL) -> None:
    q, k = [3, 0, 5, 2], [4, 2, 5, 0]
    nodes = sequence_nodes(shim, offsets(q), offsets(k), None, None, 0, 0)
    assert nodes.tolist() == [
        [0, 3, 1, 0, 4, 0, -1, 1], [3, 0, 2, 4, 2, 0, -1, 2], [3, 5, 0, 6, 5, 0, -1, 3], [8, 2, -2, 11, 0, 0, -1, 4],
    ]  # fmt: skip


def test_one_context(shim: ctypes.CDLL) -> None:
    """All rows of the tensor, or as many as the offsets say; keys of the sequences stand behind those rows."""
    q, k = [3, 9], [3, 2]
    whole = sequence_nodes(shim, offsets(q), offsets(k), None, None, 1, 7)
    assert whole.tolist() == [[0, 0, 0, 0, 7, 0, -1, 3], [0, 3, 7, 7, 3, 7, 0, 2], [3, 9, 0, 10, 2, 7, 0, 3]]
    begun = sequence_nodes(shim, offsets(q), offsets(k), offsets([4], 2), offsets([2]), 1, 7)
    assert begun.tolist() == [[0, 0, 0, 2, 4, 0, -1, 3], [0, 3, 4, 7, 3, 4, 0, 2], [3, 9, -3, 10, 2, 4, 0, 3]]


def test_several_contexts(shim: ctypes.CDLL) -> None:
    """Groups without sequences, in front and behind too, and contexts without tokens."""
    rng = np.random.default_rng(2)
    for _ in range(100):
        counts = rng.integers(0, 5, rng.integers(1, 8)).tolist()
        contexts = (rng.integers(0, 30, len(counts)) * rng.integers(0, 2, len(counts))).tolist()
        q, k = (rng.integers(0, 20, sum(counts)).tolist() for _ in range(2))
        begin = int(rng.integers(0, 3))  # padding before the first row
        cu_q, cu_k, cu_context = offsets(q, begin), offsets(k, begin), offsets(contexts, begin)
        rows = int(cu_context[-1]) + 2
        expected: list[list[int]] = []
        sequence = 0
        for group, count in enumerate(counts):
            root, context = len(expected), contexts[group]
            expected.append([int(cu_q[sequence]), 0, 0, int(cu_context[group]), context, 0, -1, root + count + 1])
            for i in range(sequence, sequence + count):
                q_pos0 = context + k[i] - q[i]
                expected.append(
                    [int(cu_q[i]), q[i], q_pos0, rows + int(cu_k[i]), k[i], context, root, len(expected) + 1]
                )
            sequence += count
        nodes = sequence_nodes(shim, cu_q, cu_k, cu_context, offsets(counts), len(counts), rows)
        assert nodes.tolist() == expected


def test_hostile_offsets_stay_in_the_table(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        groups, sequences = int(rng.integers(1, 9)), int(rng.integers(0, 20))
        arrays = [
            np.where(rng.random(count) < 0.5, rng.choice(HOSTILE_VALUES, count), rng.integers(0, 25, count))
            for count in (sequences + 1, sequences + 1, groups + 1, groups + 1)
        ]
        nodes = sequence_nodes(shim, *(array.astype(np.int32) for array in arrays), groups, 40)
        written = (nodes != UNTOUCHED).any(1)
        assert (nodes[:, 6] < np.arange(len(nodes)))[written].all()
