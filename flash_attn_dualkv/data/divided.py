# SPDX-License-Identifier: BSD-3-Clause
"""Micro-batches of a trainer that divide trees, with what they have in common in trunks that run once.

    lonely, trees = divided_trees(tree, micro_batches)

`plan_parts` chooses parts by a budget; here they are given, as trainers count samples or take other micro-batches, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import SharedPromptError
from .parts import TILE, Cut, Piece, walk
from .prefix_tree import PrefixTree
from .split import split_by_token_budget

# Of a trunk's row, where a part's costs 1: a forward, a recomputed one and a backward of twice its
# work are 4, and the trunk's first forward is 1 more.
PASSES = 1.25


@dataclass(frozen=True)
class DividedTree:
    """Micro-batches, each of which is a part of one cut.

    Attributes:
        numbers: of the micro-batches, in the order in which their parts run.
        sequences: of each of these, in their tree's order of nodes.
        tree: of all of these sequences, one micro-batch after the other. Nodes that no trunk has are copied.
        cut: of the tree. No sequence needs a trunk's own loss: those that end in one are a part's.
    """

    numbers: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    tree: PrefixTree
    cut: Cut

    def most_rows(self, kept: float) -> int:
        """Rows of the largest pass, with `kept` rows for each that is kept above it or is its own trunk's."""

        def most(pieces: Sequence[Piece], above: int) -> float:
            sizes = [sum(self.cut.node_lens[node] for node in piece.nodes) for piece in pieces]
            own = [size * (1 + kept * bool(piece.parts)) + kept * above for size, piece in zip(sizes, pieces)]
            return max([*own, *(most(piece.parts, above + size) for size, piece in zip(sizes, pieces) if piece.parts)])

        return int(most(self.cut.pieces, 0))

    @property
    def trunk_rows(self) -> int:
        """Rows that run twice where there are gradients."""
        trunks = (piece for piece in walk(self.cut.pieces) if piece.parts)
        return sum(self.cut.node_lens[node] for piece in trunks for node in piece.nodes)


@dataclass
class _Trunk:
    """Nodes below each other, and what continues them: numbers of micro-batches, and trunks."""

    nodes: list[int]
    items: list[int | _Trunk]


def divided_trees(
    tree: PrefixTree, micro_batches: Sequence[Sequence[int]], *, least_ratio: float = 1.0, passes: float = PASSES,
    max_tokens: float | None = None, kept: float = 1.0,
) -> tuple[list[int], list[DividedTree]]:  # fmt: skip
    """Micro-batches that stay as they are, by number, and those that continue trunks: trees of most parts first.

    A trunk is a path of nodes that all samples of at least two micro-batches have in common.

    Args:
        tree: of sequences.
        micro_batches: sequences of each, no sequence twice.
        least_ratio: a trunk must make the work of its micro-batches so many times less.
        passes: what a trunk's row costs, where a part's costs 1; 1 without gradients.
        max_tokens: rows of a pass with what is kept for it. Trunks for which that is too little run in several, cut at
            multiples of 384 rows. None: any.
        kept: how many rows' memory the kept keys of a row take.
    """
    planner = _Planner(tree, micro_batches, least_ratio, passes)
    lonely: list[int] = []
    found: list[DividedTree] = []
    for item in planner.below([*range(len(micro_batches))], 0):
        divided = None if isinstance(item, int) else planner.divided(item, max_tokens, kept)
        if divided is None:
            lonely += [item] if isinstance(item, int) else planner.numbers([item])
        else:
            found.append(divided)
    return sorted(lonely), sorted(found, key=lambda divided: -len(divided.numbers))


