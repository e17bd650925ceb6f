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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import torch
from torch import Tensor

from . import checks
from ._version import __version__
from .calls import BackwardCall, ForwardCall, Options, inputs_of
from .nodes import COLUMNS
from .reference import sink_gradient

LIBRARY = Path(__file__).with_name("libdualkv.so")
WITHOUT_KERNELS = LIBRARY.with_name("without_kernels.txt")  # written by setup.py
GPU_DEVICE = Path("/dev/nvidiactl")  # where NVIDIA's driver shows a GPU; to ask the driver would initialise CUDA
REINSTALL = "pip install --no-deps --force-reinstall --no-cache-dir ."
NO_ROWS = (0, 0, 0, 0, 0, 0)  # the view of a tensor that is not there


@functools.cache
def load() -> tuple[ModuleType | None, str | None]:
    """The module with the library open, or None and why it is not there; both None in an installation without it."""
    if not LIBRARY.exists():
        return None, None
    try:
        module = importlib.import_module("flash_attn_dualkv._C")
        built_with = module.open_library(str(LIBRARY))
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_dualkv._C":
            return None, str(error)
        there = ", ".join(sorted(path.name for path in LIBRARY.parent.glob("_C.*"))) or "none"
        return None, f"no module for this Python, {platform.python_version()}; there are: {there}"
    except ImportError as error:
        return None, str(error)
    if built_with != __version__:
        return None, f"{LIBRARY.name} is of version {built_with}, the Python package of {__version__}: reinstall both"
    return module, None


def compiled_module() -> ModuleType:
    """The compiled module; RuntimeError, with the fix, where there is none."""
    module, error = load()
    if module is not None:
        return module
    problem = f"its kernels do not load ({error})" if error else f"it has no kernels ({not_built()})"
    raise RuntimeError(
        f"flash_attn_dualkv cannot run on CUDA tensors: {problem}. To fix it, install a wheel with kernels for this "
        f"platform; or install from the source directory, {how_to_build()}, with the CUDA compiler nvcc (a CUDA "
        "toolkit, with CUDA_HOME set to it, or pip install 'cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*'). CPU "
        "tensors work without kernels, and DUALKV_FORCE_REFERENCE=1 computes on the GPU without them, slowly."
    )


def not_built() -> str | None:
    """Why there is no library: what setup.py wrote, or that nobody installed; None where there is one."""
    if LIBRARY.exists():
        return None
    if WITHOUT_KERNELS.exists():
        return f"{WITHOUT_KERNELS.read_text().strip()} at install"
    return f"none were built in {LIBRARY.parent}, from where Python imports it"


def how_to_build() -> str:
    """The command for the GPU here, for Hopper without one. pip's cache may hold a wheel without kernels."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch = "{}{}".format(*max(found, (8, 0)))
    return f"`DUALKV_ARCHS={arch} {REINSTALL}`"


def warn_without_kernels() -> None:
    """Says at import that a machine with a GPU got an installation without kernels that nobody asked for."""
    if not WITHOUT_KERNELS.exists() or LIBRARY.exists() or torch.version.cuda is None or not GPU_DEVICE.exists():
        return
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not is_hidden and "DUALKV_PURE_PYTHON" not in (reason := not_built() or ""):
        warnings.warn(
            f"flash_attn_dualkv is installed without CUDA kernels ({reason}), and there is a GPU here: its functions "
            f"raise on CUDA tensors. Install it again, from the source directory with `DUALKV_ARCHS=90 {REINSTALL}` "
            "(90: your GPU's compute capability); pip's cache may hold the wheel without kernels. DUALKV_PURE_PYTHON=1 "
            "at install leaves them out without this warning.",
            stacklevel=3,
        )


# Calls. Arguments have been checked: by the public functions, or by the operators.


def is_deterministic(deterministic: bool) -> bool:
    """True if gradients must be bit-identical, by argument, PyTorch's setting or environment."""
    return (
        deterministic
        or torch.are_deterministic_algorithms_enabled()
        or checks.environment_flag("FLASH_ATTENTION_DETERMINISTIC")
    )


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# Names of this module, in whose place tests put the host. CUDA is initialised where there are
# tensors: torch.cuda.current_device would look again.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def current_stream(device: int) -> int:
    """Address of PyTorch's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def code_for(device: int, archs: Sequence[str], ptx: str) -> str:
    """What a GPU runs of a build: "machine code", "PTX" that its driver compiles, or "nothing"."""
    major, minor = torch.cuda.get_device_capability(device)
    if any(int(arch) // 10 == major and int(arch) % 10 <= minor for arch in archs):
        return "machine code"
    return "PTX" if int(ptx) <= 10 * major + minor else "nothing"


@functools.cache
def has_code(device: int) -> bool:
    """True if there are kernels that a GPU runs; PyTorch calls those of ROCm CUDA devices, too."""
    build = build_info()
    if build["ptx"] is None or torch.version.hip is not None:
        return False
    return code_for(device, build["archs"], build["ptx"]) != "nothing"


@functools.cache
def prepare(device: int) -> None:
    """Says once for each GPU that it runs kernels which the driver has compiled from PTX."""
    build = build_info()
    if build["ptx"] is not None and code_for(device, build["archs"], build["ptx"]) == "PTX":
        capability = "{}{}".format(*torch.cuda.get_device_capability(device))
        warnings.warn(
            f"flash_attn_dualkv has no machine code for {torch.cuda.get_device_name(device)} (compute capability "
            f"{capability}); the driver compiles its PTX of {build['ptx']}, which takes minutes once. For native "
            f'kernels install from source with DUALKV_ARCHS="{capability}".',
            stacklevel=2,
        )


def uninitialised(beside: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A new contiguous tensor, which kernels will write entirely; new_empty takes the host half as long again."""
    strides = (shape[1], 1) if len(shape) == 2 else (shape[1] * shape[2], shape[2], 1)
    return beside.new_empty_strided(shape, strides, dtype=dtype)


