"""The geometry header, compiled for the host, against the dense relation: the very functions that the kernels call."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parent / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
KERNEL_TILES = [(192, 80), (128, 128), (128, 64), (128, 32), (64, 128), (64, 64)]
SMALL_TILES = [(16, 16), (32, 16), (16, 32), (8, 64), (21, 16)]
BATCHES = 500  # random tables for each choice of causality and small tiles
UNSPLIT = 1 << 20  # steps of a part

Ints = NDArray[np.int32]


class Problem(ctypes.Structure):
    """Mirror of the shim's Problem."""

    _fields_ = [
        ("segments", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_segments", "num_groups", "q_rows", "context_rows", "decoded_rows")),
        *((name, ctypes.c_int) for name in ("causal", "block_m", "block_n", "heads", "num_kv_heads", "num_sms")),
        ("reversed", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("run_counts", "run_begins")),
    ]


class Record(ctypes.Structure):
    """Mirror of the shim's Record."""

    NAMES = (
        "steps", "masked_steps", "empty_steps", "needless_masks", "wrong_unmasked", "out_of_range",
        "ranges", "bad_parts", "wrong_own_rows",
    )  # fmt: skip
    _fields_ = [("seen", ctypes.c_void_p), *((name, ctypes.c_int64) for name in NAMES)]


@dataclass
class Tables:
    """A segment table, a group table and the rows of the tensors they index."""

    segments: Ints  # (S, 8)
    groups: Ints  # (G, 4)
    q_rows: int
    context_rows: int
    decoded_rows: int

    def continued(self) -> NDArray[np.bool_]:
        """(S,): whether a segment belongs to the run of the one before."""
        begin = self.segments[:, 0].clip(0, self.q_rows).astype(np.int64)
        end = begin + self.segments[:, 1].clip(0, self.q_rows - begin)
        position = self.segments[:, 2].clip(-(1 << 30), 1 << 30)
        continued = np.zeros(len(self.segments), bool)
        continued[1:] = (begin[1:] == end[:-1]) & (position[1:] == position[:-1])
        return continued

    def find_runs(self) -> tuple[Ints, Ints]:
        """Runs that begin before each segment, and where each begins; as the kernel that builds the list finds them."""
        begins = np.flatnonzero(~self.continued())
        counts = np.searchsorted(begins, np.arange(len(self.segments) + 1))
        return counts.astype(np.int32), np.append(begins, len(self.segments)).astype(np.int32)

    def problem(
        self, causal: bool, tiles: tuple[int, int], heads: int = 1, kv_heads: int = 1, num_sms: int = 4
    ) -> Problem:
        self.run_counts, self.run_begins = self.find_runs()  # as long as the last problem, which holds their addresses
        return Problem(
            self.segments.ctypes.data, self.groups.ctypes.data, len(self.segments), len(self.groups),
            self.q_rows, self.context_rows, self.decoded_rows, causal, *tiles, heads, kv_heads, num_sms, False,
            self.run_counts.ctypes.data, self.run_begins.ctypes.data,
        )  # fmt: skip

    def dense(self, causal: bool) -> NDArray[np.uint8]:
        """(q_rows, context_rows + decoded_rows): 1 where a row sees a key."""
        relation = np.zeros((self.q_rows, self.context_rows + self.decoded_rows), np.uint8)
        for q_begin, q_len, q_pos0, context, context_len, decoded, decoded_len, _ in self.segments.tolist():
            positions = q_pos0 + np.arange(q_len)[:, None]
            for begin, length, pos0 in (
                (context, context_len, 0),
                (self.context_rows + decoded, decoded_len, context_len),
            ):
                sees = (pos0 + np.arange(length)[None, :] <= positions) if causal else np.ones((q_len, length), bool)
                relation[q_begin : q_begin + q_len, begin : begin + length] |= sees
        return relation


def build_shim(folder: Path, *flags: str) -> Path:
    """Compiles the shim; skips where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = folder / f"geometry{len(flags)}.so"
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", *flags]
    command += [f"-I{INCLUDE}", str(HERE / "geometry_shim.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def load(library: Path) -> ctypes.CDLL:
    shim = ctypes.CDLL(str(library))
    shim.count_steps.restype = ctypes.c_int64
    return shim


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(build_shim(tmp_path_factory.mktemp("geometry")))


def record(function: Callable[..., None], problem: Problem, seen: NDArray[np.uint8] | None, *arguments: int) -> Record:
    result = Record(seen=None if seen is None else seen.ctypes.data)
    function(ctypes.byref(problem), ctypes.byref(result), *arguments)
    return result


def random_length(rng: np.random.Generator, block: int) -> int:
    """0, around the borders of a tile, or anything up to three tiles."""
    borders = [0, 1, block - 1, block, block + 1, 2 * block]
    return int(rng.choice(borders)) if rng.random() < 0.4 else int(rng.integers(0, 3 * block + 1))


def random_query_rows(rng: np.random.Generator, context: int, decoded: int, block: int) -> tuple[int, int]:
    """(query rows, decoded rows) of a sequence: the usual cases, a prompt, and lengths without any relation."""
    kind = rng.integers(0, 6)
    if kind <= 2:
        return decoded, decoded
    if kind == 3:
        return context, 0
    return (context + decoded if kind == 4 else random_length(rng, block)), decoded


def pack_in_order(lengths: list[int], order: NDArray[np.int64], gap: list[int]) -> tuple[list[int], int]:
    """Where each run begins when runs are packed in the given order behind gaps, and the rows this takes."""
    begins, row = [0] * len(lengths), 0
    for index in order.tolist():
        row += gap[index]
        begins[index] = row
        row += lengths[index]
    return begins, row


def random_tables(rng: np.random.Generator, tiles: tuple[int, int]) -> Tables:
    """Groups of sequences in tables whose order may differ from the packed one, with or without gaps."""
    block = max(tiles) if rng.random() < 0.5 else min(tiles)
    contexts = [random_length(rng, block) for _ in range(rng.integers(1, 4))]
    owners = [group for group in range(len(contexts)) for _ in range(rng.integers(0, 5))]
    lengths = [random_query_rows(rng, contexts[g], random_length(rng, block), block) for g in owners]
    count = len(owners)
    shuffled = rng.random() < 0.3
    order = rng.permutation(count) if shuffled else np.arange(count)
    gaps = [[int(rng.integers(0, 4)) if rng.random() < 0.2 else 0 for _ in range(count)] for _ in range(2)]
    q_begin, q_rows = pack_in_order([q for q, _ in lengths], order, gaps[0])
    decoded_begin, decoded_rows = pack_in_order([r for _, r in lengths], order, gaps[1])
    context_begin, context_rows = pack_in_order(contexts, rng.permutation(len(contexts)), [0] * len(contexts))
    segments = np.array(
        [
            (q_begin[i], q, contexts[g] + r - q, context_begin[g], contexts[g], decoded_begin[i], r, g)
            for i, (g, (q, r)) in enumerate(zip(owners, lengths, strict=True))
        ],
        np.int32,
    ).reshape(count, 8)
    ends = np.searchsorted(np.array(owners, np.int64), np.arange(len(contexts) + 1))
    groups = np.array([(context_begin[g], contexts[g], ends[g], ends[g + 1]) for g in range(len(contexts))], np.int32)
    slack = rng.integers(0, 3, 3).tolist()
    return Tables(segments, groups, q_rows + slack[0], context_rows + slack[1], decoded_rows + slack[2])


def usual_tables(context: int, prompt: bool, responses: list[int]) -> Tables:
    """One group whose responses are neighbours, behind the prompt's own rows or not."""
    lengths = [(context, 0)] * prompt + [(r, r) for r in responses]
    rows, q, decoded = [], 0, 0
    for q_len, r in lengths:
        rows.append((q, q_len, context + r - q_len, 0, context, decoded, r, 0))
        q, decoded = q + q_len, decoded + r
    groups = np.array([(0, context, 0, len(rows))], np.int32)
    return Tables(np.array(rows, np.int32).reshape(-1, 8), groups, q, context, decoded)


def run_tables(rng: np.random.Generator) -> Tables:
    """Groups as a batch has them, some with equal prompts, so that runs do not end with a group."""
    segments, groups, q, context, decoded = [], [], 0, 0, 0
    length = int(rng.integers(0, 50))
    for group in range(rng.integers(1, 4)):
        first = len(segments)
        for r in [-1] * int(rng.integers(0, 2)) + rng.integers(0, 20, rng.integers(0, 8)).tolist():
            q_len, own = (length, 0) if r < 0 else (r, r)
            segments.append((q, q_len, length + own - q_len, context, length, decoded, own, group))
            q, decoded = q + q_len, decoded + own
        groups.append((context, length, first, len(segments)))
        context += length
        length = length if rng.integers(0, 2) else int(rng.integers(0, 50))
    return Tables(
        np.array(segments, np.int32).reshape(-1, 8), np.array(groups, np.int32).reshape(-1, 4), q, context, decoded
    )


def assert_sound(result: Record, seen: NDArray[np.uint8], expected: NDArray[np.uint8]) -> None:
    for head in seen:
        np.testing.assert_array_equal(head, expected)
    assert result.out_of_range == 0
    assert result.wrong_unmasked == 0
    assert result.needless_masks == 0
    assert result.empty_steps == 0, "a step without a visible pair is wasted work"
    assert result.bad_parts == 0
    assert result.wrong_own_rows == 0


def check_tables(
    shim: ctypes.CDLL, tables: Tables, causal: bool, tiles: tuple[int, int], heads: int, limit: int
) -> None:
    problem = tables.problem(causal, tiles, heads)
    expected = tables.dense(causal)
    seen = np.zeros((heads, *expected.shape), np.uint8)
    assert_sound(record(shim.record_forward, problem, seen), seen, expected)
    for direction in (False, True):
        seen[:] = 0
        problem.reversed = direction
        backward = record(shim.record_backward, problem, seen, limit)
        assert_sound(backward, seen, expected)
        assert backward.steps == shim.count_steps(ctypes.byref(problem))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tiles", SMALL_TILES + KERNEL_TILES, ids=str)
def test_every_visible_pair_is_visited_once(shim: ctypes.CDLL, tiles: tuple[int, int], causal: bool) -> None:
    rng = np.random.default_rng([*tiles, causal])
    for _ in range(BATCHES if tiles in SMALL_TILES else BATCHES // 20):
        tables = random_tables(rng, tiles)
        heads = int(rng.integers(1, 4))
        limit = int(rng.choice([1, 2, 3, 5, 8, UNSPLIT]))  # far more parts than the schedule would make
        check_tables(shim, tables, causal, tiles, heads, limit)


def ranges_of(shim: ctypes.CDLL, problem: Problem, group: int, n_block: int) -> list[int]:
    """Every range of queries that sees a tile of the group's context, with where it is full and its positions."""
    out = (ctypes.c_int * (4 * max(problem.num_segments, 1)))()
    return list(out[: 4 * shim.read_ranges(ctypes.byref(problem), group, n_block, out)])


@pytest.mark.parametrize("causal", [True, False])
def test_runs_of_segments_make_the_same_ranges(shim: ctypes.CDLL, causal: bool) -> None:
    rng = np.random.default_rng(causal)
    joined = 0
    for index in range(300):
        tables = (hostile_tables, lambda rng: random_tables(rng, (16, 16)), run_tables)[index % 3](rng)
        problem = tables.problem(causal, (16, 16))
        continued = (ctypes.c_int * max(len(tables.segments), 1))()
        shim.read_continued(ctypes.byref(problem), continued)
        assert list(continued)[: len(tables.segments)] == tables.continued().tolist()
        alone = Problem.from_buffer_copy(problem)
        alone.run_counts = alone.run_begins = None
        for group, n_block, direction in itertools.product(range(len(tables.groups)), range(4), (False, True)):
            problem.reversed = alone.reversed = direction
            expected = ranges_of(shim, alone, group, n_block)
            assert ranges_of(shim, problem, group, n_block) == expected
            joined += sum(tables.continued()) > 3 and len(expected) == 4
    assert joined > 100


def test_tiles_that_fit_their_multiprocessors_are_not_split(shim: ctypes.CDLL) -> None:
    """Context tiles at 28 x 4K x 2K, there with one KV head, with short responses; where the bounds are exact."""
    for limit, tiles, mean, longest, shortest, expected in (
        (2256, 256, 3716, 3840, 3592, 3840),
        (285, 32, 3716, 3840, 3592, 285),
        (548, 512, 556, 808, 304, 808),
        (541, 512, 556, 808, 304, 541),
        (1000, 132, 4062, 4062, 4062, 4062),
        (1000, 132, 4063, 4063, 4063, 1000),
        (1000, 264, 2031, 4000, 62, 4000),
        (1000, 264, 2070, 4000, 62, 1000),  # too many of them are long for pairs of a long and a short one
        (1000, 396, 1500, 2000, 1000, 1000),
        (1282, 396, 1500, 2000, 1000, 2000),  # a pair, and a third wave
    ):
        steps = ctypes.c_int64(tiles * mean)
        assert shim.limit_of(limit, ctypes.c_int64(tiles), steps, longest, shortest, 132) == expected
    assert shim.limit_of(50, ctypes.c_int64(0), ctypes.c_int64(0), 0, 1 << 30, 132) == 50


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_rows_that_take_part(shim: ctypes.CDLL, causal: bool) -> None:
    """All other rows are cleared: queries that see no key, and keys that no query sees."""
    rng = np.random.default_rng(0)
    for index in range(BATCHES):
        tables = random_tables(rng, (16, 16)) if index % 3 else hostile_tables(rng)
        if index % 3 == 1:
            tables.segments[:, 2] -= rng.integers(0, 40, len(tables.segments))  # keys behind the last query
        problem = tables.problem(causal, (16, 16))
        part = [np.zeros(rows, bool) for rows in (tables.q_rows, tables.context_rows, tables.decoded_rows)]
        runs = (ctypes.c_int * 6)()
        for segment in range(len(tables.segments)):
            shim.read_runs(ctypes.byref(problem), segment, runs)
            for rows, begin, end in zip(part, runs[::2], runs[1::2]):
                assert begin >= end or 0 <= begin < end <= len(rows)
                rows[begin:end] = True
        if index % 3:
            dense = tables.dense(causal)
            assert np.array_equal(part[0], dense.any(1))
            assert np.array_equal(np.concatenate(part[1:]), dense.any(0))


def test_packs_of_heads_leave_few_rows_unused(shim: ctypes.CDLL) -> None:
    for heads, tile_rows in itertools.product(range(1, 65), (64, 128, 192)):
        pack = shim.pack_of(heads, tile_rows)
        assert 1 <= pack <= heads and heads % pack == 0
        assert tile_rows - tile_rows // pack * pack <= tile_rows / 8


@pytest.mark.parametrize("prompt", [True, False])
def test_responses_of_a_group_merge_into_one_run(shim: ctypes.CDLL, prompt: bool) -> None:
    responses = [100, 1, 64, 37, 0, 128, 70]
    tables = usual_tables(256, prompt, responses)
    result = record(shim.record_backward, tables.problem(True, (64, 128)), None, UNSPLIT)
    decoded_tiles = sum(-(-r // 128) for r in responses)
    assert result.ranges == 2 + decoded_tiles, "a context tile has one range, the prompt's own rows included"
    context_steps = sum(-(-400 // 64) + (prompt and 5) for _ in range(2))
    assert result.steps <= context_steps + sum(r // 64 + 2 for r in responses)
    assert result.masked_steps <= 2 * (2 + (prompt and 3)) + sum(r // 64 + 2 for r in responses)


def test_long_context_is_mostly_unmasked(shim: ctypes.CDLL) -> None:
    tables = usual_tables(4096, True, [512] * 16)
    for function, arguments in ((shim.record_forward, ()), (shim.record_backward, (UNSPLIT,))):
        result = record(function, tables.problem(True, (64, 64), num_sms=132), None, *arguments)
        pairs = 4096 * 4097 // 2 + 16 * (512 * 4096 + 512 * 513 // 2)
        assert result.steps * 64 * 64 < 1.02 * pairs + 64 * 64 * 64 * 3
        assert result.masked_steps < 0.05 * result.steps


def test_causal_border_rows() -> None:
    """The dense relation itself, by hand: two context keys, three decoded keys, four queries."""
    tables = Tables(
        np.array([[0, 4, 1, 0, 2, 0, 3, 0]], np.int32), np.array([[0, 2, 0, 1]], np.int32), 4, 2, 3
    )  # fmt: skip
    assert tables.dense(True).tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


HOSTILE_VALUES = [-(2**31), 2**31 - 1, -1, 0, 1, 2**30, -(2**30), 2**16, 31, 32, 33, 1000]


def hostile_tables(rng: np.random.Generator) -> Tables:
    """Tables of arbitrary numbers, or honest tables with some of their numbers replaced."""
    tables = random_tables(rng, (16, 16))
    share = float(rng.choice([0.05, 0.3, 1.0]))
    for table in (tables.segments, tables.groups):
        values = np.where(
            rng.random(table.shape) < 0.5,
            rng.choice(HOSTILE_VALUES, table.shape),
            rng.integers(-(2**31), 2**31, table.shape),
        )
        table[:] = np.where(rng.random(table.shape) < share, values, table)
    return tables


def walk_hostile(shim: ctypes.CDLL, seed: int, count: int) -> None:
    """Raises AssertionError when a table of arbitrary numbers leads outside the tensors."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tables = hostile_tables(rng)
        problem = tables.problem(bool(rng.integers(0, 2)), (16, 16), heads=int(rng.integers(1, 4)))
        seen = np.zeros((problem.heads, tables.q_rows, tables.context_rows + tables.decoded_rows), np.uint8)
        for result in (
            record(shim.record_forward, problem, seen),
            record(shim.record_backward, problem, seen, int(rng.choice([1, 7, UNSPLIT]))),
        ):
            assert result.out_of_range == 0 and result.wrong_unmasked == 0 and result.bad_parts == 0


def walk_far_rows(shim: ctypes.CDLL) -> None:
    """A few rows at the far end of tensors with 2^29 rows, where products of indices leave 32 bits."""
    rows = 1 << 29
    segments = np.array([[rows - 70, 70, 30, rows - 50, 50, rows - 50, 50, 0]], np.int32)
    groups = np.array([[rows - 50, 50, 0, 1]], np.int32)
    tables = Tables(segments, groups, rows, rows, rows)
    forward = record(shim.record_forward, tables.problem(True, (64, 64)), None)
    backward = record(shim.record_backward, tables.problem(True, (64, 64)), None, 1)
    assert (forward.steps, backward.steps) == (4, 3)
    assert forward.out_of_range == backward.out_of_range == forward.empty_steps == backward.empty_steps == 0


def test_hostile_tables_stay_inside_the_tensors(shim: ctypes.CDLL) -> None:
    walk_hostile(shim, seed=0, count=2000)
    walk_far_rows(shim)


def test_no_undefined_behaviour(tmp_path: Path) -> None:
    """Honest, hostile and huge tables under the undefined-behaviour sanitizer."""
    try:
        library = build_shim(tmp_path, "-fsanitize=undefined")
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no undefined-behaviour sanitizer")
    program = (
        "import sys, numpy as np, test_geometry as t; from pathlib import Path; shim = t.load(Path(sys.argv[1]))\n"
        "t.walk_hostile(shim, 1, 300); t.walk_far_rows(shim); rng = np.random.default_rng(2)\n"
        "for _ in range(100): t.check_tables(shim, t.random_tables(rng, (16, 16)), True, (16, 16), 2, t.UNSPLIT)\n"
    )
    command = [sys.executable, "-c", program, str(library)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=300)
    assert result.returncode == 0 and "runtime error" not in result.stderr, result.stderr[-2000:]
