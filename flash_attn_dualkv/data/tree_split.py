"""Which sequences of a prefix tree go into which micro-batch and onto which rank.

    tree = group_by_prefix(sequences)
    for chosen in split_tree_by_token_budget(tree, 16384):
        batch = pack_prefix_tree([sequences[i] for i in chosen], borders=[tree.borders[i] for i in chosen])

What `split` and its functions are for prompts: a tree is cut at its nodes, and every part has a copy of its path.
"""

from __future__ import annotations

from typing import Any

from .. import checks
from ..checks import explain
from ..errors import SharedPromptError
from ..host import untraced
from .split import best_fit, fill_evenly, on_equal_terms, ranks_and_share, spread
from .trie import PrefixTree


@untraced
def split_tree_by_token_budget(tree: PrefixTree, max_tokens: int, *, dp_group: Any = None) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` packed tokens each, for `pack_prefix_tree` with the tree's borders.

    What a node has below it stays together where it fits beside the path to it; else it is divided among parts that
    have a copy of the path each. Parts and micro-batches are filled as `split_by_token_budget` fills them.

    Args:
        tree: of all sequences, as `group_by_prefix` gives it, or the `tree` of a batch.
        max_tokens: bound of a packed micro-batch without padding.
        dp_group: a torch.distributed process group whose ranks must get equally many micro-batches; the ranks with
            fewer split theirs further, between trees of the forest where they can. Every rank must call.

    Returns:
        The indices of each micro-batch's sequences, those that share most beside each other.

    Raises:
        SharedPromptError: an argument is not as described; a single sequence is longer than the budget; with dp_group,
            on every rank, if one of them fails or has fewer sequences than another needs micro-batches.
    """

    def fill() -> tuple[list[list[int]], list[list[int]]]:
        checks.instance("tree", tree, PrefixTree)
        budget = checks.integer("max_tokens", max_tokens, 1)
        for index, length in enumerate(tree.sequence_lens):
            if length > budget:
                needed = f"at least {length}, the tokens of sequence {index}"
                raise SharedPromptError(explain("max_tokens", needed, max_tokens))
        roots: list[int] = []
        sizes = [0] * tree.num_nodes
        for node, (parent, size) in enumerate(zip(tree.node_parents, tree.node_lens)):
            roots.append(node if parent < 0 else roots[parent])
            sizes[roots[node]] += size
        # Trees that fit stay whole.
        least = max([*tree.sequence_lens, *(size for size in sizes if size <= budget)], default=0)
        return fill_evenly(lambda size: _fill(tree, size), least, budget), _below(tree, roots)

    return on_equal_terms(fill, dp_group, "sequences")


def _below(tree: PrefixTree, tops: list[int]) -> list[list[int]]:
    """The sequences with the same one of `tops`, a node for each node; those that share most beside each other."""
    order = sorted(range(len(tree.leaves)), key=lambda one: (tree.leaves[one], tree.sequence_lens[one]))
    groups: dict[int, list[int]] = {}
    for index in order:
        leaf = tree.leaves[index]
        groups.setdefault(tops[leaf] if leaf >= 0 else -1, []).append(index)
    return [*groups.values()]


def _fill(tree: PrefixTree, max_tokens: int) -> tuple[list[list[int]], int]:
    """The micro-batches, and the rows of all of them."""
    nodes = tree.num_nodes
    # Of each node, and of the forest behind them, parts of what is below: rows that are not on the path, sequences.
    parts: list[list[tuple[int, list[int]]]] = [[] for _ in range(nodes + 1)]
    for members in _below(tree, [*range(nodes)]):
        parts[tree.leaves[members[0]]].append((0, members))
    for node in reversed(range(nodes)):
        own = tree.node_lens[node]
        room = max_tokens - tree.begins[node] - own
        # What is last in the row comes first.
        united = _united(parts[node][::-1], room)
        parts[tree.node_parents[node]] += [(own + size, members) for size, members in reversed(united)]
        parts[node] = []
    found = _united(parts[-1][::-1], max_tokens)
    return [members for _, members in found], sum(size for size, _ in found)


def _united(parts: list[tuple[int, list[int]]], room: int) -> list[tuple[int, list[int]]]:
    """Fewer parts of at most `room` rows."""
    sizes = [size for size, _ in parts]
    bins = (sorted(chosen) for chosen in best_fit(sizes, room))
    return [(sum(sizes[at] for at in chosen), [index for at in chosen for index in parts[at][1]]) for chosen in bins]


@untraced
def balance_tree(tree: PrefixTree, num_ranks: int, *, token_cost: float = 0.0) -> list[list[int]]:
    """Sequences for each rank: equally many, about equal costs, and what shares most on one rank where possible.

    The cost of a rank is that of its part of the tree: the visible pairs of every row, and `token_cost` for each row.
    The largest subtrees of no more sequences than a rank has go, most expensive first, to the rank that then has the
    least cost, of those with room for them; a path that is there already costs nothing.

    Args:
        tree: of all B sequences, as `group_by_prefix` gives it; B is a multiple of num_ranks.
        num_ranks: how many lists to make.
        token_cost: of the work that is done token by token, in pairs; 0 balances attention alone.

    Raises:
        SharedPromptError: an argument is not as described, a B that cannot be divided.
    """
    checks.instance("tree", tree, PrefixTree)
    ranks, share = ranks_and_share(len(tree.leaves), num_ranks, token_cost, "sequences")
    tops = _tops(tree, share)
    loads = _Loads(tree, tops, ranks, token_cost)
    groups = sorted(_below(tree, tops), key=lambda members: loads.added(-1, members), reverse=True)
    return spread(groups, ranks, share, loads.added, loads.take)


def _tops(tree: PrefixTree, most: int) -> list[int]:
    """Of each node, the uppermost one on its path with at most so many sequences below, or its leaf; else -1."""
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
        """Of the rows of a node before the position `end`."""
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
