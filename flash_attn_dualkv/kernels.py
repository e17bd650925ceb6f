# SPDX-License-Identifier: BSD-3-Clause
"""The compiled kernels: how they are loaded, called and described.

They are one library with a C interface (csrc/api.h), which knows neither PyTorch nor Python, and a
thin pybind11 module `_C`, which hands it addresses and strides. Whatever PyTorch allocates,
allocates here. The library is opened by the first call that needs it.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import torch
from torch import Tensor

from ._version import __version__
from .calls import BackwardCall, ForwardCall, Options
from .checks import CUDA_DTYPES, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, PORTABLE_HEAD_DIM
from .environment import environment_flag
from .nodes import COLUMNS

LIBRARY = Path(__file__).with_name("libdualkv.so")
NO_ROWS = (0, 0, 0, 0, 0, 0)  # the view of a tensor that is not there


class _Loaded:
    """The module and why it is not there, found by the first who asks."""

    @functools.cached_property
    def found(self) -> tuple[ModuleType | None, str | None]:
        if not LIBRARY.exists():
            return None, None
        try:
            module = importlib.import_module("flash_attn_dualkv._C")
            built_with = module.open_library(str(LIBRARY))
        except ImportError as error:
            return None, str(error)
        if built_with != __version__:
            return None, f"{LIBRARY.name} is of version {built_with}, the Python package of {__version__}"
        return module, None


loaded = _Loaded()


def compiled_module() -> ModuleType:
    """The compiled module; RuntimeError, with the fix, where there is none."""
    module, error = loaded.found
    if module is not None:
        return module
    problem = "it was installed without its kernel library" if error is None else f"its kernels do not load ({error})"
    raise RuntimeError(
        f"flash_attn_dualkv cannot run on CUDA tensors: {problem}. To fix it, install a wheel with kernels for this "
        "platform; or install the CUDA compiler nvcc (a CUDA toolkit, with CUDA_HOME set to it, or pip install "
        "'cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*') and reinstall from the source directory with 'pip install "
        "--no-deps --force-reinstall .'. CPU tensors work without it, and DUALKV_FORCE_REFERENCE=1 computes on the GPU "
        "without it, slowly."
    )


# Calls. Arguments have been checked: by the public functions, or by the operators.


def is_deterministic(deterministic: bool) -> bool:
    """Whether gradients must be bit-identical, by argument, PyTorch's setting or environment."""
    return (
        deterministic
        or torch.are_deterministic_algorithms_enabled()
        or environment_flag("FLASH_ATTENTION_DETERMINISTIC")
    )


def kernel_options(options: Options) -> tuple[float, bool, int, float, int, bool]:
    """The options as the library takes them; a misspelt switch in the environment is an error here."""
    return (
        options.softmax_scale, options.causal, options.window_left, options.softcap, options.mean_keys,
        is_deterministic(options.deterministic),
    )  # fmt: skip


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied where kernels cannot read it.

    Copies move 16 bytes, and tensor maps know no stride of zero: rows must begin on 16 bytes, and
    expanded dimensions must be real.
    """
    rows, heads, _ = tensor.shape
    row, head, last = tensor.stride()
    is_good = (
        (rows == 1 or (row > 0 and row % HEAD_DIM_MULTIPLE == 0))
        and (heads == 1 or (head > 0 and head % HEAD_DIM_MULTIPLE == 0))
        and last == 1
        and tensor.data_ptr() % 16 == 0
    )
    return tensor if is_good or tensor.numel() == 0 else tensor.clone(memory_format=torch.contiguous_format)


def view(tensor: Tensor | None) -> tuple[int, int, int, int, int, int]:
    """A tensor (rows, heads, head_dim) as the library takes it."""
    if tensor is None:
        return NO_ROWS
    row, head, _ = tensor.stride()
    return (tensor.data_ptr(), *tensor.shape, row, head)  # type: ignore[return-value]


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def current_stream(device: int) -> int:
    """Address of PyTorch's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


class on_device:  # noqa: N801 - a context manager, as torch.cuda.device
    """Makes the device of a tensor the current one, which costs nothing where it is; gives its index."""

    def __init__(self, tensor: Tensor) -> None:
        self.index = tensor.get_device()
        self.guard = None if self.index == torch.cuda.current_device() else torch.cuda.device(self.index)

    def __enter__(self) -> int:
        if self.guard is not None:
            self.guard.__enter__()
        prepare(self.index)
        return self.index

    def __exit__(self, *exception: Any) -> None:
        if self.guard is not None:
            self.guard.__exit__(*exception)