def gradient_of(tensor: Tensor) -> Tensor:
    """A new contiguous tensor for the gradient of a tensor, which kernels will write entirely."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def scratch(size: int, beside: Tensor) -> torch.UntypedStorage:
    """Memory for what passes between kernels, from PyTorch's allocator.

    A storage, because no mode fills it: use_deterministic_algorithms would write all of a tensor.
    """
    return torch.UntypedStorage(size, device=beside.device)


def _library_call(call: ForwardCall | BackwardCall, device: int, deterministic: bool) -> tuple[Any, ...]:
    """Arguments that both directions hand over; copies and scratch live until the launch."""
    is_half = call.q.dtype == torch.float16
    asked = device, current_stream(device), is_half, inputs_of(call), call.nodes, call.options, deterministic
    return asked, copied, scratch


def forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """O and LSE of a call on CUDA tensors."""
    q, (rows, heads, _) = call.q, call.q.shape
    device = q.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return forward(call)
    call.options.check_kernels()
    module = compiled_module()
    prepare(device)
    sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
    out, lse = uninitialised(q, (rows, heads, call.v.shape[2])), uninitialised(q, (heads, rows), torch.float32)
    if not module.forward(*_library_call(call, device, call.options.deterministic), out, lse, sinks):
        out.zero_(), lse.fill_(-torch.inf)
        if sinks is not None:
            # Where there is no key at all, rows of a node still have their sink.
            begin, length = (call.nodes[:, column].long().clamp(0, rows) for column in (0, 1))
            ones = torch.ones_like(begin)
            count = torch.zeros(rows + 1, dtype=torch.int64, device=q.device).index_add_(0, begin, ones)
            count.index_add_(0, (begin + length).clamp(max=rows), -ones)
            lse.copy_(torch.where(count.cumsum(0)[:rows] > 0, sinks[:, None], lse))
    return out, lse


def backward(call: BackwardCall) -> list[Tensor]:
    """The gradients of q, k and v and, where these are given, of k_decoded, v_decoded and the sinks."""
    device, deterministic = call.q.get_device(), call.options.deterministic
    if device != current_device():
        with torch.cuda.device(device):
            return backward(call)
    call.options.check_kernels()
    module = compiled_module()
    prepare(device)
    asked = _library_call(call, device, is_deterministic(deterministic))
    lse, dlse = call.lse.contiguous(), None if call.dlse is None else call.dlse.contiguous()
    gradients = [gradient_of(one) for one in inputs_of(call) if one is not None]
    sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
    dsinks = None if sinks is None else gradient_of(sinks)
    if not module.backward(*asked, call.dout, call.out, lse, dlse, gradients, sinks, dsinks):
        for gradient in gradients:
            gradient.zero_()
        dsinks = None if call.sinks is None else sink_gradient(call, call.sinks)  # of rows that see their sink alone
    return gradients if dsinks is None or call.sinks is None else [*gradients, dsinks.to(call.sinks.dtype)]


def sequence_nodes(offsets: tuple[Tensor, Tensor, Tensor | None, Tensor | None], total_context: int | None) -> Tensor:
    """The table of sequences, from offsets whose values are not looked at: of queries, keys, contexts and groups."""
    cu_seqlens_q, _, cu_seqlens_context, _ = offsets
    device = cu_seqlens_q.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return sequence_nodes(offsets, total_context)
    module = compiled_module()
    sequences = cu_seqlens_q.shape[0] - 1
    groups = 0 if total_context is None else 1
    if cu_seqlens_context is not None:
        groups = cu_seqlens_context.shape[0] - 1
    nodes = uninitialised(cu_seqlens_q, (sequences + groups, COLUMNS))
    places = tuple(map(pointer, offsets))
    module.sequence_nodes(
        device, current_stream(device), places, sequences, groups, total_context or 0, nodes.data_ptr()
    )
    return nodes


def tree_nodes(cu_seqlens: Tensor, parents: Tensor) -> Tensor:
    """The table of the nodes of trees, from tensors whose values are not looked at."""
    device = cu_seqlens.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return tree_nodes(cu_seqlens, parents)
    module = compiled_module()
    nodes = uninitialised(parents, (parents.shape[0], COLUMNS))
    places = pointer(cu_seqlens), pointer(parents)
    module.tree_nodes(device, current_stream(device), *places, parents.shape[0], nodes.data_ptr())
    return nodes


# Scores of tokens

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # by their numbers in csrc/api.h


def _library_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Any, ...]:
    """Logits as the library takes them: the fields of DualkvLogits (csrc/api.h) in their order."""
    if logits.shape[:-1] != targets.shape or targets.device != logits.device or targets.dtype != torch.int64:
        expected = f"(rows, columns) and (rows,) int64 on {logits.device}"
        got = f"{tuple(logits.shape)} and {tuple(targets.shape)} {targets.dtype} on {targets.device}"
        raise ValueError(checks.explain("logits and targets", expected, got))
    element = LOGIT_DTYPES.index(logits.dtype)
    return logits.data_ptr(), *logits.shape, logits.stride(0), element, targets.data_ptr(), float(temperature)


def score_rows(
    logits: Tensor, targets: Tensor, temperature: float, *, elsewhere: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logsumexp of each row of logits / temperature, its value at the target, and the entropy of its softmax.

    Args:
        logits: (n, columns) of LOGIT_DTYPES, each row contiguous. targets: (n,) int64, columns.
        temperature: above 0.
        elsewhere: the value at a target that is none of the columns.

    Returns:
        (n,) float32 each; the entropy if it is asked for. A row's bits depend on nothing but the row.
    """
    device = logits.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return score_rows(logits, targets, temperature, elsewhere=elsewhere, with_entropy=with_entropy)
    prepare(device)
    targets = targets.contiguous()
    normalizer, chosen, *more = uninitialised(logits, (2 + with_entropy, len(logits)), torch.float32).unbind()
    entropy = more[0] if more else None
    compiled_module().score_rows(
        device, current_stream(device), _library_logits(logits, targets, temperature), pointer(normalizer),
        pointer(chosen), pointer(entropy), elsewhere,
    )  # fmt: skip
    return normalizer, chosen, entropy


