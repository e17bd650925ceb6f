"""The operators on packed tensors: packed_forward and packed_backward, in the namespace `flash_attn_dualkv`.

They are `forward` and `backward` of `ops.py` for prompts and responses that lie in one tensor each of queries, keys and
values: the contexts are its first rows. Autograd thus sees one node, and dk and dv are written where they belong, not
put together from the gradients of two slices. On CUDA tensors either the compiled module computes or, if the caller
asks for it, the reference, which also knows windows and softcaps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from . import ops, reference
from . import segments as tables

PackedGradients = tuple[Tensor, Tensor, Tensor]

_OPTIONS = "SymInt context_rows, float softmax_scale, int? window, float? softcap, bool reference, bool deterministic"
# No argument has a default: the dispatcher would leave it out of what it hands to the implementations.
ops.library.define(
    f"packed_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor segments, Tensor groups, {_OPTIONS}) "
    "-> (Tensor out, Tensor lse)",
    tags=ops.TAGS,
)
# The sinks are in the LSE, by which the kernels compute P = exp(S - LSE), and their gradient needs no kernel.
ops.library.define(
    "packed_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor segments, Tensor groups, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=ops.TAGS,
)

packed_forward = torch.ops.flash_attn_dualkv.packed_forward.default
packed_backward = torch.ops.flash_attn_dualkv.packed_backward.default


class Options(NamedTuple):
    """The arguments of both operators that are no tensors."""

    context_rows: int
    softmax_scale: float
    window: int | None
    softcap: float | None
    reference: bool
    deterministic: bool


def _split(k: Tensor, v: Tensor, context_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k_context, v_context, k_decoded, v_decoded: views."""
    return k[:context_rows], v[:context_rows], k[context_rows:], v[context_rows:]


def _check_tables(q: Tensor, segments: Tensor, groups: Tensor, context_rows: int) -> None:
    tables.check_tables(segments, groups, q.shape[0], context_rows, q.shape[0] - context_rows)


# The reference, on any device


def _forward_reference(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor, groups: Tensor, *rest: Any
) -> ops.Results:
    options = Options(*rest)
    _check_tables(q, segments, groups, options.context_rows)
    variant = reference.Variant(options.window, options.softcap, sinks)
    keys = _split(k, v, options.context_rows)
    return reference.forward(q, *keys, segments, groups, options.softmax_scale, True, variant)


def _backward_reference(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    groups: Tensor,
    *rest: Any,
) -> PackedGradients:
    options = Options(*rest)
    dk, dv = (torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in (k, v))
    gradients = reference.KeyGradients(*_split(dk, dv, options.context_rows))
    variant = reference.Variant(options.window, options.softcap)
    keys = _split(k, v, options.context_rows)
    tables = (segments, groups, options.softmax_scale)
    dq, *_ = reference.backward(dout, dlse, q, *keys, out, lse, *tables, True, variant, gradients)
    return dq, dk, dv


# CUDA: the compiled module, or the reference for those who ask for it


def _refuse_variants(options: Options) -> None:
    for name, value in (("window", options.window), ("softcap", options.softcap)):
        if value is not None:
            raise NotImplementedError(f"{name}: expected None for the CUDA kernels, got {value}")


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor, groups: Tensor, *rest: Any
) -> ops.Results:
    options = Options(*rest)
    if options.reference:
        return _forward_reference(q, k, v, sinks, segments, groups, *rest)
    compiled = ops.compiled_module()
    _refuse_variants(options)
    if ops.checks_values():
        _check_tables(q, segments, groups, options.context_rows)
    scalars = (options.context_rows, options.softmax_scale)
    return cast(ops.Results, compiled.packed_forward(q, k, v, sinks, segments, groups, *scalars))


def _backward_cuda(*arguments: Any) -> PackedGradients:
    options = Options(*arguments[9:])
    if options.reference:
        return _backward_reference(*arguments)
    compiled = ops.compiled_module()
    _refuse_variants(options)
    deterministic = ops.is_deterministic(options.deterministic)
    gradients = compiled.packed_backward(*arguments[:9], options.context_rows, options.softmax_scale, deterministic)
    return cast(PackedGradients, gradients)