class _Planner:
    def __init__(
        self, tree: PrefixTree, micro_batches: Sequence[Sequence[int]], least_ratio: float, passes: float
    ) -> None:
        self.tree, self.passes, self.least = tree, passes, 1 - 1 / max(1.0, least_ratio)
        self.samples = [sorted(chosen, key=lambda index: (tree.leaves[index], index)) for chosen in micro_batches]
        self.rows = [sum(self.held(chosen, ()).values()) for chosen in micro_batches]
        self.common = [*map(self._common, micro_batches)]

    def lowest(self, index: int) -> int:
        """The node with a sequence's last token."""
        node = self.tree.leaves[index]
        while node >= 0 and self.tree.begins[node] >= self.tree.sequence_lens[index]:
            node = self.tree.node_parents[node]
        return node

    def path(self, node: int) -> list[int]:
        """The nodes from the root to a node."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.tree.node_parents[node]
        return found[::-1]

    def _common(self, chosen: Sequence[int]) -> list[int]:
        """The nodes that all samples of a micro-batch have, above rows that one of them has behind these."""
        ends = {self.lowest(index) for index in chosen}
        paths = [self.path(node) for node in ends]
        common = [nodes[0] for nodes in zip(*paths) if len({*nodes}) == 1]
        return [node for node in common if {*ends} != {node}]

    def held(self, chosen: Sequence[int], above: Sequence[int]) -> dict[int, int]:
        """The nodes of some sequences below those above, and how many rows of each they have."""
        tree, rows, known = self.tree, dict[int, int](), {*above, -1}
        for index in chosen:
            node = self.lowest(index)
            while node not in known:
                own = min(tree.node_lens[node], tree.sequence_lens[index] - tree.begins[node])
                rows[node] = max(own, rows.get(node, 0))
                node = tree.node_parents[node]
        return rows

    def numbers(self, items: Sequence[int | _Trunk]) -> list[int]:
        """The micro-batches below."""
        return [
            number
            for item in items
            for number in ([item] if isinstance(item, int) else self.numbers(item.items))
        ]  # fmt: skip

    def below(self, numbers: Sequence[int], depth: int) -> list[int | _Trunk]:
        """What continues a node that all samples of these micro-batches have."""
        parts: list[int | _Trunk] = []
        trunks: list[int | _Trunk] = []
        groups: dict[int, list[int]] = {}
        for number in numbers:
            common = self.common[number]
            groups.setdefault(common[depth] if len(common) > depth else -1, []).append(number)
        for node, own in groups.items():
            if node < 0 or len(own) < 2:
                parts += own
                continue
            inner = self.below(own, depth + 1)
            if len(inner) == 1 and isinstance(inner[0], _Trunk):
                trunks.append(_Trunk([node, *inner[0].nodes], inner[0].items))
            elif self._pays(node, len(inner), own):
                trunks.append(_Trunk([node], inner))
            else:  # copied, for each trunk below it as well
                parts += [item for item in inner if isinstance(item, int)]
                trunks += [_Trunk([node, *item.nodes], item.items) for item in inner if isinstance(item, _Trunk)]
        return parts + trunks

    def _pays(self, node: int, count: int, numbers: Sequence[int]) -> bool:
        saved = (count - self.passes) * self.tree.node_lens[node]
        return saved > 0 and saved >= self.least * sum(self.rows[number] for number in numbers)

    def divided(self, trunk: _Trunk, max_tokens: float | None, kept: float) -> DividedTree | None:
        """The tree of a trunk's micro-batches, and its cut; None if a pass has no room."""
        grown = _Grown(self, max_tokens, kept)
        pieces = grown.trunk(trunk, {-1: -1}, 0)
        if pieces is None:
            return None
        numbers = self.numbers([trunk])
        sequences = tuple(tuple(self.samples[number]) for number in numbers)
        order = [index for chosen in sequences for index in chosen]
        leaves = tuple(grown.leaves[index] for index in order)
        lens = tuple(self.tree.sequence_lens[index] for index in order)
        tree = PrefixTree(tuple(grown.lens), tuple(grown.parents), leaves, lens, self.tree.boundary)
        cut = Cut(tuple(grown.run_lens), tuple(grown.run_parents), (pieces,))
        divided = DividedTree(tuple(numbers), sequences, tree, cut)
        return divided if max_tokens is None or divided.most_rows(kept) <= max_tokens else None


