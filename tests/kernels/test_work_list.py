# SPDX-License-Identifier: BSD-3-Clause
"""The blocks that build work lists, run on the host: every step of every walk exactly once, by parts that agree."""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict

import numpy as np
import pytest
from geometry import shim_fixture
from node_tables import (
    Problem,
    Tables,
    comb,
    hostile_tables,
    packed_prompts,
    random_parents,
    random_prompts,
    random_tables,
    tree_tables,
)
from shapes import TREES
from work_lists import Backward, Step, Tile, are_over, backward_list, capacities, forward_list, pointers, walk_of

shim = shim_fixture("work_list")


def expected_steps(shim: ctypes.CDLL, problem: Problem) -> dict[Tile, int]:
    """Of every tile, without runs of nodes."""
    steps = {}
    for node in range(problem.num_nodes):
        n_block = 0
        while (count := shim.steps_of(ctypes.byref(problem), node, n_block)) >= 0:
            steps[Tile(node, n_block)] = count
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
    splits = {Tile(*row[:2]): row[2:] for row in made.splits.tolist()}
    assert len(splits) == len(made.splits)
    for tile, parts in found.items():
        parts.sort()
        begins = [0, *np.cumsum([count for _, count, _ in parts]).tolist()]
        assert [first for first, _, _ in parts] == begins[:-1] and begins[-1] == steps[tile], f"parts of {tile}"
        assert all(count > 0 for _, count, _ in parts) or (steps[tile] == 0 and len(parts) == 1)
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
        directions[Tile(*made.items[item, :2].tolist()), head].add(direction)
    assert all(len(found) == 1 for found in directions.values()), "parts are counted along the walk of their tile"
    return made


@pytest.mark.parametrize("make", ["prompts", "random"])
def test_every_walk_is_complete(shim: ctypes.CDLL, make: str) -> None:
    rng = np.random.default_rng(5)
    split = unseen = 0
    for index in range(20):
        tables = random_prompts(rng, 50) if make == "prompts" else random_tables(rng, (16, 16))
        kv_heads, num_sms = int(rng.choice([1, 2, 7])), int(rng.choice([1, 3, 8, 132]))
        problem = tables.problem(
            index % 3 > 0, (16, 16), heads=48, kv_heads=kv_heads, num_sms=num_sms, window=(-1, -1, 50)[index % 3]
        )
        made = check_backward(shim, tables, problem)
        split += len(made.splits) > 0
        unseen += bool((made.items[:, 3] == 0).any())
    assert split > 0 and (unseen > 0) == (make == "random")


def begins_of_walks(tables: Tables, made: Backward, block_m: int, packs: int) -> np.ndarray:
    """Of each item the row, counted in the order of the table, at whose query a walk from the end begins."""
    rows = np.concatenate([[0], np.cumsum(tables["q_len"])])
    ends = rows[tables["subtree_end"][made.items[:, 0]]]
    return ends - made.items[:, 2] // packs * block_m


