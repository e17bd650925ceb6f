# SPDX-License-Identifier: BSD-3-Clause
"""Checks of what callers give; an error names the argument, what was expected and what was got.

Functions named after a kind (`integer`, `lengths`) return the value in the form that is used and
raise a `SharedPromptError`, which is a ValueError and for a wrong type a TypeError too; `check_...`
return nothing. Nothing that attention calls reads a tensor's contents, so it neither waits for a
device nor breaks a trace. The values of offsets are checked in `nodes.py`.
"""

from __future__ import annotations

import math
import operator
import os
import reprlib
from collections.abc import Hashable, Iterable, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import SharedPromptError, SharedPromptTypeError, explain

T = TypeVar("T")

MAX_HEAD_DIM = 512
PORTABLE_HEAD_DIM = 256  # the largest of the kernels that are not only Hopper's
KERNEL_SOFTCAPS = (0.01, 1000.0)  # the least and the largest of the CUDA kernels; csrc/core/softcap.h says why
HEAD_DIM_MULTIPLE = 8
# Logical positions and rows of two tensors of keys are int32 sums.
MAX_ROWS = 2**30

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_WITHOUT_OPERATORS = (torch.uint16, torch.uint32, torch.uint64)
_SPELLINGS = {
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
    **dict.fromkeys(("1", "true", "yes", "on"), True),
}
# Iterable, but not a list of samples: their elements have no order, or are no samples.
_NOT_LISTS = (str, bytes, bytearray, dict, set, frozenset)


# --- kinds of values ---


def describe(value: object) -> str:
    """A value in an error message: never longer than a line."""
    if isinstance(value, Tensor):
        kind = "nested" if value.is_nested else f"of shape {tuple(value.shape)}"
        return f"a tensor {kind} and {value.dtype} on {value.device}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, list, tuple)):
        return reprlib.repr(value)
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An int (no bool, no tensor) within the bounds."""
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise SharedPromptTypeError(name, _an_int(least, most), describe(value)) from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise SharedPromptError(name, _an_int(least, most), number)
    return number


def _an_int(least: int | None, most: int | None) -> str:
    bounds = [f"{sign} {bound}" for sign, bound in ((">=", least), ("<=", most)) if bound is not None]
    return " ".join(("an int", " and ".join(bounds))).rstrip()


def flag(name: str, value: Any) -> bool:
    """A bool; "no" and 0 are none."""
    if not isinstance(value, bool):
        raise SharedPromptTypeError(name, "a bool", describe(value))
    return value


def number(name: str, value: Any, *, zero: bool = False, expected: str = "") -> float:
    """A finite number > 0, or with `zero` also 0."""
    bound = ">= 0" if zero else "> 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SharedPromptTypeError(name, expected or f"a float {bound}", describe(value))
    if not (0.0 < value < math.inf or (zero and value == 0.0)):
        raise SharedPromptError(name, f"a finite number {bound}", value)
    return float(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise SharedPromptError(name, " or ".join(map(repr, choices)), describe(value))
    return value


def instance(name: str, value: Any, kind: type[T], hint: str = "") -> T:
    """A value of that class."""
    if not isinstance(value, kind):
        raise SharedPromptTypeError(name, f"a {kind.__name__}{hint}", describe(value))
    return value


def items(name: str, values: Any, of: str) -> Sequence[Any]:
    """A list, a tuple or something like them, with a length and an order."""
    if type(values) is list:  # to ask whether it is a Sequence takes longer
        return values
    if not isinstance(values, Sequence) or isinstance(values, _NOT_LISTS):
        is_array = isinstance(values, Sized) and hasattr(values, "__getitem__") and not isinstance(values, _NOT_LISTS)
        if not is_array or getattr(values, "ndim", 1) == 0:
            raise SharedPromptTypeError(name, f"a list of {of}", describe(values))
        return list(values)
    return values


def integers(name: str, tensor: Any, dimensions: int, also: Sequence[torch.dtype] = ()) -> Tensor:
    """A dense integer tensor of that many dimensions; int64 for types that lack operators."""
    if not isinstance(tensor, Tensor):
        raise SharedPromptTypeError(name, "an integer tensor", describe(tensor))
    if tensor.layout != torch.strided or tensor.is_nested:
        raise SharedPromptTypeError(name, "a dense integer tensor", f"one of layout {tensor.layout}")
    if tensor.is_meta:
        raise SharedPromptError(name, "a tensor that has values", "one on meta")
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not is_integer and tensor.dtype not in also:
        raise SharedPromptTypeError(name, "integers", tensor.dtype)
    if tensor.dim() != dimensions:
        raise SharedPromptError(name, f"{dimensions} dimension(s)", f"shape {tuple(tensor.shape)}")
    return tensor.to(torch.int64) if tensor.dtype in _WITHOUT_OPERATORS else tensor


def indices(name: str, tensor: Any, device: torch.device) -> Tensor:
    """(n,) int64, on a batch's device or on the host."""
    integers(name, tensor, 1)
    given: Tensor = tensor
    if given.dtype != torch.int64 or given.device not in (device, torch.device("cpu")):
        expected = f"int64 on {device} (as the batch) or on the CPU"
        raise SharedPromptError(name, expected, f"{given.dtype} on {given.device}")
    return given


