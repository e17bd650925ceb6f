# SPDX-License-Identifier: BSD-3-Clause
"""The geometry header, compiled for the host, against the dense relation: the very functions that the kernels call."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from geometry import Record, build_shim, shim_fixture
from node_tables import (
    Problem,
    Tables,
    all_forests,
    comb,
    hostile_tables,
    joined,
    packed_prompts,
    random_contexts,
    random_parents,
    random_prompts,
    random_tables,
    random_tree,
    scattered_tree,
    tree_tables,
)
from numpy.typing import NDArray

from flash_attn_dualkv import kernels

shim = shim_fixture("geometry")

KERNEL_TILES = [(192, 80), (128, 128), (128, 64), (128, 32), (64, 128), (64, 64)]
SMALL_TILES = [(16, 16), (32, 16), (16, 32), (8, 64), (21, 16)]
BATCHES = 240  # random tables for each choice of causality and small tiles
UNSPLIT = 0  # no slices


def record(function: Callable[..., None], problem: Problem, seen: NDArray[np.uint8] | None, *arguments: int) -> Record:
    result = Record(seen=None if seen is None else seen.ctypes.data)
    function(ctypes.byref(problem), ctypes.byref(result), *arguments)
    return result


def assert_sound(result: Record, seen: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
    assert (seen == expected).all()
    for name in Record.NAMES:
        if name not in ("steps", "ranges", "blind_tiles", "border_tiles"):
            assert getattr(result, name) == 0, name


def blind_tiles(tables: Tables, block_m: int, expected: NDArray[np.uint8]) -> int:
    """Query tiles of which no row sees a key."""
    sees = np.concatenate([[0], np.cumsum(expected.any(1))])
    count = 0
    for begin, rows in zip(tables["q_begin"].tolist(), tables["q_len"].tolist(), strict=True):
        firsts = np.arange(begin, begin + rows, block_m)
        count += int((sees[np.minimum(firsts + block_m, begin + rows)] == sees[firsts]).sum())
    return count


def continued_in(shim: ctypes.CDLL, tables: Tables) -> NDArray[np.bool_]:
    """Where the header says that a node belongs to the run of the one before."""
    out = (ctypes.c_int * len(tables.nodes))()
    shim.read_continued(ctypes.byref(tables.problem(True, (16, 16))), out)
    return np.array(out, bool)


def check_tables(
    shim: ctypes.CDLL, tables: Tables, causal: bool, tiles: tuple[int, int], heads: int, width: int, window: int = -1
) -> None:
    problem = tables.problem(causal, tiles, heads, continued=continued_in(shim, tables), window=window)
    expected = tables.dense(causal, window)
    seen = np.zeros((heads, *expected.shape), np.uint8)
    forward = record(shim.record_forward, problem, seen)
    assert_sound(forward, seen, expected)
    assert forward.blind_tiles == blind_tiles(tables, tiles[0], expected), "queries that see no key walk one tile"
    seen[:] = 0
    gathering = record(shim.record_gathering, problem, seen)
    assert_sound(gathering, seen, expected)
    assert gathering.blind_tiles == forward.blind_tiles
    for direction, head_major in itertools.product((False, True), (False, True) if heads > 1 else (False,)):
        seen[:] = 0
        problem.reversed, problem.head_major = direction, head_major
        backward = record(shim.record_backward, problem, seen, width)
        assert_sound(backward, seen, expected)
        assert backward.steps == shim.count_steps(ctypes.byref(problem))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("tiles", SMALL_TILES + KERNEL_TILES, ids=str)
def test_every_visible_pair_is_visited_once(shim: ctypes.CDLL, tiles: tuple[int, int], causal: bool) -> None:
    rng = np.random.default_rng([*tiles, causal])
    for _ in range(BATCHES if tiles in SMALL_TILES else BATCHES // 20):
        heads = int(rng.integers(1, 4))
        width = int(rng.choice([1, 2, 3, 5, 8, UNSPLIT]))  # far more parts than the schedule would make
        check_tables(shim, random_tables(rng, tiles), causal, tiles, heads, width, random_window(rng, tiles))


def random_window(rng: np.random.Generator, tiles: tuple[int, int]) -> int:
    """None in half of the cases; else around the borders of tiles, or anything up to six of them."""
    if rng.random() < 0.5:
        return -1
    borders = [0, 1, *(block + shift for block in tiles for shift in (-1, 0, 1))]
    return int(rng.choice(borders) if rng.random() < 0.5 else rng.integers(0, 6 * max(tiles)))


def small_trees(count: int, lengths: Iterable[int]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    return itertools.product(itertools.product(lengths, repeat=count), all_forests(count))


@pytest.mark.slow
def test_all_small_trees(shim: ctypes.CDLL) -> None:
    """Of up to 4 nodes one by one; of 5 and 6 many side by side; and some more of 6 and 7."""
    assert [len(list(all_forests(count))) for count in range(1, 7)] == [1, 2, 5, 14, 42, 132]
    for count in range(1, 5):
        for lengths, parents in small_trees(count, (0, 1, 4, 5)):
            for window in (-1, 3) if count == 4 else (-1, 0, 3, 6):
                check_tables(shim, tree_tables(lengths, parents), True, (3, 4), 1, 2, window)
    many = [*small_trees(5, (0, 4, 5)), *small_trees(6, (0, 5))]
    rng = np.random.default_rng(0)
    for count in (6, 7):
        shapes = list(all_forests(count))
        many += [
            (tuple(rng.choice([0, 1, 3, 4, 5, 8], count).tolist()), shapes[rng.integers(0, len(shapes))])
            for _ in range(1000)
        ]
    for first in range(0, len(many), 40):
        tables = joined(many[first : first + 40])
        for causal in (True, False)[: 1 + (first % 160 == 0)]:
            check_tables(shim, tables, causal, (4, 4), 1, UNSPLIT, (-1, 5)[first // 40 % 2])


def test_trees_of_many_nodes(shim: ctypes.CDLL) -> None:
    """To 300 nodes, and to a depth of 1,000; nodes without tokens among them."""
    rng = np.random.default_rng(1)
    for index in range(20):
        parents = random_parents(rng, 300, (0.01, 0.3, 0.5, 0.9)[index % 4])
        lengths = rng.integers(0, (3, 20)[index // 4 % 2], len(parents)).tolist()
        window = (-1, -1, 20, 70)[index // 2 % 4]
        check_tables(shim, tree_tables(lengths, parents), index % 5 > 0, (16, 16), 1, 50, window)
    chain = rng.integers(0, 4, 1000).tolist()
    check_tables(shim, tree_tables(chain, list(range(-1, 999))), True, (16, 16), 1, 100)
    check_tables(shim, comb(3, [2] * 400, 1), True, (16, 16), 1, 100)


def ranges_of(shim: ctypes.CDLL, problem: Problem, node: int, n_block: int) -> list[list[int]]:
    """Every range of queries that sees a tile of the node: its rows, from where it is full, and its positions."""
    out = (ctypes.c_int * (5 * max(problem.num_nodes, 1)))()
    count = shim.read_ranges(ctypes.byref(problem), node, n_block, out)
    ranges = [out[5 * index : 5 * index + 5] for index in range(count)]
    for one in ranges:
        one[4] *= one[2] > one[0] or one[3] < one[1]  # nobody asks for the positions of rows that see all of the tile
    return ranges[::-1] if problem.reversed else ranges


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_runs_of_nodes_make_the_same_ranges(shim: ctypes.CDLL, causal: bool) -> None:
    rng = np.random.default_rng(causal)
    whole_runs = 0
    for index in range(400):
        tables = (random_tree, scattered_tree, random_contexts, random_prompts)[index % 4](rng, 16)
        problem = tables.problem(causal, (16, 16), window=(-1, 40)[index // 4 % 2])
        alone = Problem.from_buffer_copy(problem)
        alone.run_counts = alone.run_begins = None
        for node, n_block in itertools.product(range(len(tables.nodes)), range(4)):
            problem.reversed = alone.reversed = False
            expected = ranges_of(shim, alone, node, n_block)
            assert ranges_of(shim, problem, node, n_block) == expected
            problem.reversed = alone.reversed = True
            assert ranges_of(shim, alone, node, n_block) == ranges_of(shim, problem, node, n_block) == expected
            whole_runs += sum(tables.continued()) > 3 and len(expected) == 1
    assert whole_runs > 100


def test_runs_are_what_the_header_takes_for_runs(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(2)
    for index in range(300):
        tables = hostile_tables(rng) if index % 3 else random_tables(rng, (16, 16))
        assert continued_in(shim, tables).tolist() == tables.continued().tolist()


def test_a_packed_tree_has_one_range_a_tile(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        tables = random_tree(rng, 16, most=40)
        result = record(shim.record_backward, tables.problem(True, (16, 16)), None, UNSPLIT)
        assert result.ranges == sum(-(-length // 16) for length in tables["kv_len"].tolist())


def test_packs_of_heads_leave_few_rows_unused(shim: ctypes.CDLL) -> None:
    for heads, tile_rows in itertools.product(range(1, 65), (64, 128, 192)):
        pack = shim.pack_of(heads, tile_rows)
        assert 1 <= pack <= heads and heads % pack == 0
        assert tile_rows - tile_rows // pack * pack <= tile_rows / 8


def test_a_build_knows_for_which_gpus_it_has_code(shim: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        ("80;90", "90"): {80, 86, 89, 90, 100, 120},
        ("90", "90"): {90, 100, 120},
        ("86", "86"): {86, 89, 90, 100, 120},
        ("", "80"): {80, 86, 89, 90, 100, 120},
    }
    shim.has_code_for.restype = ctypes.c_bool
    for (archs, ptx), covered in cases.items():
        found = {one for one in (80, 86, 89, 90, 100, 120) if shim.has_code_for(one, archs.encode(), ptx.encode())}
        assert found == covered, (archs, found)
        for one in (80, 86, 89, 90, 100, 120):  # what build_info() says agrees with what is launched
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(device, 10))
            told = kernels.code_for(one, [arch for arch in archs.split(";") if arch], ptx)
            assert (told != "nothing") == (one in covered), (archs, one, told)


def test_borders_of_short_nodes_share_tiles(shim: ctypes.CDLL) -> None:
    """64 turns of 128 keys, of which 48 fill no tile of 80; the last turn alone is asked."""
    tables = comb(1024, [128] * 64, 1)
    tables["q_len"][:-1] = 0
    plain, gathering = (
        record(function, tables.problem(True, (192, 80)), None)
        for function in (shim.record_forward, shim.record_gathering)
    )
    assert plain.steps == 64 * 2 + 13
    assert gathering.steps == 2 + 63 + 12 and gathering.border_tiles == -(-(63 * 3 + 4) // 5)


def test_a_window_of_everything_has_the_same_border_tiles(shim: ctypes.CDLL) -> None:
    """Bits of out are those without a window. One position less, and a last query has lost a key."""
    tables = tree_tables([40] + [33] * 12, list(range(-1, 12)))
    longest = 40 + 33 * 12
    expected = record(shim.record_gathering, tables.problem(True, (64, 80)), None)
    whole, short = (
        record(shim.record_gathering, tables.problem(True, (64, 80), window=window), None)
        for window in (longest - 1, longest - 2)
    )
    assert (whole.steps, whole.border_tiles) == (expected.steps, expected.border_tiles)
    assert 0 < short.border_tiles < expected.border_tiles and short.wrong_borders == 0


def test_queries_among_the_keys_of_their_parent_walk_as_it_does(shim: ctypes.CDLL) -> None:
    """A further run of queries of a node, of which it is a child without keys."""
    whole = tree_tables([40] + [33] * 12 + [512], list(range(-1, 13)))
    rows = Tables(np.vstack([whole.nodes, whole.nodes[-1:]]), whole.q_rows, whole.key_rows)
    rows["q_len"][-2] = 256
    rows["subtree_end"][:] += rows["subtree_end"] == len(whole.nodes)
    end, position = whole.key_rows, 40 + 33 * 12
    parent = len(whole.nodes) - 1
    rows.nodes[-1] = [end - 256, 256, position + 256, end, 0, position + 512, parent, parent + 2]
    expected, found = (record(shim.record_gathering, tables.problem(True, (64, 80)), None) for tables in (whole, rows))
    assert (found.steps, found.border_tiles) == (expected.steps, expected.border_tiles)
    assert found.border_tiles > 0 == found.wrong_borders


def test_walks_without_gain_have_no_border_tile(shim: ctypes.CDLL) -> None:
    """Prompts with responses, and nodes of nearly a tile."""
    prompts = [packed_prompts([96], [[40, 0, 96]]), packed_prompts([16, 7], [[1, 40], [70]])]
    for tables in (*prompts, tree_tables([75, 65, 80, 145, 40], [-1, 0, 1, 2, 3])):
        result = record(shim.record_gathering, tables.problem(True, (64, 80)), None)
        assert result.border_tiles == result.wrong_borders == 0


def walk_hostile(shim: ctypes.CDLL, seed: int, count: int) -> None:
    """Raises AssertionError when a table of arbitrary numbers leads outside the tensors."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tables = hostile_tables(rng)
        continued = continued_in(shim, tables)
        causal, heads = bool(rng.integers(0, 2)), int(rng.integers(1, 4))
        window = int(rng.choice([-1, 0, 30, (1 << 30) - 2]))
        problem = tables.problem(causal, (16, 16), heads, continued=continued, window=window)
        problem.reversed = bool(rng.integers(0, 2))
        seen = np.zeros((problem.heads, tables.q_rows, tables.key_rows + tables.decoded_rows), np.uint8)
        forward = record(shim.record_forward, problem, seen)
        gathering = record(shim.record_gathering, problem, seen)
        backward = record(shim.record_backward, problem, seen, int(rng.choice([1, 7, UNSPLIT])))
        for name in ("out_of_range", "wrong_unmasked", "endless", "bad_parts"):
            assert getattr(forward, name) == getattr(gathering, name) == getattr(backward, name) == 0, name
        # The steps of a part are counted forward, and only honest numbers have the same ranges in
        # both directions.
        assert backward.short_parts == 0 or problem.reversed


