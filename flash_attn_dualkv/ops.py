# SPDX-License-Identifier: BSD-3-Clause
"""The operators that PyTorch sees: node tables, and attention with its gradient.

Every public function is `sequence_nodes`, `tree_nodes` or a ready table, and then one `forward`;
autograd records one node. CPU tensors go to `nodes.py` and `reference.py`, CUDA tensors to
`kernels.py`, or to the reference where it is asked for. The autograd formulas are registered
with the dispatcher, so that compilers trace through them. `torch.library`'s low-level interface
keeps calls cheap: a `custom_op` costs the host more than twice as much.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad, profiler
from torch.autograd.function import FunctionCtx

from . import checks, kernels, reference
from . import nodes as tables
from .calls import AnyCall, BackwardCall, ForwardCall, Options, check_call, inputs_of, pack, schema, unpack

Results = tuple[Tensor, Tensor]
Result = TypeVar("Result")


library = torch.library.Library("flash_attn_dualkv", "DEF")
# Compilers must not hand the kernels a tensor whose last dimension they have made strided.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))

library.define(
    "sequence_nodes(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? cu_seqlens_context, Tensor? cu_seqs_per_context, "
    "SymInt? total_context) -> Tensor nodes",
    tags=TAGS,
)
library.define("tree_nodes(Tensor cu_seqlens, Tensor parents, SymInt total) -> Tensor nodes", tags=TAGS)
library.define(f"forward({schema(ForwardCall)}) -> (Tensor out, Tensor lse)", tags=TAGS)
# dq, dk, dv and, where there are these tensors, dk_decoded, dv_decoded, dsinks.
library.define(f"backward({schema(BackwardCall)}) -> Tensor[]", tags=TAGS)

sequence_nodes = torch.ops.flash_attn_dualkv.sequence_nodes.default
tree_nodes = torch.ops.flash_attn_dualkv.tree_nodes.default
forward = torch.ops.flash_attn_dualkv.forward.default
backward = torch.ops.flash_attn_dualkv.backward.default


# CUDA: the kernels, or the reference for those who ask for it


def checks_values() -> bool:
    """True if offsets on the GPU are to be checked; impossible while a CUDA graph is captured."""
    return checks.environment_flag("DUALKV_DEBUG") and not torch.cuda.is_current_stream_capturing()


@functools.cache
def forces_reference() -> bool:
    """True if the environment asks for the reference everywhere, for debugging: read once a process, with a warning."""
    forces = checks.environment_flag("DUALKV_FORCE_REFERENCE")
    if forces:
        warnings.warn("DUALKV_FORCE_REFERENCE is set: attention runs on the reference in PyTorch, slowly", stacklevel=2)
    return forces


def _sequence_nodes_cuda(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int | None,
) -> Tensor:
    offsets = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_context, cu_seqs_per_context)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q.device)
    length = cu_seqlens_q.shape[0]
    checks.check_offsets("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.device, length, "cu_seqlens_q")
    checks.check_grouping(cu_seqlens_context, cu_seqs_per_context, length - 1, cu_seqlens_q.device)
    if cu_seqlens_context is not None and total_context is None:
        raise ValueError(checks.explain("total_context", "an int (cu_seqlens_context is given)", None))
    if forces_reference():
        return tables.sequence_nodes(*offsets, total_context)
    if checks_values():
        context, owned = (None if table is None else table.cpu() for table in (cu_seqlens_context, cu_seqs_per_context))
        tables.sequence_nodes(cu_seqlens_q.cpu(), cu_seqlens_k.cpu(), context, owned, total_context)
    return kernels.sequence_nodes(offsets, total_context)


def _tree_nodes_cuda(cu_seqlens: Tensor, parents: Tensor, total: int) -> Tensor:
    checks.check_offsets("cu_seqlens", cu_seqlens, cu_seqlens.device)
    length = cu_seqlens.shape[0] - 1
    checks.check_offsets("parents", parents, cu_seqlens.device, length, "the nodes of cu_seqlens", least=0)
    if forces_reference():
        return tables.tree_nodes(cu_seqlens, parents, total)
    if checks_values():
        tables.tree_nodes(cu_seqlens.cpu(), parents.cpu(), total)
    return kernels.tree_nodes(cu_seqlens, parents)


def _forward_cuda(call: ForwardCall) -> Results:
    if call.options.reference or forces_reference():
        return reference.forward(call)
    if checks_values():
        decoded = None if call.k_decoded is None else call.k_decoded.shape[0]
        tables.checked_nodes(call.nodes, call.q.shape[0], call.k.shape[0], decoded)
    return kernels.forward(call)


def _backward_cuda(call: BackwardCall) -> list[Tensor]:
    if call.options.reference or forces_reference():
        return reference.backward(call)
    return kernels.backward(call)


_FORWARD: dict[str, Callable[[ForwardCall], Results]] = {"cpu": reference.forward, "cuda": _forward_cuda}
_BACKWARD: dict[str, Callable[[BackwardCall], list[Tensor]]] = {"cpu": reference.backward, "cuda": _backward_cuda}


def unpacking(kind: type[AnyCall], implementation: Callable[[AnyCall], Result]) -> Callable[..., Result]:
    """The implementation as torch.library calls it."""
    return lambda *arguments: implementation(unpack(kind, arguments))


def checking(implementation: Callable[[AnyCall], Result]) -> Callable[[AnyCall], Result]:
    """The implementation for callers of the operators; the public functions have checked their arguments.

    What a tracer hands over has no values to be wrong yet.
    """

    def call_checked(call: AnyCall) -> Result:
        if not torch.compiler.is_compiling() and not any(isinstance(argument, FakeTensor) for argument in call):
            check_call(call)
        return implementation(call)

    return call_checked


for _device in _FORWARD:
    library.impl("forward", unpacking(ForwardCall, checking(_FORWARD[_device])), _device.upper())
    library.impl("backward", unpacking(BackwardCall, checking(_BACKWARD[_device])), _device.upper())
library.impl("sequence_nodes", tables.sequence_nodes, "CPU")
library.impl("sequence_nodes", _sequence_nodes_cuda, "CUDA")
library.impl("tree_nodes", tables.tree_nodes, "CPU")
library.impl("tree_nodes", _tree_nodes_cuda, "CUDA")


# Shapes: what compilers need to know of the operators


@torch.library.register_fake("flash_attn_dualkv::sequence_nodes", lib=library)
def _sequence_nodes_fake(
    cu_seqlens_q: Tensor,
    _k: Tensor,
    cu_seqlens_context: Tensor | None,
    _owned: Tensor | None,
    total_context: int | None,
) -> Tensor:
    contexts = 0 if total_context is None else 1
    if cu_seqlens_context is not None:
        contexts = cu_seqlens_context.shape[0] - 1
    return cu_seqlens_q.new_empty((cu_seqlens_q.shape[0] - 1 + contexts, tables.COLUMNS))


@torch.library.register_fake("flash_attn_dualkv::tree_nodes", lib=library)
def _tree_nodes_fake(cu_seqlens: Tensor, parents: Tensor, total: int) -> Tensor:
    return parents.new_empty((parents.shape[0], tables.COLUMNS))


@torch.library.register_fake("flash_attn_dualkv::forward", lib=library)
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Results:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@torch.library.register_fake("flash_attn_dualkv::backward", lib=library)
def _backward_fake(*arguments: Any) -> list[Tensor]:
    call = unpack(BackwardCall, arguments)
    return [tensor.new_empty(tensor.shape) for tensor in (*inputs_of(call), call.sinks) if tensor is not None]


# Autograd: above the device's implementations


# Loops, not any() over a generator, which takes the host a microsecond more.


def requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    """True if autograd must record a call; below its formula it must not look again."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_watched(tensors: Sequence[Tensor | None]) -> bool:
    """True if a subclass, a compiler, a mode or the profiler may want to see an operator.

    If not, one implementation may call the next: each way through the dispatcher costs the host
    10 us.
    """
    for tensor in tensors:
        if type(tensor) is not Tensor and tensor is not None:
            return True
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
    )


