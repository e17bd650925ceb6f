# SPDX-License-Identifier: BSD-3-Clause
"""The specification of decoding in PyTorch: exact attention of each request over its pages.

A request has the keys at positions [0, keys), of which position p is row p % page_size of page
block_table[request, p // page_size]. Its queries are at the last positions, and each sees the keys
up to its own position that lie in its window. Only rows of these keys are read: whatever else the
pages hold, NaN included, has no effect. Keys are taken block by block, so that memory stays
bounded; 16-bit numbers are computed in float32, float64 stays float64.

Contents are clamped as csrc/decode/kernel_params.h says: wrong ones give wrong numbers, never an access
outside the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import KEY_BLOCK, SCORE_ELEMENTS, plain_arithmetic
from .calls import DecodeCall, Step


class Rows(NamedTuple):
    """Some queries of a request: rows of q, the first one's position, the request's pages."""

    begin: int
    end: int
    position: int
    pages: Tensor


def decode(call: DecodeCall) -> Tensor:
    """Writes out (total_q, H, d) and returns lse (H, total_q) in float32, or float64 for float64.

    A row that sees no key, or that no request owns, is 0 and its LSE -inf (its sink, with sinks).
    """
    q, heads = call.q, call.step.limits.num_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((heads, len(q)), -math.inf, dtype=dtype, device=q.device)
    if call.sinks is not None:
        lse.copy_(call.sinks[:, None])
    with plain_arithmetic(q.device):
        call.out.zero_()
        for rows in query_blocks(call.step):
            out, own_lse = attend(call, rows, dtype)
            call.out[rows.begin : rows.end] = out
            lse[:, rows.begin : rows.end] = own_lse
    return lse


def query_blocks(step: Step) -> Iterator[Rows]:
    """The queries of every request, cut so that a block of scores stays within its bound."""
    requests, columns = step.block_table.shape
    most = columns * step.limits.page_size
    starts = [*range(requests + 1)] if step.cu_seqlens_q is None else step.cu_seqlens_q.tolist()
    size = max(1, SCORE_ELEMENTS // (step.limits.num_heads * KEY_BLOCK))
    for index, ((start, stop), length) in enumerate(zip(pairwise(starts), step.seqlens.tolist())):
        first, last = (min(max(one, 0), step.queries) for one in (start, stop))
        pages = step.block_table[index].long().clamp(0, step.limits.num_pages - 1)
        position = min(max(length, 0), most) - (last - first)
        for row in range(first, last, size):
            yield Rows(row, min(row + size, last), position + row - first, pages)


def attend(call: DecodeCall, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Online softmax of a block of queries: out (rows, H, d) and lse (H, rows)."""
    count, kv_heads = rows.end - rows.begin, call.step.limits.num_kv_heads
    q = call.q[rows.begin : rows.end].to(dtype).unflatten(1, (kv_heads, -1))
    q = q.permute(1, 2, 0, 3).flatten(1, 2) * call.softmax_scale  # (KV heads, heads of each * rows, d)
    total = torch.zeros_like(q)
    row_sum = q.new_zeros((*q.shape[:2], 1))
    row_max = torch.full_like(row_sum, -math.inf)
    if call.sinks is not None:  # a key with this score and the value 0
        row_max = call.sinks.to(dtype).view(kv_heads, -1, 1).expand(-1, -1, count).reshape(row_sum.shape)
        row_sum += 1.0
    first = max(0, rows.position - call.window_left) if call.window_left >= 0 else 0
    for begin in range(first, rows.position + count, KEY_BLOCK):
        positions = torch.arange(begin, min(begin + KEY_BLOCK, rows.position + count), device=q.device)
        k, v = (load(cache, rows.pages, positions).to(dtype).transpose(0, 1) for cache in (call.k_cache, call.v_cache))
        scores = q @ k.transpose(1, 2)
        if call.softcap != 0.0:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        distance = torch.arange(rows.position, rows.position + count, device=q.device)[:, None] - positions
        hidden = distance < 0 if call.window_left < 0 else (distance < 0) | (distance > call.window_left)
        scores.unflatten(1, (-1, count)).masked_fill_(hidden, -math.inf)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        shift = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights, decay = scores.sub_(shift).exp_(), (row_max - shift).exp_()
        total = total.mul_(decay).add_(weights @ v)
        row_sum = row_sum.mul_(decay).add_(weights.sum(-1, keepdim=True))
        row_max = new_max
    out = total.div_(row_sum.masked_fill(row_sum == 0.0, 1.0)).unflatten(1, (-1, count))
    lse = (row_max + row_sum.log()).view(-1, count)
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse


def load(cache: Tensor, pages: Tensor, positions: Tensor) -> Tensor:
    """(positions, KV heads, d): the rows of these positions, and no others, of a request."""
    page_size = cache.shape[1]
    return cache[pages[positions // page_size], positions % page_size]
