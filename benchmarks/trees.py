"""The prefix trees that are measured, as the nodes of each: (length, parent), depth first, a root's parent is -1."""

from __future__ import annotations

import random
from functools import partial

Nodes = tuple[tuple[int, int], ...]


def balanced(root: int, other: int, depth: int) -> Nodes:
    """Two children below every node but those of the last level."""
    nodes = [(root, -1)]

    def grow(parent: int, level: int) -> None:
        for _ in range(2 if level < depth else 0):
            nodes.append((other, parent))
            grow(len(nodes) - 1, level + 1)

    grow(0, 1)
    return tuple(nodes)


def spine(root: int, turns: int, turn: int, leaves: tuple[int, ...], branching: range) -> Nodes:
    """A chain of turns below the root, and leaves of the given lengths below those of its nodes that branch."""
    nodes, parent = [(root, -1)], 0
    for index in range(turns + 1):
        if index in branching:
            nodes += [(length, parent) for length in leaves]
        if index < turns:
            nodes.append((turn, parent))
            parent = len(nodes) - 1
    return tuple(nodes)


def rollouts(
    seed: int, root: tuple[int, int], turns: int, turn: tuple[int, int], probability: float, most: int
) -> Nodes:
    """Two rollouts of a task that branch on: behind every turn there are two to ``most`` next ones, or mostly one.

    Turns that follow each other without a branch are one node. Lengths are drawn from ``root`` and ``turn``.
    """
    draw = random.Random(seed)
    nodes = [(draw.randint(*root), -1)]

    def grow(parent: int, turns_left: int, branches: int) -> None:
        for _ in range(branches):
            length, left, next_branches = 0, turns_left, 1
            while left and next_branches == 1:
                length += draw.randint(*turn)
                left -= 1
                next_branches = draw.randint(2, most) if left and draw.random() < probability else 1
            nodes.append((length, parent))
            if left:
                grow(len(nodes) - 1, left, next_branches)

    grow(0, turns, 2)
    return tuple(nodes)


def pairs(root: int, count: int, shared: int, leaf: int) -> Nodes:
    """Below the root ``count`` nodes of ``shared`` tokens, two leaves below each: is it worth to share so few?"""
    nodes = [(root, -1)]
    for _ in range(count):
        node = len(nodes)
        nodes += [(shared, 0), (leaf, node), (leaf, node)]
    return tuple(nodes)


def is_of_pairs(name: str) -> bool:
    """Whether the shape of that name is one of those trees."""
    return "tree-pairs_" in name


SHORT = (8, 16, 32, 64, 128, 256)  # tokens of such nodes
LEAVES = {1024: 32, 8192: 4}  # length of the leaves, and how many pairs there are: 64K rows in all leaves

# By name. Seeds are those that come nearest to trees for which rates of more implementations are known: agentic, of 247
# nodes, 148 leaves and 273,553 tokens for 1,771,242; agentic_wide, of 22, 13 and 19,062 for 53,149.
TREES = {
    "balanced_d4": partial(balanced, 1024, 512, 5),
    "branched": partial(spine, 512, 6, 400, (2900, 2500), range(1, 5)),
    "comb": partial(spine, 1024, 64, 128, (256,), range(64)),
    "agentic": partial(rollouts, 53057, (2048, 6144), 10, (64, 1200), 0.35, 3),
    "agentic_wide": partial(rollouts, 3, (512, 2048), 7, (64, 800), 0.5, 4),
    **{
        f"pairs_{shared}x{leaf // 1024}K": partial(pairs, 1000, count, shared, leaf)
        for leaf, count in LEAVES.items()
        for shared in SHORT
    },
    "pairs_tiny": partial(pairs, 20, 3, 7, 11),
    "tiny": partial(rollouts, 1, (20, 40), 3, (1, 24), 0.6, 3),
}
