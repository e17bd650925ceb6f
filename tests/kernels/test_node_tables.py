# SPDX-License-Identifier: BSD-3-Clause
"""The kernels that write tables of nodes, run on the host, against the tables of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from geometry import shim_fixture
from node_tables import HOSTILE_VALUES, Ints, all_forests, random_parents, tree_tables
from work_lists import UNTOUCHED, pointers

from flash_attn_dualkv import nodes as tables

shim = shim_fixture("work_list")


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


@pytest.mark.parametrize("kind", ["no context", "one of all rows", "one", "several"])
def test_sequences(shim: ctypes.CDLL, kind: str) -> None:
    """What the CPU's table is, but for where a context begins in q; groups without sequences, contexts without rows."""
    rng = np.random.default_rng(2)
    for _ in range(100):
        counts = rng.integers(0, 5, rng.integers(1, 8) if kind == "several" else 1).tolist()
        contexts = (rng.integers(0, 30, len(counts)) * rng.integers(0, 2, len(counts))).tolist()
        q, k = (rng.integers(0, 20, sum(counts)).tolist() for _ in range(2))
        begin = int(rng.integers(0, 3))  # padding before the first row
        arrays = [offsets(q, begin), offsets(k, begin), offsets(contexts, begin), offsets(counts)]
        rows = int(arrays[2][-1]) + (2 if kind in ("one", "several") else 0)
        if kind in ("no context", "one of all rows"):
            arrays[2:] = [None, None]
        given = [None if one is None else torch.from_numpy(one) for one in arrays]
        expected = tables.sequence_nodes(*given, None if kind == "no context" else rows).numpy()
        has_context = kind != "no context"
        nodes = sequence_nodes(shim, *arrays, len(counts) * has_context, rows * has_context)
        np.testing.assert_array_equal(nodes[:, 1:], expected[:, 1:])
        np.testing.assert_array_equal(nodes[nodes[:, 1] > 0, 0], expected[nodes[:, 1] > 0, 0])


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
