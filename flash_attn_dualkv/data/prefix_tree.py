# SPDX-License-Identifier: BSD-3-Clause
"""Which tokens sequences share, on the host: the nodes that every form of packing puts into a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from .. import checks
from ..host import int64s, offsets_of, take
from ..nodes import path_begins

Boundary = Literal["replicate", "gather"]
SHIFTS = {"replicate": 1, "gather": 0}  # tokens before a branch that are left to the children


def checked_boundary(value: Any) -> Boundary:
    return cast(Boundary, checks.choice("boundary", value, tuple(SHIFTS)))


@dataclass(frozen=True)
class PrefixTree:
    """Which tokens B sequences share: n nodes, depth first, on the host.

    Attributes:
        node_lens: (n,) rows of each node.
        node_parents: (n,) the node that each continues; -1 for roots.
        leaves: (B,) the node whose path begins with the sequence, which may end before it; -1 for one without tokens.
        sequence_lens: (B,) tokens of each sequence.
        boundary: "gather" where a node's last row is shared by all that continue it, "replicate" where each of them
            begins with a copy of that row.
    """

    node_lens: tuple[int, ...]
    node_parents: tuple[int, ...]
    leaves: tuple[int, ...]
    sequence_lens: tuple[int, ...]
    boundary: Boundary = "gather"

    @staticmethod
    def of_prompts(
        groups: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        response_lens: Sequence[int],
        boundary: Boundary = "replicate",
    ) -> PrefixTree:
        """The tree of depth two of the samples of each prompt; samples of no group have the leaf -1.

        With "replicate" each token of a response has a row of its own that scores it. Checks only the boundary.
        """
        shift = SHIFTS[checked_boundary(boundary)]
        lens: list[int] = []
        parents: list[int] = []
        leaves = [-1] * len(prompt_lens)
        for members in groups:
            root = len(lens)
            lens.append(prompt_lens[members[0]] - shift)
            parents.append(-1)
            for index in members:
                leaves[index] = len(lens)
                lens.append(response_lens[index] + shift)
                parents.append(root)
        totals = tuple(map(int.__add__, prompt_lens, response_lens))
        return PrefixTree(tuple(lens), tuple(parents), tuple(leaves), totals, boundary)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """(n,) the position of the first token of each node in its sequences."""
        return tuple(path_begins(self.node_lens, self.node_parents))

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """(n,) the number of the tree of the forest that each node is in."""
        return tuple(count - 1 for count in accumulate(parent < 0 for parent in self.node_parents))

    @cached_property
    def borders(self) -> tuple[tuple[int, ...], ...]:
        """(B,) of each sequence, the positions from 1 to its length at which nodes of its path begin."""
        above: list[tuple[int, ...]] = []
        for parent, begin in zip(self.node_parents, self.begins):
            # Below a node without tokens its children begin where it does.
            inner = parent >= 0 and self.node_lens[parent] > 0
            above.append((*above[parent], begin) if inner else above[parent] if parent >= 0 else ())
        return tuple(
            above[leaf][: bisect_right(above[leaf], length)] if leaf >= 0 else ()
            for leaf, length in zip(self.leaves, self.sequence_lens)
        )

    def take(self, chosen: Sequence[int]) -> PrefixTree:
        """The tree of some of the sequences, in this order: the nodes on their paths, cut after the last token of all.

        Nodes begin where they begin here, so that a node may have a single child.

        Raises:
            SharedPromptError: a sequence that does not exist.
        """
        held, lowest = self.held(chosen)
        places = {node: place for place, node in enumerate(held)} | {-1: -1}
        return PrefixTree(
            tuple(held.values()),
            tuple(places[self.node_parents[node]] for node in held),
            tuple(places[node] for node in lowest),
            tuple(self.sequence_lens[index] for index in chosen),
            self.boundary,
        )

    def held(self, chosen: Sequence[int]) -> tuple[dict[int, int], list[int]]:
        """Nodes on the paths of some of the sequences, rising, with their rows up to the last token of all.

        And of each of these sequences the node with its last token.

        Raises:
            SharedPromptError: a sequence that does not exist.
        """
        lens: dict[int, int] = {}
        lowest: list[int] = []
        for index in (checks.integer("chosen", index, 0, len(self.leaves) - 1) for index in chosen):
            node, length = self.leaves[index], self.sequence_lens[index]
            # A sequence may end before the path does.
            while node >= 0 and self.begins[node] >= length:
                node = self.node_parents[node]
            lowest.append(node)
            while node >= 0:
                own = min(self.node_lens[node], length - self.begins[node])
                if lens.get(node, -1) >= own:  # and the nodes above are whole
                    break
                lens[node] = own
                node = self.node_parents[node]
        return dict(sorted(lens.items())), lowest

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """(n,) a sequence that has all tokens of each node."""
        sources = [-1] * len(self.node_lens)
        for index, (leaf, length) in enumerate(zip(self.leaves, self.sequence_lens)):
            if leaf >= 0 and (sources[leaf] < 0 or length > self.sequence_lens[sources[leaf]]):
                sources[leaf] = index
        for node in reversed(range(len(self.node_lens))):
            if self.node_parents[node] >= 0:
                sources[self.node_parents[node]] = sources[node]
        return tuple(sources)


class Spans(NamedTuple):
    """Part of each sequence in each node on its path, from the root, sequence by sequence; (spans,) on the host.

    Tokens are counted over all sequences. Span i begins at the token begins[i], and its token t has the row
    t + shifts[i].
    """

    begins: Tensor
    shifts: Tensor

    @staticmethod
    def of(tree: PrefixTree) -> Spans:
        """By vector operations, one level of the tree after the other: a comb's spans are many."""
        lengths, leaves = int64s(tree.sequence_lens), int64s(tree.leaves)
        parents, begins = int64s(tree.node_parents), int64s(tree.begins)
        rows = offsets_of(int64s(tree.node_lens))[:-1]
        sequence = (leaves >= 0).nonzero().view(-1)
        node = take(leaves, sequence)
        levels = [lengths.new_empty((2, 0))]
        while len(sequence):
            levels.append(torch.stack([sequence, node]))
            node = take(parents, node)
            rest = (node >= 0).nonzero().view(-1)
            sequence, node = take(sequence, rest), take(node, rest)
        sequence, node = torch.cat(levels[::-1], 1)  # the roots first
        order = sequence.argsort(stable=True)
        sequence, node = take(sequence, order), take(node, order)
        first, begin = take(offsets_of(lengths), sequence), take(begins, node)
        # A sequence may end before the path does.
        starts = first + torch.minimum(begin, take(lengths, sequence))
        return Spans(starts, take(rows, node) - begin - first)

    def rows(self, tokens: Tensor) -> Tensor:
        """The row of each token, where the spans are."""
        span = torch.searchsorted(self.begins, tokens, right=True).sub_(1)
        return take(self.shifts, span).add_(tokens)
