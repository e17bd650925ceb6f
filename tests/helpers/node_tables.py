# SPDX-License-Identifier: BSD-3-Clause
"""Tables of nodes for the tests of the geometry: trees, contexts with their sequences, and arbitrary numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
COLUMNS = ("q_begin", "q_len", "q_pos0", "kv_begin", "kv_len", "kv_pos0", "parent", "subtree_end")


class Problem(ctypes.Structure):
    """Mirror of the shims' Problem."""

    _fields_ = [
        ("nodes", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_nodes", "q_rows", "key_rows", "decoded_rows")),
        *((name, ctypes.c_int) for name in ("causal", "window", "block_m", "block_n")),
        *((name, ctypes.c_int) for name in ("heads", "num_kv_heads", "num_sms")),
        ("reversed", ctypes.c_int),
        ("head_major", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("run_counts", "run_begins")),
        ("orders_dq", ctypes.c_int),
    ]


@dataclass
class Tables:
    """A table of nodes and the rows of the tensors that it indexes."""

    nodes: Ints  # (n, 8): COLUMNS
    q_rows: int
    key_rows: int
    decoded_rows: int = 0

    def __getitem__(self, name: str) -> Ints:
        return self.nodes[:, COLUMNS.index(name)]

    def continued(self) -> NDArray[np.bool_]:
        """(n,): whether a node belongs to the run of the one before."""
        begin = self["q_begin"].clip(0, self.q_rows).astype(np.int64)
        end = begin + self["q_len"].clip(0, self.q_rows - begin)
        position = self["q_pos0"].clip(-(1 << 30), 1 << 30)
        first_key = self["kv_pos0"].clip(0, (1 << 30) - self.key_lengths())
        sees = position >= first_key
        alike = (sees[1:] & sees[:-1]) | (~sees[1:] & ~sees[:-1] & (position[1:] == position[:-1]))
        return np.concatenate([np.zeros(min(1, len(begin)), bool), (begin[1:] == end[:-1]) & alike])

    def key_lengths(self) -> NDArray[np.int64]:
        """(n,): keys of each node that its tensor has."""
        begin = self["kv_begin"].clip(0, self.key_rows + self.decoded_rows).astype(np.int64)
        end = np.where(begin < self.key_rows, self.key_rows, self.key_rows + self.decoded_rows)
        return self["kv_len"].clip(0, end - begin)

    def find_runs(self, continued: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Runs that begin before each node, and where each begins; as the kernel that builds the list finds them."""
        begins = np.flatnonzero(~continued)
        counts = np.searchsorted(begins, np.arange(len(self.nodes) + 1))
        return counts.astype(np.int32), np.append(begins, len(self.nodes)).astype(np.int32)

    def problem(
        self,
        causal: bool,
        tiles: tuple[int, int],
        heads: int = 1,
        kv_heads: int = 1,
        num_sms: int = 4,
        continued: NDArray[np.bool_] | None = None,
        window: int = -1,
    ) -> Problem:
        """`continued`: where runs go on; by default as continued() has it. `window`: negative for none."""
        found = self.find_runs(self.continued() if continued is None else continued)
        self.run_counts, self.run_begins = found  # as long as the last problem, which holds their addresses
        return Problem(
            self.nodes.ctypes.data, len(self.nodes), self.q_rows, self.key_rows, self.decoded_rows, causal, window,
            *tiles, heads, kv_heads, num_sms, False, False, self.run_counts.ctypes.data, self.run_begins.ctypes.data,
        )  # fmt: skip

    def ancestors(self) -> NDArray[np.bool_]:
        """(n, n): whether the second node is on the path of the first."""
        on_path = np.eye(len(self.nodes), dtype=bool)
        for index, parent in enumerate(self["parent"].tolist()):
            if parent >= 0:
                on_path[index] |= on_path[parent]
        return on_path

    def dense(self, causal: bool, window: int = -1) -> NDArray[np.uint8]:
        """(q_rows, key_rows + decoded_rows): 1 where a row sees a key."""
        relation = np.zeros((self.q_rows, self.key_rows + self.decoded_rows), np.uint8)
        q_row, q_pos = expand(self["q_begin"], self["q_len"], self["q_pos0"])
        kv_row, kv_pos = expand(self["kv_begin"], self["kv_len"], self["kv_pos0"])
        sees = self.ancestors().repeat(self["kv_len"], 1).repeat(self["q_len"], 0)
        if causal:
            sees &= kv_pos <= q_pos[:, None]
        if window >= 0:
            sees &= kv_pos >= q_pos[:, None] - window
        relation[np.ix_(q_row, kv_row)] = sees
        return relation


def expand(begins: Ints, lengths: Ints, positions: Ints) -> tuple[Ints, Ints]:
    """Of each row of all runs its packed row and its logical position."""
    node = np.repeat(np.arange(len(lengths)), lengths)
    offset = (np.arange(len(node)) - np.repeat(np.cumsum(lengths) - lengths, lengths)).astype(np.int32)
    return begins[node] + offset, positions[node] + offset


def subtree_ends(parents: Sequence[int]) -> list[int]:
    ends = [index + 1 for index in range(len(parents))]
    for index in reversed(range(len(parents))):
        if parents[index] >= 0:
            ends[parents[index]] = max(ends[parents[index]], ends[index])
    return ends


def positions_of(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Keys above each node."""
    positions: list[int] = []
    for parent in parents:
        positions.append(0 if parent < 0 else positions[parent] + lengths[parent])
    return positions


def tree_tables(lengths: Sequence[int], parents: Sequence[int]) -> Tables:
    """A tree or forest, packed depth-first: queries and keys are the same rows."""
    begins = (np.cumsum(lengths) - lengths).tolist() if len(lengths) else []
    positions = positions_of(lengths, parents)
    columns = [begins, lengths, positions, begins, lengths, positions, parents, subtree_ends(parents)]
    nodes = np.ascontiguousarray(np.array(columns, np.int32).reshape(8, -1).T)
    return Tables(nodes, int(sum(lengths)), int(sum(lengths)))


def joined(trees: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Tables:
    """Lengths and parents of many trees in one table."""
    lengths: list[int] = []
    parents: list[int] = []
    for own, above in trees:
        parents += [parent + len(lengths) if parent >= 0 else -1 for parent in above]
        lengths += own
    return tree_tables(lengths, parents)


def comb(root: int, turns: Sequence[int], leaf: int) -> Tables:
    """A spine of turns below a root, and a leaf beside each of them."""
    lengths, parents = [root], [-1]
    for index, turn in enumerate(turns):
        lengths += [leaf, turn]
        parents += [2 * index, 2 * index]
    return tree_tables(lengths, parents)


def all_forests(count: int) -> Iterator[list[int]]:
    """The parents of every forest of `count` nodes in depth-first order."""
    if count == 0:
        yield []
        return
    for parents in all_forests(count - 1):
        ancestor = count - 2  # a node's parent is on the path of the one before
        while ancestor >= 0:
            yield [*parents, ancestor]
            ancestor = parents[ancestor]
        yield [*parents, -1]


def random_parents(rng: np.random.Generator, count: int, climb: float) -> list[int]:
    """A forest in depth-first order: `climb` 0 makes a chain, 1 a bush."""
    parents: list[int] = []
    for index in range(count):
        parent = index - 1
        while parent >= 0 and rng.random() < climb:
            parent = parents[parent]
        parents.append(parent)
    return parents


def random_length(rng: np.random.Generator, block: int) -> int:
    """0, around the borders of a tile, or anything up to three tiles."""
    borders = [0, 1, block - 1, block, block + 1, 2 * block]
    return int(rng.choice(borders)) if rng.random() < 0.4 else int(rng.integers(0, 3 * block + 1))


def random_tree(rng: np.random.Generator, block: int, most: int = 12) -> Tables:
    count = int(rng.integers(1, most + 1))
    parents = random_parents(rng, count, float(rng.choice([0.02, 0.3, 0.5, 0.7])))
    return tree_tables([random_length(rng, block) for _ in range(count)], parents)


def scattered(rng: np.random.Generator, lengths: list[int]) -> tuple[list[int], int]:
    """Where runs begin, packed in any order and with gaps or not, and the rows this takes."""
    order = rng.permutation(len(lengths)) if rng.random() < 0.5 else np.arange(len(lengths))
    begins, row = [0] * len(lengths), 0
    for index in order.tolist():
        row += int(rng.integers(0, 4)) if rng.random() < 0.2 else 0
        begins[index] = row
        row += lengths[index]
    return begins, row + int(rng.integers(0, 3))


def scattered_tree(rng: np.random.Generator, block: int, most: int = 8) -> Tables:
    """A tree with keys in one or two tensors, rows in any order, and queries that may be fewer, more or elsewhere."""
    count = int(rng.integers(1, most + 1))
    parents = random_parents(rng, count, float(rng.choice([0.02, 0.3, 0.5, 0.7])))
    lengths = [random_length(rng, block) for _ in range(count)]
    positions = positions_of(lengths, parents)
    q_lens = [random_length(rng, block) if rng.random() < 0.5 else length for length in lengths]
    shifts = [int(rng.integers(-2 * block, block)) if rng.random() < 0.3 else 0 for _ in range(count)]
    q_begins, q_rows = scattered(rng, q_lens)
    in_keys = [rng.random() < 0.5 for _ in range(count)]
    kv_begins, rows = [0] * count, [0, 0]
    for region in (True, False):
        chosen = [index for index in range(count) if in_keys[index] == region]
        begins, rows[not region] = scattered(rng, [lengths[index] for index in chosen])
        for index, begin in zip(chosen, begins, strict=True):
            kv_begins[index] = begin + (0 if region else rows[0])
    q_pos0 = [
        position + length - q_len + shift  # aligned at their ends but for the shift
        for position, length, q_len, shift in zip(positions, lengths, q_lens, shifts, strict=True)
    ]
    columns = [q_begins, q_lens, q_pos0, kv_begins, lengths, positions, parents, subtree_ends(parents)]
    return Tables(np.ascontiguousarray(np.array(columns, np.int32).T), q_rows, *rows)


def random_query_rows(rng: np.random.Generator, context: int, decoded: int, block: int) -> tuple[int, int]:
    """(query rows, decoded rows) of a sequence: the usual cases, a prompt, and lengths without any relation."""
    kind = rng.integers(0, 6)
    if kind <= 2:
        return decoded, decoded
    if kind == 3:
        return context, 0
    return (context + decoded if kind == 4 else random_length(rng, block)), decoded


def context_tables(
    contexts: Sequence[int],
    sequences: Sequence[Sequence[tuple[int, int]]],
    q_begins: Sequence[int],
    kv_begins: Sequence[int],
    context_begins: Sequence[int],
    rows: tuple[int, int, int],
) -> Tables:
    """The table of two regions: contexts without queries, each before its sequences of (query rows, decoded rows).

    kv_begins are rows of k_decoded; `rows` are those of q, k and k_decoded.
    """
    nodes, index = [], 0
    for context, begin, members in zip(contexts, context_begins, sequences, strict=True):
        root = len(nodes)
        q_begin = q_begins[index] if index < len(q_begins) else 0
        nodes.append((q_begin, 0, 0, begin, context, 0, -1, root + len(members) + 1))
        for q_len, length in members:
            end = len(nodes) + 1
            position = context + length - q_len
            nodes.append((q_begins[index], q_len, position, rows[1] + kv_begins[index], length, context, root, end))
            index += 1
    return Tables(np.array(nodes, np.int32).reshape(-1, 8), *rows)


def random_contexts(rng: np.random.Generator, block: int) -> Tables:
    """Contexts with their sequences, in tables whose order may differ from the packed one."""
    contexts = [random_length(rng, block) for _ in range(rng.integers(1, 4))]
    sequences = [
        [random_query_rows(rng, context, random_length(rng, block), block) for _ in range(rng.integers(0, 5))]
        for context in contexts
    ]
    flat = [pair for members in sequences for pair in members]
    q_begins, q_rows = scattered(rng, [q for q, _ in flat])
    kv_begins, decoded_rows = scattered(rng, [length for _, length in flat])
    context_begins, key_rows = scattered(rng, contexts)
    return context_tables(contexts, sequences, q_begins, kv_begins, context_begins, (q_rows, key_rows, decoded_rows))


def packed_prompts(prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> Tables:
    """Each prompt followed by its responses."""
    return joined(([prompt, *own], [-1, *[0] * len(own)]) for prompt, own in zip(prompts, responses, strict=True))


def random_prompts(rng: np.random.Generator, block: int) -> Tables:
    """Some prompts with equal lengths, so that runs do not end with a prompt's responses."""
    prompts = [random_length(rng, block)]
    while rng.random() < 0.6:
        prompts.append(prompts[-1] if rng.random() < 0.5 else random_length(rng, block))
    return packed_prompts(prompts, [rng.integers(0, 20, rng.integers(0, 8)).tolist() for _ in prompts])


def random_tables(rng: np.random.Generator, tiles: tuple[int, int]) -> Tables:
    block = max(tiles) if rng.random() < 0.5 else min(tiles)
    make = (random_tree, scattered_tree, random_contexts, random_prompts)[rng.integers(0, 4)]
    return make(rng, block)


HOSTILE_VALUES = [-(2**31), 2**31 - 1, -1, 0, 1, 2, 3, 2**30, -(2**30), 2**16, 31, 32, 33, 1000]


def hostile_tables(rng: np.random.Generator) -> Tables:
    """Tables of arbitrary numbers, or honest tables with some of their numbers replaced."""
    tables = random_tables(rng, (16, 16))
    shape = tables.nodes.shape
    small = rng.random() < 0.3  # numbers that are not all clamped
    values = np.where(rng.random(shape) < 0.5, rng.choice(HOSTILE_VALUES, shape), rng.integers(-(2**31), 2**31, shape))
    values = rng.integers(-2, 40, shape) if small else values
    tables.nodes[:] = np.where(rng.random(shape) < rng.choice([0.05, 0.3, 1.0]), values, tables.nodes)
    return tables
