"""FlexAttention with the mask of a packed micro-batch, on its own Triton kernels or on FlashAttention-4's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from packing import Arrangement, Attention, heads_first, packed_rows, spans
from shapes import Shape
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(shape: Shape, device: torch.device) -> MaskFunction:
    """Visibility in the packed layout in FlexAttention's form: (batch, head, query row, key row) -> visible.

    Rows are depth first: those that see a key are its own and the later ones up to the end of its node's subtree.
    """
    found = spans(shape)
    subtree_ends = torch.tensor([one.subtree_end for one in found], dtype=torch.int32).to(device)
    lengths = torch.tensor([one.length for one in found]).to(device)
    ends = subtree_ends.repeat_interleave(lengths, output_size=shape.packed_tokens)

    def mask(b: Tensor, h: Tensor, q_row: Tensor, kv_row: Tensor) -> Tensor:
        return (kv_row <= q_row) & (q_row < ends[kv_row])

    return mask


@functools.cache
def block_mask_function(is_cuda: bool) -> Any:
    """create_block_mask, compiled on a GPU: uncompiled it makes tensors of all pairs of tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=True) if is_cuda else create_block_mask


def packed_block_mask(shape: Shape, device: torch.device) -> Any:
    make, total = block_mask_function(device.type == "cuda"), shape.packed_tokens
    return make(mask_function(shape, device), 1, 1, total, total, device.type)


@functools.lru_cache(maxsize=1)
def block_mask_of_rounds(shape: Shape, device: torch.device) -> Any:
    """One for all rounds of a shape: with it there is one mask function, so one compilation of the attention."""
    return packed_block_mask(shape, device)


@functools.cache
def flex_function(is_cuda: bool, is_dynamic: bool = False) -> Any:
    """FlexAttention: compiled on a GPU, by default for each shape by itself, as its users are told to."""
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import flex_attention

    if not is_cuda:
        return flex_attention
    functorch_config.donated_buffer = False  # otherwise the backward cannot be timed alone, several times
    return torch.compile(flex_attention, dynamic=is_dynamic)


def flex_attend(block_mask: Any, on_fa4: bool, is_dynamic: bool = False) -> Attention:
    """Attention over packed rows; ``on_fa4``: on FlashAttention-4's kernels instead of Triton's."""
    options: dict[str, Any] = {"kernel_options": {"BACKEND": "FLASH"}} if on_fa4 else {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flex = flex_function(q.is_cuda, is_dynamic)
        if not q.is_cuda:  # there it has no backward and refuses inputs that ask for one
            q, k, v = (one.detach() for one in (q, k, v))
        is_grouped = q.shape[1] != k.shape[1]
        out: Tensor = flex(*map(heads_first, (q, k, v)), block_mask=block_mask, enable_gqa=is_grouped, **options)
        return out[0].transpose(0, 1)

    return attention


def arrange_flex(shape: Shape, device: torch.device, on_fa4: bool = False) -> Arrangement:
    return Arrangement(packed_rows(shape), flex_attend(block_mask_of_rounds(shape, device), on_fa4))