def lengths(name: str, values: Any, count: int | None = None, like: str = "", least: int = 0) -> list[int]:
    """Numbers of tokens, a list or a 1-D integer tensor, `count` of them (as `like`)."""
    given = integers(name, values, 1).tolist() if isinstance(values, Tensor) else items(name, values, "ints")
    if count is not None:
        check_count(name, given, count, like)
    if set(map(type, given)) <= {int} and min(given, default=least) >= least:
        return list(given)
    return [integer(f"{name}[{index}]", value, least) for index, value in enumerate(given)]


def check_count(name: str, values: Sized, count: int, like: str) -> None:
    """SharedPromptError unless there is one for each of `like`: samples, or sequences."""
    if len(values) != count:
        raise SharedPromptError(name, f"{count} of them (as {like})", len(values))


def check_absent(expected: str, **values: Any) -> None:
    """SharedPromptError for a value of which `expected` says why there should be none."""
    for name, value in values.items():
        if value is not None:
            raise SharedPromptError(name, expected, describe(value))


def group_ids(values: Any) -> list[Hashable] | Tensor:
    """Ids of groups: hashable values, or one integer tensor, which is left where it is."""
    if isinstance(values, Tensor):
        return integers("group_ids", values, 1)
    has_no_order = isinstance(values, _NOT_LISTS) or getattr(values, "ndim", 1) == 0
    if not isinstance(values, Iterable) or has_no_order:
        raise SharedPromptTypeError("group_ids", "hashable values or one integer tensor", describe(values))
    ids = list(values)
    for index, value in enumerate(ids):
        # Equal tensors have different hashes.
        if isinstance(value, Tensor) or not _is_hashable(value):
            raise SharedPromptTypeError(f"group_ids[{index}]", "a hashable value that is no tensor", describe(value))
    return ids


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def device(value: Any) -> torch.device:
    """A device that is there."""
    try:
        chosen = torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise SharedPromptError("device", 'a device such as "cpu", "cuda" or "cuda:0"', describe(value)) from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SharedPromptError("device", f"one of {torch.cuda.device_count()} visible GPUs", chosen)
    return chosen


def environment_flag(name: str) -> bool:
    """A switch in the environment, off where it is not set."""
    text = os.environ.get(name)
    return False if text is None else spelled_flag(f"the environment's {name}", text)


def spelled_flag(name: str, text: str) -> bool:
    """A bool in one of its usual spellings."""
    value = _SPELLINGS.get(text.strip().lower())
    if value is None:
        raise ValueError(explain(name, "1 or 0 (true, false, yes, no, on, off)", repr(text)))
    return value


# --- tensors and options of attention ---


