# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the kernel library for decoding; arguments have been checked by the operators."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from .. import kernels
from ..checks import HEAD_DIM_MULTIPLE, explain
from .calls import DecodeCall, Limits, Step

DECODE_HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = (576, 512)  # of latents, and of the values in them


def decode_plan_bytes(limits: Limits, device: torch.device) -> int:
    """Bytes of a plan's memory, which starts as zeros; NotImplementedError for what has no kernels."""
    dims = limits.head_dim, limits.head_dim_v
    if dims not in (*((dim, dim) for dim in DECODE_HEAD_DIMS), LATENT_DIMS):
        expected = f"one of {DECODE_HEAD_DIMS}, or 576 with head_dim_v 512"
        raise NotImplementedError(explain("head_dim", expected, f"{dims[0]} with {dims[1]}"))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        size: int = kernels.compiled_module().decode_plan_bytes(kernels.current_device(), (*(0,) * 10, *limits, 0))
    return size


def _library_plan(step: Step) -> tuple[int, ...]:
    """A step as the library takes it: the fields of DualkvDecodePlan (csrc/api.h) in their order."""
    table, pointer = step.block_table, kernels.pointer
    return (
        table.data_ptr(), table.stride(0), *table.shape, step.queries, step.seqlens.data_ptr(),
        pointer(step.cu_seqlens_q), pointer(step.boundaries), pointer(step.parents), pointer(step.shared_pages),
        *step.limits, pointer(step.memory),
    )  # fmt: skip


def decode_plan(step: Step) -> None:
    """Makes the plan of a step in its memory."""
    device = step.block_table.get_device()
    if device != kernels.current_device():
        with torch.cuda.device(device):
            return decode_plan(step)
    kernels.prepare(device)
    kernels.compiled_module().decode_plan(device, kernels.current_stream(device), _library_plan(step))
    return None


def _check_in_place(name: str, tensor: Tensor) -> None:
    """ValueError for a tensor that kernels could only use as a copy."""
    strides = tensor.stride()[:-1]
    is_good = all(
        size <= 1 or (stride > 0 and stride % HEAD_DIM_MULTIPLE == 0) for size, stride in zip(tensor.shape, strides)
    )
    if not is_good or tensor.data_ptr() % 16:
        expected = f"a first byte on 16 bytes, and strides that are positive multiples of {HEAD_DIM_MULTIPLE}"
        raise ValueError(explain(name, expected, f"{tensor.data_ptr() % 16} bytes off, strides {tensor.stride()}"))


def decode(call: DecodeCall) -> Tensor:
    """Writes `out` of a layer and returns its LSE, by the plan that the step's memory holds."""
    q, out, step = call.q, call.out, call.step
    device = q.get_device()
    if device != kernels.current_device():
        with torch.cuda.device(device):
            return decode(call)
    call.options.check_kernels()
    for name, tensor in (("k_cache", call.k_cache), ("v_cache", call.v_cache), ("out", out)):
        _check_in_place(name, tensor)
    lse = kernels.uninitialised(q, (q.shape[1], q.shape[0]), torch.float32)
    if q.shape[0] == 0:
        return lse
    sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
    kernels.compiled_module().decode(
        device, kernels.current_stream(device), _library_plan(step), kernels.copied, q, out, call.k_cache, call.v_cache,
        lse, sinks, q.dtype == torch.float16, call.options,
    )  # fmt: skip
    return lse
