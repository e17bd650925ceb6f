# SPDX-License-Identifier: BSD-3-Clause
"""Plans of decoding steps: requests over pages, the device's lists, and what a list must be."""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

import numpy as np
import torch
from geometry import load_shim
from launches import DEVICE
from torch import Tensor

from flash_attn_dualkv.decode import library as decode_library
from flash_attn_dualkv.decode.calls import Limits, Step

# Rows and keys of a tile of the sm90 kernels, by head dim.
TILES = {64: (64, 128), 128: (64, 80), 256: (128, 80), 576: (64, 64)}
GUARD = 4096  # bytes behind a plan's memory
PADDING = -1  # the request of a row that is in none
MAX_KEYS = 1 << 16  # of a request


class Item(NamedTuple):
    """As csrc/decode/geometry.h describes it."""

    request: int
    row: int
    rows: int
    q_pos: int
    cut: int
    keys: int
    first: int
    end: int
    waits: int
    arrivals: int
    signals: int
    split: int = -1
    folds: int = 0
    folded: int = 0


class DecodeStep(NamedTuple):
    """A step without a plan's memory."""

    block_table: Tensor
    seqlens: Tensor
    queries: int
    cu_seqlens_q: Tensor | None = None
    boundaries: Tensor | None = None
    parents: Tensor | None = None
    shared_pages: Tensor | None = None


class Lists(NamedTuple):
    shared: list[Item]
    alone: list[Item]
    queries: list[int]
    splits: list[int]  # how many states of each row of q are to be combined
    block_m: int
    block_n: int


