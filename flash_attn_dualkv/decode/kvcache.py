# SPDX-License-Identifier: BSD-3-Clause
"""The function of FlashAttention that decodes from a cache, and tokens appended to paged caches."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .. import checks
from ..checks import explain
from .attention import shared_prefix_decode
from .calls import PAGE_ROWS, check_cache, check_ints, check_table
from .contents import are_checked, check_appended, check_planned
from .operators import refuse_gradients
from .plan import SharedPrefixPlan, check_plan


def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None = None,
) -> None:  # fmt: skip
    """Write keys and values of new tokens into their requests' pages, behind those that are there.

    Token i of request r goes to position cache_seqlens[r] + i. It does not wait for the device and
    can be captured in a CUDA graph. Tokens without a place (a position before 0 or behind the
    columns of the table, an entry that is no page, rows that no request owns) are dropped and
    change nothing, so that requests of padding may have entries of -1.

    Args:
        k, v: (total, H_k, d) in the dtype of the caches.
        k_cache, v_cache: (num_pages, page_size, H_k, d), by any strides; written in place.
        block_table: (B, columns) int32, the pages of each request; two requests may share those
            only that lie before what they append.
        cache_seqlens: (B,) int32, keys of each request before these tokens.
        cu_seqlens_q: (B+1,) int32, request r has the tokens [r] .. [r+1] - 1. None: total / B each.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is not as described; the message
            names it. Pages that two requests have are seen on the CPU, and with DUALKV_DEBUG=1.
        RuntimeError: k or v requires a gradient while gradients are recorded.
    """
    names, tensors = ("k", "v", "k_cache", "v_cache"), (k, v, k_cache, v_cache)
    checks.check_are_tensors(names, tensors)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_cache(name, cache)
    if v_cache.shape[3] != k_cache.shape[3]:
        expected = f"head dimension {k_cache.shape[3]} (as k_cache)"
        raise NotImplementedError(explain("v_cache", expected, v_cache.shape[3]))
    device, dtype = k_cache.device, k_cache.dtype
    checks.check_shape("v_cache", v_cache, tuple(k_cache.shape), device, dtype)
    shape = (k.shape[0] if k.dim() else 0, *k_cache.shape[2:])
    for name, tensor in zip(names[:2], tensors):
        checks.check_shape(name, tensor, shape, device, dtype)
    check_table(block_table, device)
    requests = block_table.shape[0]
    check_ints("cache_seqlens", cache_seqlens, (requests,), "the requests of block_table", device)
    if cu_seqlens_q is not None:
        check_ints("cu_seqlens_q", cu_seqlens_q, (requests + 1,), "the requests of block_table + 1", device)
    elif shape[0] % max(requests, 1):
        raise ValueError(explain("k", f"as many rows for each of {requests} requests", shape[0]))
    refuse_gradients(tensors)
    if shape[0] == 0 or requests == 0 or k_cache.shape[0] == 0:
        return
    if are_checked(block_table):
        counts = shape[0] // requests if cu_seqlens_q is None else cu_seqlens_q.diff()
        check_appended(block_table, cache_seqlens, counts, k_cache.shape[1], k_cache.shape[0])
    with torch.no_grad():
        _write(k, v, k_cache, v_cache, block_table, cache_seqlens, cu_seqlens_q)


def _write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None,
) -> None:  # fmt: skip
    """`append_kv` of checked tensors, of which none is empty."""
    total, (requests, columns), (pages, page_size) = k.shape[0], block_table.shape, k_cache.shape[:2]
    token = torch.arange(total, device=k.device)
    if cu_seqlens_q is None:
        owner, place = token // (total // requests), token % (total // requests)
        is_good = torch.ones_like(token, dtype=torch.bool)
    else:
        owner = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
        is_good = owner < requests
        owner = owner.clamp(max=requests - 1)
        place = token - cu_seqlens_q[owner]
        is_good &= place >= 0
    position = cache_seqlens[owner] + place
    is_good &= (position >= 0) & (position < columns * page_size)
    position = position.clamp(0, columns * page_size - 1)
    page, row = block_table[owner, position // page_size].long(), position % page_size
    is_good &= (page >= 0) & (page < pages)
    # How many tokens are written cannot depend on values, so that a dropped one repeats the first
    # good one, in the same place. If none is good, that place keeps its contents.
    first = is_good.int().argmax()
    token = torch.where(is_good, token, first)
    page, row = page.clamp(0, pages - 1)[token], row[token]
    for new, cache in ((k, k_cache), (v, v_cache)):
        old = cache[page[:1], row[:1]]
        cache.index_put_((page, row), torch.where(is_good.any(), new[token], old))


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: Literal[False] = False, *, s_aux: Tensor | None = None, plan: SharedPrefixPlan | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    *, return_softmax_lse: Literal[True], s_aux: Tensor | None = None, plan: SharedPrefixPlan | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, s_aux: Tensor | None = None, plan: SharedPrefixPlan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention to a cache, called as FlashAttention 2's function of this name.

    The queries of each sequence are its last tokens. Without `plan` each call plans for itself and
    allocates the plan's memory; in a model that costs every layer what a plan costs once a step.
    Dtypes and strides are those that `shared_prefix_decode` takes.

    Args:
        q: (B, seqlen_q, H, d).
        k_cache, v_cache: (num_pages, page_size, H_k, d) with `block_table`, pages a multiple of 16
            rows. Without it (sequences, S, H_k, d), sequence b in row b (or cache_batch_idx[b]), S
            a multiple of 16.
        k, v: (B, seqlen_new, H_k, d), both or neither: written into the cache at cache_seqlens[b],
            in place, before attention. With a block table, tokens without a page are dropped
            (`append_kv`).
        cache_seqlens: (B,) int32, or an int for all: keys in the cache, without those of k. None:
            the cache is full, only without k.
        cache_batch_idx: (B,) int32 or int64, only without `block_table`.
        block_table: (B, columns) int32.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c).
        causal: aligned to the bottom right. With one query it changes nothing; with more, False is
            not implemented.
        window_size: (left, right); `right` matters only without `causal`.
        return_softmax_lse: return (out, lse).
        s_aux: sinks, (H,), by vLLM's and transformers' name.
        plan: a plan of these requests, updated in this step with the keys of `k` counted, with the
            same block table, and with `cu_seqlens_q` if seqlen_q > 1. `block_table` and
            `cache_seqlens` then serve to write k and v alone.
        rotary_cos, rotary_sin, cache_leftpad, alibi_slopes, num_splits: not implemented; only the
            defaults are accepted (for num_splits also 1). `rotary_interleaved` says nothing without
            rotary_cos.

    Returns:
        out (B, seqlen_q, H, d), or with `return_softmax_lse` (out, lse), lse (B, H, seqlen_q).

    Raises:
        NotImplementedError: an option that is not implemented is used; the message names it.
        TypeError, ValueError: an argument is not as described; the message names it.
        RuntimeError: the plan has planned no step; an input requires a gradient, of which there is
            none.
    """
    unavailable = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad}
    for name, value in (unavailable | {"alibi_slopes": alibi_slopes}).items():
        if value is not None:
            raise NotImplementedError(explain(name, "None (it is not implemented)", checks.describe(value)))
    if checks.integer("num_splits", num_splits) not in (0, 1):
        raise NotImplementedError(explain("num_splits", "0 or 1 (keys are never split)", num_splits))
    checks.flag("rotary_interleaved", rotary_interleaved)
    checks.flag("return_softmax_lse", return_softmax_lse)
    checks.check_are_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(explain(name, "4 dimensions", f"shape {tuple(tensor.shape)}"))
    batch, queries = q.shape[:2]
    window = (_left_window(causal, window_size, queries), -1)
    added = _added(k, v, batch)
    if plan is None or added:
        table = _table(block_table, cache_batch_idx, k_cache, batch)
        lengths = _lengths(cache_seqlens, table, k_cache.shape[1], added)
    if plan is None:
        plan = _plan(q, k_cache, table)
        offsets = None
        if queries != 1:
            offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        plan.update(table, lengths + added, cu_seqlens_q=offsets, num_queries=batch * queries)
    else:
        step = check_plan(plan)
        if (step.block_table.shape[0], step.queries) != (batch, batch * queries):
            expected = f"a step of {batch} requests and {batch * queries} queries"
            raise ValueError(explain("plan", expected, f"one of {step.block_table.shape[0]} and {step.queries}"))
        if added and are_checked(table):
            check_planned(step, table, lengths + added)
    if k is not None and v is not None and added:
        append_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, table, lengths)
    out, lse = shared_prefix_decode(
        q.flatten(0, 1), k_cache, v_cache, plan, softmax_scale=softmax_scale, window_size=window, softcap=softcap,
        sinks=s_aux, return_lse=True,
    )  # fmt: skip
    out = out.unflatten(0, (batch, queries))
    return (out, lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous()) if return_softmax_lse else out


