# SPDX-License-Identifier: BSD-3-Clause
"""The specification in PyTorch: exact attention along the paths of a tree, forward and backward, block by block.

For a node with query rows Q, and the keys K and values V of its path (Gai et al., DualKV, 2026, for a context with its
sequences)

    S = scale * Q K^T  where visible, else -inf        LSE = logsumexp(S)        P = exp(S - LSE)        O = P V
    delta = rowsum(dO * O) - dLSE        dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)
    dQ = scale * dS K        dK = scale * dS^T Q

with sums over the query heads of a KV head and, for the keys of a node, over its whole subtree. It follows the table of
`nodes.py` and nothing else, runs on any device, and holds one block of scores at a time. 16-bit inputs are computed and
summed in float32 and rounded once; float64 stays float64.

A softcap c replaces S by c * tanh(S / c) before the mask, a window hides the keys that lie too far away, and sinks are
one more score in every row's LSE, of a key whose value is 0.

The operators use it for CPU tensors; CUDA tensors reach it only where the caller asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .calls import BackwardCall, ForwardCall, inputs_of
from .nodes import Node, checked_nodes

# Bounds of the working memory, in elements: a block of scores, its keys, and sums of dK and dV.
SCORE_ELEMENTS = 2**18
KEY_BLOCK = 512
ACCUMULATOR_ELEMENTS = 2**22


@dataclass(frozen=True)
class Visibility:
    """Visibility rule by logical positions: which keys a query sees. Defined only here.

    Up to `left` positions before its own; None for all of them. With causality none after it, else all.
    """

    left: int | None = None
    causal: bool = True

    def key_range(self, q_first: int, q_last: int, kv_len: int) -> tuple[int, int]:
        """Keys [begin, end) outside of which no query of [q_first, q_last] sees any of the kv_len keys."""
        begin = 0 if self.left is None else max(0, q_first - self.left)
        return begin, max(0, min(kv_len, q_last + 1)) if self.causal else kv_len

    def hidden(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """(queries, keys) bool, True where the query does not see the key; None if every query sees every key."""
        sees_left = self.left is None or queries[-1] - keys[0] <= self.left
        if sees_left and (not self.causal or keys[-1] <= queries[0]):
            return None
        q_pos, kv_pos = (torch.arange(span.start, span.stop, device=device) for span in (queries, keys))
        distance = q_pos[:, None] - kv_pos[None, :]
        behind = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        return behind if self.left is None else behind | (distance > self.left)


class Keys:
    """A node's keys and values for some KV heads, (heads, rows, d) views; in a backward also the sums of gradients."""

    def __init__(self, node: Node, k: Tensor, v: Tensor, *gradients: Tensor, dtype: torch.dtype) -> None:
        self.node = node
        self.k, self.v = k, v
        self.gradients = gradients
        self.sums = gradients
        if any(tensor.dtype != dtype for tensor in gradients):
            self.sums = tuple(torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) for tensor in gradients)

    def finish(self) -> None:
        """Round the sums into the gradients and free them: the next ones are made while this object still lives."""
        if self.sums is not self.gradients:
            for gradient, total in zip(self.gradients, self.sums):
                gradient.copy_(total)
            self.sums = ()


class KeyBlock(NamedTuple):
    """Some rows of a node's keys, and their logical positions."""

    source: Keys
    rows: slice
    positions: range


class QueryBlock(NamedTuple):
    """Some query rows of the last node of a path, for some KV heads and their query heads."""

    path: Sequence[Keys]
    rows: slice
    heads: slice

    @property
    def positions(self) -> range:
        """Logical positions of the rows."""
        node = self.path[-1].node
        return range(node.q_pos0 + self.rows.start - node.q_begin, node.q_pos0 + self.rows.stop - node.q_begin)

    def of(self, values: Tensor) -> Tensor:
        """The block's part of (KV heads, query heads per KV head, total_q, d), a view."""
        return values[self.heads, :, self.rows]