def test_trees(shim: ctypes.CDLL) -> None:
    """A comb, a bush, a chain and a forest: the first KV head is in raster order, from the last query to the first."""
    rng = np.random.default_rng(6)
    parents = random_parents(rng, 200, 0.5)
    trees = [
        comb(1024, [128] * 64, 256),
        tree_tables([2048, *[64] * 300], [-1, *[0] * 300]),
        tree_tables([800] * 20, range(-1, 19)),
        tree_tables(rng.integers(0, 300, 200).tolist(), parents),
    ]
    local = split = 0
    for tables in trees:
        made = check_backward(shim, tables, tables.problem(True, (16, 128), heads=1, kv_heads=8, num_sms=132))
        begins = begins_of_walks(tables, made, 16, 1)
        later = begins[made.items[:, 2] > 0]  # of parts behind the first of their tile
        assert len(set((later // 16).tolist())) <= 8, "all tiles are cut at the same rows"
        split += len(later) > 0
        if made.local_heads:
            local += 1
            order = made.blocks[: len(made.items), 0]
            assert len(set(order.tolist())) == len(order) and made.blocks[: len(made.items), 2].all()
            assert (np.diff(begins[order]) < 16).all()
            whole = order[made.items[order, 2] == 0]
            keys = [(-begins[item], *made.items[item, :2].tolist()) for item in whole.tolist()]
            assert keys == sorted(keys), "a node comes before its subtree, and the last child first"
    assert split >= 3 and local >= 2


def test_long_shapes(shim: ctypes.CDLL) -> None:
    """Of 132 multiprocessors: alternating waves, parts, local heads."""
    branched = TREES["branched"]
    shapes = {
        "28 x 4K x 2K": (packed_prompts([4096], [[2048] * 28]), 8),
        "two KV heads": (packed_prompts([4096], [[2048] * 28]), 2),
        "short": (packed_prompts([8192], [[146] * 32]), 8),
        "32 x 5059": (packed_prompts([5059], [[*range(131, 2048, 60)]]), 8),
        "sequences": (packed_prompts([256] + [0] * 16, [[1024] * 32] + [[2048]] * 16), 8),
        "a spine": (tree_tables(*zip(*branched)), 8),
    }
    made = {
        name: check_backward(shim, tables, tables.problem(True, (16, 128), heads=1, kv_heads=kv_heads, num_sms=132))
        for name, (tables, kv_heads) in shapes.items()
    }
    found = {
        name: (len(one.splits) > 0, bool(one.by_head), one.alternating & 1, one.local_heads)
        for name, one in made.items()
    }
    assert found == {
        "28 x 4K x 2K": (False, False, 1, 0),
        "two KV heads": (True, True, 0, 0),
        "short": (True, True, 0, 0),
        "32 x 5059": (True, True, 0, 0),
        "sequences": (True, True, 0, 5),
        "a spine": (False, False, 1, 0),  # its tiles have one end, though each node has few
    }


def test_there_are_slots_for_all_parts(shim: ctypes.CDLL) -> None:
    """Short parts are left out until the slots suffice: in the last case they would not."""
    with_responses, alone = packed_prompts([16 * 40], [[16 * 10] * 8]), packed_prompts([16 * 60], [[0]])
    few_slots = tree_tables([416, 912, 464], [-1, 0, 0])
    for tables, heads, kv_heads in ((with_responses, 12, 2), (alone, 64, 4), (few_slots, 48, 6)):
        problem = tables.problem(True, (16, 16), heads=heads, kv_heads=kv_heads, num_sms=132)
        made = check_backward(shim, tables, problem)
        parts = {len(parts) for tile, parts in made.by_tile().items() if tile.node == 0}
        assert max(parts) > 1 and made.items[:, 3].max() < 2.2 * made.items[:, 3].mean()


def tile_before(tables: Tables, tile: Tile, block_n: int) -> Tile | None:
    """The one before it on its path."""
    if tile.n_block > 0:
        return Tile(tile.node, tile.n_block - 1)
    node = int(tables["parent"][tile.node])
    while node >= 0 and not tables["kv_len"][node]:
        node = int(tables["parent"][node])
    return Tile(node, -(-int(tables["kv_len"][node]) // block_n) - 1) if node >= 0 else None


def check_order(shim: ctypes.CDLL, tables: Tables, problem: Problem) -> Backward:
    """Every item behind the one that owns the keys before and visits the same queries, earlier in the grid.

    A step waits until the walk before has passed its queries, for longer only where that walk visits a tile twice.
    """
    made = check_backward(shim, tables, problem)
    assert made.blocks[:, 2].all(), "all walks are backward"
    place = {(item, head): index for index, (item, head) in enumerate(made.blocks[:, :2].tolist())}
    block_m = problem.block_m
    walks = [walk_of(shim, problem, item) for item in made.items]
    for item, (node, n_block, *_, before) in enumerate(made.items.tolist()):
        walk = walks[item]
        turns = [step.turn for step in walk]
        assert turns == sorted(set(turns)) and all(turns), "what blocks wait for grows along the walk"
        expected = tile_before(tables, Tile(node, n_block), problem.block_n)
        if expected is None:
            assert before == -1
            continue
        assert Tile(*made.items[before, :2].tolist()) == expected
        assert all(place[before, head] < place[item, head] for head in range(problem.num_kv_heads))
        visits = defaultdict(list)
        for index, upper in enumerate(walks[before]):
            visits[upper.row // block_m, upper.pack].append((index, upper))
        done = np.array([0, *(upper.turn for upper in walks[before]), 2**64 - 1], np.uint64)
        for step in walk:
            of_tile = visits[step.row // block_m, step.pack]
            same = [index for index, upper in of_tile if upper.row <= step.row and step.end <= upper.end]
            assert len(same) == 1, "other queries"
            nothing, *over, everything = are_over(shim, step, block_m, done)
            assert everything and not nothing and not any(over[: same[0]])
            assert len(of_tile) > 1 or all(over[same[0] :])
    return made


def test_a_tile_of_queries_that_is_visited_twice(shim: ctypes.CDLL) -> None:
    """First with the rows behind: those in front of them are not over yet, with whatever pack of heads."""
    shim.number_of_turn.restype = ctypes.c_uint64
    visits = [(begin, pack) for begin in (9, 4) for pack in range(3)]
    done = np.array([shim.number_of_turn(7, *visit) for visit in visits], np.uint64)
    assert (np.diff(done.astype(np.int64)) > 0).all()
    behind, in_front = (are_over(shim, Step(7 * 16 + begin, 0, 1, 0), 16, done) for begin in (10, 6))
    assert behind == [False, True, True, False, True, True] and in_front == [False] * 4 + [True] * 2


@pytest.mark.slow
def test_the_order_in_which_dq_is_added(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(11)
    split = whole = 0
    for index in range(12):
        parents = random_parents(rng, 60, 0.6)
        lengths = rng.integers(0, 90, 60) * (rng.random(60) < 0.9)
        tables = (
            random_prompts(rng, 30),
            tree_tables(lengths.tolist(), parents),
            packed_prompts(rng.integers(0, 400, 2).tolist(), [rng.integers(1, 90, 8).tolist() for _ in range(2)]),
        )[index % 3]
        problem = tables.problem(
            index % 5 > 0, (16, 16), heads=(40, 1, 3)[index // 3 % 3], kv_heads=int(rng.choice([1, 2, 5])),
            num_sms=(32, 132)[index % 2],
        )  # fmt: skip
        problem.orders_dq = 1
        made = check_order(shim, tables, problem)
        split, whole = split + (len(made.splits) > 0), whole + (len(made.splits) == 0)
    assert split > 2 and whole > 2


def test_the_order_of_very_many_tiles(shim: ctypes.CDLL) -> None:
    """More than the bins of a list keep in order side by side: every tile but the first of a root is behind another."""
    tables = packed_prompts([160_000, 64], [[3000] * 30, [3000] * 10])
    problem = tables.problem(True, (64, 16), num_sms=132)
    problem.orders_dq = 1
    made = backward_list(shim, problem)
    assert len(made.items) > 16 * 1024 and (made.items[:, 5] < np.arange(len(made.items))).all()
    slices = len(made.items[(made.items[:, 0] == 0) & (made.items[:, 1] == 0)])
    assert (made.items[:, 5] == -1).sum() == slices + 1


def test_nobody_waits_for_later_blocks(shim: ctypes.CDLL) -> None:
    """Whatever a table says: such a wait would be for ever."""
    rng = np.random.default_rng(12)
    for index in range(48):
        tables = hostile_tables(rng) if index % 4 else random_tables(rng, (16, 16))
        problem = tables.problem(True, (16, 16), heads=4, kv_heads=3, num_sms=8)
        problem.orders_dq = 1
        made = backward_list(shim, problem)
        place = {(item, head): index for index, (item, head) in enumerate(made.blocks[:, :2].tolist())}
        assert len(place) == len(made.blocks) == len(made.items) * 3
        for (item, head), index in place.items():
            before = int(made.items[item, 5])
            assert before == -1 or place[before, head] < index


def test_lists_do_not_change_from_run_to_run(shim: ctypes.CDLL) -> None:
    tables = random_prompts(np.random.default_rng(8), 200)
    problem = tables.problem(True, (16, 16), heads=4, kv_heads=2, num_sms=8)
    first, second = backward_list(shim, problem), backward_list(shim, problem)
    assert np.array_equal(first.items[:, :4], second.items[:, :4]) and np.array_equal(first.blocks, second.blocks)


def test_hostile_tables_keep_to_their_arrays(shim: ctypes.CDLL) -> None:
    """Wrong numbers, but none outside of what is allocated, and an end."""
    rng = np.random.default_rng(6)
    for _ in range(10):
        problem = hostile_tables(rng).problem(True, (16, 16), heads=12, kv_heads=2, num_sms=8)
        most, made = capacities(shim, problem), backward_list(shim, problem)
        assert len(made.items) <= most.items and len(made.splits) <= most.splits
        assert all(-1 <= slot < most.slots for slot in made.items[:, 4].tolist())
        assert len(forward_list(shim, problem).items) <= most.forward


def test_forward_items_come_longest_first(shim: ctypes.CDLL) -> None:
    """Every query tile once, also of queries that see no key: it writes their rows."""
    rng = np.random.default_rng(7)
    for index in range(8):
        tables = random_prompts(rng, 50) if index % 2 else random_tables(rng, (16, 16))
        problem = tables.problem(index % 3 > 0, (16, 16), window=(-1, 30)[index % 2])
        made = forward_list(shim, problem)
        expected = {(node, m) for node, rows in enumerate(tables["q_len"].tolist()) for m in range(-(-rows // 16))}
        assert len(made.items) == len(expected) and set(map(tuple, made.items.tolist())) == expected
        assert (made.costs >= 1).all() and sorted(made.costs.tolist(), reverse=True) == made.costs.tolist()
        assert (made.tiles >= made.costs).all(), "a path has a partial tile for each of its nodes"


def siblings_of(item: tuple[int, int]) -> list[int]:
    """The nodes that share an item's tile."""
    node, tile = item
    return [node] if tile >= 0 else [node, *(node + d for d in (~tile & 31, ~tile >> 5) if d)]


def check_siblings(shim: ctypes.CDLL, tables: Tables, problem: Problem, slice_queries: int) -> list[list[int]]:
    """Every row in one slice, which meets the tiles that it meets in a query tile of its node alone."""
    made = forward_list(shim, problem, slice_queries)
    assert made.costs.tolist() == sorted(made.costs.tolist(), reverse=True) and (made.tiles >= made.costs).all()
    rows = np.zeros(tables.q_rows, np.int32)
    items = np.ascontiguousarray(made.items)
    assert shim.check_slices(ctypes.byref(problem), slice_queries, *pointers(items), len(items), *pointers(rows)) == 0
    owned = np.zeros(tables.q_rows, np.int32)
    for begin, length in tables.nodes[:, :2].tolist():
        owned[begin : begin + length] += 1
    assert rows.tolist() == owned.tolist()
    groups = [siblings_of(item) for item in map(tuple, made.items.tolist())]
    return sorted(nodes for nodes in groups if len(nodes) > 1)


def test_siblings_share_tiles(shim: ctypes.CDLL) -> None:
    """Slices of 16 queries: two join one, and ones that are left over join by threes."""
    lengths = [400, 32, 16, 20, 7, 90, 48, 96, 16, 1, 130, 17]
    tables = tree_tables(lengths, [-1] + [0] * 11)
    problem = tables.problem(True, (48, 16))
    groups = check_siblings(shim, tables, problem, 16)
    assert groups == [[1, 2], [3, 4], [8, 11]]
    ones = tree_tables([400] + [10] * 8, [-1] + [0] * 8)
    assert check_siblings(shim, ones, ones.problem(True, (48, 16)), 16) == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert check_siblings(shim, ones, ones.problem(True, (48, 16), window=409), 16) == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert check_siblings(shim, ones, ones.problem(True, (48, 16), window=408), 16) == []
    few = forward_list(shim, ones.problem(True, (48, 16)), 16, least_tiles=18).items
    assert len(few) == 17 and (few >= 0).all(), "fewer tiles than would fill the card"
    assert len(forward_list(shim, ones.problem(True, (48, 16)), 16, least_tiles=17).items) == 12


@pytest.mark.parametrize(
    ("name", "lengths", "parents"),
    [
        ("roots", [10] * 9, [-1] * 9),
        ("a chain", [100] + [10] * 9, range(-1, 9)),
        ("full tiles", [400] + [96] * 6, [-1] + [0] * 6),
        ("three slices", [400] + [33] * 6, [-1] + [0] * 6),
        ("keys of their own", [100] + [52] * 6, [-1] + [0] * 6),
        ("cousins", [200, 60, 10, 60, 10, 60, 10], [-1, 0, 1, 0, 3, 0, 5]),
        ("no rows", [400] + [0] * 5 + [10], [-1] + [0] * 6),
    ],
)
def test_others_have_tiles_of_their_own(shim: ctypes.CDLL, name: str, lengths: list[int], parents: list[int]) -> None:
    tables = tree_tables(lengths, list(parents))
    joined = check_siblings(shim, tables, tables.problem(True, (48, 16)), 16)
    assert joined == ([] if name != "cousins" else [[1, 3, 5]]), name


def test_slices_of_siblings_meet_their_own_tiles(shim: ctypes.CDLL) -> None:
    """Random prompts, trees, combs and hostile numbers, with borders and windows, causal or not."""
    rng = np.random.default_rng(13)
    joined = 0
    for index in range(120):
        parents = random_parents(rng, 80, (0.2, 0.5, 0.8)[index % 3])
        lengths = rng.integers(0, 60, 80) * (rng.random(80) < 0.9)
        tables = (
            random_prompts(rng, 50),
            tree_tables(lengths.tolist(), parents),
            comb(int(rng.integers(20, 200)), rng.integers(1, 60, 20).tolist(), int(rng.integers(1, 60))),
            random_tables(rng, (48, 16)),
            tree_tables(
                [*rng.integers(30, 60, 6).tolist(), *rng.integers(1, 70, 70).tolist()], [*range(-1, 5)] + [5] * 70
            ),
        )[index % 5]
        slice_queries = int(rng.choice([1, 4, 16]))
        window = (-1, -1, 150, 20)[index % 4]
        problem = tables.problem(index % 7 > 0, (3 * slice_queries, 16), window=window)
        joined += len(check_siblings(shim, tables, problem, slice_queries))
    assert joined > 300


def test_hostile_siblings_keep_to_their_arrays(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(14)
    for _ in range(100):
        problem = hostile_tables(rng).problem(
            bool(rng.integers(0, 2)), (48, 16), window=int(rng.choice([-1, 30, 10000]))
        )
        made = forward_list(shim, problem, 16)
        assert len(made.items) <= capacities(shim, problem).forward
        nodes = [node for item in map(tuple, made.items.tolist()) for node in siblings_of(item)]
        assert all(0 <= node < problem.num_nodes for node in nodes)


def test_rows_of_no_node_are_cleared(shim: ctypes.CDLL) -> None:
    """By one warp each, and no others."""
    rng = np.random.default_rng(9)
    gaps = 0
    for index in range(12):
        tables = hostile_tables(rng) if index % 3 == 0 else random_tables(rng, (64, 64))
        tables.q_rows += 300 * (index % 2)
        problem = tables.problem(True, (16, 16))
        for queries, rows in ((True, tables.q_rows), (False, tables.key_rows + tables.decoded_rows)):
            cleared = np.zeros(rows, np.int32)
            shim.clear_rows_of(ctypes.byref(problem), queries, ctypes.c_void_p(cleared.ctypes.data))
            if index % 3 == 0:
                assert set(cleared.tolist()) <= {0, 32}
                continue
            owned = np.zeros(rows, bool)
            for begin, length in tables.nodes[:, :2] if queries else tables.nodes[:, 3:5]:
                owned[begin : begin + length] = True
            assert cleared.tolist() == (32 * ~owned).tolist()
            gaps += not owned.all()
    assert gaps > 5