def _left_window(causal: Any, window_size: Any, queries: int) -> int:
    """Positions before its own that a row sees, -1 for all; causality ends the window."""
    is_causal, left = checks.resolve_window(checks.flag("causal", causal) or queries == 1, window_size)
    if not is_causal:
        raise NotImplementedError(explain("causal", f"True for {queries} queries of a sequence", causal))
    return left


def _table(block_table: Any, cache_batch_idx: Any, k_cache: Tensor, batch: int) -> Tensor:
    """The block table of a call; of a cache that is not paged each sequence is a page."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(explain("cache_batch_idx", "None beside block_table", checks.describe(cache_batch_idx)))
        check_table(block_table, k_cache.device)
        if block_table.shape[0] != batch:
            raise ValueError(explain("block_table", f"{batch} requests (as q)", block_table.shape[0]))
        return block_table
    if k_cache.shape[1] % PAGE_ROWS:
        expected = f"a multiple of {PAGE_ROWS} rows for each sequence (block_table is not given)"
        raise ValueError(explain("k_cache", expected, k_cache.shape[1]))
    if cache_batch_idx is None:
        if k_cache.shape[0] < batch:
            raise ValueError(explain("k_cache", f"at least {batch} sequences (as q)", k_cache.shape[0]))
        return torch.arange(batch, dtype=torch.int32, device=k_cache.device)[:, None]
    index = checks.integers("cache_batch_idx", cache_batch_idx, 1)
    checks.check_shape("cache_batch_idx", index, (batch,), k_cache.device)
    return index.to(torch.int32)[:, None]


def _added(k: Any, v: Any, batch: int) -> int:
    """Tokens that a call appends to each sequence."""
    if k is None and v is None:
        return 0
    for name, tensor, other in (("k", k, "v"), ("v", v, "k")):
        if tensor is None:
            raise ValueError(explain(name, f"a tensor, as {other} is given", None))
        checks.check_are_tensors((name,), (tensor,))
        if tensor.dim() != 4 or tensor.shape[0] != batch or tensor.shape[1] != k.shape[1]:
            got = f"shape {tuple(tensor.shape)}"
            raise ValueError(explain(name, f"shape ({batch}, new tokens, heads, head_dim), as q and k", got))
    return k.shape[1]


def _lengths(cache_seqlens: Any, table: Tensor, page_size: int, added: int) -> Tensor:
    """Keys of each sequence before the call's own."""
    batch, columns = table.shape
    if isinstance(cache_seqlens, Tensor):
        check_ints("cache_seqlens", cache_seqlens, (batch,), "the sequences of q", table.device)
        return cache_seqlens
    most = columns * page_size
    if cache_seqlens is None:
        if added:
            raise ValueError(explain("cache_seqlens", "an int or a tensor (k is given)", None))
        length = most
    else:
        length = checks.integer("cache_seqlens", cache_seqlens, 0, most - added)
    return torch.full((batch,), length, dtype=torch.int32, device=table.device)


def _plan(q: Tensor, k_cache: Tensor, table: Tensor) -> SharedPrefixPlan:
    """A plan for one call.

    In the trainer's mode for any model: splits depend on the table's width, which is the batch's.
    """
    (batch, queries, heads, head_dim), (pages, page_size, kv_heads, _) = q.shape, k_cache.shape
    return SharedPrefixPlan(
        max(batch, 1), max(table.shape[1], 1), num_pages=pages, max_queries=max(batch * queries, 1),
        page_size=page_size, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, device=q.device,
        exact="trainer",
    )  # fmt: skip