@dataclass(frozen=True)
class Problem:
    """The inputs of one call.

    Attributes:
        q: (KV heads, query heads per KV head, total_q, d).
        storages: tensors (KV heads, rows, d) of keys, values and in a backward their gradients; those of contexts and
            those of decoded rows, whose rows follow in the table.
        dtype: of all arithmetic and of the LSE.
    """

    q: Tensor
    storages: list[list[Tensor]]
    nodes: list[Node]
    scale: float
    visibility: Visibility
    softcap: float
    dtype: torch.dtype

    @staticmethod
    def of(call: ForwardCall | BackwardCall, gradients: Sequence[Tensor] = ()) -> Problem:
        """The problem of a call; `gradients` are those of its tensors of keys and values."""
        q, k, _, k_decoded, _ = inputs_of(call)
        table = checked_nodes(call.nodes, len(q), len(k), None if k_decoded is None else len(k_decoded))
        tensors = [tensor.transpose(0, 1) for tensor in inputs_of(call)[1:] if tensor is not None]
        sums = [gradient.transpose(0, 1) for gradient in gradients]
        storages = [tensors[at : at + 2] + sums[at : at + 2] for at in range(0, len(tensors), 2)]
        options = call.options
        visibility = Visibility(None if options.window_left < 0 else options.window_left, options.causal)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows = by_head(q, k.shape[1])
        return Problem(rows, storages, table, options.softmax_scale, visibility, options.softcap, dtype)

    def query_blocks(self) -> Iterator[QueryBlock]:
        """All query rows, node by node in the order of the table, cut so that a block of scores is within its bound.

        The path of a block is one list, which changes; a node's sums are finished when its subtree is done.
        """
        for heads in self._head_chunks():
            path: list[Keys] = []
            for index, node in enumerate(self.nodes):
                while path and path[-1].node.subtree_end <= index:
                    path.pop().finish()
                path.append(self._keys(node, heads))
                keys = min(KEY_BLOCK, max(1, *(source.node.kv_len for source in path)))
                size = max(1, SCORE_ELEMENTS // ((heads.stop - heads.start) * self.q.shape[1] * keys))
                end = node.q_begin + node.q_len
                for row in range(node.q_begin, end, size):
                    yield QueryBlock(path, slice(row, min(row + size, end)), heads)
            while path:
                path.pop().finish()

    def _head_chunks(self) -> Iterator[slice]:
        """KV heads to compute at once: one, unless several fit in the bounds of the working memory."""
        kv_heads, per_head, _, head_dim = self.q.shape
        queries = max((node.q_len for node in self.nodes), default=0)
        longest = max((node.kv_len for node in self.nodes), default=0)
        path = max((node.kv_pos0 + node.kv_len for node in self.nodes), default=0)
        scores = per_head * queries * min(KEY_BLOCK, longest)
        sums = path * (head_dim + self.storages[0][1].shape[2])
        chunk = min(SCORE_ELEMENTS // max(1, scores), ACCUMULATOR_ELEMENTS // max(1, sums))
        chunk = max(1, min(chunk, kv_heads))
        for begin in range(0, kv_heads, chunk):
            yield slice(begin, min(begin + chunk, kv_heads))

    def _keys(self, node: Node, heads: slice) -> Keys:
        rows = self.storages[0][0].shape[1]
        is_behind = len(self.storages) > 1 and node.kv_begin >= rows
        begin = node.kv_begin - rows * is_behind
        own = (tensor[heads, begin : begin + node.kv_len] for tensor in self.storages[is_behind])
        return Keys(node, *own, dtype=self.dtype)

    def visible_blocks(self, block: QueryBlock) -> Iterator[KeyBlock]:
        """The key blocks of which the query block sees something, from the root; none crosses a node's border."""
        last, positions = block.path[-1].node, block.positions
        begin, end = self.visibility.key_range(positions[0], positions[-1], last.kv_pos0 + last.kv_len)
        for keys in block.path:
            first = keys.node.kv_pos0
            stop = min(end, first + keys.node.kv_len)
            for position in range(max(begin, first), stop, KEY_BLOCK):
                own = range(position, min(position + KEY_BLOCK, stop))
                yield KeyBlock(keys, slice(own.start - first, own.stop - first), own)

    def load(self, values: Tensor, block: QueryBlock) -> Tensor:
        """Its part of (KV heads, query heads per KV head, total_q, d) as (KV heads, query heads * rows, d)."""
        return block.of(values).to(self.dtype).flatten(1, 2)

    def store(self, values: Tensor, block: QueryBlock, part: Tensor) -> None:
        """The inverse of `load`, rounding to the type of the values."""
        block.of(values).copy_(part.unflatten(1, (values.shape[1], -1)))

    def scores(self, block: QueryBlock, keys: KeyBlock, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of scaled queries within the softcap, -inf where hidden; and what is hidden."""
        scores = q @ k.transpose(1, 2)
        if self.softcap != 0.0:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        hidden = self.visibility.hidden(block.positions, keys.positions, q.device)
        self.fill(scores, hidden, -math.inf)
        return scores, hidden

    def fill(self, scores: Tensor, hidden: Tensor | None, value: float) -> None:
        """Set a block of scores (or of what is computed from them) to `value` where hidden, in place."""
        if hidden is not None:
            scores.unflatten(1, (self.q.shape[1], -1)).masked_fill_(hidden, value)


def by_head(rows: Tensor, kv_heads: int) -> Tensor:
    """(total_q, H, d) as (KV heads, query heads per KV head, total_q, d), a view."""
    return rows.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def row_values(values: Tensor, kv_heads: int) -> Tensor:
    """(H, total_q) as (KV heads, query heads per KV head, total_q, 1), a view."""
    return by_head(values.transpose(0, 1)[:, :, None], kv_heads)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, and no autocast that would round the float32 products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Attention of every node of the table.

    Returns:
        out (total_q, H, d_v) in q's dtype, and lse (H, total_q) in float32 (float64 for float64). Rows that are in no
        node or see no key are 0 and -inf (with sinks, a row that sees no key has its sink as LSE).

    Raises:
        ValueError: the table is not consistent.
    """
    problem, q = Problem.of(call), call.q
    out = torch.zeros((*q.shape[:2], call.v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=problem.dtype, device=q.device)
    kv_heads = call.k.shape[1]
    outs, lses = by_head(out, kv_heads), row_values(lse, kv_heads)
    sinks = None if call.sinks is None else row_values(call.sinks[:, None].expand(-1, len(q)), kv_heads)
    with plain_arithmetic(q.device):
        for block in problem.query_blocks():
            block_out, block_lse = attend(problem, block, sinks)
            problem.store(outs, block, block_out)
            problem.store(lses, block, block_lse)
    return out, lse


def attend(problem: Problem, block: QueryBlock, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Online softmax of one query block over the keys it sees: (heads, rows, d) and (heads, rows, 1)."""
    q = problem.load(problem.q, block) * problem.scale
    total = q.new_zeros((*q.shape[:2], block.path[-1].v.shape[2]))
    row_sum = q.new_full((*q.shape[:2], 1), 0.0 if sinks is None else 1.0)
    row_max = torch.full_like(row_sum, -math.inf) if sinks is None else problem.load(sinks, block)
    for keys in problem.visible_blocks(block):
        k, v = (tensor[:, keys.rows].to(problem.dtype) for tensor in (keys.source.k, keys.source.v))
        scores, _ = problem.scores(block, keys, q, k)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        # Rows without a visible key so far have the maximum -inf, and -inf - -inf is NaN.
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights = scores.sub_(shift).exp_()
        decay = (row_max - shift).exp_()
        row_sum = row_sum.mul_(decay).add_(weights.sum(-1, keepdim=True))
        total = total.mul_(decay).add_(weights @ v)
        row_max = new_max
    out = total.div_(row_sum.masked_fill(row_sum == 0.0, 1.0))
    return out, row_max + row_sum.log()


def backward(call: BackwardCall) -> list[Tensor]:
    """Gradients of `forward`.

    Returns:
        dq, dk, dv and, where there are these tensors, dk_decoded, dv_decoded: contiguous, 0 for rows that took no part;
        after them dsinks, where there are sinks.
    """
    inputs = [tensor for tensor in inputs_of(call) if tensor is not None]
    gradients = [torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs]
    problem = Problem.of(call, gradients[1:])
    with plain_arithmetic(call.q.device):
        _fill_gradients(problem, call, gradients[0])
    return gradients if call.sinks is None else [*gradients, sink_gradient(call, call.sinks)]


def sink_gradient(call: BackwardCall, sinks: Tensor) -> Tensor:
    """(H,): of each row, its sink's probability times 0 - delta, since a sink's value is 0.

    Its error is that of the rounded `out` in delta. To save what rounding takes would cost as much
    memory as `out`, for an error of a third: the kernels round P too.
    """
    lse = call.lse
    delta = (call.dout.to(lse.dtype) * call.out).sum(-1).transpose(0, 1)
    if call.dlse is not None:
        delta = delta - call.dlse
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # A row of no node has the LSE -inf: whatever its upstream gradient, it has no sink.
    rows = torch.where(lse == -math.inf, 0.0, probability * delta)
    return rows.sum(1).neg().to(sinks.dtype)


def _fill_gradients(problem: Problem, call: BackwardCall, dq: Tensor) -> None:
    """All gradients. A function of its own: PyTorch 2.11 cannot compile a `with` after a graph break."""
    kv_heads = call.k.shape[1]
    dqs, dout, out = (by_head(tensor, kv_heads) for tensor in (dq, call.dout, call.out))
    lse = row_values(call.lse, kv_heads)
    dlse = None if call.dlse is None else row_values(call.dlse, kv_heads)
    for block in problem.query_blocks():
        problem.store(dqs, block, differentiate(problem, block, dout, dlse, out, lse))


def differentiate(
    problem: Problem, block: QueryBlock, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """dQ of one query block as (heads, rows, d); its parts of dK and dV are added to the sums of their node."""
    q = problem.load(problem.q, block) * problem.scale
    do = problem.load(dout, block)
    delta = (do * problem.load(out, block)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= problem.load(dlse, block)
    row_lse = problem.load(lse, block)
    # Rows that see no key are hidden everywhere; 0 only keeps exp() away from -inf - -inf.
    row_lse = row_lse.masked_fill(row_lse == -math.inf, 0.0)
    dq = torch.zeros_like(q)
    for keys in problem.visible_blocks(block):
        k, v = (tensor[:, keys.rows].to(problem.dtype) for tensor in (keys.source.k, keys.source.v))
        scores, hidden = problem.scores(block, keys, q, k)
        weights = (scores - row_lse).exp_()
        dscores = (do @ v.transpose(1, 2)).sub_(delta).mul_(weights)
        if problem.softcap != 0.0:
            dscores.mul_(1.0 - (scores / problem.softcap).square_())
        problem.fill(dscores, hidden, 0.0)
        dq += dscores @ k
        for total, part in zip(keys.source.sums, (dscores.transpose(1, 2) @ q, weights.transpose(1, 2) @ do)):
            total[:, keys.rows].add_(part)
    return dq.mul_(problem.scale)
