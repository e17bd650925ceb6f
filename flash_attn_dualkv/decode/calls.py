# SPDX-License-Identifier: BSD-3-Clause
"""A step of decoding and a layer's call as typed structures, and the checks of both.

They are the arguments of the operators `decode_plan` and `decode`, flat and in the order of the
fields. `check_step` and `check_call` look at shapes, types and places; contents.py at values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import checks
from ..calls import Options
from ..checks import MAX_ROWS, explain

PAGE_ROWS = 16  # pages are multiples of it
# Requests of a step: the planning kernel has memory for these. Keys of one: pages are found
# by an exact float product for these.
MOST_REQUESTS, MOST_KEYS = 4096, 1 << 25
MAX_LATENT_DIM = 576  # DeepSeek's: 512 columns that are values, too, and 64 with positions


class Limits(NamedTuple):
    """What is fixed for a plan's life: what its memory has room for, and the model's shape.

    max_keys: of a request. split_keys: of a split, rounded up to tiles; 0 where walks are not divided, -1 as many as
    the library chooses.

    head_dim_v: of the values. Smaller than `head_dim`: keys are latents, of which the first columns are the values.
    """

    max_requests: int
    max_keys: int
    max_queries: int
    num_pages: int
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    split_keys: int

    @property
    def are_latents(self) -> bool:
        return self.head_dim_v != self.head_dim


class Step(NamedTuple):
    """The requests of a step; `SharedPrefixPlan.update` says what the tensors are.

    memory: of the plan, on a GPU; None for the reference. queries: rows of q.
    """

    block_table: Tensor
    seqlens: Tensor
    cu_seqlens_q: Tensor | None
    boundaries: Tensor | None
    parents: Tensor | None
    shared_pages: Tensor | None
    memory: Tensor | None
    queries: int
    limits: Limits


class DecodeCall(NamedTuple):
    """Attention of a layer; `shared_prefix_decode` says what the tensors are. `out` is written."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    sinks: Tensor | None
    out: Tensor
    softmax_scale: float
    window_left: int
    softcap: float
    step: Step

    @property
    def options(self) -> Options:
        """The options of training's kernels, which hold for these."""
        return Options(self.softmax_scale, True, self.window_left, self.softcap, False, 0, False)


def pack_step(step: Step) -> tuple[Any, ...]:
    """The step as the operators take it."""
    return *step[:-1], *step.limits


def unpack_step(arguments: tuple[Any, ...]) -> Step:
    """What the operator `decode_plan` was called with."""
    tensors = len(Step._fields) - 1
    return Step._make((*arguments[:tensors], Limits._make(arguments[tensors:])))


def pack(call: DecodeCall) -> tuple[Any, ...]:
    """The call as the operator takes it."""
    return *call[:-1], *pack_step(call.step)


def unpack(arguments: tuple[Any, ...]) -> DecodeCall:
    """What the operator `decode` was called with."""
    own = len(DecodeCall._fields) - 1
    return DecodeCall._make((*arguments[:own], unpack_step(arguments[own:])))


def tensors_of(call: DecodeCall) -> tuple[Tensor | None, ...]:
    """All tensors of a call, those of its step included."""
    return *call[:5], *call.step[:7]


def have_values(tensors: Iterable[object]) -> bool:
    """True if no compiler traces the tensors: they have values."""
    return not torch.compiler.is_compiling() and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


# --- checks ---


def check_limits(limits: Limits) -> None:
    """TypeError or ValueError for sizes that no plan can have."""
    most = {"max_requests": MOST_REQUESTS, "max_keys": MOST_KEYS}
    for name, value in zip(Limits._fields[:-1], limits):
        checks.integer(name, value, 1, most.get(name, MAX_ROWS))
    checks.integer("split_keys", limits.split_keys, -1, MAX_ROWS)
    if limits.page_size % PAGE_ROWS:
        raise ValueError(explain("page_size", f"a multiple of {PAGE_ROWS}", limits.page_size))
    if limits.num_heads % limits.num_kv_heads:
        raise ValueError(explain("num_kv_heads", f"a number that divides {limits.num_heads}", limits.num_kv_heads))
    if limits.max_queries * limits.num_heads > MAX_ROWS:
        expected = f"at most {MAX_ROWS // limits.num_heads} with {limits.num_heads} heads"
        raise ValueError(explain("max_queries", expected, limits.max_queries))
    if limits.are_latents:
        check_latents(limits)
    else:
        checks.check_head_dim("head_dim", limits.head_dim)


def check_latents(limits: Limits) -> None:
    """An error for sizes of keys whose first columns are the values that no plan can have."""
    checks.check_head_dim("head_dim", limits.head_dim, MAX_LATENT_DIM)
    checks.check_head_dim("head_dim_v", limits.head_dim_v)
    if limits.head_dim_v > limits.head_dim:
        expected = f"at most {limits.head_dim} (head_dim: values are the first columns of the keys)"
        raise ValueError(explain("head_dim_v", expected, limits.head_dim_v))
    if limits.num_kv_heads != 1:
        raise ValueError(explain("num_kv_heads", "1, as head_dim_v is not head_dim (latents)", limits.num_kv_heads))
    if limits.split_keys == 0:
        expected = "'split' for latents (training expands them)"
        raise NotImplementedError(explain("exact", expected, "'trainer'"))