@dataclass
class Requests:
    """A step's requests. Lengths may be anything; entries behind them too."""

    table: list[list[int]]
    keys: list[int]
    page_size: int
    num_pages: int
    queries: list[int] | None = None  # None: one each
    cuts: list[int] | None = None
    rows_before: int = 0  # rows of q in front of the requests', and behind them
    rows_behind: int = 0

    @property
    def q_rows(self) -> int:
        return self.rows_before + sum(self.q_lens) + self.rows_behind

    @property
    def q_lens(self) -> list[int]:
        return [1] * len(self.table) if self.queries is None else self.queries

    @property
    def q_begins(self) -> list[int]:
        return list(accumulate(self.q_lens, initial=self.rows_before))[:-1]

    def cut(self, request: int) -> int:
        return self.keys[request] if self.cuts is None else min(max(self.cuts[request], 0), self.keys[request])

    def shareable(self, request: int) -> int:
        """Keys before the cut that all queries see."""
        queries = self.q_lens[request]
        return max(min(self.cut(request), self.keys[request] - queries + 1), 0) if queries else 0

    def pages(self, request: int, begin: int, end: int) -> tuple[int, ...]:
        """Of keys [begin, end)."""
        return tuple(self.table[request][begin // self.page_size : -(-end // self.page_size)])

    def tree(self) -> tuple[list[int], list[int]]:
        """Of each request the earlier one with most of its first pages that both may share, and how many."""
        most = [-(-self.shareable(request) // self.page_size) for request in range(len(self.table))]
        parents, shared = [-1] * len(most), [0] * len(most)
        for request in range(len(most)):
            for other in range(request):
                pairs = zip(self.table[request][: most[request]], self.table[other][: most[other]])
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if common > shared[request]:
                    parents[request], shared[request] = other, common
        return parents, shared

    def request_of_row(self) -> list[int]:
        owners = [index for index, queries in enumerate(self.q_lens) for _ in range(queries)]
        return [PADDING] * self.rows_before + owners + [PADDING] * self.rows_behind

    def step(self, columns: int, gives_tree: bool = False) -> DecodeStep:
        table = torch.full((len(self.table), columns + 1), -7, dtype=torch.int32)  # its rows are not contiguous
        for row, entries in zip(table, self.table, strict=True):
            row[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
        offsets = None if self.queries is None else [*self.q_begins, self.rows_before + sum(self.q_lens)]
        tree = self.tree() if gives_tree else (None, None)
        made = [None if one is None else ints(one) for one in (self.keys, offsets, self.cuts, *tree)]
        assert made[0] is not None
        return DecodeStep(table.to(DEVICE)[:, :columns], made[0], self.q_rows, *made[1:])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class PlanStruct(ctypes.Structure):
    """Mirror of DualkvDecodePlan."""

    _fields_ = [
        ("block_table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("table_stride", "requests", "columns", "queries")),
        *((name, ctypes.c_void_p) for name in ("seqlens", "cu_seqlens_q", "boundaries", "parents", "shared_pages")),
        *((name, ctypes.c_int64) for name in Limits._fields),
        ("memory", ctypes.c_void_p),
    ]


class Plan:
    """A plan's memory from step to step."""

    def __init__(self, limits: Limits, columns: int) -> None:
        self.limits, self.columns = limits, columns
        self.size = decode_library.decode_plan_bytes(limits, torch.device(DEVICE))
        self.memory = torch.zeros(self.size + GUARD, dtype=torch.uint8, device=DEVICE)
        self.memory[self.size :] = 0xA5

    def update(self, step: Requests | DecodeStep) -> Lists:
        made = step if isinstance(step, DecodeStep) else step.step(self.columns)
        self.launch(made)
        return self.read(made.queries)

    def launch(self, step: DecodeStep) -> None:
        optional = (step.cu_seqlens_q, step.boundaries, step.parents, step.shared_pages)
        decode_library.decode_plan(
            Step(step.block_table, step.seqlens, *optional, self.memory, step.queries, self.limits)
        )

    def read(self, q_rows: int) -> Lists:
        assert (self.memory[self.size :].cpu() == 0xA5).all()
        return read_lists(self.memory[: self.size], self.limits, q_rows, TILES[self.limits.head_dim])


def read_lists(memory: Tensor, limits: Limits, q_rows: int, tile: tuple[int, int]) -> Lists:
    """The lists in a plan's memory, for kernels with tiles of so many rows and keys."""
    layout, asked = (ctypes.c_int64 * 7)(), PlanStruct(*(0,) * 10, *limits, 0)
    load_shim("decode").read_decode_layout(ctypes.byref(asked), *tile, layout)
    *offsets, shared_capacity, alone_capacity = layout
    content = memory.cpu().numpy()
    shared, alone, counts, queries, splits = (content[offset:] for offset in offsets)
    sizes = counts[:8].view(np.int32)
    assert 0 <= sizes[0] <= shared_capacity and 0 <= sizes[1] <= alone_capacity
    lists = [
        [Item(*row[:14]) for row in one[: 64 * size].view(np.int32).reshape(-1, 16).tolist()]
        for one, size in zip((shared, alone), sizes, strict=True)
    ]
    numbers = [one[: 4 * q_rows].view(np.int32).tolist() for one in (queries, splits)]
    return Lists(*lists, numbers[0], numbers[1] if limits.split_keys else [], *tile)


def values_of(head_dim: int) -> int:
    """Head dim of the values: latents are wider."""
    return 512 if head_dim == 576 else head_dim


Tile = tuple[int, int]  # position of the first key, and number of keys


def tiles_of(item: Item, block_n: int, most: int = 4096) -> list[Tile]:
    given, found = (ctypes.c_int * 16)(*item), (ctypes.c_int * (2 * most))()
    count = load_shim("decode").read_decode_walk(given, block_n, most, found)
    assert 0 <= count <= most
    return list(zip(found[: 2 * count : 2], found[1 : 2 * count : 2], strict=True))


def steps_of(item: Item, block_n: int, split_tiles: int) -> list[tuple[int, Item]]:
    """What an item walks, one after the other, each with its split; an item that does not fold is one step."""
    if item.folds == 0:
        return [(item.split, item)]
    last, steps = -(-item.first // split_tiles) + item.folds - 1, []
    for step in range(item.folds):
        given, found = (ctypes.c_int * 16)(*item), (ctypes.c_int * 16)()
        load_shim("decode").read_decode_step(given, split_tiles, block_n, step, found)
        part = Item(*found[:14])
        kept = item.split if step == item.folds - 1 else max(item.split, 0)
        assert (part.split, part.folds, part.folded) == (kept, item.folds, step)
        steps.append((last - step, part._replace(folds=0, folded=0)))
    return steps


def trainers_tiles(requests: Requests, request: int, end: int, block_n: int) -> list[Tile]:
    """What rows that see keys of [0, end) meet, in order: the node behind the request's cut, then that before it."""
    cut = min(requests.cut(request), end)
    return [
        (begin + first, min(block_n, node_end - begin - first))
        for begin, node_end in ((cut, end), (0, cut))
        for first in reversed(range(0, node_end - begin, block_n))
    ]


def splits_of(requests: Requests, request: int, end: int, block_n: int, split_tiles: int) -> dict[int, list[Tile]]:
    """The same tiles by their split, -1 where nothing is to be combined."""
    cut, tiles = requests.cut(request), trainers_tiles(requests, request, end, block_n)
    if split_tiles == 0:
        return {-1: tiles}
    whole, own = cut // block_n, -(-(requests.keys[request] - cut) // block_n)
    low = -(-whole // split_tiles)
    total = low + max(-(-own // split_tiles), 1)
    found: dict[int, list[Tile]] = {split: [] for split in range(total)}
    for first, valid in tiles:
        is_low = first < whole * block_n
        found[
            first // block_n // split_tiles if is_low else low + max(first - cut, 0) // block_n // split_tiles
        ].append((first, valid))
    return found if total > 1 else {-1: tiles}


BRANCH = 1 << 30  # position of the queries of one
Part = tuple[Item, list[Tile]]  # of a walk


@dataclass
class Walks:
    """Checks a list row by row, and keeps who reads each tile."""

    requests: Requests
    lists: Lists
    heads: int  # of a KV head
    split_tiles: int = 0
    # Who reads a tile, a request for its own or -1 - that of a branch: by the tile's end and the
    # pages up to it.
    readers: defaultdict[tuple[int, tuple[int, ...]], set[int]] = field(default_factory=lambda: defaultdict(set))

    def check(self, items: list[Item]) -> None:
        lists, rows = self.lists, self.requests.q_rows * self.heads
        assert sorted(lists.queries) == list(range(self.requests.q_rows))
        begins = self.requests.q_begins
        chains: list[defaultdict[int, list[Part]]] = [defaultdict(list) for _ in range(rows)]  # by split
        states: list[set[int]] = [set() for _ in range(rows)]  # that are left of each row
        for item in items:
            assert 0 < item.rows <= lists.block_m and item.row >= 0 and item.row + item.rows <= rows
            assert item.folded == 0 and item.folds != 1
            assert item.folds == 0 or item.waits == item.signals == -1
            for split, part in steps_of(item, lists.block_n, self.split_tiles):
                step = part, tiles_of(part, lists.block_n)
                self.note_readers(*step)
                for row in range(item.row, item.row + item.rows):
                    chains[row][split].append(step)
            for row in range(item.row, item.row + item.rows):
                states[row].add(item.split)
        owners = self.requests.request_of_row()
        for row in range(rows):
            for chain in chains[row].values():
                links = [(one.signals, other.waits) for (one, _), (other, _) in pairwise(chain)]
                assert chain[0][0].waits == chain[-1][0].signals == -1
                assert all(signals == waits >= 0 for signals, waits in links), "items come behind those they wait for"
            query = lists.queries[row // self.heads]
            self.check_row(owners[query], query - begins[owners[query]], dict(chains[row]), row)
            left = sorted(states[row])
            assert left in ([-1], list(range(len(left)))), "states of a row are those up to some split"
            assert not self.split_tiles or lists.splits[query] == (0 if left == [-1] else len(left))
        self.check_signals(items)
        if not self.split_tiles:
            self.check_order(items, [tiles_of(item, lists.block_n) for item in items])

    def check_row(self, request: int, place: int, walks: dict[int, list[Part]], row: int) -> None:
        every = [one for walk in walks.values() for one in walk]
        if request == PADDING:
            assert len(every) == 1 and not every[0][1] and -1 in walks
            return
        requests, block_n = self.requests, self.lists.block_n
        position = requests.keys[request] - requests.q_lens[request] + place
        ends = set()
        for item, tiles in every:
            if item.q_pos == BRANCH:
                for first, valid in tiles:
                    end = first + valid
                    assert valid == block_n and end <= position + 1
                    assert requests.pages(item.request, first, end) == requests.pages(request, first, end)
                continue
            assert item.request == request
            assert item.q_pos + row // self.heads - item.row // self.heads == position
            ends.add(item.q_pos + (item.row + item.rows - 1) // self.heads - item.row // self.heads + 1)
        assert len(ends) == 1  # behind the last query of a row tile
        expected = splits_of(requests, request, max(*ends, 0), block_n, self.split_tiles)
        assert {split: [tile for _, tiles in walk for tile in tiles] for split, walk in walks.items()} == expected

    def note_readers(self, item: Item, tiles: list[Tile]) -> None:
        """Whole tiles before the cut."""
        owner = -1 - item.request if item.q_pos == BRANCH else item.request
        for first, valid in tiles:
            if first + valid <= item.cut and valid == self.lists.block_n:
                self.readers[first + valid, self.requests.pages(item.request, 0, first + valid)].add(owner)

    def check_signals(self, items: list[Item]) -> None:
        signals = Counter(item.signals for item in items)
        for item in items:
            assert item.arrivals == (signals[item.waits] if item.waits >= 0 else 0)
            assert item.waits < len(self.requests.table)

    def check_order(self, items: list[Item], tiles: list[list[Tile]]) -> None:
        """Longest remaining path first: of all M tiles of a branch or leaf, that of the longest."""
        remaining: dict[int, int] = {}  # of branches
        lengths = [0] * len(items)
        for index in reversed(range(len(items))):
            lengths[index] = len(tiles[index]) + remaining.get(items[index].signals, 0)
            if items[index].waits >= 0:
                assert remaining.setdefault(items[index].waits, lengths[index]) == lengths[index]
        longest: dict[tuple[int, int], int] = {}
        for item, length in zip(items, lengths, strict=True):
            longest.setdefault((item.request, item.waits), length)
            assert length <= longest[item.request, item.waits]
        firsts = [longest[item.request, item.waits] for item in items if item.keys or item.first or item.end]
        assert firsts == sorted(firsts, reverse=True)

    def check_sharing(self) -> int:
        """Every whole tile is read once for all that may share it. Returns how many are shared.

        Where one of those that have its last page may share a part of it only, the tile may be read more often.
        """
        requests, shared, count = self.requests, 0, len(self.requests.table)
        shareable = [requests.shareable(index) for index in range(count)]
        for (end, pages), readers in self.readers.items():
            last_page = (end - 1) // requests.page_size * requests.page_size
            same = [index for index in range(count) if requests.pages(index, 0, end) == pages]
            able = [index for index in same if shareable[index] >= end]
            if len(able) > 1 and len(able) == sum(shareable[index] > last_page for index in same):
                assert len(readers.difference(set(same).difference(able))) == 1
                shared += 1
        return shared


def check_lists(requests: Requests, lists: Lists, heads: int, split_tiles: int = 0) -> Walks:
    """Checks both lists; the walks of the shared one."""
    Walks(requests, lists, heads).check(lists.alone)
    assert all(item.signals == item.waits == item.split == -1 and item.first == 0 for item in lists.alone)
    walks = Walks(requests, lists, heads, split_tiles)
    walks.check(lists.shared)
    return walks


@dataclass
class Cache:
    """Hands out pages, in random order."""

    rng: np.random.Generator
    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        self.free = self.rng.permutation(self.num_pages).tolist()

    def extend(self, pages: list[int], keys: int, more: int) -> tuple[list[int], int]:
        """A continuation: whole pages are shared, a page that is not full is copied."""
        kept = pages[: keys // self.page_size] if more else list(pages)
        needed = -(-(keys + more) // self.page_size) - len(kept)
        return kept + [self.free.pop() for _ in range(needed)], keys + more


def random_tree(
    rng: np.random.Generator, page_size: int, block_n: int, columns: int, most: int = 12
) -> tuple[Requests, Cache]:
    """Some system prompts, prompts that continue them, and responses; in any order, with what else there is."""
    cache = Cache(rng, 20 * most * columns, page_size)
    room, found = columns * page_size, list[tuple[list[int], int, int]]()
    while len(found) < most:
        system = cache.extend([], 0, int(rng.integers(0, room // 2)))
        for _ in range(rng.integers(1, 4)):
            prompt = cache.extend(*system, int(rng.integers(0, room // 4)))
            for _ in range(rng.integers(1, 5)):
                own = int(rng.choice([0, 1, int(rng.integers(0, room // 4))]))
                found.append((*cache.extend(*prompt, own), prompt[1]))
                if rng.random() < 0.2:  # one that shares all
                    found.append(found[-1])
    found = [found[index] for index in rng.permutation(len(found))[:most]]
    if rng.random() < 0.5:
        found.insert(int(rng.integers(0, len(found))), ([-1, 3], 0, 0))  # without keys
    stale = [pages + rng.integers(-1, cache.num_pages, columns - len(pages)).tolist() for pages, _, _ in found]
    requests = Requests(stale, [keys for _, keys, _ in found], page_size, cache.num_pages)
    if rng.random() < 0.7:
        requests.cuts = [cut for _, _, cut in found]
    if rng.random() < 0.5:
        requests.queries = rng.choice([0, 1, 1, 2, 4, 37], len(found)).tolist()
        requests.rows_before, requests.rows_behind = rng.integers(0, 3, 2).tolist()
    return requests, cache


def grown(rng: np.random.Generator, requests: Requests, cache: Cache, columns: int) -> Requests:
    """The next step: most requests have another key, some a prompt's response ended and another one's begins."""
    table, keys = [list(row) for row in requests.table], list(requests.keys)
    for index in range(len(table)):
        more = int(rng.choice([0, 1, 1, 1, 90]))
        used = -(-keys[index] // cache.page_size)
        if keys[index] + more <= columns * cache.page_size:
            pages, keys[index] = cache.extend(table[index][:used], keys[index], more)
            table[index][: len(pages)] = pages
    order = rng.permutation(len(table)) if rng.random() < 0.5 else np.arange(len(table))
    picked = [int(index) for index in order]
    return replace(
        requests, table=[table[index] for index in picked], keys=[keys[index] for index in picked],
        cuts=None if requests.cuts is None else [requests.cuts[index] for index in picked],
    )  # fmt: skip


def limits_for(
    requests: Requests, heads: tuple[int, int], head_dim: int, spare: int = 0, split_keys: int = 0
) -> Limits:
    return Limits(
        len(requests.table) + spare, MAX_KEYS, requests.q_rows + spare, requests.num_pages, requests.page_size, *heads,
        head_dim, values_of(head_dim), split_keys,
    )  # fmt: skip
