# SPDX-License-Identifier: BSD-3-Clause
"""Micro-batches of a trainer that divide trees, with what they have in common in trunks that run once.

    divided = divided_trees(tree, micro_batches, Trunks())

`plan_parts` chooses parts by a budget; here they are given, as trainers count samples or take other micro-batches, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..errors import SharedPromptError
from .parts import TILE, Cut, Run, Runs, cut_of, walk
from .prefix_tree import PrefixTree
from .split import below, split_by_token_budget

# Of a trunk's row, where a part's costs 1: a forward, a recomputed one and a backward of twice its
# work are 4, and the trunk's first forward is 1 more.
PASSES = 1.25
# A node of the tree that grows is named by its path: each node that was given, and the first of the
# micro-batches that have it. Sorted, these are depth first.
_Key: TypeAlias = "tuple[tuple[int, int], ...]"


class Trunks(NamedTuple):
    """Which trunks are kept.

    Attributes:
        kept: how many rows' memory the kept keys of a row take.
        state: how many rows' memory the kept end state of a node takes.
        least_ratio: a trunk must make the work of its micro-batches so many times less.
        passes: what a trunk's row costs, where a part's costs 1; 1 without gradients.
        is_bounded: no pass has more rows than the largest micro-batch, with what is kept for it.
        in_order: parts run in the order of their micro-batches: a single trunk has all that those which share anything
            have in common. Else a trunk is a path of nodes that all samples of its micro-batches have, may continue
            another one, and those of most parts are first.
    """

    kept: float = 1.0
    state: float = 0.0
    least_ratio: float = 1.0
    passes: float = PASSES
    is_bounded: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class DividedTrees:
    """Micro-batches that are parts of a cut, and those that stay as they are.

    Attributes:
        lonely: numbers of micro-batches that are no parts.
        numbers: of those that are, in the order in which their parts run.
        sequences: of each of these.
        tree: of all of these sequences, one micro-batch after the other. Nodes that no trunk has are copied.
        cut: of the tree. No sequence needs a trunk's own loss: those that end in one are a part's.
    """

    lonely: tuple[int, ...]
    numbers: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    tree: PrefixTree
    cut: Cut


class _Trunk(NamedTuple):
    """Nodes in trunks, and what continues them: numbers of micro-batches, and trunks."""

    nodes: list[int]
    items: list[int | _Trunk]


def divided_trees(
    tree: PrefixTree, micro_batches: Sequence[Sequence[int]], trunks: Trunks, max_tokens: float | None = None
) -> DividedTrees:
    """Micro-batches that continue trunks, and others.

    Args:
        tree: of sequences.
        micro_batches: sequences of each, no sequence twice.
        trunks: which are kept.
        max_tokens: rows of a pass with what is kept for it. Trunks for which that is too little run in several, cut at
            multiples of 384 rows. None: any, or as many as `trunks` allow.
    """
    planner = _Planner(tree, micro_batches, trunks, max_tokens)
    lonely: list[int] = []
    numbers: list[int] = []
    pieces: list[Runs] = []
    items = planner.below([*range(len(micro_batches))], frozenset())
    for item in sorted(items, key=lambda item: 0 if trunks.in_order else -len(_numbers([item]))):
        found = None
        if isinstance(item, _Trunk):
            with suppress(SharedPromptError):  # a pass has no room
                found = planner.trunk(item, {-1: ()}, 0.0)
        if found is None:
            lonely += _numbers([item])
        else:
            numbers += _numbers([item])
            pieces.append(found)
    sequences = tuple(tuple(micro_batches[number]) for number in numbers)
    grown, cut = planner.grown(pieces, [index for chosen in sequences for index in chosen])
    return DividedTrees(tuple(sorted(lonely)), tuple(numbers), sequences, grown, cut)


def linked(sets: Iterable[Collection[Hashable]]) -> list[list[int]]:
    """The places of sets that have something in common, directly or by way of others; in the order of their firsts."""
    found: list[tuple[set[Hashable], list[int]]] = []
    for place, members in enumerate(sets):
        own, places = {*members}, [place]
        apart = [cluster for cluster in found if cluster[0].isdisjoint(own)]
        for others, before in found:
            if not others.isdisjoint(own):
                own, places = own | others, before + places
        found = [*apart, (own, sorted(places))]
    return sorted(places for _, places in found)


def _numbers(items: Iterable[int | _Trunk]) -> list[int]:
    """The micro-batches below."""
    return [number for item in items for number in (_numbers(item.items) if isinstance(item, _Trunk) else [item])]


class _Planner:
    def __init__(
        self, tree: PrefixTree, micro_batches: Sequence[Sequence[int]], trunks: Trunks, max_tokens: float | None
    ) -> None:
        self.tree, self.micro_batches, self.trunks = tree, micro_batches, trunks
        self.least = 1 - 1 / max(1.0, trunks.least_ratio)
        taken = [*map(tree.held, micro_batches)]
        self.held, self.lowest = [held for held, _ in taken], [lowest for _, lowest in taken]
        self.rows = [sum(held.values()) for held in self.held]
        self.inner = [*map(self._inner, micro_batches, self.held)]
        self.leaves: dict[int, _Key] = {}  # of sequences
        if max_tokens is None:
            max_tokens = max(self.rows, default=0) if trunks.is_bounded else float("inf")
        self.max_tokens = max_tokens

    def _inner(self, chosen: Sequence[int], held: Mapping[int, int]) -> set[int]:
        """The nodes of a micro-batch that a trunk may have, above rows of it."""
        parents = {self.tree.node_parents[node] for node in held} - {-1}
        if self.trunks.in_order:
            return parents
        return parents.intersection(*(self.tree.held([index])[0] for index in chosen))

    def below(self, numbers: Sequence[int], above: frozenset[int]) -> list[int | _Trunk]:
        """Micro-batches and trunks that continue nodes which all samples of these micro-batches have."""
        parts: list[int | _Trunk] = []
        trunks: list[int | _Trunk] = []
        clusters = linked(self.inner[number] - above for number in numbers)
        if self.trunks.in_order:  # those that lie between others are among them
            spans = linked(range(cluster[0], cluster[-1] + 1) for cluster in clusters)
            clusters = [sorted(place for at in span for place in clusters[at]) for span in spans]
        for cluster in clusters:
            own = [numbers[place] for place in cluster]
            if len(own) < 2:
                parts += own
                continue
            counts = Counter(node for number in own for node in self.inner[number] - above)
            least = 2 if self.trunks.in_order else len(own)
            nodes = sorted(node for node, count in counts.items() if count >= least)
            inner = self.below(own, above.union(nodes))
            if self._pays(nodes, inner, own):
                trunks.append(_Trunk(nodes, inner))
                continue
            for item in inner:  # the nodes are copied, for each trunk below them as well
                if isinstance(item, _Trunk):
                    trunks.append(_Trunk([*nodes, *item.nodes], item.items))
                else:
                    parts.append(item)
        return parts + trunks

    def _pays(self, nodes: Sequence[int], items: Sequence[int | _Trunk], numbers: Sequence[int]) -> bool:
        if any(self.held[number].keys() <= {*nodes} for number in numbers):  # no rows are left for a part
            return False
        copies = Counter(node for item in items for node in self.inner[_numbers([item])[0]])
        saved = sum((copies[node] - self.trunks.passes) * self.tree.node_lens[node] for node in nodes)
        return saved > 0 and saved >= self.least * sum(self.rows[number] for number in numbers)

    def trunk(self, trunk: _Trunk, above: Mapping[int, _Key], kept: float) -> Runs:
        """The pieces of a trunk, one below the other, and of all that continues it.

        Args:
            trunk: which.
            above: the nodes that grow, by those that were given.
            kept: how many rows' memory is kept above.

        Raises:
            SharedPromptError: a pass has no room.
        """
        places = self._grow(trunk.nodes, _numbers([trunk])[0], above)
        passes: list[list[Run]] = [[]]
        rows, own = 0, 0.0  # of the last of them, and the memory that is kept of these
        for node in trunk.nodes:
            begin, end, length = 0, -1, self.tree.node_lens[node]
            state = self.trunks.state if length else 0.0
            while end < length:
                room = (self.max_tokens - kept - own - rows - state) / (1 + self.trunks.kept)
                end = length if length - begin <= room else begin + max(0, int(room) // TILE * TILE)
                if end > begin or not length:
                    passes[-1].append(Run(places[node], begin, end))
                    own += self.trunks.kept * (end - begin) + state
                rows, begin = rows + end - begin, end
                if end < length:
                    if not passes[-1]:
                        raise SharedPromptError("max_tokens", "more, for a trunk", self.max_tokens)
                    passes.append([])
                    kept, rows, own = kept + own, 0, 0.0
        kept += own
        parts = [
            self.trunk(item, places, kept) if isinstance(item, _Trunk) else self._part(item, places, kept)
            for item in trunk.items
        ]
        for own in reversed(passes):
            parts = [Runs(own, parts)]
        return parts[0]

    def _part(self, number: int, above: Mapping[int, _Key], kept: float) -> Runs:
        held = {node: rows for node, rows in self.held[number].items() if node not in above}
        if sum(held.values()) + kept > self.max_tokens:
            raise SharedPromptError("max_tokens", "more, for a part", self.max_tokens)
        places = self._grow(held, number, above)
        self.leaves |= {index: places[node] for index, node in zip(self.micro_batches[number], self.lowest[number])}
        return Runs([Run(places[node], 0, rows) for node, rows in held.items()], [])

    def _grow(self, nodes: Iterable[int], copy: int, above: Mapping[int, _Key]) -> dict[int, _Key]:
        places = dict(above)
        for node in nodes:
            places[node] = (*places[self.tree.node_parents[node]], (node, copy))
        return places

    def grown(self, pieces: list[Runs], sequences: Sequence[int]) -> tuple[PrefixTree, Cut]:
        """The tree that has grown for some sequences, and its cut."""
        lens: dict[_Key, int] = {}
        for piece in walk(pieces):
            lens |= {run.node: max(run.end, lens.get(run.node, 0)) for run in piece.own}
        order = sorted(lens)
        places = {node: place for place, node in enumerate(order)} | {(): -1}
        tree = PrefixTree(
            tuple(lens[node] for node in order),
            tuple(places[node[:-1]] for node in order),
            tuple(places[self.leaves[index]] for index in sequences),
            tuple(self.tree.sequence_lens[index] for index in sequences),
            self.tree.boundary,
        )
        return tree, cut_of(pieces, lambda node: node[:-1])


def split_with_trunks(tree: PrefixTree, max_tokens: int, trunks: Trunks) -> list[list[int]]:
    """Micro-batches of `split_by_token_budget`; or, if these cost less, those of each tree that does not fit apart from
    others, with room for what trunks keep.

    A row of a trunk counts as one at least.

    Raises:
        SharedPromptError: a single sample is longer than the budget.
    """

    def work(micro_batches: list[list[int]]) -> float:
        divided = divided_trees(tree, micro_batches, trunks, max_tokens)
        rows = sum(sum(tree.take(micro_batches[number]).node_lens) for number in divided.lonely)
        return rows + sum(divided.tree.node_lens) + (trunks.passes - 1) * divided.cut.trunk_rows

    stock = split_by_token_budget(tree, max_tokens=max_tokens)
    sizes = Counter[int]()
    for root, size in zip(tree.roots, tree.node_lens):
        sizes[root] += size
    groups = below(tree, [root if sizes[root] > max_tokens else -1 for root in tree.roots])
    with suppress(SharedPromptError):  # no room for a sequence beside what is kept
        scaled = [_scaled(tree.take(chosen), max_tokens, trunks) for chosen in groups]
        others = [
            [chosen[at] for at in part]
            for chosen, own in zip(groups, scaled)
            for part in split_by_token_budget(own, max_tokens=max_tokens)
        ]
        return min(stock, others, key=work)
    return stock


def _scaled(tree: PrefixTree, max_tokens: int, trunks: Trunks) -> PrefixTree:
    """The tree, in which nodes whose subtrees do not fit have as many rows as what is kept of theirs takes."""
    scale, state = max(1.0, trunks.kept), math.ceil(trunks.state)
    sizes = [*tree.node_lens]
    for node in reversed(range(len(sizes))):
        if tree.node_parents[node] >= 0:
            sizes[tree.node_parents[node]] += sizes[node]
    lens = [math.ceil(scale * own) + state if size > max_tokens else own for own, size in zip(tree.node_lens, sizes)]
    scaled = PrefixTree(tuple(lens), tree.node_parents, tree.leaves, (), tree.boundary)
    sequence_lens = tuple(
        max(1, length - tree.begins[leaf] + scaled.begins[leaf]) if leaf >= 0 else 0
        for leaf, length in zip(tree.leaves, tree.sequence_lens)
    )
    return PrefixTree(tuple(lens), tree.node_parents, tree.leaves, sequence_lens, tree.boundary)
