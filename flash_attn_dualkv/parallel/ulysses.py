# SPDX-License-Identifier: BSD-3-Clause
"""Ulysses sequence parallelism: each rank holds a slice of the row and attends to all of it.

Around attention, an all-to-all exchanges slices of rows for slices of heads: every rank gets all
rows of some heads, attends with the layout of the whole row, and sends the output back (Jacobs et
al., DeepSpeed Ulysses, 2023). Where there are fewer KV heads than ranks, heads are repeated side by
side, so that each rank gets those of its query heads; gradients of copies are summed in float32.

    batch = pack_shared_prompts(..., pad_to_multiple_of=dist.get_world_size(group))
    layout = UlyssesLayout.of(batch.layout, group)
    model(shard_rows(batch.input_ids, group)[None], position_ids=shard_rows(batch.position_ids, group)[None],
          shared_prompt_layout=layout, ...)

Works with any process group; needs no other library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, SharedPromptLayoutError
from ..host import untraced
from ..layout import SharedPromptLayout
from ..packed_attention import shared_prompt_attention
from .sharded import DividedLayout, Sum, all_gather, check_group, same_on_all_ranks


@dataclass(frozen=True, eq=False)
class UlyssesLayout(DividedLayout):
    """A layout whose rows are divided among a group's ranks: rank r has the r-th slice.

    Models of transformers take it as they take a `SharedPromptLayout`.

    Attributes:
        whole: what was divided: a whole row, or the rows that context parallelism gives to all ranks of the group.
    """

    whole: SharedPromptLayout | None = None

    @staticmethod
    @untraced
    @torch.inference_mode(False)  # autograd saves the tables
    def of(layout: SharedPromptLayout, group: dist.ProcessGroup) -> UlyssesLayout:
        """The layout of a whole packed row, or of a `ContextLayout`, divided among a group's ranks, which all call.

        Args:
            layout: with a number of rows that the ranks divide, by `pad_to_multiple_of` of the packing or of
                `ContextLayout.of`.
            group: of torch.distributed. Its ranks have the same rows of a `ContextLayout`.

        Raises:
            SharedPromptError: an argument is not as described; on all ranks, another one has failed, or rows or ids are
                not the same on all.
        """
        check_group(group)
        with same_on_all_ranks(group) as common:
            checks.instance("layout", layout, SharedPromptLayout, " (batch.layout)")
            if isinstance(layout, UlyssesLayout):
                raise SharedPromptLayoutError("layout", "one without Ulysses", "a UlyssesLayout")
            ranks, rows = dist.get_world_size(group), layout.num_local_tokens
            if rows % ranks:
                expected = f"a multiple of the {ranks} ranks as number of rows (pad_to_multiple_of={ranks})"
                raise SharedPromptLayoutError("layout", expected, rows)
            common.note(layout, getattr(layout, "head_groups", None))
            begin = dist.get_rank(group) * (rows // ranks)
            row_index = torch.arange(begin, begin + rows // ranks, device=layout.device)
            if isinstance(layout, DividedLayout) and layout.row_index is not None:
                common["row_index"] = layout.row_index
                row_index = layout.row_index.index_select(0, row_index)
            given = {field.name: getattr(layout, field.name) for field in fields(SharedPromptLayout)}
        # A rank's slice of the positions is not known by its memory; all of its rows stay.
        given.update(position_ids=None, late=None)
        return UlyssesLayout(**given, group=group, row_index=row_index, whole=layout)

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.group, *(self.whole.groups if isinstance(self.whole, DividedLayout) else ()))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return ulysses_attention(q, k, v, self, **options)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: UlyssesLayout, *, sinks: Tensor | None = None, **options: Any
) -> Tensor:
    """`shared_prompt_attention` of a packed row whose slices lie on the group's ranks.

    Every rank must call. The result does not depend on the number of ranks.

    Args:
        q: (T / ranks, H, d), this rank's slice of the row; H is a multiple of the ranks.
        k, v: (T / ranks, H_k, d) and (T / ranks, H_k, d_v); H is a multiple of H_k. There may be
            fewer KV heads than ranks.
        layout: of the whole row.
        sinks: (H,), all heads'; a rank's gradient is that of its own heads, zero for others.
        options: of `shared_prompt_attention`.

    Returns:
        out (T / ranks, H, d_v): this rank's slice.

    Raises:
        SharedPromptError: heads that cannot be divided, or what `shared_prompt_attention` raises.
    """
    checks.instance("layout", layout, UlyssesLayout)
    group = layout.group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % ranks:
        raise SharedPromptError("q", f"a number of heads that the {ranks} ranks divide", heads)
    if kv_heads < 1 or heads % kv_heads:
        raise SharedPromptError("k", f"a number of heads that divides q's {heads} heads", kv_heads)
    rows = layout.num_local_tokens
    if any(tensor.shape[0] != rows for tensor in (q, k, v)):
        got = ", ".join(str(tensor.shape[0]) for tensor in (q, k, v))
        raise SharedPromptLayoutError("layout", f"{rows} rows a rank in q, k and v", got)
    copies = math.lcm(kv_heads, ranks) // kv_heads
    # PyTorch sums the gradients of the copies in float32.
    k, v = (tensor.repeat_interleave(copies, 1) if copies > 1 else tensor for tensor in (k, v))
    parts = [tensor.unflatten(1, (ranks, -1)) for tensor in (q, k, v)]
    # One exchange for all three: their heads side by side, rank by rank. v may have a head
    # dimension of its own.
    exchanged = _Exchange.apply(torch.cat([part.flatten(2) for part in parts], 2).transpose(0, 1), group).flatten(0, 1)
    own_sinks = None if sinks is None else sinks.unflatten(0, (ranks, -1))[rank]
    pieces = exchanged.split([part.shape[2] * part.shape[3] for part in parts], 1)
    own_q, own_k, own_v = (piece.unflatten(1, like.shape[2:]) for piece, like in zip(pieces, parts))
    whole = layout.whole
    assert whole is not None
    options["sinks"] = own_sinks
    if isinstance(whole, DividedLayout):
        out = whole.attention(own_q, own_k, own_v, **options)
    else:
        out = shared_prompt_attention(own_q, own_k, own_v, whole, **options)
    return _Exchange.apply(out.unflatten(0, (ranks, rows)), group).transpose(0, 1).flatten(1, 2)


def shard_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice, a view, of (T, ...) values; T is a multiple of the ranks.

    Raises:
        SharedPromptError: an argument is not as described.
    """
    check_group(group)
    ranks = dist.get_world_size(group)
    checks.instance("values", values, Tensor)
    if values.dim() < 1 or values.shape[0] % ranks:
        raise SharedPromptError("values", f"a multiple of the {ranks} ranks as rows", tuple(values.shape))
    return values.unflatten(0, (ranks, -1))[dist.get_rank(group)]


def gather_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' slices one after the other: the inverse of `shard_rows`. Every rank must call.

    Differentiable: a rank's gradient is that of its slice, summed over what every rank does with
    the whole. Where all ranks compute the same loss of the whole, divide it by the number of ranks.

    Args:
        values: (T / ranks, ...), equally many rows on every rank.
    """
    check_group(group)
    checks.instance("values", values, Tensor)
    return _Gather.apply(values, group)


class _Exchange(torch.autograd.Function):
    """Block i of (ranks, ...) goes to rank i, the result's comes from there: self-inverse."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        result = torch.empty_like(blocks)
        dist.all_to_all_single(result, blocks, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather(values, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Few numbers a row; not every backend has a reduce_scatter.
        return shard_rows(Sum.apply(gradient, ctx.group), ctx.group), None
