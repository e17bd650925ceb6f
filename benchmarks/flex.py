"""FlexAttention with the packed shared-prompt mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from packing import Prepared, Source, fold_packed, heads_first, leaf, spans
from shapes import Shape
from torch import Tensor
from torch.nn.functional import pad

FLEX_BLOCK = 128


@dataclass(frozen=True)
class PackedMask:
    """Visibility in the packed layout, per row: its own span and its group's prompt. All int32 (T,)."""

    span: Tensor
    prompt: Tensor
    begin: Tensor
    prompt_begin: Tensor
    prompt_end: Tensor

    def function(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The mask function in FlexAttention's form: (batch, head, query row, key row) -> visible."""
        span, prompt = self.span, self.prompt

        def mask(b: Tensor, h: Tensor, q_row: Tensor, kv_row: Tensor) -> Tensor:
            kv_span = span[kv_row]
            return ((kv_span == span[q_row]) | (kv_span == prompt[q_row])) & (kv_row <= q_row)

        return mask

    @staticmethod
    def of(shape: Shape, device: torch.device) -> PackedMask:
        all_spans = spans(shape)
        columns = torch.tensor(
            [
                (index, span.prompt, span.begin, all_spans[span.prompt].begin, all_spans[span.prompt].end)
                for index, span in enumerate(all_spans)
            ],
            dtype=torch.int32,
        )
        lengths = torch.tensor([span.end - span.begin for span in all_spans])
        return PackedMask(*(column.to(device) for column in columns.repeat_interleave(lengths, dim=0).T.contiguous()))

    def visible_in_blocks(self, rows: Tensor, block: int) -> Tensor:
        """Keys that each row sees in each block of keys, (rows, blocks) int64."""
        low = torch.arange(0, self.span.numel(), block, device=rows.device)

        def overlap(begin: Tensor, end: Tensor) -> Tensor:
            left, right = torch.maximum(begin[:, None], low), torch.minimum(end[:, None], low + block)
            return (right - left).clamp_min_(0)

        own = overlap(self.begin[rows], rows + 1)
        is_response = self.span[rows] != self.prompt[rows]
        return own + overlap(self.prompt_begin[rows], self.prompt_end[rows]) * is_response[:, None]

    def block_mask(self, block: int = FLEX_BLOCK) -> Any:
        """The BlockMask that create_block_mask would return, without ever holding T x T elements."""
        from torch.nn.attention.flex_attention import BlockMask

        total = self.span.numel()
        partial, full = [], []
        for begin in range(0, total, 64 * block):
            rows = torch.arange(begin, min(begin + 64 * block, total), device=self.span.device)
            counts = self.visible_in_blocks(rows, block)
            missing = -len(rows) % block  # rows after the last are hidden: a ragged last block is never full
            counts = pad(counts, (0, 0, 0, missing)).unflatten(0, (-1, block))
            is_full = (counts == block).all(dim=1)
            full.append(is_full)
            partial.append(counts.any(dim=1) & ~is_full)
        lists = [ordered_blocks(torch.cat(kind)) for kind in (partial, full)]
        (partial_count, partial_index), (full_count, full_index) = lists
        return BlockMask.from_kv_blocks(
            partial_count, partial_index, full_count, full_index, block, self.function(), seq_lengths=(total, total)
        )


@functools.lru_cache(maxsize=1)
def packed_block_mask(shape: Shape, device: torch.device) -> Any:
    """One BlockMask (and one mask function, so one compilation) for all rounds of a shape."""
    return PackedMask.of(shape, device).block_mask()


def ordered_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(Q blocks, KV blocks) bool to FlexAttention's counts and index lists, each with leading (1, 1)."""
    counts = chosen.sum(dim=-1, dtype=torch.int32)
    indices = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices.contiguous()[None, None]


@functools.cache
def compiled_flex_attention() -> Any:
    """FlexAttention compiled for each shape by itself, as its users are told to."""
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import flex_attention

    functorch_config.donated_buffer = False  # otherwise the backward cannot be timed alone, several times
    return torch.compile(flex_attention, dynamic=False)


def build_flex(source: Source) -> Prepared:
    """FlexAttention with the packed shared-prompt mask; compiled on a GPU, eager elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    is_cuda = source.device.type == "cuda"
    flex: Any = compiled_flex_attention() if is_cuda else flex_attention
    block_mask = packed_block_mask(source.shape, source.device)
    is_grouped = source.shape.heads != source.shape.kv_heads
    # on the CPU it has no backward and refuses inputs that ask for one
    q, k, v = (leaf(tensor).requires_grad_(is_cuda) for tensor in (source.q, source.k, source.v))

    def run() -> Tensor:
        return flex(*map(heads_first, (q, k, v)), block_mask=block_mask, enable_gqa=is_grouped)

    return Prepared(
        (q, k, v), heads_first(source.dout), run, lambda out, which: out[0, :, which].transpose(0, 1), fold_packed
    )
