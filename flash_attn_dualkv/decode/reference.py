# SPDX-License-Identifier: BSD-3-Clause
"""The specification of decoding in PyTorch: that of training, `..reference`, over the keys of each request's pages.

A request has the keys at positions [0, keys), of which position p is row p % page_size of page
block_table[request, p // page_size]. Its queries are at the last positions, and each sees the keys
up to its own position that lie in its window. Only rows of these keys are read: whatever else the
pages hold, NaN included, has no effect. One request's keys are copied at a time.

Contents are clamped as csrc/decode/kernel_params.h says: wrong ones give wrong numbers, never an access
outside the cache.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from .. import reference
from ..calls import ForwardCall
from ..host import ints
from ..nodes import Node
from .calls import DecodeCall


@torch.no_grad()
def decode(call: DecodeCall) -> Tensor:
    """Writes out (total_q, H, d) and returns lse (H, total_q) in float32, or float64 for float64.

    A row that sees no key, or that no request owns, is 0 and its LSE -inf (its sink, with sinks).
    """
    q, step = call.q, call.step
    requests, columns = step.block_table.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full((q.shape[1], len(q)), -math.inf, dtype=dtype, device=q.device)
    if call.sinks is not None:
        lse.copy_(call.sinks[:, None])
    call.out.zero_()
    starts = [*range(requests + 1)] if step.cu_seqlens_q is None else step.cu_seqlens_q.tolist()
    for pages, given, (start, stop) in zip(step.block_table.long(), step.seqlens.tolist(), pairwise(starts)):
        first, last = (min(max(row, 0), step.queries) for row in (start, stop))
        if first >= last:
            continue
        keys = min(max(given, 0), columns * step.limits.page_size)
        position = torch.arange(keys, device=q.device)
        page = pages.clamp(0, step.limits.num_pages - 1)[position // step.limits.page_size]
        k, v = (cache[page, position % step.limits.page_size] for cache in (call.k_cache, call.v_cache))
        node = Node(0, last - first, keys - (last - first), 0, keys, 0, -1, 1)
        table = ints(node, torch.int32)[None].to(q.device)
        own = ForwardCall(q[first:last], k, v, None, None, call.sinks, table, call.options)
        call.out[first:last], lse[:, first:last] = reference.forward(own)
    return lse