@dataclass
class _Grown:
    """A tree that grows depth first, and the runs of rows that its nodes are cut into."""

    planner: _Planner
    max_tokens: float | None
    kept: float
    lens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    leaves: dict[int, int] = field(default_factory=dict)  # of sequences
    run_lens: list[int] = field(default_factory=list)
    run_parents: list[int] = field(default_factory=list)
    lasts: dict[int, int] = field(default_factory=lambda: {-1: -1})  # of each node the last run

    def _node(self, length: int, parent: int) -> int:
        self.lens.append(length)
        self.parents.append(parent)
        node = len(self.lens) - 1
        self.lasts[node] = self.lasts[parent]
        return node

    def _run(self, length: int, node: int) -> int:
        self.run_lens.append(length)
        self.run_parents.append(self.lasts[node])
        self.lasts[node] = len(self.run_lens) - 1
        return self.lasts[node]

    def trunk(self, trunk: _Trunk, above: dict[int, int], kept: int) -> Piece | None:
        """The pieces of a trunk, one below the other, and of all that continues it; `above`: nodes by the old ones."""
        tree, places = self.planner.tree, dict(above)
        passes: list[list[int]] = [[]]
        rows = 0  # of the last of them
        for old in trunk.nodes:
            node = places[old] = self._node(tree.node_lens[old], places[tree.node_parents[old]])
            left = tree.node_lens[old]
            while True:
                room = self._room(kept) - rows
                taken = left if left <= room else max(0, int(room) // TILE * TILE)
                if taken or not left:
                    passes[-1].append(self._run(taken, node))
                rows, left = rows + taken, left - taken
                if not left:
                    break
                if not passes[-1]:
                    return None
                passes.append([])
                kept, rows = kept + rows, 0
        kept += rows
        parts: list[Piece] = []
        for item in trunk.items:
            piece = self._part(item, places) if isinstance(item, int) else self.trunk(item, places, kept)
            if piece is None:
                return None
            parts.append(piece)
        for own in reversed(passes):
            parts = [Piece(tuple(own), tuple(parts))]
        return parts[0]

    def _room(self, kept: int) -> float:
        if self.max_tokens is None:
            return float("inf")
        return (self.max_tokens - self.kept * kept) / (1 + self.kept)

    def _part(self, number: int, above: dict[int, int]) -> Piece:
        chosen, places = self.planner.samples[number], dict(above)
        own = []
        for old, length in sorted(self.planner.held(chosen, [*above]).items()):
            places[old] = self._node(length, places[self.planner.tree.node_parents[old]])
            own.append(self._run(length, places[old]))
        for index in chosen:
            self.leaves[index] = places[self.planner.lowest(index)]
        return Piece(tuple(own))


def split_with_trunks(tree: PrefixTree, max_tokens: int, kept: float, **options: float) -> list[list[int]]:
    """Micro-batches of `split_by_token_budget`; or, if these cost less, those of each tree that does not fit apart from
    others, with room for what trunks keep.

    A row of a trunk counts as one at least. `options`: of `divided_trees`.

    Raises:
        SharedPromptError: a single sample is longer than the budget.
    """

    def work(micro_batches: list[list[int]]) -> float:
        lonely, found = divided_trees(tree, micro_batches, max_tokens=max_tokens, kept=kept, **options)
        rows = sum(sum(tree.take(micro_batches[number]).node_lens) for number in lonely)
        passes = options.get("passes", PASSES)
        return rows + sum(sum(divided.tree.node_lens) + (passes - 1) * divided.trunk_rows for divided in found)

    stock = split_by_token_budget(tree, max_tokens=max_tokens)
    sizes = Counter[int]()
    for root, size in zip(tree.roots, tree.node_lens):
        sizes[root] += size
    groups: dict[int, list[int]] = {}
    for index, leaf in enumerate(tree.leaves):
        root = tree.roots[leaf] if leaf >= 0 else -1
        groups.setdefault(root if sizes[root] > max_tokens else -1, []).append(index)
    with suppress(SharedPromptError):  # no room for a sequence beside what is kept
        scaled = {root: _scaled(tree.take(chosen), max_tokens, max(1.0, kept)) for root, chosen in groups.items()}
        others = [
            [chosen[at] for at in part]
            for root, chosen in groups.items()
            for part in split_by_token_budget(scaled[root], max_tokens=max_tokens)
        ]
        return min(stock, others, key=work)
    return stock


def _scaled(tree: PrefixTree, max_tokens: int, scale: float) -> PrefixTree:
    """The tree, in which nodes whose subtrees do not fit have as many rows as what is kept of theirs takes."""
    sizes = [*tree.node_lens]
    for node in reversed(range(len(sizes))):
        if tree.node_parents[node] >= 0:
            sizes[tree.node_parents[node]] += sizes[node]
    lens = [-int(-scale * own // 1) if size > max_tokens else own for own, size in zip(tree.node_lens, sizes)]
    scaled = PrefixTree(tuple(lens), tree.node_parents, tree.leaves, (), tree.boundary)
    sequence_lens = tuple(
        max(1, length - tree.begins[leaf] + scaled.begins[leaf]) if leaf >= 0 else 0
        for leaf, length in zip(tree.leaves, tree.sequence_lens)
    )
    return PrefixTree(tuple(lens), tree.node_parents, tree.leaves, sequence_lens, tree.boundary)