def unwatched(
    implementations: Mapping[str, Callable[[AnyCall], Result]], call: AnyCall
) -> Callable[[AnyCall], Result] | None:
    """The device's implementation, unless the call is watched."""
    if is_watched(call[:-1]):
        return None
    # The type of a device takes five times as long as is_cuda.
    return implementations.get("cuda" if call.q.is_cuda else call.q.device.type)


def refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """NotImplementedError for forward-mode derivatives, which would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError("flash_attn_dualkv has no forward-mode derivatives (torch.func.jvp, forward_ad)")


def _below(operator: Any, implementations: Mapping[str, Callable[[AnyCall], Result]], call: AnyCall) -> Result:
    """The operator below autograd, past the dispatcher unless the call is watched."""
    implementation = unwatched(implementations, call)
    if implementation is not None:
        return implementation(call)
    with torch._C._AutoDispatchBelowAutograd():
        return cast(Result, operator(*pack(call)))


class _Attention(torch.autograd.Function):
    """Joins `forward` and `backward`. An unused LSE costs nothing: its gradient stays None."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[ForwardCall], Results], *arguments: Any) -> Results:
        call = ForwardCall._make(arguments)
        out, lse = compute(call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs_of(call), call.sinks, call.nodes, out, lse)
        ctx.options = call.options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, k_decoded, v_decoded, sinks, nodes, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = sinks if ctx.needs_input_grad[6] else None
        call = BackwardCall(dout, dlse, q, k, v, k_decoded, v_decoded, wanted, out, lse, nodes, ctx.options)
        gradients = iter(_backward_autograd(call))
        given = (*inputs_of(call), wanted)
        return None, *(None if tensor is None else next(gradients) for tensor in given), None, None


