# SPDX-License-Identifier: BSD-3-Clause
"""The operators of decoding that PyTorch sees: the plan of a step, and attention of a layer.

Both write into tensors that the caller made: the plan's memory and `out`. CPU tensors go to
`reference.py`, CUDA tensors to the kernels, or to the reference where the environment asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..checks import explain
from . import calls, library, reference
from .calls import have_values
from .contents import check_values

_STEP = (
    "Tensor block_table, Tensor seqlens, Tensor? cu_seqlens_q, Tensor? boundaries, Tensor? parents, "
    "Tensor? shared_pages, Tensor(a!)? memory, SymInt queries, "
    "SymInt max_requests, SymInt max_keys, SymInt max_queries, SymInt num_pages, SymInt page_size, SymInt num_heads, "
    "SymInt num_kv_heads, SymInt head_dim, SymInt head_dim_v, SymInt split_keys"
)
ops.library.define(f"decode_plan({_STEP}) -> ()", tags=ops.TAGS)
ops.library.define(
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, Tensor(b!) out, float softmax_scale, "
    f"SymInt window_left, float softcap, {_STEP}) -> Tensor lse",
    tags=ops.TAGS,
)
_decode_plan = torch.ops.flash_attn_dualkv.decode_plan.default
_decode = torch.ops.flash_attn_dualkv.decode.default


def _plan_cuda(step: calls.Step) -> None:
    if ops.checks_values():
        check_values(step)
    if not ops.forces_reference():
        library.decode_plan(step)


def _decode_cuda(call: calls.DecodeCall) -> Tensor:
    return reference.decode(call) if ops.forces_reference() else library.decode(call)


_PLAN: dict[str, Callable[[calls.Step], None]] = {"cpu": check_values, "cuda": _plan_cuda}
_DECODE: dict[str, Callable[[calls.DecodeCall], Tensor]] = {"cpu": reference.decode, "cuda": _decode_cuda}


# Callers of the operators are checked here; the public functions have checked their arguments.


def _check_step(step: calls.Step) -> None:
    calls.check_limits(step.limits)
    calls.check_table(step.block_table, step.block_table.device, calls.MOST_KEYS // step.limits.page_size)
    calls.check_step(step, step.block_table.device)
    if not step.block_table.is_cuda or ops.forces_reference():
        return
    least, memory = library.decode_plan_bytes(step.limits, step.block_table.device), step.memory
    if memory is None or memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.nbytes < least:
        expected = f"at least {least} contiguous bytes (torch.uint8), zeros at first"
        raise ValueError(explain("memory", expected, None if memory is None else tuple(memory.shape)))


def _planning(implementation: Callable[[calls.Step], None]) -> Callable[..., None]:
    def plan(*arguments: Any) -> None:
        step = calls.unpack_step(arguments)
        if have_values(arguments):
            _check_step(step)
        implementation(step)

    return plan


def _decoding(implementation: Callable[[calls.DecodeCall], Tensor]) -> Callable[..., Tensor]:
    def decode(*arguments: Any) -> Tensor:
        call = calls.unpack(arguments)
        if have_values(arguments):
            _check_step(call.step)
            calls.check_call(call)
        return implementation(call)

    return decode


def _without_gradients(*arguments: Any) -> Tensor:
    call = calls.unpack(arguments)
    refuse_gradients(calls.tensors_of(call))
    with torch._C._AutoDispatchBelowAutograd():
        lse: Tensor = _decode(*arguments)
    return lse


def refuse_gradients(tensors: tuple[Tensor | None, ...]) -> None:
    """RuntimeError for inputs that autograd would have to follow; there is no backward."""
    ops.refuse_tangents(tensors)
    if ops.requires_grad(tensors):
        raise RuntimeError(
            "decoding has no backward, and an input requires a gradient: call it under torch.no_grad(), or detach its "
            "inputs. flash_attn_dualkv_varlen_func and shared_prompt_attention are differentiable"
        )


for _device in _PLAN:
    ops.library.impl("decode_plan", _planning(_PLAN[_device]), _device.upper())
    ops.library.impl("decode", _decoding(_DECODE[_device]), _device.upper())
ops.library.impl("decode", _without_gradients, "Autograd")


@torch.library.register_fake("flash_attn_dualkv::decode_plan", lib=ops.library)
def _plan_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("flash_attn_dualkv::decode", lib=ops.library)
def _decode_fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


# What the public functions call: the operators, past the dispatcher where nobody watches them.


def make_plan(step: calls.Step) -> None:
    """Writes the plan of a step into its memory."""
    if ops.is_watched(step[:7]):
        _decode_plan(*calls.pack_step(step))
    else:
        _PLAN[step.block_table.device.type](step)


def decode(call: calls.DecodeCall) -> Tensor:
    """Writes `out` and returns the LSE, (H, total_q)."""
    tensors = calls.tensors_of(call)
    refuse_gradients(tensors)
    if ops.is_watched(tensors):
        return _decode(*calls.pack(call))
    return _DECODE[call.q.device.type](call)
