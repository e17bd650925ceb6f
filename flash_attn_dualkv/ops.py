"""The operators that PyTorch sees: segment_tables, forward and backward, in the namespace `flash_attn_dualkv`.

CPU tensors go to `segments.py` and `reference.py`, CUDA tensors to the compiled module. `forward` is differentiable:
its autograd formula is registered with the dispatcher, so that compilers trace through it and eager code pays for one
call.
`torch.library`'s low-level interface keeps that call cheap: a `custom_op` costs the host more than twice as much.
"""

from __future__ import annotations

import importlib
import platform
from types import ModuleType
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from . import reference
from . import segments as tables
from ._version import __version__
from .arguments import environment_flag

Tables = tuple[Tensor, Tensor]
Results = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

DIFFERENTIABLE_ONCE = "flash_attn_dualkv is differentiable once: its gradients cannot be differentiated again"


def _load_compiled() -> tuple[ModuleType | None, str | None]:
    """The compiled module, or None and why it is not there."""
    try:
        return importlib.import_module("flash_attn_dualkv._C"), None
    except ModuleNotFoundError as error:
        if error.name == "flash_attn_dualkv._C":
            return None, None
        return None, str(error)
    except ImportError as error:
        return None, str(error)


_C, _load_error = _load_compiled()

library = torch.library.Library("flash_attn_dualkv", "DEF")
# Compilers must not hand the kernels a tensor whose last dimension they have made strided.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))

_INPUTS = (
    "Tensor q, Tensor k_context, Tensor v_context, Tensor k_decoded, Tensor v_decoded",
    "Tensor segments, Tensor groups, float softmax_scale, bool causal",
)
library.define(
    "segment_tables(Tensor cu_seqlens_q, Tensor cu_seqlens_k_decoded, Tensor? cu_seqlens_context, "
    "Tensor? cu_seqs_per_context, SymInt total_context) -> (Tensor segments, Tensor groups)",
    tags=TAGS,
)
# `deterministic` is for the backward of this call: autograd has no other way to it.
library.define(
    f"forward({_INPUTS[0]}, {_INPUTS[1]}, bool deterministic=False) -> (Tensor out, Tensor lse)",
    tags=TAGS,
)
library.define(
    f"backward(Tensor dout, Tensor? dlse, {_INPUTS[0]}, Tensor out, Tensor lse, {_INPUTS[1]}, bool deterministic) "
    "-> (Tensor dq, Tensor dk_context, Tensor dv_context, Tensor dk_decoded, Tensor dv_decoded)",
    tags=TAGS,
)

segment_tables = torch.ops.flash_attn_dualkv.segment_tables.default
forward = torch.ops.flash_attn_dualkv.forward.default
backward = torch.ops.flash_attn_dualkv.backward.default


def _check_tables(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    segments: Tensor,
    groups: Tensor,
    *_: Any,
) -> None:
    tables.check_tables(segments, groups, q.shape[0], k_context.shape[0], k_decoded.shape[0])


# CPU: the reference


def _forward_cpu(*arguments: Any) -> Results:
    inputs = arguments[:9]  # not `deterministic`: the reference always sums in one order
    _check_tables(*inputs)
    return reference.forward(*inputs)


def _backward_cpu(*arguments: Any) -> Gradients:
    return reference.backward(*arguments[:13])


library.impl("segment_tables", tables.build_segment_tables, "CPU")
library.impl("forward", _forward_cpu, "CPU")
library.impl("backward", _backward_cpu, "CPU")


# CUDA: the compiled module


def compiled_module() -> ModuleType:
    """The compiled module; RuntimeError, with the fix, where there is none."""
    if _C is not None:
        return _C
    if _load_error is not None:
        problem = f"its compiled module does not load into PyTorch {torch.__version__} ({_load_error})"
    else:
        problem = "it was installed without its compiled module"
    raise RuntimeError(
        f"flash_attn_dualkv cannot run on CUDA tensors: {problem}. To fix it, install the CUDA compiler nvcc for CUDA "
        f"{torch.version.cuda}, the version of this PyTorch (a CUDA toolkit, with CUDA_HOME set to it, or pip install "
        f"'cuda-toolkit[nvcc,nvvm,crt,cccl]=={torch.version.cuda}.*'), then reinstall from the source directory with "
        "'pip install --no-build-isolation --no-deps "
        "--force-reinstall .'. CPU tensors work without it."
    )


def checks_values() -> bool:
    """Whether to read back offsets from the GPU and check them; impossible while a CUDA graph is captured."""
    return environment_flag("DUALKV_DEBUG") and not torch.cuda.is_current_stream_capturing()


def is_deterministic(deterministic: bool) -> bool:
    """Whether gradients must be bit-identical from run to run: by argument, PyTorch's setting or the environment."""
    return (
        deterministic
        or torch.are_deterministic_algorithms_enabled()
        or environment_flag("FLASH_ATTENTION_DETERMINISTIC")
    )


def _segment_tables_cuda(
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int,
) -> Tables:
    compiled = compiled_module()
    offsets = (cu_seqlens_q, cu_seqlens_k_decoded, cu_seqlens_context, cu_seqs_per_context)
    if checks_values():
        context, owned = (None if one is None else one.cpu() for one in offsets[2:])
        tables.build_segment_tables(cu_seqlens_q.cpu(), cu_seqlens_k_decoded.cpu(), context, owned, total_context)
    return cast(Tables, compiled.segment_tables(*offsets, total_context))


