"""The operators that PyTorch sees, in the namespace `flash_attn_dualkv`: node tables, and attention with its gradient.

Every public function is `sequence_nodes`, `tree_nodes` or a ready table, and then one `forward`; autograd records one
node. CPU tensors go to `nodes.py` and `reference.py`, CUDA tensors to the compiled module, or to the reference where it
is asked for. The autograd formulas are registered with the dispatcher, so that compilers trace through them.
`torch.library`'s low-level interface keeps calls cheap: a `custom_op` costs the host more than twice as much.
"""

from __future__ import annotations

import importlib
import math
import platform
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from . import nodes as tables
from . import reference
from ._version import __version__
from .arguments import environment_flag
from .checks import KERNEL_SOFTCAPS, is_kernel_softcap

Results = tuple[Tensor, Tensor]

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

# Of the keys: rows of k and then those of k_decoded, see `nodes.Node`.
_KEYS = "Tensor q, Tensor k, Tensor v, Tensor? k_decoded, Tensor? v_decoded"
# No argument has a default: the dispatcher would leave it out of what it hands to the implementations. `reference`
# computes CUDA tensors in PyTorch. The last two are for the backward of this call: autograd has no other way to it.
# A row sees about `mean_keys` keys on average: by it the backward chooses among its kernels; a wrong one costs time.
_OPTIONS = (
    "float softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, bool reference, "
    "SymInt mean_keys, bool deterministic"
)
library.define(
    "sequence_nodes(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? cu_seqlens_context, Tensor? cu_seqs_per_context, "
    "SymInt? total_context) -> Tensor nodes",
    tags=TAGS,
)
library.define("tree_nodes(Tensor cu_seqlens, Tensor parents, SymInt total) -> Tensor nodes", tags=TAGS)
library.define(f"forward({_KEYS}, Tensor? sinks, Tensor nodes, {_OPTIONS}) -> (Tensor out, Tensor lse)", tags=TAGS)
# dq, dk, dv and, where there are these tensors, dk_decoded, dv_decoded. The sinks are in the LSE, by which the kernels
# compute P = exp(S - LSE), and their gradient needs no kernel.
library.define(
    f"backward(Tensor dout, Tensor? dlse, {_KEYS}, Tensor out, Tensor lse, Tensor nodes, {_OPTIONS}) -> Tensor[]",
    tags=TAGS,
)

sequence_nodes = torch.ops.flash_attn_dualkv.sequence_nodes.default
tree_nodes = torch.ops.flash_attn_dualkv.tree_nodes.default
forward = torch.ops.flash_attn_dualkv.forward.default
backward = torch.ops.flash_attn_dualkv.backward.default

_NUM_KEYS = 5  # tensors of _KEYS


class Options(NamedTuple):
    """The arguments of both operators that are no tensors; what they mean says `reference.forward`."""

    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    reference: bool
    mean_keys: int
    deterministic: bool

    @property
    def variant(self) -> tuple[Any, ...]:
        """Those of the reference."""
        return self.softmax_scale, self.causal, self.window_left, self.window_right, self.softcap

    def of_kernels(self) -> Any:
        """What the compiled module takes; here a misspelt switch in the environment is an error."""
        return compiled_module().Options(
            softmax_scale=self.softmax_scale, causal=self.causal, window_left=self.window_left, softcap=self.softcap,
            mean_keys=self.mean_keys, deterministic=is_deterministic(self.deterministic),
        )  # fmt: skip

    def check_kernels(self) -> None:
        """NotImplementedError for what only the reference has."""
        if self.window_right != -1:
            raise NotImplementedError(f"window_right: expected -1 for the CUDA kernels, got {self.window_right}")
        if not is_kernel_softcap(self.softcap):
            expected = f"0.0 or {KERNEL_SOFTCAPS[0]} to {KERNEL_SOFTCAPS[1]} for the CUDA kernels"
            raise NotImplementedError(f"softcap: expected {expected}, got {self.softcap}")


# The reference, on any device


