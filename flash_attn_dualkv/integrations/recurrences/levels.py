# SPDX-License-Identifier: BSD-3-Clause
"""Where the segments of a layout lie for layers that carry something along the sequence: index tensors, made once.

A segment is a node that has rows; it continues the nearest ancestor that has some. Roots and segments with children are
computed level by level, each level in one call from the states of the one before; then all others, from any level, in
one more. For prompts and responses these are two calls.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...host import int64s, runs, to_device
from ...layout import SharedPromptLayout
from ...pieces import PieceLayout


@dataclass(frozen=True)
class Tails:
    """The packed row with `width` rows of context in front of each segment, for a convolution of width + 1 inputs.

    Rows of states that are given, `width` each, are counted as packed rows behind the others.

    Attributes:
        own: (T,) int64, where each packed row lies.
        copies: (c,) int64, rows in front of segments, in the order of what they are copies of.
        copied: (c,) int64, the packed row of each.
        sources: (u,) int64, the packed rows that are copied, once each; counts: (u,) int64, how often.
        wanted: (n * width,) int64, where the last inputs of n paths lie that others continue.
        total: rows E. Those that are neither own nor copies are zero: there is nothing in front of a sequence.
    """

    own: Tensor
    copies: Tensor
    copied: Tensor
    sources: Tensor
    counts: Tensor
    wanted: Tensor
    total: int


# Segments up to this many rows share a bucket: recurrences compute chunks of at least as many.
ALIKE = 64


@dataclass(frozen=True)
class Level:
    """Segments that are computed together; rows are those of the order of `Levels`.

    Attributes:
        begin, end: their rows.
        cu_seqlens: (n+1,) int32, where they begin and end, and on the host.
        parents: (n,) int64 or None, the state that each begins with: of the level before, or of all that there are,
            those that are given and of each level one after the other.
        reads_all: that of all.
        children: of each of these states, how many continue it.
        buckets: for functions without offsets, how many segments are about equally long (at most twice the shortest or
            64), and how long the longest of them is.
        order: (n,) int64, the segments bucket by bucket; None if there is one bucket.
        places: (rows,) int64, where each row lies if each bucket's segments are padded to its longest, one bucket after
            the other; None if all are equally long.
        has_children: whether the states behind these segments are needed.
    """

    begin: int
    end: int
    cu_seqlens: Tensor
    cu_seqlens_host: Tensor
    parents: Tensor | None
    children: Tensor | None
    buckets: tuple[tuple[int, int], ...]
    order: Tensor | None
    places: Tensor | None
    reads_all: bool = False
    has_children: bool = False


@dataclass(frozen=True)
class Levels:
    """All segments of a layout.

    Attributes:
        order: (rows,) int64, the packed row of each row of the levels, or None if they are the same.
        wanted: (n,) int64, which of all states others continue.
        total: rows T of the packed row, padding included.
    """

    order: Tensor | None
    wanted: Tensor
    total: int
    levels: tuple[Level, ...]


class _Nodes(NamedTuple):
    """Nodes of a packed row, rows and above; and states of them: given ones of nodes without rows, wanted of others."""

    lens: tuple[int, ...]
    parents: tuple[int, ...]
    pad: int
    states: tuple[int, ...]  # the number of each node's state, those that are given first; -1 for none
    num_given: int = 0

    @staticmethod
    def of(layout: SharedPromptLayout) -> _Nodes:
        if isinstance(layout, PieceLayout):
            return _Nodes(layout.own_lens, layout.node_parents, layout.pad, layout.states, layout.kept_states)
        return _Nodes(layout.node_lens, layout.node_parents, layout.pad, (-1,) * layout.num_nodes)

    def is_given(self, node: int) -> bool:
        return not self.lens[node] and self.states[node] >= 0

    @property
    def wanted(self) -> list[int]:
        """Nodes whose states are, by their numbers, which rise as nodes do."""
        return [node for node, length in enumerate(self.lens) if length and self.states[node] >= 0]


def tails_of(layout: SharedPromptLayout, width: int, device: torch.device) -> Tails:
    return _tails(_Nodes.of(layout), width, device)


def levels_of(layout: SharedPromptLayout, device: torch.device) -> Levels:
    return _levels(_Nodes.of(layout), device)


# Cached by value, not by layout: FSDP makes a new layout for every layer. A small cache: all layers
# of a forward share an entry, and micro-batches come one after the other.
@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def _tails(nodes: _Nodes, width: int, device: torch.device) -> Tails:
    lens, parents, pad, states, _ = nodes
    begins = [*accumulate(lens, initial=0)]
    behind: list[list[int]] = []  # the last rows of the path to each node's end, at most `width`
    for node, (begin, length, parent) in enumerate(zip(begins, lens, parents)):
        above = behind[parent] if parent >= 0 and length < width else []
        if nodes.is_given(node):
            begin, length = begins[-1] + pad + states[node] * width, width
        behind.append([*above, *range(begin + max(0, length - width), begin + length)][-width:] if width else [])
    segments = [(length, behind[parent] if parent >= 0 else []) for length, parent in zip(lens, parents) if length]
    if pad:
        segments.append((pad, []))
    places: list[int] = []
    pairs: list[tuple[int, int]] = []
    place = 0
    for length, above in segments:  # in row order
        place += width
        pairs += ((source, place - len(above) + at) for at, source in enumerate(above))
        places.append(place)
        place += length
    pairs.sort()
    uses = Counter(source for source, _ in pairs)
    own_rows = runs(places, [length for length, _ in segments])
    firsts = dict(zip((node for node, length in enumerate(lens) if length), places))
    ends = [firsts[node] + lens[node] for node in nodes.wanted]
    wanted = [row for end in ends for row in range(end - width, end)]
    host = [[copy for _, copy in pairs], [source for source, _ in pairs], uses, uses.values(), wanted]
    own, copies, copied, sources, counts, last = to_device([own_rows, *map(int64s, host)], device)
    return Tails(own, copies, copied, sources, counts, last, place)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def _levels(nodes: _Nodes, device: torch.device) -> Levels:
    lens, parents, pad, states, count = nodes
    begins = [*accumulate(lens, initial=0)][:-1]
    nearest: list[int] = []  # last segment of each node's path
    above: list[int] = []  # segment that each node continues
    depths: list[int] = []
    for index, (length, parent) in enumerate(zip(lens, parents)):
        above.append(nearest[parent] if parent >= 0 and not nodes.is_given(index) else -1)
        nearest.append(index if length or nodes.is_given(index) else above[index])
        depths.append(depths[above[index]] + 1 if above[index] >= 0 else 0)
    segments = [index for index, length in enumerate(lens) if length]
    continued = {above[index] for index in segments} | {*nodes.wanted}
    calls: list[list[int]] = [[] for _ in range(len(lens) + 1)]
    for index in segments:
        is_leaf = above[index] >= 0 and index not in continued
        calls[-1 if is_leaf else depths[index]].append(index)
    # Places of the segments' states, those that are given first, then level by level.
    places = {index: states[index] for index in range(len(lens)) if nodes.is_given(index)}
    before = 0  # the first of the level above
    levels: list[Level] = []
    row = 0
    for depth, chosen in enumerate(calls):
        if not chosen:
            continue
        # Children of one segment are neighbours: their gradients are summed as runs.
        chosen.sort(key=lambda index: (places.get(above[index], -1), index))
        reads_all = depth in (1, len(lens))  # the first level after those that are given, and the leaves
        first = 0 if reads_all else before
        begun = [places[above[index]] - first for index in chosen] if depth else None
        has_children = any(index in continued for index in chosen)
        level = _level(chosen, lens, row, begun, count - first, device)
        levels.append(replace(level, reads_all=reads_all, has_children=has_children))
        row = levels[-1].end
        if has_children:
            before = count
            places.update((index, before + at) for at, index in enumerate(chosen))
            count += len(chosen)
    ordered = [index for chosen in calls for index in chosen]
    host = [int64s(places[index] for index in nodes.wanted)]
    if ordered != segments:
        host.append(runs([begins[index] for index in ordered], [lens[index] for index in ordered]))
    wanted, *order = to_device(host, device)
    return Levels(order[0] if order else None, wanted, sum(lens) + pad, tuple(levels))


def _level(
    segments: Sequence[int],
    all_lens: Sequence[int],
    begin: int,
    states: list[int] | None,
    num_states: int,
    device: torch.device,
) -> Level:
    lens = [all_lens[index] for index in segments]
    alike: dict[int, list[int]] = {}
    for index, length in enumerate(lens):
        alike.setdefault((max(length, ALIKE) - 1).bit_length(), []).append(index)
    buckets = [(len(chosen), max(lens[index] for index in chosen)) for chosen in alike.values()]
    firsts = [0] * len(lens)  # the place of each segment's first row
    padded = 0
    for chosen, (_, longest) in zip(alike.values(), buckets):
        for index in chosen:
            firsts[index] = padded
            padded += longest
    long = {}
    if states is not None:
        children = Counter(states)
        long["parents"] = int64s(states)
        long["children"] = int64s(children[state] for state in range(num_states))
    if len(buckets) > 1:
        long["order"] = int64s(index for chosen in alike.values() for index in chosen)
    if len(buckets) > 1 or padded > sum(lens):
        long["places"] = runs(firsts, lens)
    host = int64s([0, *accumulate(lens)])
    *tensors, cu_seqlens = to_device([*long.values(), host], device)
    moved: dict[str, Any] = dict.fromkeys(("parents", "children", "order", "places")) | dict(zip(long, tensors))
    end = begin + sum(lens)
    return Level(begin, end, cu_seqlens.int(), host.int(), buckets=tuple(buckets), **moved)