def score_rows_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    normalizer: Tensor,
    d_logps: Tensor,
    entropy: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits, in their type; normalizer and entropy are those of the whole vocabulary."""
    device = logits.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            return score_rows_gradient(logits, targets, temperature, normalizer, d_logps, entropy, d_entropy)
    prepare(device)
    of_rows = normalizer, d_logps, entropy, d_entropy
    targets, (normalizer, d_logps, entropy) = targets.contiguous(), (one.contiguous() for one in of_rows[:3])
    d_entropy = None if d_entropy is None else d_entropy.contiguous()
    d_logits = gradient_of(logits)
    compiled_module().score_rows_gradient(
        device, current_stream(device), _library_logits(logits, targets, temperature), pointer(normalizer),
        pointer(d_logps), pointer(entropy), pointer(d_entropy), pointer(d_logits),
    )  # fmt: skip
    return d_logits


# What there is


def pairs(text: str) -> list[tuple[str, str]]:
    """Name and value of each of the library's lines."""
    return [(name, value) for name, _, value in (line.partition("\t") for line in text.splitlines())]


def explain_plan(sizes: Sequence[int], options: Options, gpu: str | None) -> list[tuple[str, str, str]]:
    """Choice, value and reason of a call; sizes: heads, KV heads, head dims, rows, nodes."""
    device = current_device() if torch.cuda.is_available() else 0
    deterministic = is_deterministic(options.deterministic)
    text: str = compiled_module().explain_plan(*sizes, options, deterministic, device, gpu)
    return [(name, value, why) for name, value, why in (line.split("\t") for line in text.splitlines())]