def check_are_tensors(names: Sequence[str], values: Sequence[Any]) -> None:
    """TypeError unless every value is a tensor."""
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            raise TypeError(explain(name, "a torch.Tensor", type(value).__name__))


def check_device(name: str, tensor: Tensor) -> None:
    """ValueError unless the tensor is on an NVIDIA GPU or on the CPU."""
    if tensor.is_cuda:
        if torch.version.hip is not None:
            raise ValueError(explain(name, "an NVIDIA CUDA or CPU tensor", f"{tensor.device} of ROCm (unsupported)"))
    elif not tensor.is_cpu:
        raise ValueError(explain(name, "an NVIDIA CUDA or CPU tensor", f"device {tensor.device} (unsupported)"))


def inputs(names: Sequence[str], values: Sequence[Any], allowed: Sequence[torch.dtype] | None = None) -> list[Tensor]:
    """q (total_q, H, d) and the k and v tensors, cast as autocast casts them.

    `allowed` are the dtypes of whoever computes; None for those of the device's own implementation.
    """
    check_are_tensors(names, values)
    check_device(names[0], values[0])
    tensors = autocast(values)
    check_alike(names, tensors, allowed)
    for name, tensor in zip(names, tensors):
        stride = tensor.stride()[2]
        if stride != 1 and tensor.shape[2] != 1 and tensor.numel() != 0:
            raise ValueError(explain(name, "a contiguous last dimension (stride 1)", f"stride {stride}"))
    _, heads, head_dim = shape = tensors[0].shape
    if heads < 1:
        raise ValueError(explain(names[0], "at least one head", f"shape {tuple(shape)}"))
    check_head_dim(names[0], head_dim)
    return tensors


def check_alike(names: Sequence[str], tensors: Sequence[Tensor], allowed: Sequence[torch.dtype] | None = None) -> None:
    """Check rank, dtype, device and rows; the first tensor sets dtype and device."""
    dtype, device = tensors[0].dtype, tensors[0].device
    if allowed is None:
        allowed = CUDA_DTYPES if tensors[0].is_cuda else CPU_DTYPES
    if dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise TypeError(explain(names[0], f"dtype {expected} on {device.type}", dtype))
    for name, tensor in zip(names, tensors):
        if tensor.dtype != dtype:
            raise TypeError(explain(name, f"dtype {dtype} (as {names[0]})", tensor.dtype))
        if tensor.device != device:
            raise ValueError(explain(name, f"device {device} (as {names[0]})", tensor.device))
        shape = tensor.shape
        if len(shape) != 3:
            raise ValueError(explain(name, "3 dimensions (rows, heads, head_dim)", f"shape {tuple(shape)}"))
        if shape[0] >= MAX_ROWS:
            raise ValueError(explain(name, f"fewer than {MAX_ROWS} rows", shape[0]))


def check_head_dim(name: str, head_dim: int, most: int = MAX_HEAD_DIM) -> None:
    if head_dim > most:
        raise ValueError(explain(name, f"a head dimension of at most {most}", head_dim))
    if head_dim < 1 or head_dim % HEAD_DIM_MULTIPLE != 0:
        raise ValueError(explain(name, f"a head dimension that is a multiple of {HEAD_DIM_MULTIPLE}", head_dim))


def check_pair_shape(q: Tensor, k_name: str, k: Tensor, v_name: str, v: Tensor) -> None:
    """Check one pair k (rows, H_k, d), v (rows, H_k, d_v) against q (total_q, H, d)."""
    (_, heads, head_dim), (rows, kv_heads, k_dim), (v_rows, v_heads, v_dim) = q.shape, k.shape, v.shape
    if k_dim != head_dim:
        raise ValueError(explain(k_name, f"head dimension {head_dim} (as q)", k_dim))
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError(explain(k_name, f"a number of heads that divides q's {heads} heads", kv_heads))
    if v_rows != rows:
        raise ValueError(explain(v_name, f"{rows} rows (as {k_name})", v_rows))
    if v_heads != kv_heads:
        raise ValueError(explain(v_name, f"{kv_heads} heads (as {k_name})", v_heads))
    check_head_dim(v_name, v_dim)