def check_ints(name: str, tensor: Any, shape: tuple[int, ...], like: str, device: torch.device) -> None:
    """Check a tensor of numbers of requests: int32, contiguous, of that shape (as `like`)."""
    checks.check_int32(name, tensor, device, "the plan")
    if tensor.shape != shape:
        raise ValueError(explain(name, f"shape {shape} ({like})", f"shape {tuple(tensor.shape)}"))
    if not tensor.is_contiguous():
        raise ValueError(explain(name, "a contiguous tensor", f"strides {tensor.stride()}"))


def check_table(block_table: Any, device: torch.device, most_columns: int = MAX_ROWS) -> None:
    """Check a block table: (B, columns) int32, columns contiguous, on the device."""
    checks.check_int32("block_table", block_table, device, "the caches")
    shape = tuple(block_table.shape)
    if len(shape) != 2:
        raise ValueError(explain("block_table", "2 dimensions (requests, pages of each)", f"shape {shape}"))
    if not 1 <= shape[1] <= most_columns:
        expected = f"1 to {most_columns} columns (max_pages_per_request: make the plan for the widest table)"
        raise ValueError(explain("block_table", expected, shape[1]))
    if shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(explain("block_table", "contiguous columns (stride 1)", f"stride {block_table.stride(1)}"))


def check_step(step: Step, device: torch.device) -> None:
    """TypeError or ValueError for a step that no implementation may be handed; its table has been checked."""
    limits = step.limits
    requests = step.block_table.shape[0]
    if requests > limits.max_requests:
        raise ValueError(explain("block_table", f"at most {limits.max_requests} requests (max_requests)", requests))
    check_ints("seqlens", step.seqlens, (requests,), "the requests of block_table", device)
    if step.cu_seqlens_q is not None:
        check_ints("cu_seqlens_q", step.cu_seqlens_q, (requests + 1,), "the requests of block_table + 1", device)
    for name in ("boundaries", "parents", "shared_pages"):
        if getattr(step, name) is not None:
            check_ints(name, getattr(step, name), (requests,), "the requests of block_table", device)
    if (step.parents is None) != (step.shared_pages is None):
        got = "shared_pages alone" if step.parents is None else "parents alone"
        raise ValueError(explain("parents", "both this and shared_pages, or neither", got))
    checks.integer("num_queries", step.queries, 0, limits.max_queries)
    if step.cu_seqlens_q is None and step.queries != requests:
        expected = f"{requests} (one query for each request, as cu_seqlens_q is not given)"
        raise ValueError(explain("num_queries", expected, step.queries))


def check_call(call: DecodeCall) -> None:
    """An error for tensors that no implementation may be handed."""
    q, k, v, limits = call.q, call.k_cache, call.v_cache, call.step.limits
    checks.check_device("q", q)
    if q.device != call.step.block_table.device:
        raise ValueError(explain("q", f"device {call.step.block_table.device} (the plan's)", q.device))
    pages = (limits.num_pages, limits.page_size, limits.num_kv_heads)
    for name, cache, dim in (("k_cache", k, limits.head_dim), ("v_cache", v, limits.head_dim_v)):
        check_cache(name, cache)
        checks.check_shape(name, cache, (*pages, dim), q.device, k.dtype)
    if limits.are_latents:
        check_values_in_keys(k, v)
    for name, tensor, dim in (("q", q, limits.head_dim), ("out", call.out, limits.head_dim_v)):
        checks.check_shape(name, tensor, (call.step.queries, limits.num_heads, dim), q.device, k.dtype)
        if tensor.stride(2) != 1 and tensor.numel() != 0:
            raise ValueError(explain(name, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(2)}"))
    checks.check_sinks(call.sinks, q)


def check_values_in_keys(k_cache: Tensor, v_cache: Tensor) -> None:
    """ValueError for values that are not the first columns of the keys, of which kernels read the keys only."""
    begins_there = not have_values((k_cache, v_cache)) or v_cache.data_ptr() == k_cache.data_ptr()
    if not begins_there or v_cache.stride() != k_cache.stride():
        expected = f"k_cache[..., :{v_cache.shape[3]}] (values are the first columns of latents)"
        raise ValueError(explain("v_cache", expected, f"another tensor, strides {v_cache.stride()}"))


def check_cache(name: str, cache: Tensor) -> None:
    """Check the type, rank and strides of a cache."""
    if cache.is_floating_point() and cache.dtype.itemsize == 1:
        raise NotImplementedError(explain(name, "16-bit numbers (FP8 caches are not implemented)", cache.dtype))
    allowed = checks.CUDA_DTYPES if cache.is_cuda else checks.CPU_DTYPES
    if cache.dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise TypeError(explain(name, f"dtype {expected} on {cache.device.type}", cache.dtype))
    if cache.dim() != 4:
        expected = "4 dimensions (pages, page_size, heads, head_dim)"
        raise ValueError(explain(name, expected, f"shape {tuple(cache.shape)}"))
    if cache.stride(3) != 1 and cache.numel() != 0:
        raise ValueError(explain(name, "a contiguous last dimension (stride 1)", f"stride {cache.stride(3)}"))
