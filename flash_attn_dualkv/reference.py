"""The specification in PyTorch: exact attention over a shared context, forward and backward, block by block.

For a segment with query rows Q, keys K = [K_context; K_decoded] and values V likewise (Gai et al., DualKV, 2026)

    S = scale * Q K^T  where visible, else -inf        LSE = logsumexp(S)        P = exp(S - LSE)        O = P V
    delta = rowsum(dO * O) - dLSE        dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)
    dQ = scale * dS K        dK = scale * dS^T Q

with sums over the query heads of a KV head and, for a context, over all segments of its group. It follows the tables of
`segments.py` and nothing else, runs on any device, and holds one block of scores at a time. 16-bit inputs are computed
and summed in float32 and rounded once; float64 stays float64.

What some models change in it is in `Variant`: a softcap c replaces S by c * tanh(S / c) before the mask, a window hides
the keys that lie too far back, and sinks are one more score in every row's LSE, of a key whose value is 0.

The operators use it for CPU tensors; CUDA tensors reach it only where the caller asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import Group, Segment, read_tables

# Bounds of the working memory: a block of scores, its keys, and the float32 sums of dK and dV (in elements).
SCORE_ELEMENTS = 2**18
KEY_BLOCK = 512
ACCUMULATOR_ELEMENTS = 2**22


@dataclass(frozen=True)
class Visibility:
    """Which logical key positions a query at a logical position sees: the only place that knows the rule.

    With `causal` none after its own; with a `window` none that is `window` or more positions before its own.
    """

    causal: bool
    window: int | None = None

    def key_range(self, q_first: int, q_last: int, kv_len: int) -> tuple[int, int]:
        """Keys [begin, end) outside of which no query of [q_first, q_last] sees any of the kv_len keys."""
        begin = 0 if self.window is None else max(0, q_first - self.window + 1)
        return begin, max(0, min(kv_len, q_last + 1)) if self.causal else kv_len

    def sees_all(self, q_first: int, q_last: int, kv_begin: int, kv_end: int) -> bool:
        """Whether every query of [q_first, q_last] sees every key of [kv_begin, kv_end): no mask is needed."""
        near = self.window is None or q_last - kv_begin < self.window
        return near and (not self.causal or kv_end <= q_first + 1)

    def hidden(self, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
        """(queries, keys) bool: True where the query does not see the key."""
        distance = q_pos[:, None] - kv_pos[None, :]
        hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        return hidden if self.window is None else hidden | (distance >= self.window)


class Variant(NamedTuple):
    """What models change in the attention of a row; the default is none of it.

    window: the row sees this many positions, its own the last of them. softcap: bound of the scores' magnitude, > 0.
    sinks: (H,), a score of each query head that joins the softmax but carries no value.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Variant()


class KeyBlock(NamedTuple):
    """Keys that lie together in one region (0: context, 1: decoded)."""

    region: int
    row: int
    position: int
    size: int


def key_blocks(segment: Segment, begin: int, end: int) -> Iterator[KeyBlock]:
    """The blocks that hold the segment's keys at logical positions [begin, end); none crosses a region's border."""
    runs = (
        KeyBlock(0, segment.context_begin, 0, segment.context_len),
        KeyBlock(1, segment.decoded_begin, segment.context_len, segment.decoded_len),
    )
    for run in runs:
        yield from blocks_of(run, begin, end)


def blocks_of(run: KeyBlock, begin: int, end: int) -> Iterator[KeyBlock]:
    """The blocks that hold those keys of a run that stand at logical positions [begin, end)."""
    stop = min(end, run.position + run.size)
    for position in range(max(begin, run.position), stop, KEY_BLOCK):
        yield KeyBlock(run.region, run.row + position - run.position, position, min(KEY_BLOCK, stop - position))


class QueryBlock(NamedTuple):
    """Rows of one segment, for the query heads of the KV heads [head_begin, head_end)."""

    segment: Segment
    row: int
    size: int
    head_begin: int
    head_end: int

    @property
    def position(self) -> int:
        """Logical position of the first row."""
        return self.segment.q_pos0 + self.row - self.segment.q_begin


