# SPDX-License-Identifier: BSD-3-Clause
"""The blocks that build work lists and tables of nodes, compiled for the host, and what they make."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from node_tables import Ints, Problem
from numpy.typing import NDArray


class Tile(NamedTuple):
    node: int
    n_block: int


class Backward(NamedTuple):
    """What the device's list says."""

    items: Ints  # (items, 6): tile, first step, steps, slot, the item before
    splits: Ints  # (splits, 4): tile, slot, parts
    blocks: Ints  # (items x KV heads, 3): item, KV head, direction
    run_counts: Ints
    run_begins: Ints
    by_head: int
    alternating: int
    first_class: int  # items
    local_heads: int

    def by_tile(self) -> dict[Tile, list[list[int]]]:
        found = defaultdict(list)
        for node, n_block, *rest in self.items[:, :5].tolist():
            found[Tile(node, n_block)].append(rest)
        return found


class Forward(NamedTuple):
    items: Ints  # (items, 2): node, query tile or, negative, what stands for its siblings
    costs: Ints  # in KV tiles, as the list takes them
    tiles: Ints  # KV tiles that they visit


class Capacities(NamedTuple):
    items: int
    splits: int
    slots: int
    forward: int  # items of the forward list


def capacities(shim: ctypes.CDLL, problem: Problem) -> Capacities:
    out = (ctypes.c_int * 4)()
    shim.read_capacities(ctypes.byref(problem), out)
    return Capacities(*out)


UNTOUCHED = -12345  # what stands behind the rows that an array holds


def pointers(*arrays: Ints) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def backward_list(shim: ctypes.CDLL, problem: Problem) -> Backward:
    most = capacities(shim, problem)
    guard = most.slots + 8  # rows: more than could be written behind an array
    items, splits = (
        np.full((rows + guard, columns), UNTOUCHED, np.int32) for rows, columns in ((most.items, 6), (most.splits, 4))
    )
    blocks = np.full(((most.items + guard) * problem.num_kv_heads, 3), -1, np.int32)
    runs = np.zeros((2, problem.num_nodes + 1), np.int32)
    counts = (ctypes.c_int * 5)()
    count = shim.build_backward(ctypes.byref(problem), *pointers(items, splits, runs[0], runs[1], blocks), counts)
    assert (items[most.items :] == UNTOUCHED).all() and (splits[most.splits :] == UNTOUCHED).all()
    return Backward(
        items[:count], splits[: counts[0]], blocks[: count * problem.num_kv_heads], runs[0], runs[1], *counts[1:]
    )


class Step(NamedTuple):
    """Of a walk from the end."""

    row: int  # the first of its query tile that it has
    end: int  # of these rows
    pack: int
    turn: int  # when its dQ is added: DqSemaphore's number


def walk_of(shim: ctypes.CDLL, problem: Problem, item: Ints) -> list[Step]:
    steps, turns = np.zeros((int(item[3]), 3), np.int32), np.zeros(int(item[3]), np.uint64)
    found = shim.read_walk(ctypes.byref(problem), *pointers(np.ascontiguousarray(item), steps, turns))
    assert found == len(steps)
    return [Step(*step, turn) for step, turn in zip(steps.tolist(), turns.tolist())]


def are_over(shim: ctypes.CDLL, step: Step, block_m: int, done: NDArray[np.uint64]) -> list[bool]:
    """Whether a block that waits for another's part of a step's dQ goes on when that one has come to each of `done`."""
    over = np.zeros(len(done), np.bool_)
    place = step.row // block_m, step.row % block_m, step.pack
    shim.are_turns_over(*place, ctypes.c_void_p(done.ctypes.data), len(done), ctypes.c_void_p(over.ctypes.data))
    return over.tolist()


def forward_list(shim: ctypes.CDLL, problem: Problem, slice_queries: int = 0, least_tiles: int = 0) -> Forward:
    """With `slice_queries`, siblings share tiles."""
    most = capacities(shim, problem).forward
    arrays = [np.full((most + 8, 2), UNTOUCHED, np.int32), *(np.zeros(most + 8, np.int32) for _ in range(2))]
    count = shim.build_forward(ctypes.byref(problem), slice_queries, least_tiles, *pointers(*arrays))
    assert (arrays[0][most:] == UNTOUCHED).all()
    return Forward(*(array[:count] for array in arrays))


def query_places(shim: ctypes.CDLL, items: int, groups: int, num_sms: int) -> Ints:
    """(items x groups, 2): item and head, or pack of heads, of each block of a forward's grid."""
    places = np.full((items * groups, 2), UNTOUCHED, np.int32)
    shim.place_queries(items, groups, num_sms, *pointers(places))
    return places