class DifferentiableOnce(torch.autograd.Function):
    """Gradients under create_graph=True: they have a history, which cannot be followed."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Any) -> Any:
        raise RuntimeError("flash_attn_dualkv is differentiable once: its gradients cannot be differentiated again")


def differentiable_once(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """A function's gradients, which with create_graph=True have a history that raises where it is followed."""
    if not requires_grad(inputs):
        return [*gradients]
    anchor = next(tensor for tensor in inputs if tensor is not None and tensor.requires_grad)
    return [*DifferentiableOnce.apply(anchor, *gradients)]


class GuardedInputs(torch.autograd.Function):
    """Inputs of a function whose gradients come without a history, as they are: second derivatives raise."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(differentiable_once(ctx.saved_tensors, gradients))


def _forward_autograd(call: ForwardCall) -> Results:
    refuse_tangents(call)
    compute = partial(_below, forward, _FORWARD)
    if requires_grad(call[:-1]):
        return cast(Results, _Attention.apply(compute, *call))
    return compute(call)


def _backward_autograd(call: BackwardCall) -> list[Tensor]:
    return cast(list[Tensor], differentiable_once(call[:-1], _below(backward, _BACKWARD, call)))


library.impl("forward", unpacking(ForwardCall, checking(_forward_autograd)), "Autograd")
library.impl("backward", unpacking(BackwardCall, checking(_backward_autograd)), "Autograd")


def _record(compute: Callable[[ForwardCall], Results], call: ForwardCall) -> Results:
    """Fast path of `_Attention.apply`: skips the search for function transforms, which takes 2 us."""
    for tensor in call[:-1]:
        if tensor is not None and is_functorch_wrapped_tensor(tensor):  # left over from a transform
            return cast(Results, _Attention.apply(compute, *call))
    return super(torch.autograd.Function, _Attention).apply(compute, *call)


def attend(
    q: Tensor, k: Tensor, v: Tensor, nodes: Tensor, options: Options, *,
    k_decoded: Tensor | None = None, v_decoded: Tensor | None = None, sinks: Tensor | None = None,
) -> Results:  # fmt: skip
    """`forward`, past the dispatcher unless the call is watched."""
    call = ForwardCall(q, k, v, k_decoded, v_decoded, sinks, nodes, options)
    compute = unwatched(_FORWARD, call)
    if compute is None:
        return cast(Results, forward(*pack(call)))
    refuse_tangents(call)
    return _record(compute, call) if requires_grad(call[:-1]) else compute(call)
