# SPDX-License-Identifier: BSD-3-Clause
"""How trees that no micro-batch holds are cut: trunks whose keys are kept, and parts that run one after the other.

    cut = plan_parts(batch.tree, max_tokens=16384)

A trunk runs before its parts, which see its keys, and once more after them, when the gradients of these are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .. import checks
from ..errors import SharedPromptError
from .prefix_tree import PrefixTree
from .split import united

# Rows at whose multiples a node is cut: query tiles of all kernels of the forward divide it.
TILE = 384


@dataclass(frozen=True)
class Piece:
    """Nodes that run in one pass.

    Attributes:
        nodes: of the cut, rising. The nodes that they continue are theirs, or those of trunks above.
        parts: the pieces that continue a trunk, in the order in which they run; none for a part.
    """

    nodes: tuple[int, ...]
    parts: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Cut:
    """Trees in pieces. Every node that has rows is in one of them.

    Attributes:
        node_lens: (n,) rows of each node, depth first. Nodes of the tree that are too long for a trunk are several
            here, one below the other; the row is the same.
        node_parents: (n,) the node that each continues; -1 for roots.
        pieces: that continue nothing, in the order in which they run; one without parts where nothing had to be cut.
    """

    node_lens: tuple[int, ...]
    node_parents: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_whole(self) -> bool:
        """True if one pass has all rows."""
        return len(self.pieces) < 2 and not any(piece.parts for piece in self.pieces)

    @property
    def passes(self) -> str:
        """A letter for each pass, in their order: F and B: a trunk's first and last one; P: a part's."""
        return passes_of(self.pieces)

    @property
    def trunks(self) -> list[Piece]:
        """The pieces that others continue."""
        return [piece for piece in walk(self.pieces) if piece.parts]

    @property
    def trunk_rows(self) -> int:
        """Rows that run twice where there are gradients."""
        return sum(map(self.rows_of, self.trunks))

    def rows_of(self, piece: Piece) -> int:
        """Rows of a piece."""
        return sum(self.node_lens[node] for node in piece.nodes)


def passes_of(pieces: Iterable[Piece]) -> str:
    """Letters of `Cut.passes`."""
    return "".join(f"F{passes_of(piece.parts)}B" if piece.parts else "P" for piece in pieces)


class _Rest(NamedTuple):
    """A node from a row on, and all that is below it."""

    node: int
    begin: int = 0


class Run(NamedTuple):
    """Some rows of a node; nodes are sorted depth first."""

    node: Any
    begin: int
    end: int


@dataclass
class Runs:
    """A piece while nodes are still to be cut."""

    own: list[Run]
    parts: list[Runs]


_Found = TypeVar("_Found", Piece, Runs)


def plan_parts(
    tree: PrefixTree, max_tokens: int, *, kept: float = 1.0, state: float = 0.0, held: bool = False,
    levels: int | None = None, tile: int = TILE,
) -> Cut:  # fmt: skip
    """Trunks and parts of which none needs more memory than a micro-batch of `max_tokens` rows.

    Trees that fit are not cut, and share passes. Of others the nodes whose subtrees do not fit are trunks, one level
    below the other where a single trunk would not fit, and depth first, so that about the keys of one path are kept.
    What continues a trunk is divided among parts that are as full as the budget allows. Nodes too long for a trunk are
    cut.

    Args:
        tree: of a batch, or of `group_by_prefix`.
        max_tokens: rows of a micro-batch that fits.
        kept: how many rows' memory the kept keys, values and sums of their gradients of a row take; >= 0.
        state: how many rows' memory the kept end state of a node and the sum of its gradients take; >= 0.
        held: the activations of trunks stay as well while their parts run.
        levels: the most trunks of a path; None: any.
        tile: cuts inside of nodes are at multiples of so many rows.

    Raises:
        SharedPromptError: an argument is not as described; what is kept of a path leaves no room; too many levels.
    """
    checks.instance("tree", tree, PrefixTree)
    budget = checks.integer("max_tokens", max_tokens, 1)
    most = None if levels is None else checks.integer("levels", levels, 0)
    planner = _Planner(
        tree.node_lens, tree.node_parents, budget, checks.number("kept", kept, zero=True),
        checks.number("state", state, zero=True), checks.flag("held", held), checks.integer("tile", tile, 1),
    )  # fmt: skip
    try:
        return planner.cut(most)
    except SharedPromptError:
        planner.branches = 0  # the keys of one path alone, whatever it costs in passes
        return planner.cut(most)


class _Planner:
    def __init__(
        self, lens: Sequence[int], parents: Sequence[int], budget: int, kept: float, state: float, held: bool, tile: int
    ) -> None:
        self.lens, self.parents = lens, parents
        self.budget, self.tile = budget, tile
        self.per_row = kept + held  # that a trunk's row takes while others run
        self.own_row = 1 + kept  # while its own trunk runs
        self.state = state
        # Share of a trunk's room that branches which are no single path may fill: small nodes, each of
        # which would cost two passes as a trunk of its own.
        self.branches = 0.25
        self.sizes = list(lens)  # of subtrees
        self.children: list[list[int]] = [[] for _ in lens]
        for node, parent in enumerate(parents):
            if parent >= 0:
                self.children[parent].append(node)
        for node in reversed(range(len(lens))):
            if parents[node] >= 0:
                self.sizes[parents[node]] += self.sizes[node]

    def pieces_of(self, rests: list[_Rest], kept: float, levels: int | None) -> list[Runs]:
        """The pieces of subtrees below trunks of which as much is kept as `kept` rows take."""
        room = int(self.budget - kept)
        light = [rest for rest in rests if 0 < self._size(rest) <= room]
        bins = united([(self._size(rest), [place]) for place, rest in enumerate(light)], room)
        pieces = [Runs([run for place in chosen for run in self._all_of(light[place])], []) for _, chosen in bins]
        empty = [run for rest in rests if not self._size(rest) for run in self._all_of(rest)]  # need no pass
        for rest in rests:
            if self._size(rest) <= max(room, 0):
                continue
            if levels == 0:
                raise SharedPromptError("levels", "more, to keep trunks in", "no further trunk")
            own, below = self._trunk(rest, kept)
            rows = sum(run.end - run.begin for run in own)
            below_own = kept + self._kept(rows, own)
            parts = self.pieces_of(below, below_own, None if levels is None else levels - bool(rows))
            if rows:
                pieces.append(Runs(own, parts))
            else:
                empty += own
                pieces += parts
        if empty and not pieces:
            pieces = [Runs([], [])]
        if empty:
            pieces[0].own += empty
        return pieces

    def _size(self, rest: _Rest) -> int:
        return self.sizes[rest.node] - rest.begin

    def _all_of(self, rest: _Rest) -> Iterator[Run]:
        pending = [rest]
        while pending:
            node, begin = pending.pop()
            yield Run(node, begin, self.lens[node])
            pending += map(_Rest, self.children[node])

    def _kept(self, rows: int, own: Sequence[Run]) -> float:
        """How many rows' memory is kept of a trunk of so many rows."""
        return self.per_row * rows + self.state * sum(run.begin < run.end for run in own)

    def _trunk(self, rest: _Rest, kept: float) -> tuple[list[Run], list[_Rest]]:
        """The trunk that begins with a node whose subtree does not fit, and the subtrees that continue it."""
        most = int((self.budget - kept - self.state) / self.own_row)
        node, begin = rest
        rows = self.lens[node] - begin
        if rows > most:
            rows = most - most % self.tile
            if rows <= 0:
                expected = f"more, as what is kept above a part takes as much as {kept:,.0f} rows"
                raise SharedPromptError("max_tokens", expected, self.budget)
            return [Run(node, begin, begin + rows)], [_Rest(node, begin + rows)]
        own, below = [Run(node, begin, self.lens[node])], [*map(_Rest, self.children[node])]
        while True:
            room = int(self.budget - kept - self._kept(rows, own))
            heavy = [rest for rest in below if self._size(rest) > room]
            is_path = len(heavy) == 1 and (self.branches > 0 or len(below) == 1)
            limit = (most if is_path else self.branches * most) - self.state * len(own) / self.own_row
            chosen = next((rest for rest in heavy if rows + self.lens[rest.node] <= limit), None)
            if chosen is None:
                return own, below
            node = chosen.node
            own.append(Run(node, 0, self.lens[node]))
            rows += self.lens[node]
            at = below.index(chosen)
            below[at : at + 1] = map(_Rest, self.children[node])

    def cut(self, levels: int | None) -> Cut:
        roots = [_Rest(node) for node, parent in enumerate(self.parents) if parent < 0]
        return cut_of(self.pieces_of(roots, 0.0, levels), self.parents.__getitem__)


def cut_of(pieces: Sequence[Runs], parent_of: Callable[[Any], Any]) -> Cut:
    """The cut whose nodes are the runs of pieces; `parent_of`: of nodes, another one or none of these."""
    runs = sorted(run for piece in walk(pieces) for run in piece.own)
    numbers = {run: number for number, run in enumerate(runs)}
    lasts = {run.node: number for run, number in numbers.items()}
    parents = [number - 1 if run.begin else lasts.get(parent_of(run.node), -1) for number, run in enumerate(runs)]

    def named(found: Sequence[Runs]) -> tuple[Piece, ...]:
        return tuple(Piece(tuple(sorted(numbers[run] for run in piece.own)), named(piece.parts)) for piece in found)

    return Cut(tuple(run.end - run.begin for run in runs), tuple(parents), named(pieces))


def walk(pieces: Iterable[_Found]) -> Iterator[_Found]:
    """The pieces, each followed by its parts."""
    for piece in pieces:
        yield piece
        yield from walk(piece.parts)
