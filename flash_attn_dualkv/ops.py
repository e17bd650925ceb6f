# SPDX-License-Identifier: BSD-3-Clause
"""The operators that PyTorch sees: node tables, and attention with its gradient.

Every public function is `sequence_nodes`, `tree_nodes` or a ready table, and then one `forward`;
autograd records one node. CPU tensors go to `nodes.py` and `reference.py`, CUDA tensors to the
compiled module, or to the reference where it is asked for. The autograd formulas are registered
with the dispatcher, so that compilers trace through them. `torch.library`'s low-level interface
keeps calls cheap: a `custom_op` costs the host more than twice as much.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from . import nodes as tables
from . import reference
from ._version import __version__
from .calls import AnyCall, BackwardCall, ForwardCall, Options, inputs_of, pack, schema, unpack
from .checks import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, PORTABLE_HEAD_DIM, is_kernel_softcap
from .environment import environment_flag

Results = tuple[Tensor, Tensor]
Result = TypeVar("Result")

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

library.define(
    "sequence_nodes(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? cu_seqlens_context, Tensor? cu_seqs_per_context, "
    "SymInt? total_context) -> Tensor nodes",
    tags=TAGS,
)
library.define("tree_nodes(Tensor cu_seqlens, Tensor parents, SymInt total) -> Tensor nodes", tags=TAGS)
library.define(f"forward({schema(ForwardCall)}) -> (Tensor out, Tensor lse)", tags=TAGS)
# dq, dk, dv and, where there are these tensors, dk_decoded, dv_decoded.
library.define(f"backward({schema(BackwardCall)}) -> Tensor[]", tags=TAGS)

sequence_nodes = torch.ops.flash_attn_dualkv.sequence_nodes.default
tree_nodes = torch.ops.flash_attn_dualkv.tree_nodes.default
forward = torch.ops.flash_attn_dualkv.forward.default
backward = torch.ops.flash_attn_dualkv.backward.default


# CUDA: the compiled module, or the reference for those who ask for it


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
    """Whether to check offsets on the GPU; impossible while a CUDA graph is captured."""
    return environment_flag("DUALKV_DEBUG") and not torch.cuda.is_current_stream_capturing()


def is_deterministic(deterministic: bool) -> bool:
    """Whether gradients must be bit-identical, by argument, PyTorch's setting or environment."""
    return (
        deterministic
        or torch.are_deterministic_algorithms_enabled()
        or environment_flag("FLASH_ATTENTION_DETERMINISTIC")
    )


