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
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .calls import BackwardCall, ForwardCall
from .nodes import Node, checked_nodes

# Bounds of the working memory, in elements: a block of scores, its keys, and the float32 sums of
# dK and dV.
SCORE_ELEMENTS = 2**18
KEY_BLOCK = 512
ACCUMULATOR_ELEMENTS = 2**22


@dataclass(frozen=True)
class Visibility:
    """Visibility rule by logical positions: which keys a query sees. Defined only here.

    Up to `left` positions before its own and up to `right` behind it; None for all. Causality is `right` 0.
    """

    left: int | None = None
    right: int | None = None

    def key_range(self, q_first: int, q_last: int, kv_len: int) -> tuple[int, int]:
        """Keys [begin, end) outside of which no query of [q_first, q_last] sees any of the kv_len keys."""
        begin = 0 if self.left is None else max(0, q_first - self.left)
        return begin, kv_len if self.right is None else max(0, min(kv_len, q_last + self.right + 1))

    def sees_all(self, q_first: int, q_last: int, kv_begin: int, kv_end: int) -> bool:
        """Whether every query of [q_first, q_last] sees every key of [kv_begin, kv_end): no mask is needed."""
        is_near = self.left is None or q_last - kv_begin <= self.left
        return is_near and (self.right is None or kv_end - 1 - q_first <= self.right)

    def hidden(self, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        """(queries, keys) bool: True where the query does not see the key."""
        distance = q_pos[:, None] - kv_pos[None, :]
        behind = torch.zeros_like(distance, dtype=torch.bool) if self.right is None else distance < -self.right
        return behind if self.left is None else behind | (distance > self.left)


class KeyBlock(NamedTuple):
    """Keys of the node at `depth` of a path: rows of k (storage 0) or of k_decoded (1)."""

    depth: int
    storage: int
    row: int
    position: int
    size: int


class QueryBlock(NamedTuple):
    """Rows of the last node of a path, for the query heads of the KV heads [head_begin, head_end)."""

    path: Sequence[Node]
    row: int
    size: int
    head_begin: int
    head_end: int

    @property
    def position(self) -> int:
        """Logical position of the first row."""
        return self.path[-1].q_pos0 + self.row - self.path[-1].q_begin


@dataclass(frozen=True)
class Problem:
    """The inputs of one call. The rows of several tensors of keys follow each other."""

    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    nodes: list[Node]
    scale: float
    visibility: Visibility
    softcap: float
    sinks: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The type of all arithmetic and of the LSE."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def kv_heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def heads_per_kv_head(self) -> int:
        return self.q.shape[1] // self.kv_heads

    def head_chunks(self) -> Iterator[tuple[int, int]]:
        """KV heads to compute at once: one, unless several fit in the bounds of the working memory."""
        queries = max((one.q_len for one in self.nodes), default=0)
        longest = max((one.kv_len for one in self.nodes), default=0)
        path = max((one.kv_pos0 + one.kv_len for one in self.nodes), default=0)
        scores = self.heads_per_kv_head * queries * min(KEY_BLOCK, longest)
        sums = path * (self.q.shape[2] + self.values[0].shape[2])
        chunk = min(SCORE_ELEMENTS // max(1, scores), ACCUMULATOR_ELEMENTS // max(1, sums))
        chunk = max(1, min(chunk, self.kv_heads))
        for begin in range(0, self.kv_heads, chunk):
            yield begin, min(begin + chunk, self.kv_heads)

    def paths(self) -> Iterator[Sequence[Node]]:
        """The path of every node, from the root, in the order of the table; one list, which changes."""
        path: list[Node] = []
        ends: list[int] = []
        for index, node in enumerate(self.nodes):
            while ends and ends[-1] <= index:
                path.pop()
                ends.pop()
            path.append(node)
            ends.append(node.subtree_end)
            yield path

    def query_blocks(self, path: Sequence[Node], head_begin: int, head_end: int) -> Iterator[QueryBlock]:
        """The query rows of the path's last node, cut so that a block of scores stays within its bound."""
        node = path[-1]
        keys = min(KEY_BLOCK, max(1, *(one.kv_len for one in path)))
        size = max(1, SCORE_ELEMENTS // ((head_end - head_begin) * self.heads_per_kv_head * keys))
        end = node.q_begin + node.q_len
        for row in range(node.q_begin, end, size):
            yield QueryBlock(path, row, min(size, end - row), head_begin, head_end)

    def visible_blocks(self, block: QueryBlock) -> Iterator[KeyBlock]:
        """The key blocks of which the query block sees something, from the root; none crosses a node's border."""
        node = block.path[-1]
        last = block.position + block.size - 1
        begin, end = self.visibility.key_range(block.position, last, node.kv_pos0 + node.kv_len)
        for depth, one in enumerate(block.path):
            stop = min(end, one.kv_pos0 + one.kv_len)
            storage, row = self.locate(one)
            for position in range(max(begin, one.kv_pos0), stop, KEY_BLOCK):
                first = row + position - one.kv_pos0
                yield KeyBlock(depth, storage, first, position, min(KEY_BLOCK, stop - position))

    def locate(self, node: Node) -> tuple[int, int]:
        """In which tensor the node's keys lie, and at which row."""
        rows = self.keys[0].shape[0]
        is_behind = len(self.keys) > 1 and node.kv_begin >= rows
        return int(is_behind), node.kv_begin - rows if is_behind else node.kv_begin

    def load_queries(self, tensor: Tensor, block: QueryBlock) -> Tensor:
        """Rows of a (total_q, H, d) tensor as (KV heads, query heads per KV head * rows, d)."""
        per_head = self.heads_per_kv_head
        rows = tensor[block.row : block.row + block.size, block.head_begin * per_head : block.head_end * per_head]
        rows = rows.unflatten(1, (-1, per_head)).permute(1, 2, 0, 3)
        return rows.to(self.dtype).reshape(rows.shape[0], -1, tensor.shape[2])

    def store_queries(self, tensor: Tensor, block: QueryBlock, value: Tensor) -> None:
        """The inverse of `load_queries`, rounding to the tensor's type."""
        per_head = self.heads_per_kv_head
        rows = tensor[block.row : block.row + block.size, block.head_begin * per_head : block.head_end * per_head]
        value = value.unflatten(1, (per_head, -1)).permute(2, 0, 1, 3)
        rows.unflatten(1, (-1, per_head)).copy_(value)

    def row_values(self, tensor: Tensor, block: QueryBlock) -> Tensor:
        """View of a (H, total_q) tensor as (query heads, rows): the block's rows in the order of `load_queries`."""
        per_head = self.heads_per_kv_head
        return tensor[block.head_begin * per_head : block.head_end * per_head, block.row : block.row + block.size]

    def load_row_values(self, tensor: Tensor, block: QueryBlock) -> Tensor:
        """Rows of a (H, total_q) tensor as (KV heads, query heads per KV head * rows, 1)."""
        return self.row_values(tensor, block).reshape(block.head_end - block.head_begin, -1, 1)

    def load_keys(self, tensors: tuple[Tensor, ...], block: KeyBlock, head_begin: int, head_end: int) -> Tensor:
        """Rows of a (rows, H_k, d) tensor as (KV heads, rows, d)."""
        rows = tensors[block.storage][block.row : block.row + block.size, head_begin:head_end]
        return rows.to(self.dtype).transpose(0, 1)

    def hidden(self, queries: QueryBlock, keys: KeyBlock) -> Tensor | None:
        """(rows, keys) bool, True where hidden; None if every row sees every key."""
        last, end = queries.position + queries.size - 1, keys.position + keys.size
        if self.visibility.sees_all(queries.position, last, keys.position, end):
            return None
        q_pos = torch.arange(queries.position, queries.position + queries.size, device=self.q.device)
        kv_pos = torch.arange(keys.position, keys.position + keys.size, device=self.q.device)
        return self.visibility.hidden(q_pos, kv_pos)

    def fill_hidden(self, scores: Tensor, hidden: Tensor | None, value: float) -> None:
        """Set a block of scores (or of what is computed from them) to `value` where hidden, in place."""
        if hidden is not None:
            scores.unflatten(1, (self.heads_per_kv_head, -1)).masked_fill_(hidden, value)

    def load_sinks(self, block: QueryBlock) -> Tensor | None:
        """The sinks of the block's heads as (KV heads, query heads per KV head * rows, 1)."""
        if self.sinks is None:
            return None
        per_head = self.heads_per_kv_head
        own = self.sinks[block.head_begin * per_head : block.head_end * per_head].to(self.dtype)
        return own[:, None].expand(-1, block.size).reshape(block.head_end - block.head_begin, -1, 1)

    def cap(self, scores: Tensor) -> Tensor:
        """The scores within the softcap, in place."""
        return scores if self.softcap == 0.0 else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def cap_slope(self, capped: Tensor) -> Tensor | None:
        """Derivative of `cap` where it gave `capped`; None for 1."""
        return None if self.softcap == 0.0 else (capped / self.softcap).square_().neg_().add_(1.0)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, and no autocast that would round the float32 products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _problem(call: ForwardCall | BackwardCall, sinks: Tensor | None) -> Problem:
    decoded = None if call.k_decoded is None else call.k_decoded.shape[0]
    table = checked_nodes(call.nodes, call.q.shape[0], call.k.shape[0], decoded)
    keys = tuple(one for one in (call.k, call.k_decoded) if one is not None)
    values = tuple(one for one in (call.v, call.v_decoded) if one is not None)
    options = call.options
    left, right = (None if one < 0 else one for one in (options.window_left, options.window_right))
    visibility = Visibility(left, 0 if options.causal else right)
    return Problem(call.q, keys, values, table, options.softmax_scale, visibility, options.softcap, sinks)


def forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Attention of every node of the table.

    Returns:
        out (total_q, H, d_v) in q's dtype, and lse (H, total_q) in float32 (float64 for float64). Rows that are in no
        node or see no key are 0 and -inf (with sinks, a row that sees no key has its sink as LSE).

    Raises:
        ValueError: the table is not consistent, see `nodes.checked_nodes`.
    """
    problem, q = _problem(call, call.sinks), call.q
    out = torch.zeros((*q.shape[:2], call.v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=problem.dtype, device=q.device)
    with plain_arithmetic(q.device):
        for heads in problem.head_chunks():
            for path in problem.paths():
                for block in problem.query_blocks(path, *heads):
                    block_out, block_lse = attend(problem, block)
                    problem.store_queries(out, block, block_out)
                    rows = problem.row_values(lse, block)
                    rows.copy_(block_lse.reshape(rows.shape))
    return out, lse


def attend(problem: Problem, block: QueryBlock) -> tuple[Tensor, Tensor]:
    """Online softmax of one query block over the keys it sees: (heads, rows, d) and (heads, rows, 1)."""
    q = problem.load_queries(problem.q, block) * problem.scale
    total = q.new_zeros((*q.shape[:2], problem.values[0].shape[2]))
    sinks = problem.load_sinks(block)
    row_sum = q.new_full((*q.shape[:2], 1), 0.0 if sinks is None else 1.0)
    row_max = torch.full_like(row_sum, -math.inf) if sinks is None else sinks
    for keys in problem.visible_blocks(block):
        k = problem.load_keys(problem.keys, keys, block.head_begin, block.head_end)
        v = problem.load_keys(problem.values, keys, block.head_begin, block.head_end)
        scores = problem.cap(q @ k.transpose(1, 2))
        problem.fill_hidden(scores, problem.hidden(block, keys), -math.inf)
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


def zeros_like(tensor: Tensor) -> Tensor:
    """Contiguous, whatever the tensor's strides."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def backward(call: BackwardCall) -> list[Tensor]:
    """Gradients of `forward`.

    Returns:
        dq, dk, dv and, where there are these tensors, dk_decoded, dv_decoded: contiguous, 0 for rows that took no part.
        The gradient of the sinks is not among them: it follows from these arguments without a look at the keys.
    """
    problem = _problem(call, None)
    with plain_arithmetic(call.q.device):
        return _gradients(problem, (call.dout, call.dlse, call.out, call.lse))


def _gradients(problem: Problem, results: tuple[Tensor, Tensor | None, Tensor, Tensor]) -> list[Tensor]:
    """What `backward` returns. A function of its own: PyTorch 2.11 cannot compile a `with` behind a graph break."""
    dq = zeros_like(problem.q)
    dkeys, dvalues = tuple(map(zeros_like, problem.keys)), tuple(map(zeros_like, problem.values))
    for heads in problem.head_chunks():
        sums: list[Sums] = []  # one per node on the path; rounded once its subtree is done
        for path in problem.paths():
            while len(sums) >= len(path):
                sums.pop().finish()
            storage, row = problem.locate(path[-1])
            sums.append(Sums(problem, dkeys[storage], dvalues[storage], row, path[-1].kv_len, heads))
            for block in problem.query_blocks(path, *heads):
                problem.store_queries(dq, block, differentiate(problem, block, results, sums))
        while sums:
            sums.pop().finish()
    return [dq, *chain(*zip(dkeys, dvalues))]


class Sums:
    """Sums of dK and dV over a run of rows: the gradients themselves, or where those are narrower, wide copies."""

    def __init__(
        self, problem: Problem, dk: Tensor, dv: Tensor, begin: int, length: int, heads: tuple[int, int]
    ) -> None:
        self.begin = begin
        self.dk_out = dk[begin : begin + length, heads[0] : heads[1]]
        self.dv_out = dv[begin : begin + length, heads[0] : heads[1]]
        self.dk, self.dv = self.dk_out, self.dv_out
        if dk.dtype != problem.dtype:
            self.dk, self.dv = (
                torch.zeros(one.shape, dtype=problem.dtype, device=dk.device) for one in (self.dk_out, self.dv_out)
            )

    def add(self, block: KeyBlock, dk: Tensor, dv: Tensor) -> None:
        """Add (heads, rows, d) to the block's rows."""
        first = block.row - self.begin
        self.dk[first : first + block.size].add_(dk.transpose(0, 1))
        self.dv[first : first + block.size].add_(dv.transpose(0, 1))

    def finish(self) -> None:
        """Round the sums into the gradients and free them: the next ones are made while this object still lives."""
        if self.dk is not self.dk_out:
            self.dk_out.copy_(self.dk)
            self.dv_out.copy_(self.dv)
            del self.dk, self.dv


def differentiate(
    problem: Problem, block: QueryBlock, results: tuple[Tensor, Tensor | None, Tensor, Tensor], sums: Sequence[Sums]
) -> Tensor:
    """dQ of one query block as (heads, rows, d); its parts of dK and dV are added to the sums of their node."""
    dout, dlse, out, lse = results
    q = problem.load_queries(problem.q, block) * problem.scale
    do = problem.load_queries(dout, block)
    delta = (do * problem.load_queries(out, block)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= problem.load_row_values(dlse, block)
    row_lse = problem.load_row_values(lse, block)
    # Rows that see no key are hidden everywhere; 0 only keeps exp() away from -inf - -inf.
    row_lse = row_lse.masked_fill(row_lse == -math.inf, 0.0)
    dq = torch.zeros_like(q)
    for keys in problem.visible_blocks(block):
        k = problem.load_keys(problem.keys, keys, block.head_begin, block.head_end)
        v = problem.load_keys(problem.values, keys, block.head_begin, block.head_end)
        hidden = problem.hidden(block, keys)
        scores = problem.cap(q @ k.transpose(1, 2))
        slope = problem.cap_slope(scores)
        weights = scores.sub_(row_lse).exp_()
        problem.fill_hidden(weights, hidden, 0.0)
        dscores = (do @ v.transpose(1, 2)).sub_(delta).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        problem.fill_hidden(dscores, hidden, 0.0)
        dq += dscores @ k
        sums[keys.depth].add(keys, dscores.transpose(1, 2) @ q, weights.transpose(1, 2) @ do)
    return dq.mul_(problem.scale)