def _forward_cuda(*arguments: Any) -> Results:
    compiled = compiled_module()
    inputs = arguments[:9]
    if checks_values():
        _check_tables(*inputs)
    return cast(Results, compiled.forward(*inputs))


def _backward_cuda(*arguments: Any) -> Gradients:
    return cast(Gradients, compiled_module().backward(*arguments[:13], is_deterministic(arguments[13])))


library.impl("segment_tables", _segment_tables_cuda, "CUDA")
library.impl("forward", _forward_cuda, "CUDA")
library.impl("backward", _backward_cuda, "CUDA")


# Shapes: what compilers need to know of the operators


@torch.library.register_fake("flash_attn_dualkv::segment_tables", lib=library)
def _segment_tables_fake(
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int,
) -> Tables:
    groups = 1 if cu_seqlens_context is None else cu_seqlens_context.shape[0] - 1
    segments = cu_seqlens_q.new_empty((cu_seqlens_q.shape[0] - 1, tables.SEGMENT_COLUMNS))
    return segments, cu_seqlens_q.new_empty((groups, tables.GROUP_COLUMNS))


@torch.library.register_fake("flash_attn_dualkv::forward", lib=library)
def forward_fake(q: Tensor, *_: Any) -> Results:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@torch.library.register_fake("flash_attn_dualkv::backward", lib=library)
def _backward_fake(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(one.new_empty(one.shape) for one in arguments[:5])


# Autograd: above the device's implementations


class _Attention(torch.autograd.Function):
    """Joins `forward` and `backward`. An unused LSE costs nothing: its gradient stays None."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Results:
        *tensors, softmax_scale, causal, deterministic = arguments
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = forward(*arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = (softmax_scale, causal, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, segments, groups, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = backward(dout, dlse, *inputs, out, lse, segments, groups, *ctx.options)
        needed = zip(gradients, ctx.needs_input_grad[:5], strict=True)
        return (*(gradient if need else None for gradient, need in needed), None, None, None, None, None)


class _Gradient(torch.autograd.Function):
    """`backward` under create_graph=True: its results have a history, which cannot be followed."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return cast(Gradients, backward(*arguments))

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Any) -> Any:
        raise RuntimeError(DIFFERENTIABLE_ONCE)


def requires_grad(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd must record the call: below its own formula it must not look at the call again."""
    return torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether somebody may want to see a call of these as an operator: a subclass, a compiler, a mode, the profiler.

    Where nobody does, one implementation may call the next: each way through the dispatcher costs the host 10 us.
    """
    for one in tensors:  # any() over a generator takes the host a microsecond more
        if type(one) is not Tensor and one is not None:
            return True
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.profiler._is_profiler_enabled
    )


def refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """NotImplementedError if a forward-mode derivative is asked for, which would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for one in arguments:
        if isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None:
            raise NotImplementedError("flash_attn_dualkv has no forward-mode derivatives (torch.func.jvp, forward_ad)")


def _forward_autograd(*arguments: Any) -> Results:
    refuse_tangents(arguments)
    # The dispatcher leaves out a last argument that has its default value.
    if len(arguments) == 9:
        arguments = (*arguments, False)
    if requires_grad(arguments):
        return cast(Results, _Attention.apply(*arguments))
    with torch._C._AutoDispatchBelowAutograd():
        return cast(Results, forward(*arguments))


def _backward_autograd(*arguments: Any) -> Gradients:
    if requires_grad(arguments):
        return cast(Gradients, _Gradient.apply(*arguments))
    with torch._C._AutoDispatchBelowAutograd():
        return cast(Gradients, backward(*arguments))


library.impl("forward", _forward_autograd, "Autograd")
library.impl("backward", _backward_autograd, "Autograd")


class BuildInfo(TypedDict):
    """What `build_info` tells. What was built is empty or None where there is no compiled module.

    version: of this package. compiled: whether the CUDA kernels are there. compiled_error: why they do not load, or
    None. archs, ptx: compute capabilities with machine code, and that of the PTX for newer GPUs. head_dims,
    backward_head_dims: those that are built, by family of kernels. dtypes: of tensors. cuda: its version.
    torch, torch_cuda, python, platform: what it runs in.
    """

    version: str
    compiled: bool
    compiled_error: str | None
    archs: list[str]
    ptx: str | None
    head_dims: dict[str, list[int]]
    backward_head_dims: dict[str, list[int]]
    dtypes: list[str]
    cuda: str | None
    torch: str
    torch_cuda: str | None
    python: str
    platform: str


def build_info() -> BuildInfo:
    """What this installation is; paste it into bug reports."""
    built = {} if _C is None else _C.build_info()
    return BuildInfo(
        version=__version__,
        compiled=_C is not None,
        compiled_error=_load_error,
        archs=built.get("archs", []),
        ptx=built.get("ptx"),
        head_dims=built.get("head_dims", {}),
        backward_head_dims=built.get("backward_head_dims", {}),
        dtypes=built.get("dtypes", []),
        cuda=built.get("cuda"),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        python=platform.python_version(),
        platform=platform.platform(),
    )