@dataclass(frozen=True)
class Problem:
    """The inputs of one call, the two regions' tensors side by side."""

    q: Tensor
    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    segments: list[Segment]
    groups: list[Group]
    scale: float
    visibility: Visibility
    softcap: float | None
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
        queries = max((one.q_len for one in self.segments), default=0)
        context = max((one.context_len for one in self.segments), default=0)
        decoded = max((one.decoded_len for one in self.segments), default=0)
        scores = self.heads_per_kv_head * queries * min(KEY_BLOCK, max(context, decoded))
        sums = 2 * (context + decoded) * self.q.shape[2]
        chunk = min(SCORE_ELEMENTS // max(1, scores), ACCUMULATOR_ELEMENTS // max(1, sums))
        chunk = max(1, min(chunk, self.kv_heads))
        for begin in range(0, self.kv_heads, chunk):
            yield begin, min(begin + chunk, self.kv_heads)

    def query_blocks(self, segment: Segment, head_begin: int, head_end: int) -> Iterator[QueryBlock]:
        """The segment's query rows, cut so that a block of scores stays within its bound."""
        keys = min(KEY_BLOCK, max(1, segment.context_len, segment.decoded_len))
        size = max(1, SCORE_ELEMENTS // ((head_end - head_begin) * self.heads_per_kv_head * keys))
        end = segment.q_begin + segment.q_len
        for row in range(segment.q_begin, end, size):
            yield QueryBlock(segment, row, min(size, end - row), head_begin, head_end)

    def visible_blocks(self, block: QueryBlock) -> Iterator[KeyBlock]:
        """The key blocks of which the query block sees something."""
        kv_len = block.segment.context_len + block.segment.decoded_len
        last = block.position + block.size - 1
        return key_blocks(block.segment, *self.visibility.key_range(block.position, last, kv_len))

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

    def load_keys(self, tensors: tuple[Tensor, Tensor], block: KeyBlock, head_begin: int, head_end: int) -> Tensor:
        """Rows of a region's (rows, H_k, d) tensor as (KV heads, rows, d)."""
        rows = tensors[block.region][block.row : block.row + block.size, head_begin:head_end]
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
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def cap_slope(self, capped: Tensor) -> Tensor | None:
        """Derivative of `cap` where it gave `capped`; None for 1."""
        return None if self.softcap is None else (capped / self.softcap).square_().neg_().add_(1.0)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, and no autocast that would round the float32 products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _problem(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    segments: Tensor,
    groups: Tensor,
    softmax_scale: float,
    causal: bool,
    variant: Variant,
) -> Problem:
    keys, values = (k_context, k_decoded), (v_context, v_decoded)
    rule = Visibility(causal, variant.window)
    tables = read_tables(segments, groups)
    return Problem(q, keys, values, *tables, softmax_scale, rule, variant.softcap, variant.sinks)


def forward(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    segments: Tensor,
    groups: Tensor,
    softmax_scale: float,
    causal: bool,
    variant: Variant = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Attention of every segment of the tables.

    Args:
        q: (total_q, H, d).
        k_context, v_context: (total_context, H_k, d).
        k_decoded, v_decoded: (total_decoded, H_k, d).
        segments, groups: (S, 8) and (G, 4) int32, see `segments.py`.
        softmax_scale: factor of the scores, > 0.
        causal: whether a row sees only keys up to its own logical position.
        variant: what the model changes in it; the default is nothing.

    Returns:
        out (total_q, H, d) in q's dtype, and lse (H, total_q) in float32 (float64 for float64). Rows that are in no
        segment or see no key are 0 and -inf (with sinks, a row that sees no key has its sink as LSE).
    """
    problem = _problem(q, k_context, v_context, k_decoded, v_decoded, segments, groups, softmax_scale, causal, variant)
    return attend_all(problem)


def attend_all(problem: Problem) -> tuple[Tensor, Tensor]:
    """out and lse of all segments; rows in none of them are 0 and -inf."""
    q = problem.q
    out = zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=problem.dtype, device=q.device)
    with plain_arithmetic(q.device):
        for heads in problem.head_chunks():
            for segment in problem.segments:
                for block in problem.query_blocks(segment, *heads):
                    block_out, block_lse = attend(problem, block)
                    problem.store_queries(out, block, block_out)
                    rows = problem.row_values(lse, block)
                    rows.copy_(block_lse.reshape(rows.shape))
    return out, lse


def attend(problem: Problem, block: QueryBlock) -> tuple[Tensor, Tensor]:
    """Online softmax of one query block over the keys it sees: (heads, rows, d) and (heads, rows, 1)."""
    q = problem.load_queries(problem.q, block) * problem.scale
    total = torch.zeros_like(q)
    sinks = problem.load_sinks(block)
    row_sum = q.new_full((*q.shape[:2], 1), 0.0 if sinks is None else 1.0)
    row_max = torch.full_like(row_sum, -math.inf) if sinks is None else sinks
    for keys in problem.visible_blocks(block):
        k = problem.load_keys(problem.keys, keys, block.head_begin, block.head_end)
        v = problem.load_keys(problem.values, keys, block.head_begin, block.head_end)
        scores = problem.cap(q @ k.transpose(1, 2))
        problem.fill_hidden(scores, problem.hidden(block, keys), -math.inf)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        # A row without a visible key so far has the maximum -inf, and -inf - -inf is not a number.
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights = scores.sub_(shift).exp_()
        decay = (row_max - shift).exp_()
        row_sum = row_sum.mul_(decay).add_(weights.sum(-1, keepdim=True))
        total = total.mul_(decay).add_(weights @ v)
        row_max = new_max
    out = total.div_(row_sum.masked_fill(row_sum == 0.0, 1.0))
    return out, row_max + row_sum.log()


class KeyGradients(NamedTuple):
    """Gradients of the keys and values of both regions."""

    k_context: Tensor
    v_context: Tensor
    k_decoded: Tensor
    v_decoded: Tensor


def zeros_like(tensor: Tensor) -> Tensor:
    """Contiguous, whatever the tensor's strides."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    groups: Tensor,
    softmax_scale: float,
    causal: bool,
    variant: Variant = PLAIN,
    key_gradients: KeyGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `forward`.

    Args:
        dout: (total_q, H, d), any strides.
        dlse: (H, total_q), or None if the LSE is not used.
        out, lse: what `forward` returned; the rest are its arguments.
        key_gradients: zeros of the shapes of k_context, v_context, k_decoded, v_decoded to write into; None: fresh.

    Returns:
        dq, dk_context, dv_context, dk_decoded, dv_decoded: 0 for rows that took no part; contiguous unless given. The
        gradient of the sinks is not among them: it follows from these arguments without a look at the keys.
    """
    problem = _problem(q, k_context, v_context, k_decoded, v_decoded, segments, groups, softmax_scale, causal, variant)
    dq = zeros_like(q)
    if key_gradients is None:
        key_gradients = KeyGradients(*map(zeros_like, (k_context, v_context, k_decoded, v_decoded)))
    dkeys = key_gradients.k_context, key_gradients.k_decoded
    dvalues = key_gradients.v_context, key_gradients.v_decoded
    results = (dout, dlse, out, lse)
    with plain_arithmetic(q.device):
        for heads in problem.head_chunks():
            for group in problem.groups:
                context = Sums(problem, dkeys[0], dvalues[0], group.context_begin, group.context_len, heads)
                for segment in problem.segments[group.segment_begin : group.segment_end]:
                    decoded = Sums(problem, dkeys[1], dvalues[1], segment.decoded_begin, segment.decoded_len, heads)
                    for block in problem.query_blocks(segment, *heads):
                        problem.store_queries(dq, block, differentiate(problem, block, results, (context, decoded)))
                    decoded.finish()
                context.finish()
    return dq, *key_gradients


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
            self.dk = torch.zeros(self.dk_out.shape, dtype=problem.dtype, device=dk.device)
            self.dv = torch.zeros_like(self.dk)

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
    problem: Problem,
    block: QueryBlock,
    results: tuple[Tensor, Tensor | None, Tensor, Tensor],
    sums: tuple[Sums, Sums],
) -> Tensor:
    """dQ of one query block as (heads, rows, d); its parts of dK and dV are added to the sums of their region."""
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
        sums[keys.region].add(keys, dscores.transpose(1, 2) @ q, weights.transpose(1, 2) @ do)
    return dq.mul_(problem.scale)
