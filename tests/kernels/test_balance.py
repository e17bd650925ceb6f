# SPDX-License-Identifier: BSD-3-Clause
"""Simulated schedules of prefix trees and shared prompts: how long multiprocessors stand idle, and what they read.

An item takes as long as its steps and what a block takes beside them; a multiprocessor that is free takes the next.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterable

import numpy as np
import pytest
from geometry import shim_fixture
from node_tables import Tables, comb, joined, packed_prompts, random_parents, tree_tables
from shapes import TREES
from work_lists import backward_list, forward_list, query_places

shim = shim_fixture("work_list")

NUM_SMS = 132
HEADS, KV_HEADS = 32, 8
MOST_IDLE = 0.03  # of the time until the last multiprocessor ends; a tenth is what the schedule is meant for


def random_tree_of_turns() -> Tables:
    rng = np.random.default_rng(0)
    return tree_tables(rng.integers(64, 1200, 250).tolist(), random_parents(rng, 250, 0.45))


def forest(*trees: Tables) -> Tables:
    return joined((one["kv_len"].tolist(), one["parent"].tolist()) for one in trees)


COMB, CHAIN = comb(1024, [128] * 64, 256), comb(800, [800] * 39, 64)
BALANCED = tree_tables(*zip(*TREES["balanced_d4"]))
SHAPES = {
    "comb": COMB,
    "bush": packed_prompts([2048], [[64] * 5000]),
    "long chain, short leaves": CHAIN,
    "chain": tree_tables([800] * 40, range(-1, 39)),
    "balanced": BALANCED,
    "turns": random_tree_of_turns(),
    "comb and bush": forest(COMB, packed_prompts([2048], [[64] * 1000])),
    "chain and bush": forest(packed_prompts([2048], [[64] * 1000]), CHAIN),
    "chain and balanced": forest(CHAIN, BALANCED),
    "all": forest(BALANCED, COMB, CHAIN, packed_prompts([1000], [[64] * 300])),
    "28 x 4K x 2K": packed_prompts([4096], [[2048] * 28]),
    "32 x 5059": packed_prompts([5059], [[*range(131, 2048, 60)]]),
    "16K": packed_prompts([16384], [[]]),
}


def idle_share(costs: Iterable[float]) -> float:
    free, total = [0.0] * NUM_SMS, 0.0
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
        total += cost
    return 1 - total / NUM_SMS / max(free)


@pytest.mark.parametrize(("kv_heads", "most"), [(KV_HEADS, MOST_IDLE), (2, 0.1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_blocks_end_together(shim: ctypes.CDLL, shape: str, kv_heads: int, most: float) -> None:
    beside_steps = 8
    problem = SHAPES[shape].problem(True, (64, 128), HEADS // KV_HEADS, kv_heads, NUM_SMS)
    made = backward_list(shim, problem)
    costs = made.items[:, 3] + beside_steps
    assert idle_share(costs[made.blocks[:, 0]].tolist()) < most


@pytest.mark.parametrize(("heads", "pack", "most"), [(32, 4, 0.01), (32, 1, 0.015), (8, 4, 0.1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_blocks_end_together(shim: ctypes.CDLL, shape: str, heads: int, pack: int, most: float) -> None:
    """In the order of the keys that they see, although each node of a path costs up to a tile more."""
    beside_steps = 2
    made = forward_list(shim, SHAPES[shape].problem(True, (192 // pack, 80)))
    assert made.tiles.max() <= 1.3 * made.costs.max()
    places = query_places(shim, len(made.items), heads // pack, NUM_SMS)
    assert idle_share((made.tiles + beside_steps)[places[:, 0]].tolist()) < most


@pytest.mark.parametrize("items", [1, 2, 86, 132, 700, 2000])
@pytest.mark.parametrize("groups", [1, 3, 8, 40])
@pytest.mark.parametrize("num_sms", [1, 4, NUM_SMS])
def test_heads_take_turns_at_the_end(shim: ctypes.CDLL, items: int, groups: int, num_sms: int) -> None:
    """Every item of every head has one block; heads come one after the other, and the last ones item by item."""
    places = query_places(shim, items, groups, num_sms)
    turns = min(groups, 8, -(-8 * num_sms // items))
    alone = [(item, group) for group in range(groups - turns) for item in range(items)]
    together = [(item, group) for item in range(items) for group in range(groups - turns, groups)]
    assert list(map(tuple, places.tolist())) == alone + together
