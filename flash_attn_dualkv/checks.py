"""Argument checks: each violated precondition is an error that names the argument, what was expected and what was got.

Nothing here reads the contents of a tensor, so the checks neither synchronise with a device nor break a trace.
The values of offset tensors are checked in `nodes.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 512
PORTABLE_HEAD_DIM = 256  # the largest of the kernels that are not Hopper's alone
KERNEL_SOFTCAPS = (0.01, 1000.0)  # the least and the largest of the CUDA kernels; csrc/core/softcap.h says why
HEAD_DIM_MULTIPLE = 8
# Logical positions and rows of two tensors of keys are int32 sums.
MAX_ROWS = 2**30

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def explain(name: str, expected: object, got: object) -> str:
    """The wording of every argument error."""
    return f"{name}: expected {expected}, got {got}"


def check_are_tensors(names: Sequence[str], values: Sequence[Any]) -> None:
    """TypeError unless every value is a tensor."""
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            raise TypeError(explain(name, "a torch.Tensor", type(value).__name__))


def check_device(name: str, tensor: Tensor) -> None:
    """ValueError unless the tensor is on an NVIDIA GPU or on the CPU."""
    kind = tensor.device.type
    if kind == "cuda":
        if torch.version.hip is not None:
            raise ValueError(explain(name, "an NVIDIA CUDA or CPU tensor", f"{tensor.device} of ROCm (unsupported)"))
    elif kind != "cpu":
        raise ValueError(explain(name, "an NVIDIA CUDA or CPU tensor", f"device {tensor.device} (unsupported)"))


def check_alike(names: Sequence[str], tensors: Sequence[Tensor], allowed: Sequence[torch.dtype] | None = None) -> None:
    """Check rank, dtype, device, strides and rows of q, k and v tensors; the first one sets dtype and device.

    `allowed` are the dtypes of whoever computes; None for those of the device's own implementation.
    """
    dtype, device = tensors[0].dtype, tensors[0].device
    if allowed is None:
        allowed = CUDA_DTYPES if device.type == "cuda" else CPU_DTYPES
    if dtype not in allowed:
        expected = " or ".join(str(one) for one in allowed)
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
        if tensor.stride(2) != 1 and shape[2] != 1 and tensor.numel() != 0:
            raise ValueError(explain(name, "a contiguous last dimension (stride 1)", f"stride {tensor.stride(2)}"))


def check_query_shape(q: Tensor) -> None:
    """Check heads and head dimension of q (total_q, H, d)."""
    _, heads, head_dim = q.shape
    if heads < 1:
        raise ValueError(explain("q", "at least one head", f"shape {tuple(q.shape)}"))
    _check_head_dim("q", head_dim)


def _check_head_dim(name: str, head_dim: int) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(explain(name, f"a head dimension of at most {MAX_HEAD_DIM}", head_dim))
    if head_dim < 1 or head_dim % HEAD_DIM_MULTIPLE != 0:
        raise ValueError(explain(name, f"a head dimension that is a multiple of {HEAD_DIM_MULTIPLE}", head_dim))


def check_pair_shape(q: Tensor, k_name: str, k: Tensor, v_name: str, v: Tensor) -> None:
    """Check one pair k (rows, H_k, d), v (rows, H_k, d_v) against q (total_q, H, d)."""
    rows, kv_heads, head_dim = k.shape
    if head_dim != q.shape[2]:
        raise ValueError(explain(k_name, f"head dimension {q.shape[2]} (as q)", head_dim))
    if kv_heads < 1 or q.shape[1] % kv_heads != 0:
        expected = f"a number of heads that divides q's {q.shape[1]} heads"
        raise ValueError(explain(k_name, expected, kv_heads))
    if v.shape[0] != rows:
        raise ValueError(explain(v_name, f"{rows} rows (as {k_name})", v.shape[0]))
    if v.shape[1] != kv_heads:
        raise ValueError(explain(v_name, f"{kv_heads} heads (as {k_name})", v.shape[1]))
    _check_head_dim(v_name, v.shape[2])


def check_same_width(name: str, v: Tensor, other_name: str, other: Tensor) -> None:
    """ValueError unless both have one head dimension."""
    if v.shape[2] != other.shape[2]:
        raise ValueError(explain(name, f"head dimension {other.shape[2]} (as {other_name})", v.shape[2]))


def check_apart(k_name: str, k: Tensor, context_name: str, context: Tensor) -> None:
    """ValueError for keys that begin with the context's own rows: `k` where `k[context_seqlen:]` is meant.

    Offsets may end before the tensors do, so the rows behind would pass for padding.
    """
    if k.shape[0] and context.shape[0] and address(k) == address(context) is not None:
        expected = f"the rows behind the context, such as k[{context.shape[0]}:]"
        raise ValueError(explain(k_name, expected, f"a tensor that begins with the rows of {context_name}"))


def address(tensor: Tensor) -> int | None:
    """Where a tensor lies in memory; None where that cannot be known: in traces, and for wrappers."""
    if type(tensor) is not Tensor or torch.compiler.is_compiling():
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # function transforms wrap tensors without memory of their own
        return None


def check_same_heads(k_name: str, k: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two key tensors have the same number of heads."""
    if k.shape[1] != other.shape[1]:
        raise ValueError(explain(k_name, f"{other.shape[1]} heads (as {other_name})", k.shape[1]))