def walk_far_rows(shim: ctypes.CDLL) -> None:
    """A few rows at the far end of tensors with 2^29 rows, where products of indices leave 32 bits."""
    rows = 1 << 29
    root = [rows - 70, 0, 0, rows // 2 - 50, 50, 0, -1, 2]
    for region_rows, decoded in (((rows // 2, rows // 2), rows - 50), ((rows, 0), rows - 50)):
        tables = Tables(np.array([root, [rows - 70, 70, 30, decoded, 50, 50, 0, 2]], np.int32), rows, *region_rows)
        forward = record(shim.record_forward, tables.problem(True, (64, 64)), None)
        backward = record(shim.record_backward, tables.problem(True, (64, 64)), None, 1)
        assert (forward.steps, backward.steps) == (4, 3)
        assert all(not getattr(one, name) for one in (forward, backward) for name in ("out_of_range", "empty_steps"))
        assert forward.wrong_order == 0


def test_hostile_tables_stay_inside_the_tensors(shim: ctypes.CDLL) -> None:
    walk_hostile(shim, seed=0, count=2000)
    walk_far_rows(shim)


@pytest.mark.slow
def test_no_undefined_behaviour(tmp_path: Path) -> None:
    """Honest, hostile and huge tables under the undefined-behaviour sanitizer."""
    try:
        library = build_shim("geometry", tmp_path, "-fsanitize=undefined")
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no undefined-behaviour sanitizer")
    program = (
        "import ctypes, sys, numpy as np, test_geometry as t\n"
        "shim = ctypes.CDLL(sys.argv[1])\n"
        "t.walk_hostile(shim, 1, 300); t.walk_far_rows(shim); rng = np.random.default_rng(2)\n"
        "for _ in range(100): t.check_tables(shim, t.random_tables(rng, (16, 16)), True, (16, 16), 2, t.UNSPLIT)\n"
    )
    command = [sys.executable, "-c", program, str(library)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, env=environment, timeout=300
    )
    assert result.returncode == 0 and "runtime error" not in result.stderr, result.stderr[-2000:]
