# SPDX-License-Identifier: BSD-3-Clause
"""Which sequences go onto which rank, so that what they share stays together and no rank waits for another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .. import checks
from ..host import untraced
from ..nodes import visible_pairs
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
        groups: a tree (`group_by_prefix`), or of each prompt the indices of its samples (`group_by_prompt`).
        prompt_lens, response_lens: (B,) tokens; None with a tree.
        num_ranks: how many lists to make, no more than samples.
        token_cost: of the work that is done token by token, in pairs; 0 balances only attention.
        equal_counts: whether ranks get equally many samples, or where they do not divide them, some get one more.
            Without it only costs count, and groups are never divided: for trainers that weight ranks by their tokens.

    Raises:
        SharedPromptError: an argument is not as described.
    """
    tree = as_tree(groups, prompt_lens, response_lens)
    checks.flag("equal_counts", equal_counts)
    checks.number("token_cost", token_cost, zero=True, expected="a finite number >= 0")
    samples = sum(map(len, below(tree, [0] * len(tree.node_lens))))
    ranks = checks.integer("num_ranks", num_ranks, 1, max(1, samples))
    share, over = divmod(samples, ranks) if equal_counts else (samples, 0)
    costs = _costs(tree, token_cost)

    def cost(nodes: Iterable[int]) -> float:
        return sum(costs[node] for node in nodes)

    found: list[list[int]] = [[] for _ in range(ranks)]
    held: list[set[int]] = [set() for _ in range(ranks)]  # the nodes that a rank has
    loads = [0.0] * ranks
    parts = below(tree, _tops(tree, share + (over > 0)))
    for rest in sorted(parts, key=lambda members: cost(tree.held(members)[0]), reverse=True):
        while rest:
            rooms = [max(0, share + (over > 0) - len(own)) for own in found]
            roomy = [rank for rank, room in enumerate(rooms) if room >= len(rest)]
            if roomy:
                nodes = {*tree.held(rest)[0]}
                rank = min(roomy, key=lambda rank: loads[rank] - cost(nodes & held[rank]))
            else:
                rank = min(range(ranks), key=lambda rank: (len(found[rank]), loads[rank]))
            taken, rest = rest[: rooms[rank]], rest[rooms[rank] :]
            nodes = {*tree.held(taken)[0]}
            loads[rank] += cost(nodes - held[rank])
            held[rank] |= nodes
            found[rank] += taken
            over -= len(found[rank]) > share
    return found


def _costs(tree: PrefixTree, token_cost: float) -> list[float]:
    """(n,) of the rows of each node."""
    pairs = map(visible_pairs, tree.begins, tree.node_lens)
    return [own + token_cost * length for own, length in zip(pairs, tree.node_lens)]


def _tops(tree: PrefixTree, most: int) -> list[int]:
    """(n,) the uppermost node on its path of each node with at most so many sequences below, or its leaf; else -1."""
    # Leaf -1 and parent -1 find the last entry.
    counts = [0] * (len(tree.node_lens) + 1)
    for leaf in tree.leaves:
        counts[leaf] += 1
    for node in reversed(range(len(tree.node_lens))):
        counts[tree.node_parents[node]] += counts[node]
    inner = {*tree.node_parents}
    tops: list[int] = []
    for node, parent in enumerate(tree.node_parents):
        inherited = tops[parent] if parent >= 0 else -1
        tops.append(inherited if inherited >= 0 else node if counts[node] <= most or node not in inner else -1)
    return tops