def launch_counts() -> dict[str, int]:
    """Launches of each kernel since the process began."""
    return {name: int(count) for name, count in pairs(compiled_module().launch_counts())}


class BuildInfo(TypedDict):
    """Answer of `build_info`. What was built is empty or None where there are no kernels.

    version: of this package. installation: "package" (of a wheel or by pip), or "checkout" where
    Python imports the source folder. compiled: whether the CUDA kernels are there.
    compiled_error: why they do not load, or None. not_built: why there is nothing to load, or
    None. archs, ptx: compute capabilities with machine code, and that of the PTX for newer GPUs.
    gpus: the visible ones by name, and what they run: "machine code", "PTX" or "nothing".
    head_dims, backward_head_dims: those that are built for q, k and v alike, by family of
    kernels. dtypes: of tensors. cuda: its version. torch, torch_cuda, python, platform: what it
    runs in.
    """

    version: str
    installation: str
    compiled: bool
    compiled_error: str | None
    not_built: str | None
    archs: list[str]
    ptx: str | None
    gpus: dict[str, str]
    head_dims: dict[str, list[int]]
    backward_head_dims: dict[str, list[int]]
    dtypes: list[str]
    cuda: str | None
    torch: str
    torch_cuda: str | None
    python: str
    platform: str


def build_info() -> BuildInfo:
    """Description of this installation; paste it into bug reports."""
    module, error = load()
    built: dict[str, str] = {} if module is None else dict(pairs(module.build_info()))

    def head_dims(direction: str) -> dict[str, list[int]]:
        families = (name.split(" ") for name in built)
        found = {words[1]: built[" ".join(words)] for words in families if words[0] == direction}
        return {family: [int(one) for one in dims.split()] for family, dims in found.items()}

    archs = [one for one in built.get("archs", "").split(";") if one]
    gpus = range(torch.cuda.device_count() if module is not None and torch.cuda.is_available() else 0)
    return BuildInfo(
        version=__version__,
        installation="checkout" if (LIBRARY.parents[1] / "csrc").is_dir() else "package",
        compiled=module is not None,
        compiled_error=error,
        not_built=not_built(),
        archs=archs,
        ptx=built.get("ptx"),
        gpus={f"{index}: {torch.cuda.get_device_name(index)}": code_for(index, archs, built["ptx"]) for index in gpus},
        head_dims=head_dims("head_dims"),
        backward_head_dims=head_dims("backward_head_dims"),
        dtypes=[] if module is None else [str(one).removeprefix("torch.") for one in checks.CUDA_DTYPES],
        cuda=built.get("cuda"),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        python=platform.python_version(),
        platform=platform.platform(),
    )


def max_head_dim(device: torch.device) -> int:
    """The largest head dimension: of this build's kernels on a GPU, of the reference on the CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return checks.MAX_HEAD_DIM
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9 and os.environ.get("DUALKV_KERNELS") != "sm80"
    has_wide = checks.MAX_HEAD_DIM in build_info()["head_dims"].get("sm90", ())
    return checks.MAX_HEAD_DIM if is_hopper and has_wide else checks.PORTABLE_HEAD_DIM


def kernels_lack(head_dims: Iterable[int], softcap: float, device: torch.device) -> str | None:
    """Requirement that a device's kernels lack for these head dimensions and this softcap; None if they have all."""
    if not checks.is_kernel_softcap(softcap):
        return f"a softcap of {softcap}"
    most = max_head_dim(device)
    wrong = [one for one in head_dims if one > most or one % checks.HEAD_DIM_MULTIPLE]
    return f"a head dim of {wrong[0]}" if wrong else None