def check_decoded(k: Tensor, v: Tensor, k_context: Tensor, v_context: Tensor) -> None:
    """Check k_decoded and v_decoded against the context's keys and values, which they follow.

    A tensor that begins with the context's own rows is `k` where `k[context_seqlen:]` is meant:
    offsets may end before the tensors do, so the rows after them would pass for padding.
    """
    if k.shape[1] != k_context.shape[1]:
        raise ValueError(explain("k_decoded", f"{k_context.shape[1]} heads (as k_context)", k.shape[1]))
    if v.shape[2] != v_context.shape[2]:
        raise ValueError(explain("v_decoded", f"head dimension {v_context.shape[2]} (as v_context)", v.shape[2]))
    check_key_rows(k, "k_context", k_context)
    for name, decoded, context in (("k", k, k_context), ("v", v, v_context)):
        rows = context.shape[0]
        if rows and decoded.shape[0] and address(decoded) == address(context) is not None:
            expected = f"the rows behind the context, such as {name}[{rows}:]"
            raise ValueError(
                explain(f"{name}_decoded", expected, f"a tensor that begins with the rows of {name}_context")
            )


def check_key_rows(decoded: Tensor, name: str, keys: Tensor) -> None:
    """Check the rows of k_decoded together with those that they follow."""
    rows = keys.shape[0] + decoded.shape[0]
    if rows >= MAX_ROWS:
        raise ValueError(explain("k_decoded", f"fewer than {MAX_ROWS} rows together with {name}", rows))


def address(tensor: Any) -> int | None:
    """Address of a tensor in memory; None in traces, for wrappers (both unknown) and for what is no tensor."""
    if type(tensor) is not Tensor or torch.compiler.is_compiling():
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # function transforms wrap tensors without memory of their own
        return None


def check_int32(name: str, tensor: Any, device: torch.device, like: str = "q") -> None:
    """TypeError or ValueError unless a tensor is int32 and on the device (that of `like`)."""
    check_are_tensors((name,), (tensor,))
    if tensor.dtype != torch.int32:
        raise TypeError(explain(name, "dtype torch.int32", tensor.dtype))
    if tensor.device != device:
        raise ValueError(explain(name, f"device {device} (as {like})", tensor.device))


def check_offsets(
    name: str, offsets: Any, device: torch.device, length: int | None = None, like: str = "", least: int = 1
) -> None:
    """Check offsets: int32, contiguous, 1-D, on `device`, `length` elements (as `like`)."""
    check_int32(name, offsets, device)
    if offsets.dim() != 1:
        raise ValueError(explain(name, "1 dimension", f"shape {tuple(offsets.shape)}"))
    if offsets.shape[0] < least:
        raise ValueError(explain(name, "at least 1 element (sequences + 1)", 0))
    if length is not None and offsets.shape[0] != length:
        raise ValueError(explain(name, f"{length} elements (as {like})", offsets.shape[0]))
    if not offsets.is_contiguous():
        raise ValueError(explain(name, "a contiguous tensor", f"stride {offsets.stride(0)}"))


def check_grouping(cu_seqlens_context: Any, cu_seqs_per_context: Any, sequences: int, device: torch.device) -> None:
    """Check the two optional tensors that describe groups: both or neither, equally long."""
    if cu_seqlens_context is None and cu_seqs_per_context is None:
        return
    if cu_seqs_per_context is None:
        raise ValueError(explain("cu_seqs_per_context", "a tensor (cu_seqlens_context is given)", None))
    if cu_seqlens_context is None:
        raise ValueError(explain("cu_seqlens_context", "a tensor (cu_seqs_per_context is given)", None))
    check_offsets("cu_seqlens_context", cu_seqlens_context, device)
    groups = cu_seqlens_context.shape[0] - 1
    check_offsets("cu_seqs_per_context", cu_seqs_per_context, device, groups + 1, "cu_seqlens_context")
    if groups == 0 and sequences != 0:
        raise ValueError(explain("cu_seqlens_context", f"at least one context for {sequences} sequences", 0))