def _checked_on_host(table: Callable[..., Tensor], arguments: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a table, whose values are checked where that is asked for."""
    if checks_values():
        table(*(one.cpu() if isinstance(one, Tensor) else one for one in arguments))
    return arguments


def _sequence_nodes_cuda(*arguments: Any) -> Tensor:
    compiled = compiled_module()
    return cast(Tensor, compiled.sequence_nodes(*_checked_on_host(tables.sequence_nodes, arguments)))


def _tree_nodes_cuda(cu_seqlens: Tensor, parents: Tensor, total: int) -> Tensor:
    compiled = compiled_module()
    _checked_on_host(tables.tree_nodes, (cu_seqlens, parents, total))
    return cast(Tensor, compiled.tree_nodes(cu_seqlens, parents))


def _kernels(options: Options) -> ModuleType:
    """The compiled module, for a call that it can compute."""
    compiled = compiled_module()
    options.check_kernels()
    return compiled


def kernel_options(options: Options) -> Any:
    """The options as the compiled module takes them; a misspelt switch in the environment is an error here."""
    return compiled_module().Options(
        softmax_scale=options.softmax_scale, causal=options.causal, window_left=options.window_left,
        softcap=options.softcap, mean_keys=options.mean_keys, deterministic=is_deterministic(options.deterministic),
    )  # fmt: skip


def _forward_cuda(call: ForwardCall, *, records: bool = False) -> Results:
    """The forward on CUDA; with `records` by the compiled equivalent of `_Attention`."""
    if call.options.reference:
        return reference.forward(call)
    compiled = _kernels(call.options)
    if checks_values():
        decoded = None if call.k_decoded is None else call.k_decoded.shape[0]
        tables.checked_nodes(call.nodes, call.q.shape[0], call.k.shape[0], decoded)
    launch = compiled.attention if records else compiled.forward
    return cast(Results, launch(*call[:-1], kernel_options(call.options)))


def _backward_cuda(call: BackwardCall) -> list[Tensor]:
    if call.options.reference:
        return reference.backward(call)
    launch = _kernels(call.options).backward
    return cast("list[Tensor]", launch(*call[:-1], kernel_options(call.options)))


_FORWARD: dict[str, Callable[[ForwardCall], Results]] = {"cpu": reference.forward, "cuda": _forward_cuda}
_BACKWARD: dict[str, Callable[[BackwardCall], list[Tensor]]] = {"cpu": reference.backward, "cuda": _backward_cuda}


def unpacking(kind: type[AnyCall], implementation: Callable[[AnyCall], Result]) -> Callable[..., Result]:
    """The implementation as torch.library calls it."""
    return lambda *arguments: implementation(unpack(kind, arguments))


for _device in _FORWARD:
    library.impl("forward", unpacking(ForwardCall, _FORWARD[_device]), _device.upper())
    library.impl("backward", unpacking(BackwardCall, _BACKWARD[_device]), _device.upper())
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
    inputs = inputs_of(unpack(BackwardCall, arguments))
    return [one.new_empty(one.shape) for one in inputs if one is not None]


# Autograd: above the device's implementations


def requires_grad(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd must record the call; below its formula it must not look again."""
    return torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether a subclass, a compiler, a mode or the profiler may want to see an operator.

    Where nobody does, one implementation may call the next: each way through the dispatcher costs
    the host 10 us.
    """
    return _is_traced(tensors) or torch.autograd.profiler._is_profiler_enabled


def _is_traced(tensors: Sequence[Tensor | None]) -> bool:
    for one in tensors:  # any() over a generator takes the host a microsecond more
        if type(one) is not Tensor and one is not None:
            return True
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """NotImplementedError for forward-mode derivatives, which would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for one in arguments:
        if isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None:
            raise NotImplementedError("flash_attn_dualkv has no forward-mode derivatives (torch.func.jvp, forward_ad)")


def _below(operator: Any, implementations: Mapping[str, Callable[[AnyCall], Result]], call: AnyCall) -> Result:
    """The device's implementation of the operator, past the dispatcher where nobody watches."""
    implementation = implementations.get(call.q.device.type)
    if implementation is not None and not is_watched(*call[:-1]):
        return implementation(call)
    with torch._C._AutoDispatchBelowAutograd():
        return cast(Result, operator(*pack(call)))


class _Attention(torch.autograd.Function):
    """Joins `forward` and `backward`. An unused LSE costs nothing: its gradient stays None."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Results:
        call = ForwardCall(*arguments)
        out, lse = _below(forward, _FORWARD, call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs_of(call), call.sinks, call.nodes, out, lse)
        ctx.options = call.options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, sinks, nodes, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        call = BackwardCall._make((dout, dlse, *inputs, out, lse, nodes, ctx.options))
        gradients = iter(_backward_autograd(call))
        needs = ctx.needs_input_grad
        of_inputs = [None if one is None else next(gradients) for one in inputs]
        kept = (gradient if need else None for gradient, need in zip(of_inputs, needs))
        dsinks = _sink_gradient(dout, dlse, out, lse, sinks) if needs[len(inputs)] else None
        return (*kept, dsinks, None, None)


def _sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,): of each row, its sink's probability times 0 - delta, since a sink's value is 0.

    Its error is that of the rounded `out` in delta. To save what rounding takes would cost as much
    memory as `out`, for an error of a third: the kernels round P too.
    """
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(0, 1)
    if dlse is not None:
        delta = delta - dlse
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # A row of no node has the LSE -inf: whatever its upstream gradient, it has no sink.
    rows = torch.where(lse == -math.inf, 0.0, probability * delta)
    return rows.sum(1).neg().to(sinks.dtype)


class _Gradient(torch.autograd.Function):
    """`backward` under create_graph=True: its results have a history, which cannot be followed."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_below(backward, _BACKWARD, BackwardCall(*arguments)))

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Any) -> Any:
        raise RuntimeError(DIFFERENTIABLE_ONCE)


def _forward_autograd(call: ForwardCall) -> Results:
    refuse_tangents(call)
    if requires_grad(call):
        return cast(Results, _Attention.apply(*call))
    return _below(forward, _FORWARD, call)


def _backward_autograd(call: BackwardCall) -> list[Tensor]:
    if requires_grad(call):
        return list(_Gradient.apply(*call))
    return _below(backward, _BACKWARD, call)


library.impl("forward", unpacking(ForwardCall, _forward_autograd), "Autograd")
library.impl("backward", unpacking(BackwardCall, _backward_autograd), "Autograd")


def attend(
    q: Tensor, k: Tensor, v: Tensor, nodes: Tensor, options: Options, *,
    k_decoded: Tensor | None = None, v_decoded: Tensor | None = None, sinks: Tensor | None = None,
) -> Results:  # fmt: skip
    """`forward`, past the dispatcher where nobody watches it."""
    call = ForwardCall(q, k, v, k_decoded, v_decoded, sinks, nodes, options)
    if is_watched(*call[:-1]):
        return cast(Results, forward(*pack(call)))
    if options.reference or not q.is_cuda:
        return _forward_autograd(call)
    refuse_tangents(call)
    # The compiled node spares autograd's engine the interpreter. It asks the environment again, in
    # the backward; here a misspelt switch is an error.
    return _forward_cuda(call, records=True)


class BuildInfo(TypedDict):
    """What `build_info` tells. What was built is empty or None where there is no compiled module.

    version: of this package. compiled: whether the CUDA kernels are there. compiled_error: why they
    do not load, or None. archs, ptx: compute capabilities with machine code, and that of the PTX
    for newer GPUs. head_dims, backward_head_dims: those that are built for q, k and v alike, by
    family of kernels. dtypes: of tensors. cuda: its version. torch, torch_cuda, python, platform:
    what it runs in.
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


def max_head_dim(device: torch.device) -> int:
    """The largest head dimension: of this build's kernels on a GPU, of the reference on the CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MAX_HEAD_DIM
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9 and os.environ.get("DUALKV_KERNELS") != "sm80"
    has_wide = MAX_HEAD_DIM in build_info()["head_dims"].get("sm90", ())
    return MAX_HEAD_DIM if is_hopper and has_wide else PORTABLE_HEAD_DIM


def kernels_lack(head_dims: Iterable[int], softcap: float, device: torch.device) -> str | None:
    """What a device's kernels lack for these head dimensions and this softcap; None if they have all."""
    if not is_kernel_softcap(softcap):
        return f"a softcap of {softcap}"
    most = max_head_dim(device)
    wrong = [one for one in head_dims if one > most or one % HEAD_DIM_MULTIPLE]
    return f"a head dim of {wrong[0]}" if wrong else None
