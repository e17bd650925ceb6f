"""FlexAttention with the packed shared-prompt mask, on its own Triton kernels or on FlashAttention-4's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from packing import Arrangement, Attention, heads_first, packed_rows, spans
from shapes import Shape
from torch import Tensor
from torch.nn.functional import pad

FLEX_BLOCK = 128
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(shape: Shape, device: torch.device) -> MaskFunction:
    """Visibility in the packed layout in FlexAttention's form: (batch, head, query row, key row) -> visible."""
    found = spans(shape)
    table = torch.tensor([(index, one.prompt) for index, one in enumerate(found)], dtype=torch.int32).to(device)
    lengths = torch.tensor([one.length for one in found]).to(device)
    # Of every row its own span and that of its group's prompt.
    rows = table.repeat_interleave(lengths, dim=0, output_size=shape.packed_tokens)
    span, prompt = rows[:, 0].contiguous(), rows[:, 1].contiguous()

    def mask(b: Tensor, h: Tensor, q_row: Tensor, kv_row: Tensor) -> Tensor:
        kv_span = span[kv_row]
        return ((kv_span == span[q_row]) | (kv_span == prompt[q_row])) & (kv_row <= q_row)

    return mask


@functools.lru_cache(maxsize=1)
def packed_block_mask(shape: Shape, device: torch.device, block: int = FLEX_BLOCK) -> Any:
    """The BlockMask that create_block_mask would return, without ever holding T x T elements.

    One for all rounds of a shape: with it there is one mask function, so one compilation.
    """
    from torch.nn.attention.flex_attention import BlockMask

    total, mask = shape.packed_tokens, mask_function(shape, device)
    keys, zero = torch.arange(total, device=device), torch.zeros((), dtype=torch.int64, device=device)
    parts = []
    for rows in keys.split(16 * block):
        visible = mask(zero, zero, rows[:, None], keys)
        visible = pad(visible, (0, -total % block, 0, -len(rows) % block))  # a ragged last block is never full
        parts.append(visible.unflatten(1, (-1, block)).unflatten(0, (-1, block)).sum(dim=(1, 3)))
    counts = torch.cat(parts)
    full = counts == block * block
    partial = ordered_blocks((counts > 0) & ~full)
    return BlockMask.from_kv_blocks(*partial, *ordered_blocks(full), block, mask, seq_lengths=(total, total))


def ordered_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(Q blocks, KV blocks) bool to FlexAttention's counts and index lists, each with leading (1, 1)."""
    counts = chosen.sum(dim=-1, dtype=torch.int32)
    indices = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices.contiguous()[None, None]


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
    return Arrangement(packed_rows(shape), flex_attend(packed_block_mask(shape, device), on_fa4))
