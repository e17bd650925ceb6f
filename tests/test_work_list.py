"""The blocks that build work lists, run on the host: every step of every walk exactly once, by parts that agree."""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from test_geometry import (
    COMPILER,
    HERE,
    INCLUDE,
    Ints,
    Problem,
    Tables,
    hostile_tables,
    random_tables,
    run_tables,
    usual_tables,
)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The source of the blocks that build the lists, with a context for each of their threads."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("work_list") / "work_list.so"
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HERE / 'host_cuda'}"]
    command += [f"-I{INCLUDE}", str(HERE / "work_list_shim.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Tile(NamedTuple):
    region: int  # 0: context
    owner: int
    n_block: int


class Backward(NamedTuple):
    """What the device's list says."""

    items: Ints  # (items, 6): tile, first step, steps, slot
    splits: Ints  # (splits, 5): tile, slot, parts
    blocks: Ints  # (items x KV heads, 3): item, KV head, direction
    run_counts: Ints
    run_begins: Ints
    parts: int
    fillers: int
    alternating: int

    def by_tile(self) -> dict[Tile, list[list[int]]]:
        found = defaultdict(list)
        for region, owner, n_block, *rest in self.items.tolist():
            found[Tile(region, owner, n_block)].append(rest)
        return found


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


def backward_list(shim: ctypes.CDLL, problem: Problem) -> Backward:
    most = capacities(shim, problem)
    guard = most.slots + 8  # rows: more than could be written behind an array
    items, splits = (
        np.full((rows + guard, columns), UNTOUCHED, np.int32) for rows, columns in ((most.items, 6), (most.splits, 5))
    )
    blocks = np.full(((most.items + guard) * problem.num_kv_heads, 3), -1, np.int32)
    runs = np.zeros((2, problem.num_segments + 1), np.int32)
    counts = (ctypes.c_int * 4)()
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (items, splits, runs[0], runs[1], blocks)]
    count = shim.build_backward(ctypes.byref(problem), *pointers, counts)
    assert (items[most.items :] == UNTOUCHED).all() and (splits[most.splits :] == UNTOUCHED).all()
    return Backward(
        items[:count], splits[: counts[0]], blocks[: count * problem.num_kv_heads],
        runs[0], runs[1], counts[1], counts[2], counts[3],
    )  # fmt: skip


def expected_steps(shim: ctypes.CDLL, problem: Problem) -> dict[Tile, int]:
    """Of every tile that a query sees, without runs of segments."""
    steps = {}
    for index in range(problem.num_groups + problem.num_segments):
        n_block = 0
        while (count := shim.steps_of(ctypes.byref(problem), index, n_block)) >= 0:
            context = index < problem.num_groups
            tile = Tile(int(not context), index if context else index - problem.num_groups, n_block)
            if count:
                steps[tile] = count
            n_block += 1
    return steps


def check_backward(shim: ctypes.CDLL, tables: Tables, problem: Problem) -> Backward:
    made = backward_list(shim, problem)
    slots = capacities(shim, problem).slots
    runs = tables.run_begins
    np.testing.assert_array_equal(made.run_counts, tables.run_counts)
    np.testing.assert_array_equal(made.run_begins[: len(runs)], runs)

    steps, found = expected_steps(shim, problem), made.by_tile()
    assert set(found) == set(steps)
    used = Counter()
    splits = {Tile(*row[:3]): row[3:] for row in made.splits.tolist()}
    assert len(splits) == len(made.splits)
    for tile, parts in found.items():
        begins = [0, *np.cumsum([count for _, count, _ in parts]).tolist()]
        assert [first for first, _, _ in parts] == begins[:-1] and begins[-1] == steps[tile], f"parts of {tile}"
        assert all(count > 0 for _, count, _ in parts)
        assert (tile in splits) == (len(parts) > 1)
        for index, (_, _, slot) in enumerate(parts):
            assert slot == (splits[tile][0] + index * problem.num_kv_heads if len(parts) > 1 else -1)
            used.update(range(slot, slot + problem.num_kv_heads) if slot >= 0 else ())
        assert tile not in splits or splits[tile][1] == len(parts)
    assert all(count == 1 for count in used.values()) and all(slot < slots <= 8 * problem.num_sms for slot in used)

    heads = problem.num_kv_heads
    assert Counter(map(tuple, made.blocks[:, :2].tolist())) == Counter(np.ndindex(len(made.items), heads))
    directions = defaultdict(set)
    for item, head, direction in made.blocks.tolist():
        directions[Tile(*made.items[item, :3].tolist()), head].add(direction)
    assert all(len(found) == 1 for found in directions.values()), "parts are counted along the walk of their tile"
    return made


@pytest.mark.parametrize("make", ["usual", "random"])
def test_every_walk_is_complete(shim: ctypes.CDLL, make: str) -> None:
    rng = np.random.default_rng(5)
    split = 0
    for index in range(15):
        tables = run_tables(rng) if make == "usual" else random_tables(rng, (16, 16))
        kv_heads, num_sms = int(rng.choice([1, 2, 7])), int(rng.choice([1, 3, 8, 132]))
        problem = tables.problem(index % 3 > 0, (16, 16), heads=48, kv_heads=kv_heads, num_sms=num_sms)
        split += len(check_backward(shim, tables, problem).splits) > 0
    assert split > 0


def test_long_shapes(shim: ctypes.CDLL) -> None:
    """Of 132 multiprocessors: alternating waves, rounds by parts, parts without rounds, fillers."""
    shapes = {
        "28 x 4K x 2K": (usual_tables(4096, True, [2048] * 28), 8),
        "two KV heads": (usual_tables(4096, True, [2048] * 28), 2),
        "short": (usual_tables(8192, True, [146] * 32), 8),
        "32 x 5059": (usual_tables(5059, True, [*range(131, 2048, 60)]), 8),
    }
    made = {
        name: check_backward(shim, tables, tables.problem(True, (64, 128), heads=4, kv_heads=kv_heads, num_sms=132))
        for name, (tables, kv_heads) in shapes.items()
    }
    assert {name: len(one.splits) > 0 for name, one in made.items()} == {
        "28 x 4K x 2K": False, "two KV heads": True, "short": False, "32 x 5059": True,
    }  # fmt: skip
    assert {name: one.parts > 1 for name, one in made.items()} == {
        "28 x 4K x 2K": False, "two KV heads": True, "short": False, "32 x 5059": False,
    }  # fmt: skip
    assert {name: one.alternating & 1 for name, one in made.items()} == {
        "28 x 4K x 2K": 1, "two KV heads": 0, "short": 1, "32 x 5059": 0,
    }  # fmt: skip
    assert made["28 x 4K x 2K"].fillers and made["short"].fillers and made["two KV heads"].fillers


def test_tiles_of_a_context_are_split_alike(shim: ctypes.CDLL) -> None:
    """As its first tile is; unless that takes more slots than there are, where few queries see most of them."""
    with_responses, alone = usual_tables(16 * 40, True, [16 * 20] * 8), usual_tables(16 * 60, True, [])
    for tables, heads, kv_heads, alike in ((with_responses, 12, 8, True), (alone, 64, 4, False)):
        problem = tables.problem(True, (16, 16), heads=heads, kv_heads=kv_heads, num_sms=132)
        found = check_backward(shim, tables, problem).by_tile()
        parts = {len(parts) for tile, parts in found.items() if tile.region == 0}
        assert max(parts) > 1 and (len(parts) == 1) == alike


def test_hostile_tables_keep_to_their_arrays(shim: ctypes.CDLL) -> None:
    """Wrong numbers, but none outside of what is allocated, and an end."""
    rng = np.random.default_rng(6)
    for _ in range(6):
        problem = hostile_tables(rng).problem(True, (16, 16), heads=12, kv_heads=2, num_sms=8)
        most, made = capacities(shim, problem), backward_list(shim, problem)
        assert len(made.items) <= most.items and len(made.splits) <= most.splits
        assert all(-1 <= slot < most.slots for slot in made.items[:, 5].tolist())


def test_forward_items_come_longest_first(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    for index in range(6):
        tables = run_tables(rng) if index % 2 else random_tables(rng, (16, 16))
        problem = tables.problem(index % 3 > 0, (16, 16))
        most = capacities(shim, problem).forward
        items, costs = np.zeros((most + 1, 2), np.int32), np.zeros(most + 1, np.int32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (items, costs)]
        count = shim.build_forward(ctypes.byref(problem), *pointers)
        seen = {tuple(item) for item in items[:count].tolist()}
        assert len(seen) == count
        sees = tables.dense(bool(problem.causal)).any(1)
        for segment, (q_begin, q_len, *_) in enumerate(tables.segments.tolist()):
            for m_block in range(-(-q_len // 16)):
                rows = sees[q_begin + 16 * m_block : q_begin + min(16 * m_block + 16, q_len)]
                assert ((segment, m_block) in seen) == bool(rows.any())
        assert sorted(costs[:count].tolist(), reverse=True) == costs[:count].tolist()
