# SPDX-License-Identifier: BSD-3-Clause
"""Trees for the tests of attention along paths: their tables, what each row sees, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

Tree = tuple[list[int], list[int]]  # lengths and parents of nodes, depth first

# Empty nodes, one of them with children; a chain; a root without children.
DEEP: Tree = ([7, 3, 0, 9, 4, 6, 1, 5, 0], [-1, 0, 1, 2, 2, 0, -1, 6, -1])


def offsets_and_parents(tree: Tree, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    offsets = [*accumulate(tree[0], initial=0)]
    cu_seqlens, parents = (torch.tensor(one, dtype=torch.int32, device=device) for one in (offsets, tree[1]))
    return cu_seqlens, parents


def paths_of(tree: Tree) -> list[list[int]]:
    """The rows of the path of every node, from the root to the node's last row."""
    paths: list[list[int]] = []
    begin = 0
    for length, parent in zip(*tree):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(begin, begin + length)])
        begin += length
    return paths


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root to a node, whose parents may stand anywhere."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def visible(tree: Tree, rows: int, begins: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """(rows, rows) bool: which rows see which; and (rows,) logical positions. `begins`: of nodes that lie anywhere."""
    begins = [*accumulate(tree[0], initial=0)] if begins is None else begins
    sees = torch.zeros(rows, rows, dtype=torch.bool)
    positions = torch.zeros(rows, dtype=torch.int64)
    for node, length in enumerate(tree[0]):
        path = [row for one in path_to(node, tree[1]) for row in range(begins[one], begins[one] + tree[0][one])]
        for at in range(len(path) - length, len(path)):
            sees[path[at], path[: at + 1]] = True
            positions[path[at]] = at
    return sees, positions


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Depth-first tables, with nodes of no rows and chains."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(draw(st.integers(0, 9))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return [draw(st.integers(0, 5)) for _ in parents], parents


Forest = tuple[list[int], list[int], list[int]]  # first rows, lengths and parents of nodes


@st.composite
def forests(draw: st.DrawFn, shuffled: bool = True) -> Forest:
    """Nodes that lie anywhere in the row, parents before and after their children; or depth first."""
    count = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    lens = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    names = draw(st.permutations(range(count))) if shuffled else [*range(count)]
    places = draw(st.permutations(range(count))) if shuffled else _depth_first(parents)
    rows = dict(zip(places, accumulate((lens[node] for node in places), initial=0)))
    found = {names[node]: (rows[node], lens[node], names[parent] if parent >= 0 else -1)
             for node, parent in enumerate(parents)}  # fmt: skip
    begins, sizes, above = zip(*(found[name] for name in range(count)))
    return [*begins], [*sizes], [*above]


def _depth_first(parents: list[int], top: int = -1) -> list[int]:
    children = [node for node, parent in enumerate(parents) if parent == top]
    return [one for child in children for one in (child, *_depth_first(parents, child))]


def mask_of(forest: Forest, rows: int) -> Tensor:
    """(rows, rows): which row sees which."""
    begins, *nodes = forest
    return visible((nodes[0], nodes[1]), rows, begins)[0]


def random_tree(seed: int, nodes: int, longest: int, fall: float = 0.5) -> Tree:
    """A forest; `fall` is how likely a node is to leave the path to the one before, again and again."""
    rng = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    for node in range(nodes):
        while path and rng.random() < fall:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(node)
    return [rng.choice((0, rng.randint(1, longest), rng.randint(1, longest))) for _ in parents], parents


def dense(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output (rows, H, d) and LSE (H, rows) by a softmax of the whole matrix of scores; `sees`: (rows, keys) bool."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, -torch.inf)
    extra = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores)[:, None, None].expand_as(extra)
    lse = torch.cat([scores, extra], -1).logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def inputs(rows: int) -> list[Tensor]:
    """(1, rows, heads, 8) of queries, keys, values."""
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(1, rows, heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def check(got: Tensor, given: list[Tensor], mask: Tensor, scale: float | None) -> None:
    """Output (1, rows, heads, 8) and gradients against dense attention."""
    expected = dense(*(one[0] for one in given), mask, given[0].shape[-1] ** -0.5 if scale is None else scale)[0][None]
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    weights = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected).cos()
    gradients, wanted = (torch.autograd.grad((one * weights).sum(), given) for one in (got, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-11)