def check_shape(
    name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Check a tensor's device, dtype (None: any) and shape."""
    if tensor.device != device:
        raise ValueError(explain(name, f"device {device} (as q)", tensor.device))
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(explain(name, f"dtype {dtype}", tensor.dtype))
    if tensor.shape != shape:
        raise ValueError(explain(name, f"shape {shape}", f"shape {tuple(tensor.shape)}"))


def check_table(name: str, table: Tensor, device: torch.device) -> None:
    """Check a table of nodes: (n, 8) int32, contiguous."""
    check_shape(name, table, (table.shape[0] if table.dim() else 0, 8), device, torch.int32)
    if not table.is_contiguous():
        raise ValueError(explain(name, "a contiguous tensor", f"strides {table.stride()}"))


def resolve_softmax_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale of the scores: 1 / sqrt(head_dim) unless given, finite and positive.

    The kernels take the maximum of a row before they scale it, which only a positive scale allows.
    """
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    return number("softmax_scale", softmax_scale, expected="a float or None")


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Check sinks (H,), one for each head of q, or None."""
    if sinks is None:
        return
    check_are_tensors(("sinks",), (sinks,))
    if not sinks.is_floating_point():
        raise TypeError(explain("sinks", "a floating point tensor", sinks.dtype))
    if sinks.shape != (q.shape[1],):
        raise ValueError(explain("sinks", f"shape ({q.shape[1]},), the heads of q", tuple(sinks.shape)))
    if sinks.device != q.device:
        raise ValueError(explain("sinks", f"device {q.device} (as q)", sinks.device))


def is_kernel_softcap(softcap: float) -> bool:
    """True if the CUDA kernels have this softcap; 0 is none."""
    return softcap == 0.0 or KERNEL_SOFTCAPS[0] <= softcap <= KERNEL_SOFTCAPS[1]


def resolve_window(causal: Any, window_size: Any) -> tuple[bool, int]:
    """True if the mask is causal, and how many positions before its own a row sees (-1: all).

    As in FlashAttention, a window that ends with the row's own position is causality, and causality
    ends every window there.
    """
    flag("causal", causal)
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or any(isinstance(bound, bool) or not isinstance(bound, int) for bound in window_size):
        raise TypeError(explain("window_size", "two ints", type(window_size).__name__))
    left, right = window = tuple(window_size)
    if min(window) < -1 or max(window) >= 2**31:
        raise ValueError(explain("window_size", "two ints from -1 to 2**31 - 1", window))
    if right > 0 and not causal:
        expected = "-1 or 0 as its second number without causality (keys behind a row are seen all, or none)"
        raise NotImplementedError(explain("window_size", expected, window))
    return causal or right == 0, left


def check_unimplemented(dropout_p: Any, alibi_slopes: Any, block_table: Any) -> None:
    """NotImplementedError for options of FlashAttention that are not implemented here."""
    if number("dropout_p", dropout_p, zero=True, expected="a float") != 0.0:
        raise NotImplementedError(explain("dropout_p", "0.0 (dropout is not implemented)", dropout_p))
    for name, value, what in (("alibi_slopes", alibi_slopes, "ALiBi"), ("block_table", block_table, "paged KV")):
        if value is not None:
            raise NotImplementedError(explain(name, f"None ({what} is not implemented)", type(value).__name__))


def autocast(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cast to autocast's lower precision, as for PyTorch's attention; float64 stays."""
    device_type = "cuda" if tensors[0].is_cuda else tensors[0].device.type  # which takes the host longer
    if not torch.is_autocast_enabled(device_type):
        return [*tensors]
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) if _is_castable(tensor, device_type) else tensor for tensor in tensors]


def _is_castable(tensor: Tensor, device_type: str) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
