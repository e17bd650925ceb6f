# SPDX-License-Identifier: BSD-3-Clause
"""Which tokens of many sequences are shared: the nodes of their prefix tree, worked out on the host.

Sequences are sorted, so that those that begin alike are neighbours; how many tokens neighbours have in common is all
that the tree is made of. What costs time for each token is done by sorting of bytes and by vector operations, what
costs time for each sequence in Python.

A sequence that is equal to another, or to the beginning of another, needs no node: causal rows do not depend on what
follows them, so its rows are those of the other sequence. What is left are the leaves of the tree, and every other node
has at least two children.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..host import expand, int64s, offsets_of, take
from .given import bytes_of
from .prefix_tree import SHIFTS, Boundary, PrefixTree


def build_tree(
    tokens: Tensor,
    lengths: Sequence[int],
    groups: Sequence[Hashable] | None,
    *,
    boundary: Boundary,
    min_shared: int,
    borders: Sequence[Sequence[int]] | None = None,
) -> PrefixTree:
    """The prefix tree of sequences.

    Args:
        tokens: of all sequences, one after the other, int64 on the host, none negative.
        lengths: of the sequences.
        groups: only sequences with equal ones share anything; None for one group.
        boundary: "gather" or "replicate", where the row before a branch lies: above it, or in each child.
        min_shared: the fewest tokens that a node must save.
        borders: where nodes begin, instead of min_shared: of each sequence, rising, from 1 to its length. Two sequences
            share a node if they have the same borders up to its end, and the same tokens up to there and, with the
            boundary "replicate", one token further.
    """
    shift = SHIFTS[boundary]
    if borders is None:
        leaves = _Leaves.of(tokens, lengths, groups)
        tree = _Tree(leaves.lengths, [max(0, common - shift) for common in leaves.common])
        tree.keep_savings(min_shared)
        lens, parents, places = tree.depth_first()
    else:
        leaves = _Leaves.of(_marked(tokens, lengths, borders, shift), lengths, groups)
        lens, parents, places = _cut(leaves, borders, shift)
    of_sequences = (places[leaf] if length else -1 for leaf, length in zip(leaves.leaf_of.tolist(), lengths))
    return PrefixTree(tuple(lens), tuple(parents), tuple(of_sequences), tuple(lengths), boundary)


def _marked(tokens: Tensor, lengths: Sequence[int], borders: Sequence[Sequence[int]], shift: int) -> Tensor:
    """Keys to compare: a token, and whether a node ends `shift` places before the next one."""
    firsts = offsets_of(int64s(lengths)).tolist()
    marked = [
        first + border + shift - 1
        for first, length, own in zip(firsts, lengths, borders)
        for border in own
        if border + shift <= length
    ]
    keys = tokens * 2
    keys[int64s(marked)] += 1
    return keys


def _cut(leaves: _Leaves, borders: Sequence[Sequence[int]], shift: int) -> tuple[list[int], list[int], list[int]]:
    """Rows and parents of nodes that begin at borders, and the node with the end of each leaf."""
    lens: list[int] = []
    parents: list[int] = []
    places: list[int] = []
    path: list[int] = []  # to the leaf before
    for source, length, common in zip(leaves.sources, leaves.lengths, [0, *leaves.common]):
        own = borders[source]
        del path[bisect_right(own, common - shift) :]
        begins = [0, *own[: bisect_left(own, length)]][len(path) :]
        for begin, end in pairwise((*begins, length)):
            parents.append(path[-1] if path else -1)
            path.append(len(lens))
            lens.append(end - begin)
        places.append(path[-1])
    return lens, parents, places


class _Leaves(NamedTuple):
    """The sequences that no other one begins with, sorted."""

    sources: list[int]
    lengths: list[int]
    common: list[int]  # how many tokens each has in common with the next
    leaf_of: Tensor  # (sequences,) the leaf that begins with the sequence; any number for one without tokens

    @staticmethod
    def of(tokens: Tensor, lengths: Sequence[int], groups: Sequence[Hashable] | None) -> _Leaves:
        begins = offsets_of(int64s(lengths))[:-1]
        seen: dict[Hashable, int] = {}
        numbers = [seen.setdefault(group, len(seen)) for group in groups or [0] * len(lengths)]
        index = int64s(_sorted(tokens, begins, lengths, numbers))
        sizes = take(int64s(lengths), index)
        common = _common_prefixes(tokens, take(begins, index), sizes, take(int64s(numbers), index))
        # A leaf is what does not go on in the next sequence.
        is_leaf = sizes > torch.nn.functional.pad(common, (0, 1))
        leaves = is_leaf.nonzero().view(-1)
        return _Leaves(
            take(index, leaves).tolist(),
            take(sizes, leaves).tolist(),
            # With the leaf before it: the sequences between the two are beginnings of the second.
            take(common, leaves[:-1]).tolist(),
            torch.empty_like(index).index_copy_(0, index, is_leaf.cumsum(0) - is_leaf.long()),
        )


def _sorted(tokens: Tensor, begins: Tensor, lengths: Sequence[int], groups: Sequence[int]) -> list[int]:
    """The sequences in the order of their groups, and in a group in that of their tokens."""
    if tokens.numel() == 0:
        return sorted(range(len(lengths)), key=groups.__getitem__)
    # The most significant byte first: then bytes are in the order of the numbers.
    swapped = tokens.contiguous().view(torch.uint8).view(-1, tokens.itemsize).flip(1).view(-1).view(torch.int64)
    keys = bytes_of(swapped, begins.tolist(), lengths)
    return sorted(range(len(lengths)), key=lambda sequence: (groups[sequence], keys[sequence]))


def _common_prefixes(tokens: Tensor, begins: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """(sequences - 1,): how many tokens each of the sorted sequences has in common with the next."""
    shorter = torch.minimum(lengths[1:], lengths[:-1]).masked_fill_(groups[1:] != groups[:-1], 0)
    ends = shorter.cumsum(0)
    firsts, count = ends - shorter, int(shorter.sum())
    pair, place = expand(shorter, count)
    token = take(tokens, take(begins[:-1] - firsts, pair).add_(place))
    other = take(tokens, take(begins[1:] - firsts, pair).add_(place))
    # The first place of each pair at which they differ; after the pair's own where they do not.
    differing = torch.nn.functional.pad((token != other).nonzero().view(-1), (0, 1), value=count)
    first = take(differing, torch.searchsorted(differing, firsts))
    return torch.minimum(first, ends) - firsts


class _Tree:
    """The tree while it is made: the leaves, the root above all trees, then the inner nodes, each kept or dissolved.

    The tokens of a node end at `ends`. Parents may be dissolved nodes until `keep_savings`.
    """

    def __init__(self, leaf_lengths: list[int], borders: list[int]) -> None:
        """From the lengths of the leaves, and how many tokens each shares with the next."""
        self.root = root = len(leaf_lengths)
        self.ends = [*leaf_lengths, 0]
        self.parents = [root] * len(self.ends)
        self.first_leaves = [*range(len(self.ends))]
        path = [root]  # to the leaf before
        for leaf, border in enumerate(borders):
            below = leaf  # the last node that leaves the path
            while self.ends[path[-1]] > border:
                below = path.pop()
            if self.ends[path[-1]] < border:
                self.parents.append(path[-1])
                self.first_leaves.append(self.first_leaves[below])
                path.append(len(self.ends))
                self.ends.append(border)
                self.parents[below] = path[-1]
            self.parents[leaf + 1] = path[-1]
        # The inner nodes, parents before their children.
        self.order = sorted(range(root + 1, len(self.ends)), key=self.ends.__getitem__)

    def keep_savings(self, least: int) -> None:
        """Keep the nodes with which the rows of all nodes, and `least` more for each inner one, are fewest.

        Then none saves fewer than `least`: without it the sum would be smaller. Whether a node is worth its cost is
        seen from the end of the next kept node above it: it is up to a limit, which `_limits` knows.
        """
        limits = self._limits(least)
        above = [*range(len(self.ends))]  # the node itself where it is kept, else the next kept one above
        for node in self.order:
            self.parents[node] = parent = above[self.parents[node]]
            if self.ends[parent] > limits[node]:
                above[node] = parent
        self.order = [node for node in self.order if above[node] == node]
        for leaf in range(self.root):
            self.parents[leaf] = above[self.parents[leaf]]

    def _limits(self, least: int) -> list[int]:
        """Last place at which a kept node above each inner node may end for it to be kept; negative for never.

        The least sum of a subtree, if the next kept node above it ends at x, is made of straight pieces: a child costs
        its end less x. Such a function is the line `constants[node] - counts[node] * x` of the largest x, and in a heap
        what is to be added to it below the limits of nodes in the subtree. A kept node costs a line with a slope of -1;
        the sum of its children falls faster, so that the two cross once.
        """
        limits = [-1] * len(self.ends)
        constants, counts = [0] * len(self.ends), [0] * len(self.ends)
        heaps: list[list[tuple[int, int, int]]] = [[] for _ in self.ends]  # minus a limit, constant, count
        for leaf in range(self.root):
            constants[self.parents[leaf]] += self.ends[leaf]
            counts[self.parents[leaf]] += 1
        for node in reversed(self.order):
            heap, end = heaps[node], self.ends[node]
            while heap and -heap[0][0] >= end:
                _, constant, count = heappop(heap)
                constants[node] += constant
                counts[node] += count
            constant, count = constants[node], counts[node]
            own = end + least + constant - count * end
            limit = (constant - own) // (count - 1)
            passed = []
            while heap and -heap[0][0] >= limit:
                passed.append(heappop(heap))
                constant += passed[-1][1]
                count += passed[-1][2]
                limit = min(-passed[-1][0], (constant - own) // (count - 1))
            limits[node] = limit
            # Below its limit the node is kept, whatever is in its subtree.
            heap = [(-limit, own - constant, 1 - count)] if limit >= 0 else heap
            for line in passed:
                heappush(heap, line)
            parent = self.parents[node]
            constants[parent] += constants[node]
            counts[parent] += counts[node]
            # The smaller one goes into the larger: a node may have a child for each sequence.
            less, more = sorted((heap, heaps[parent]), key=len)
            for line in less:
                heappush(more, line)
            heaps[parent] = more
        return limits

    def depth_first(self) -> tuple[list[int], list[int], list[int]]:
        """Rows and parents of the nodes that are kept, and the place of each leaf among them."""
        # Nodes with the same first leaf are ancestors of each other: the upper one ends first.
        nodes = [*range(self.root), *self.order]
        nodes.sort(key=lambda node: (self.first_leaves[node], self.ends[node]))
        places = {node: place for place, node in enumerate(nodes)} | {self.root: -1}
        lens = [self.ends[node] - self.ends[self.parents[node]] for node in nodes]
        parents = [places[self.parents[node]] for node in nodes]
        return lens, parents, [places[leaf] for leaf in range(self.root)]