def check_offsets(
    name: str, offsets: Any, device: torch.device, length: int | None = None, like: str = "", least: int = 1
) -> None:
    """Check a tensor of offsets: int32, contiguous, one dimension, on `device`, `length` elements (as `like`)."""
    if not isinstance(offsets, Tensor):
        raise TypeError(explain(name, "a torch.Tensor", type(offsets).__name__))
    if offsets.dtype != torch.int32:
        raise TypeError(explain(name, "dtype torch.int32", offsets.dtype))
    if offsets.device != device:
        raise ValueError(explain(name, f"device {device} (as q)", offsets.device))
    if offsets.dim() != 1:
        raise ValueError(explain(name, "1 dimension", f"shape {tuple(offsets.shape)}"))
    if offsets.shape[0] < least:
        raise ValueError(explain(name, "at least 1 element (sequences + 1)", 0))
    if length is not None and offsets.shape[0] != length:
        raise ValueError(explain(name, f"{length} elements (as {like})", offsets.shape[0]))
    if not offsets.is_contiguous():
        raise ValueError(explain(name, "a contiguous tensor", f"stride {offsets.stride(0)}"))


def check_grouping(cu_seqlens_context: Any, cu_seqs_per_context: Any, sequences: int, device: torch.device) -> None:
    """Check the two optional tensors that describe several groups: both or neither, equally long."""
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


def check_length(name: str, value: Any) -> None:
    """Check a length given as a number: an int (not a bool, not a tensor), not negative."""
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise TypeError(explain(name, "an int", type(value).__name__)) from None
    if value < 0:
        raise ValueError(explain(name, "an int >= 0", value))


def check_context_length(context_seqlen: int, rows: int) -> None:
    """Check that, with a single context, its length is the number of its rows."""
    if context_seqlen != rows:
        expected = f"{rows} (the rows of k_context, as cu_seqlens_context is not given)"
        raise ValueError(explain("context_seqlen", expected, context_seqlen))


def check_flag(name: str, value: Any) -> None:
    """TypeError unless the value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(explain(name, "a bool", type(value).__name__))


def resolve_softmax_scale(softmax_scale: Any, head_dim: int) -> float:
    """The scale of the scores: 1 / sqrt(head_dim) unless given, finite and positive.

    The kernels take the maximum of a row before they scale it, which only a positive scale allows.
    """
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(explain("softmax_scale", "a float or None", type(softmax_scale).__name__))
    if not 0.0 < softmax_scale < math.inf:
        raise ValueError(explain("softmax_scale", "a finite number > 0", softmax_scale))
    return float(softmax_scale)


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
    """Whether the CUDA kernels have this softcap; 0 is none."""
    return softcap == 0.0 or KERNEL_SOFTCAPS[0] <= softcap <= KERNEL_SOFTCAPS[1]


def resolve_softcap(softcap: Any) -> float:
    """The bound of the scores, finite and >= 0; 0 for none."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(explain("softcap", "a float", type(softcap).__name__))
    if not 0.0 <= softcap < math.inf:
        raise ValueError(explain("softcap", "a finite number >= 0", softcap))
    return float(softcap)


def resolve_variant(causal: bool, window_size: Any, softcap: Any) -> tuple[bool, int, float]:
    """Whether the mask is causal, how many positions before its own a row sees (-1: all), and the softcap.

    As in FlashAttention, a window that ends with the row's own position is causality.
    """
    cap = resolve_softcap(softcap)
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or any(isinstance(one, bool) or not isinstance(one, int) for one in window_size):
        raise TypeError(explain("window_size", "two ints", type(window_size).__name__))
    left, right = window = tuple(window_size)
    if min(window) < -1 or max(window) >= 2**31:
        raise ValueError(explain("window_size", "two ints from -1 to 2**31 - 1", window))
    if right > 0:
        expected = "-1 or 0 as its second number (a window that ends behind a row is not implemented)"
        raise NotImplementedError(explain("window_size", expected, window))
    return causal or right == 0, left, cap


def check_unimplemented(dropout_p: Any, alibi_slopes: Any, block_table: Any) -> None:
    """NotImplementedError for the options of FlashAttention that this library does not implement."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(explain("dropout_p", "a float", type(dropout_p).__name__))
    if dropout_p != 0.0:
        raise NotImplementedError(explain("dropout_p", "0.0 (dropout is not implemented)", dropout_p))
    if alibi_slopes is not None:
        raise NotImplementedError(
            explain("alibi_slopes", "None (ALiBi is not implemented)", type(alibi_slopes).__name__)
        )
    if block_table is not None:
        raise NotImplementedError(
            explain("block_table", "None (paged KV is not implemented)", type(block_table).__name__)
        )


def autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast as autocast does for PyTorch's own attention: floating point, other than float64, to its lower precision."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(one.to(dtype) if _is_castable(one, device_type) else one for one in tensors)


def _is_castable(tensor: Tensor, device_type: str) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
