"""The specification of attention over a tree of nodes: every row attends to its path, on the blocks of `reference.py`.

A node is a run of packed rows that continues another one, its parent. A path is a node's ancestors from the root to
itself; the rows of a node see their ancestors in full and their own node causally. With the logical positions of a
sequence that is packed alone that is the causal rule, `reference.Visibility`: what changes is only where the keys lie.
dK and dV of a node are sums over the rows of its subtree.

Nodes are in depth-first order: a node, then its subtree, which is one run of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import explain, resolve_softmax_scale
from .reference import (
    PLAIN,
    KeyBlock,
    Problem,
    QueryBlock,
    Sums,
    Variant,
    Visibility,
    attend_all,
    blocks_of,
    differentiate,
    plain_arithmetic,
    zeros_like,
)
from .segments import Segment


class Node(NamedTuple):
    """A run of packed rows. Row r of it stands at logical position `position` + r."""

    row: int
    size: int
    position: int
    parent: int


def read_nodes(cu_seqlens: Tensor, parents: Tensor, rows: int) -> list[Node]:
    """The nodes as Python values; synchronises when the tensors lie on a GPU.

    Args:
        cu_seqlens: (n+1,), node i has the rows [i] .. [i+1] - 1.
        parents: (n,), -1 for roots.
        rows: of the packed tensors; those behind the last node are padding.

    Raises:
        ValueError: offsets that do not rise from 0 or pass `rows`; a parent below -1 or not before its child; an order
            that is not depth-first.
    """
    offsets, above = cu_seqlens.tolist(), parents.tolist()
    if len(offsets) != len(above) + 1:
        raise ValueError(explain("parents", f"{len(offsets) - 1} nodes (as cu_seqlens)", len(above)))
    if offsets[0] != 0 or offsets[-1] > rows:
        expected = f"offsets from 0 to at most {rows} (rows of q)"
        raise ValueError(explain("cu_seqlens", expected, f"{offsets[0]} to {offsets[-1]}"))
    nodes: list[Node] = []
    path: list[int] = []  # to the node before
    for index, ((begin, end), parent) in enumerate(zip(pairwise(offsets), above)):
        if end < begin:
            raise ValueError(explain("cu_seqlens", "offsets that do not decrease", f"{end} after {begin}"))
        if not -1 <= parent < index:
            raise ValueError(explain(f"parents[{index}]", f"-1 or a node before {index}", parent))
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            expected = f"a node on the path to node {index - 1} (depth-first order)"
            raise ValueError(explain(f"parents[{index}]", expected, parent))
        position = nodes[parent].position + nodes[parent].size if parent >= 0 else 0
        nodes.append(Node(begin, end - begin, position, parent))
        path.append(index)
    return nodes


@dataclass(frozen=True)
class TreeProblem(Problem):
    """One call. Both regions are the packed keys; a segment is a node, with the path above it as its context."""

    nodes: list[Node]

    def visible_blocks(self, block: QueryBlock) -> Iterator[KeyBlock]:
        """The key blocks on the path of which the query block sees something, from the root."""
        segment = block.segment
        end = segment.context_len + segment.decoded_len
        keys = self.visibility.key_range(block.position, block.position + block.size - 1, end)
        path = []
        index = segment.group
        while index >= 0:
            path.append(self.nodes[index])
            index = path[-1].parent
        for node in reversed(path):
            yield from blocks_of(KeyBlock(0, node.row, node.position, node.size), *keys)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, softmax_scale: float, variant: Variant
) -> TreeProblem:
    nodes = read_nodes(cu_seqlens, parents, q.shape[0])
    segments = [
        # What lies above has no rows in one place: only its length counts.
        Segment(one.row, one.size, one.position, 0, one.position, one.row, one.size, index)
        for index, one in enumerate(nodes)
    ]
    rule = Visibility(causal=True, window=variant.window)
    keys, values = (k, k), (v, v)
    return TreeProblem(q, keys, values, segments, [], softmax_scale, rule, variant.softcap, variant.sinks, nodes)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Tensor,
    softmax_scale: float,
    variant: Variant = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Attention of every row to its path.

    Args:
        q: (T, H, d), rows of nodes in depth-first order.
        k, v: (T, H_k, d).
        cu_seqlens, parents: (n+1,) and (n,), see `read_nodes`.
        softmax_scale: factor of the scores, > 0.
        variant: what the model changes in it; the default is nothing.

    Returns:
        out (T, H, d) in q's dtype, and lse (H, T) in float32 (float64 for float64). Rows in no node are 0 and -inf.
    """
    return attend_all(_problem(q, k, v, cu_seqlens, parents, softmax_scale, variant))


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    parents: Tensor,
    softmax_scale: float,
    variant: Variant = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`.

    Args:
        dout: (T, H, d), any strides.
        dlse: (H, T), or None if the LSE is not used.
        out, lse: what `forward` returned; the rest are its arguments.

    Returns:
        dq, dk, dv, each summed in the type of the LSE and rounded once; 0 for rows that took no part.
    """
    problem = _problem(q, k, v, cu_seqlens, parents, softmax_scale, variant)
    dq, dk, dv = map(zeros_like, (q, k, v))
    results = (dout, dlse, out, lse)
    with plain_arithmetic(q.device):
        for heads in problem.head_chunks():
            # Any node may be above any other: one sum for all of them.
            sums = Sums(problem, dk, dv, 0, k.shape[0], heads)
            for segment in problem.segments:
                for block in problem.query_blocks(segment, *heads):
                    problem.store_queries(dq, block, differentiate(problem, block, results, (sums, sums)))
            sums.finish()
    return dq, dk, dv


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`forward` with its gradients, of the LSE too; 1 / sqrt(d) is the default of the scale."""
    scale = resolve_softmax_scale(softmax_scale, q.shape[2])
    out, lse = _Attention.apply(q, k, v, cu_seqlens, parents, scale)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, scale: float) -> Any:
        out, lse = forward(q, k, v, cu_seqlens, parents, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, parents)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens, parents = ctx.saved_tensors
        gradients = backward(dout, dlse, q, k, v, out, lse, cu_seqlens, parents, ctx.scale)
        return *gradients, None, None, None