_FORWARD = {"cpu": _forward_reference, "cuda": _forward_cuda}
_BACKWARD = {"cpu": _backward_reference, "cuda": _backward_cuda}
for _device in _FORWARD:
    ops.library.impl("packed_forward", _FORWARD[_device], _device.upper())
    ops.library.impl("packed_backward", _BACKWARD[_device], _device.upper())


# Shapes: what compilers need to know of the operators


@torch.library.register_fake("flash_attn_dualkv::packed_forward", lib=ops.library)
def _forward_fake(q: Tensor, *_: Any) -> ops.Results:
    return ops.forward_fake(q)


@torch.library.register_fake("flash_attn_dualkv::packed_backward", lib=ops.library)
def _backward_fake(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in arguments[:3])


# Autograd: above the device's implementations


def _forward_below(*arguments: Any) -> ops.Results:
    q = arguments[0]
    if not ops.is_watched(*arguments[:4]) and q.device.type in _FORWARD:
        return _FORWARD[q.device.type](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return cast(ops.Results, packed_forward(*arguments))


def _backward_below(*arguments: Any) -> PackedGradients:
    q = arguments[2]
    if not ops.is_watched(arguments[0], *arguments[2:7]) and q.device.type in _BACKWARD:
        return _BACKWARD[q.device.type](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return cast(PackedGradients, packed_backward(*arguments))


class _PackedAttention(torch.autograd.Function):
    """Joins `packed_forward` and `packed_backward`: one node for the prompts and responses of all groups."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> ops.Results:
        out, lse = _forward_below(*arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments[:6], out, lse)
        ctx.options = arguments[6:]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, segments, groups, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        arguments = (dout, dlse, q, k, v, out, lse, segments, groups, *ctx.options)
        dq, dk, dv = _backward_autograd(*arguments)
        needs = ctx.needs_input_grad
        dsinks = _sink_gradient(dout, dlse, out, lse, sinks) if needs[3] else None
        kept = (one if need else None for one, need in zip((dq, dk, dv), needs))
        return (*kept, dsinks, *(None for _ in needs[4:]))


def _sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,): of each row, its sink's probability times 0 - delta, since a sink's value is 0."""
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(0, 1)
    if dlse is not None:
        delta = delta - dlse
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # A row of no segment has the LSE -inf: whatever its upstream gradient, it has no sink.
    rows = torch.where(lse == -math.inf, 0.0, probability * delta)
    return rows.sum(1).neg().to(sinks.dtype)


class _PackedGradient(torch.autograd.Function):
    """`packed_backward` under create_graph=True: its results have a history, which cannot be followed."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> PackedGradients:
        return _backward_below(*arguments)

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Any) -> Any:
        raise RuntimeError(ops.DIFFERENTIABLE_ONCE)


def _forward_autograd(*arguments: Any) -> ops.Results:
    ops.refuse_tangents(arguments)
    if ops.requires_grad(arguments):
        return cast(ops.Results, _PackedAttention.apply(*arguments))
    return _forward_below(*arguments)


def _backward_autograd(*arguments: Any) -> PackedGradients:
    if ops.requires_grad(arguments):
        return cast(PackedGradients, _PackedGradient.apply(*arguments))
    return _backward_below(*arguments)


ops.library.impl("packed_forward", _forward_autograd, "Autograd")
ops.library.impl("packed_backward", _backward_autograd, "Autograd")


def attend(*arguments: Any) -> ops.Results:
    """`packed_forward`, past the dispatcher where nobody watches it."""
    q, k, v, sinks, segments, groups = arguments[:6]
    if ops.is_watched(q, k, v, sinks):
        return cast(ops.Results, packed_forward(*arguments))
    options = Options(*arguments[6:])
    is_plain = sinks is options.window is options.softcap is None and not options.reference
    if not (is_plain and q.is_cuda):
        return _forward_autograd(*arguments)
    ops.refuse_tangents((q, k, v))
    # The same node as _PackedAttention, but compiled: the engine then runs no Python for it.
    compiled = ops.compiled_module()
    if ops.checks_values():
        _check_tables(q, segments, groups, options.context_rows)
    # The node asks the environment again, in the backward; here a misspelt switch is an error.
    deterministic = ops.is_deterministic(options.deterministic)
    scalars = (options.context_rows, options.softmax_scale, deterministic)
    return cast(ops.Results, compiled.packed_attention(q, k, v, segments, groups, *scalars))