def _forward_reference(*arguments: Any) -> Results:
    return reference.forward(*arguments[:7], *Options(*arguments[7:]).variant)


def _backward_reference(*arguments: Any) -> list[Tensor]:
    return reference.backward(*arguments[:10], *Options(*arguments[10:]).variant)


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
    """Whether to read back offsets from the GPU and check them; impossible while a CUDA graph is captured."""
    return environment_flag("DUALKV_DEBUG") and not torch.cuda.is_current_stream_capturing()


def is_deterministic(deterministic: bool) -> bool:
    """Whether gradients must be bit-identical from run to run: by argument, PyTorch's setting or the environment."""
    return (
        deterministic
        or torch.are_deterministic_algorithms_enabled()
        or environment_flag("FLASH_ATTENTION_DETERMINISTIC")
    )


def _sequence_nodes_cuda(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int | None,
) -> Tensor:
    compiled = compiled_module()
    grouping = (cu_seqlens_context, cu_seqs_per_context)
    if checks_values():
        context, owned = (None if one is None else one.cpu() for one in grouping)
        tables.sequence_nodes(cu_seqlens_q.cpu(), cu_seqlens_k.cpu(), context, owned, total_context)
    return cast(Tensor, compiled.sequence_nodes(cu_seqlens_q, cu_seqlens_k, *grouping, total_context))


def _tree_nodes_cuda(cu_seqlens: Tensor, parents: Tensor, total: int) -> Tensor:
    compiled = compiled_module()
    if checks_values():
        tables.tree_nodes(cu_seqlens.cpu(), parents.cpu(), total)
    return cast(Tensor, compiled.tree_nodes(cu_seqlens, parents))


def _kernels(options: Options) -> ModuleType:
    """The compiled module, for a call that it can compute."""
    compiled = compiled_module()
    options.check_kernels()
    return compiled


def _check_nodes(q: Tensor, k: Tensor, k_decoded: Tensor | None, nodes: Tensor) -> None:
    if checks_values():
        tables.checked_nodes(nodes, q.shape[0], k.shape[0], None if k_decoded is None else k_decoded.shape[0])


def _forward_cuda(*arguments: Any) -> Results:
    options = Options(*arguments[7:])
    if options.reference:
        return _forward_reference(*arguments)
    compiled = _kernels(options)
    q, k, _, k_decoded, _, _, nodes = arguments[:7]
    _check_nodes(q, k, k_decoded, nodes)
    return cast(Results, compiled.forward(*arguments[:7], options.of_kernels()))


def _backward_cuda(*arguments: Any) -> list[Tensor]:
    options = Options(*arguments[10:])
    if options.reference:
        return _backward_reference(*arguments)
    return cast("list[Tensor]", _kernels(options).backward(*arguments[:10], options.of_kernels()))


_FORWARD = {"cpu": _forward_reference, "cuda": _forward_cuda}
_BACKWARD = {"cpu": _backward_reference, "cuda": _backward_cuda}
for _device in _FORWARD:
    library.impl("forward", _FORWARD[_device], _device.upper())
    library.impl("backward", _BACKWARD[_device], _device.upper())
library.impl("sequence_nodes", tables.sequence_nodes, "CPU")
library.impl("sequence_nodes", _sequence_nodes_cuda, "CUDA")
library.impl("tree_nodes", tables.tree_nodes, "CPU")
library.impl("tree_nodes", _tree_nodes_cuda, "CUDA")


# Shapes: what compilers need to know of the operators


