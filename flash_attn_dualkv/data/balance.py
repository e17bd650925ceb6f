# SPDX-License-Identifier: BSD-3-Clause
"""Which sequences go onto which rank, so that what they share stays together and no rank waits for another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import checks
from ..host import untraced
from .prefix_tree import PrefixTree
from .split import Groups, as_tree, below


@untraced
def balance(
    groups: Groups,
    prompt_lens: Sequence[int] | Tensor | None = None,
    response_lens: Sequence[int] | Tensor | None = None,
    num_ranks: int | None = None,
    *,
    token_cost: float = 0.0,
    equal_counts: bool = True,
) -> list[list[int]]:
    """Samples for each rank: about equal costs, equally many, and what shares most on one rank where possible.

    The cost of a rank is that of its part of the tree: the visible pairs of every row, and `token_cost` for each row.
    The largest subtrees of no more sequences than a rank has go, most expensive first, to the rank that then has the
    least cost, of those with room for them; a path that is there already costs nothing. A subtree for which there is no
    such rank is divided among those with most room.

    Args:
        groups, prompt_lens, response_lens: as for `split_by_token_budget`.
        num_ranks: how many lists to make, no more than samples.
        token_cost: of the work that is done token by token, in pairs; 0 balances attention alone.
        equal_counts: whether ranks get equally many samples, or where they do not divide them, some get one more.
            Without it costs alone count, and groups are never divided: for trainers that weight ranks by their tokens.

    Raises:
        SharedPromptError: an argument is not as described.
    """
    tree = as_tree(groups, prompt_lens, response_lens)
    checks.flag("equal_counts", equal_counts)
    checks.number("token_cost", token_cost, zero=True, expected="a finite number >= 0")
    samples = sum(map(len, below(tree, [0] * tree.num_nodes)))
    ranks = checks.integer("num_ranks", num_ranks, 1, max(1, samples))
    share, over = divmod(samples, ranks) if equal_counts else (samples, 0)
    tops = _tops(tree, share + (over > 0))
    loads = _Loads(tree, tops, ranks, token_cost)
    found: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0.0] * ranks
    for rest in sorted(below(tree, tops), key=lambda members: loads.added(-1, members), reverse=True):
        while rest:
            rooms = [max(0, share + (over > 0) - len(own)) for own in found]
            roomy = [rank for rank, room in enumerate(rooms) if room >= len(rest)]
            if roomy:
                rank = min(roomy, key=lambda one: costs[one] + loads.added(one, rest))
            else:
                rank = min(range(ranks), key=lambda one: (len(found[one]), costs[one]))
            taken, rest = rest[: rooms[rank]], rest[rooms[rank] :]
            costs[rank] += loads.added(rank, taken)
            loads.take(rank, taken)
            found[rank] += taken
            over -= len(found[rank]) > share
    return found


def _tops(tree: PrefixTree, most: int) -> list[int]:
    """(n,) the uppermost node on its path of each node with at most so many sequences below, or its leaf; else -1."""
    counts = [0] * tree.num_nodes
    is_leaf = [True] * tree.num_nodes
    for leaf in tree.leaves:
        if leaf >= 0:
            counts[leaf] += 1
    for node in reversed(range(tree.num_nodes)):
        parent = tree.node_parents[node]
        if parent >= 0:
            counts[parent] += counts[node]
            is_leaf[parent] = False
    tops: list[int] = []
    for node, parent in enumerate(tree.node_parents):
        inherited = tops[parent] if parent >= 0 else -1
        tops.append(inherited if inherited >= 0 else node if counts[node] <= most or is_leaf[node] else -1)
    return tops


class _Loads:
    """What parts of a tree cost, on ranks that have others."""

    def __init__(self, tree: PrefixTree, tops: list[int], num_ranks: int, token_cost: float) -> None:
        self.tree = tree
        self.tops = tops
        self.token_cost = token_cost
        self.paths: list[set[int]] = [set() for _ in range(num_ranks + 1)]  # nodes above tops; of the last rank none
        self.own: dict[tuple[int, int], float] = {}

    def added(self, rank: int, members: list[int]) -> float:
        """The cost of sequences below one top beside those that the rank has."""
        key = members[0], len(members)
        if key not in self.own:
            self.own[key] = self._own(members)
        return self.own[key] + sum(self._cost(node, self._end(node)) for node in self._path(rank, members))

    def take(self, rank: int, members: list[int]) -> None:
        self.paths[rank].update(self._path(rank, members))

    def _end(self, node: int) -> int:
        return self.tree.begins[node] + self.tree.node_lens[node]

    def _cost(self, node: int, end: int) -> float:
        """Cost of the rows of a node before the position `end`."""
        begin = self.tree.begins[node]
        return (end * (end + 1) - begin * (begin + 1)) / 2 + self.token_cost * (end - begin)

    def _own(self, members: list[int]) -> float:
        """From their top downwards."""
        ends: dict[int, int] = {}
        for index in members:
            node = self.tree.leaves[index]
            above = self.tree.node_parents[self.tops[node]] if node >= 0 else node
            while node != above:
                known = ends.get(node, self.tree.begins[node])
                ends[node] = max(known, min(self._end(node), self.tree.sequence_lens[index]))
                if known > self.tree.begins[node]:
                    break  # what is above has been counted
                node = self.tree.node_parents[node]
        return sum(self._cost(node, end) for node, end in ends.items())

    def _path(self, rank: int, members: list[int]) -> list[int]:
        """The nodes above the top that the rank lacks."""
        leaf = self.tree.leaves[members[0]]
        path: list[int] = []
        node = self.tree.node_parents[self.tops[leaf]] if leaf >= 0 else leaf
        while node >= 0 and node not in self.paths[rank]:
            path.append(node)
            node = self.tree.node_parents[node]
        return path