@functools.cache
def prepare(device: int) -> None:
    """Says once for each GPU that it runs kernels which the driver has compiled from PTX."""
    major, minor = torch.cuda.get_device_capability(device)
    build = build_info()
    has_code = any(int(arch) // 10 == major and int(arch) % 10 <= minor for arch in build["archs"])
    if build["compiled"] and not has_code and major >= int(build["ptx"] or 0) // 10:
        warnings.warn(
            f"flash_attn_dualkv has no machine code for {torch.cuda.get_device_name(device)} (compute capability "
            f"{major}.{minor}); the driver compiles its PTX of {build['ptx']}, which takes minutes once. For native "
            f'kernels install from source with DUALKV_ARCHS="{major}{minor}".',
            stacklevel=2,
        )


def scratch(size: int, q: Tensor) -> torch.UntypedStorage:
    """Memory for what passes between kernels, from PyTorch's allocator.

    A storage, because no mode fills it: use_deterministic_algorithms would write all of a tensor.
    """
    return torch.UntypedStorage(size, device=q.device)


def library_call(module: ModuleType, device: int, tensors: Sequence[Tensor | None], nodes: Tensor, options: Options) -> Any:
    """What both directions hand over: q, k, v, k_decoded, v_decoded, nodes and options."""
    options.check_kernels()
    q = tensors[0]
    assert q is not None
    return module.Call(
        device, current_stream(device), q.dtype == torch.float16, [view(one) for one in tensors], nodes.data_ptr(),
        nodes.shape[0], kernel_options(options),
    )  # fmt: skip


def is_empty(q: Tensor, k: Tensor, k_decoded: Tensor | None, nodes: Tensor) -> bool:
    """Whether nobody sees a key."""
    keys = k.shape[0] + (0 if k_decoded is None else k_decoded.shape[0])
    return nodes.shape[0] == 0 or q.shape[0] == 0 or keys == 0


def forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """O and LSE of a call on CUDA tensors."""
    module = compiled_module()
    q, k, v, k_decoded, v_decoded = (None if one is None else aligned(one) for one in call[:5])
    assert q is not None and k is not None and v is not None
    rows, heads, _ = q.shape
    if is_empty(q, k, k_decoded, call.nodes):
        call.options.check_kernels()
        lse = torch.full((heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        return q.new_zeros((rows, heads, v.shape[2])), lse
    sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
    with on_device(q) as device:
        asked = library_call(module, device, (q, k, v, k_decoded, v_decoded), call.nodes, call.options)
        memory = scratch(asked.forward_scratch(), q)
        out = q.new_empty((rows, heads, v.shape[2]))
        lse = q.new_empty((heads, rows), dtype=torch.float32)
        asked.forward(memory.data_ptr(), view(out), lse.data_ptr(), pointer(sinks))
    return out, lse


def backward(call: BackwardCall) -> list[Tensor]:
    """The gradients of q, k and v and, where these are given, of k_decoded and v_decoded."""
    module = compiled_module()
    given = [call.q, call.k, call.v, call.k_decoded, call.v_decoded]
    if is_empty(call.q, call.k, call.k_decoded, call.nodes):
        call.options.check_kernels()
        return [one.new_zeros(one.shape) for one in given if one is not None]
    dout, out = aligned(call.dout), aligned(call.out)
    lse, dlse = call.lse.contiguous(), None if call.dlse is None else call.dlse.contiguous()
    with on_device(call.q) as device:
        tensors = [None if one is None else aligned(one) for one in given]
        asked = library_call(module, device, tensors, call.nodes, call.options)
        memory = scratch(asked.backward_scratch(), call.q)
        gradients = [None if one is None else one.new_empty(one.shape) for one in given]
        asked.backward(
            memory.data_ptr(), view(dout), view(out), lse.data_ptr(), pointer(dlse), [view(one) for one in gradients]
        )
    return [one for one in gradients if one is not None]


def sequence_nodes(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int | None,
) -> Tensor:
    """As `nodes.sequence_nodes`, without a look at the values."""
    module = compiled_module()
    sequences = cu_seqlens_q.shape[0] - 1
    groups = 0 if total_context is None else 1
    if cu_seqlens_context is not None:
        groups = cu_seqlens_context.shape[0] - 1
    with on_device(cu_seqlens_q) as device:
        nodes = cu_seqlens_q.new_empty((sequences + groups, COLUMNS))
        offsets = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_context, cu_seqs_per_context)
        module.sequence_nodes(
            device, current_stream(device), [pointer(one) for one in offsets], sequences, groups, total_context or 0,
            nodes.data_ptr(),
        )  # fmt: skip
    return nodes


def tree_nodes(cu_seqlens: Tensor, parents: Tensor) -> Tensor:
    """As `nodes.tree_nodes`, without a look at the values."""
    module = compiled_module()
    with on_device(cu_seqlens) as device:
        nodes = parents.new_empty((parents.shape[0], COLUMNS))
        module.tree_nodes(
            device, current_stream(device), cu_seqlens.data_ptr(), parents.data_ptr(), parents.shape[0], nodes.data_ptr()
        )
    return nodes


# What there is


def lines(text: str) -> list[list[str]]:
    """Fields of the library's lines."""
    return [line.split("\t") for line in text.splitlines()]


def explain_plan(sizes: Sequence[int], options: Options, gpu: str | None) -> list[list[str]]:
    """Choice, value and reason of a call; sizes: heads, KV heads, head dims, rows, nodes."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return lines(compiled_module().explain_plan(*sizes, kernel_options(options), device, gpu))


def launch_counts() -> dict[str, int]:
    """Launches of each kernel since the process began."""
    return {name: int(count) for name, count in lines(compiled_module().launch_counts())}


class BuildInfo(TypedDict):
    """What `build_info` tells. What was built is empty or None where there are no kernels.

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
    module, error = loaded.found
    built = {} if module is None else {name: value for name, value in lines(module.build_info())}

    def head_dims(direction: str) -> dict[str, list[int]]:
        families = (name.split(" ") for name in built)
        found = {words[1]: built[" ".join(words)] for words in families if words[0] == direction}
        return {family: [int(one) for one in dims.split()] for family, dims in found.items()}

    return BuildInfo(
        version=__version__,
        compiled=module is not None,
        compiled_error=error,
        archs=[one for one in built.get("archs", "").split(";") if one],
        ptx=built.get("ptx"),
        head_dims=head_dims("head_dims"),
        backward_head_dims=head_dims("backward_head_dims"),
        dtypes=[] if module is None else [str(one).removeprefix("torch.") for one in CUDA_DTYPES],
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