@torch.library.register_fake("flash_attn_dualkv::sequence_nodes", lib=library)
def _sequence_nodes_fake(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
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
def _backward_fake(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in arguments[:_NUM_KEYS] if one is not None]


# Autograd: above the device's implementations


def requires_grad(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd must record the call: below its own formula it must not look at the call again."""
    return torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether somebody may want to see a call of these as an operator: a subclass, a compiler, a mode, the profiler.

    Where nobody does, one implementation may call the next: each way through the dispatcher costs the host 10 us.
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
    """NotImplementedError if a forward-mode derivative is asked for, which would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for one in arguments:
        if isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None:
            raise NotImplementedError("flash_attn_dualkv has no forward-mode derivatives (torch.func.jvp, forward_ad)")


def _forward_below(*arguments: Any) -> Results:
    """The implementation of the operator, past the dispatcher where nobody watches."""
    q = arguments[0]
    if not is_watched(*arguments[:7]) and q.device.type in _FORWARD:
        return _FORWARD[q.device.type](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return cast(Results, forward(*arguments))


def _backward_below(*arguments: Any) -> list[Tensor]:
    q = arguments[2]
    if not is_watched(*arguments[:10]) and q.device.type in _BACKWARD:
        return _BACKWARD[q.device.type](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return cast("list[Tensor]", backward(*arguments))


class _Attention(torch.autograd.Function):
    """Joins `forward` and `backward`. An unused LSE costs nothing: its gradient stays None."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Results:
        out, lse = _forward_below(*arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments[:7], out, lse)
        ctx.options = arguments[7:]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *keys, sinks, nodes, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = iter(_backward_autograd(dout, dlse, *keys, out, lse, nodes, *ctx.options))
        needs = ctx.needs_input_grad
        of_keys = [None if one is None else next(gradients) for one in keys]
        kept = (gradient if need else None for gradient, need in zip(of_keys, needs))
        dsinks = _sink_gradient(dout, dlse, out, lse, sinks) if needs[_NUM_KEYS] else None
        return (*kept, dsinks, *(None for _ in needs[_NUM_KEYS + 1 :]))


def _sink_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,): of each row, its sink's probability times 0 - delta, since a sink's value is 0.

    Its error is that of the rounded `out` in delta. To save what rounding takes would cost as much memory as `out`, for
    an error of a third: the kernels round P too.
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
        return tuple(_backward_below(*arguments))

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Any) -> Any:
        raise RuntimeError(DIFFERENTIABLE_ONCE)


def _forward_autograd(*arguments: Any) -> Results:
    refuse_tangents(arguments)
    if requires_grad(arguments):
        return cast(Results, _Attention.apply(*arguments))
    return _forward_below(*arguments)


def _backward_autograd(*arguments: Any) -> list[Tensor]:
    if requires_grad(arguments):
        return list(_Gradient.apply(*arguments))
    return _backward_below(*arguments)


library.impl("forward", _forward_autograd, "Autograd")
library.impl("backward", _backward_autograd, "Autograd")


def attend(*arguments: Any) -> Results:
    """`forward`, past the dispatcher where nobody watches it."""
    if is_watched(*arguments[:7]):
        return cast(Results, forward(*arguments))
    options = Options(*arguments[7:])
    q, k, _, k_decoded, _, _, nodes = arguments[:7]
    if options.reference or not q.is_cuda:
        return _forward_autograd(*arguments)
    refuse_tangents(arguments)
    # The same node as _Attention, but compiled: the engine then runs no Python for it.
    compiled = _kernels(options)
    _check_nodes(q, k, k_decoded, nodes)
    # The node asks the environment again, in the backward.
    return cast(Results, compiled.attention(*arguments[:7], options.of_kernels()))


# Packing


PACKED_BY_KERNELS = {"cuda"}  # types of devices


def packing_module(tokens: Sequence[Tensor], device: torch.device) -> ModuleType | None:
    """The compiled module if it packs these tokens on that device; None: PyTorch's operators do."""
    return _C if device.type in PACKED_BY_KERNELS and not _is_traced(tokens) else None


class BuildInfo(TypedDict):
    """What `build_info` tells. What was built is empty or None where there is no compiled module.

    version: of this package. compiled: whether the CUDA kernels are there. compiled_error: why they do not load, or
    None. archs, ptx: compute capabilities with machine code, and that of the PTX for newer GPUs. head_dims,
    backward_head_dims: those that are built for q, k and v alike, by family of kernels. dtypes: of tensors. cuda: its
    version.
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
