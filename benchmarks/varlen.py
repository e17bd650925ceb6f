"""Kernels for packed sequences that share nothing, by one signature: FlashAttention's, and plain PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from packing import Attention, cumulative, heads_first
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]

# By the word that names of implementations have: the module that is imported, and what is installed for it.
PACKAGES = {
    "fa4": ("flash_attn.cute", "flash-attn-4"),
    "flash_attn": ("flash_attn", "flash-attn"),
    "fa3": ("flash_attn_interface", "FlashAttention-3"),
    "prefix_grouper": ("prefix_grouper", "prefix-grouper"),
}


def is_importable(label: str) -> bool:
    """Whether the module is there: flash-attn-4 alone leaves a folder flash_attn that is not the flash_attn package."""
    try:
        spec = importlib.util.find_spec(PACKAGES[label][0])
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


@dataclass(frozen=True)
class VarlenCall:
    """Sequences of one call of a kernel."""

    tokens: int
    offsets: Tensor
    longest: int

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> VarlenCall:
        return VarlenCall(sum(lengths), cumulative(lengths, device), max(lengths))


def varlen_attention(kernel: VarlenKernel, calls: list[VarlenCall]) -> Attention:
    """Causal attention of each sequence with itself, in one call or in several one after another."""
    tokens = [call.tokens for call in calls]

    def one(call: VarlenCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, call.offsets, call.offsets, call.longest, call.longest)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(calls) == 1:  # splitting would cost the backward a copy
            return one(calls[0], q, k, v)
        return torch.cat([one(*call) for call in zip(calls, q.split(tokens), k.split(tokens), v.split(tokens))])

    return attention


def torch_varlen() -> VarlenKernel:
    """PyTorch's own FlashAttention-2 kernels."""
    from torch.nn.attention.varlen import varlen_attn

    # Newer versions want to be told about grouped heads, older ones do not know the argument, or no window.
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    options |= {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
        return cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options))

    return kernel


def package_varlen(label: str) -> VarlenKernel:
    """``flash_attn_varlen_func`` of a package: FlashAttention-2, -3 or -4, which name these arguments alike."""
    function = importlib.import_module(PACKAGES[label][0]).flash_attn_varlen_func

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
    ) -> Tensor:
        offsets, longest = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        out = function(q, k, v, **offsets, **longest, causal=True, **options)
        return out[0] if isinstance(out, tuple) else out

    return kernel


def math_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
    """The same contract in plain PyTorch, sequence by sequence, for machines without a GPU."""
    outs = []
    for query, key, value in zip(*(one.split(cu.diff().tolist()) for one, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))):
        mask = torch.ones(len(query), len(key), dtype=torch.bool, device=q.device).tril(len(key) - len(query))
        query, key, value = map(heads_first, (query, key, value))
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
