# SPDX-License-Identifier: BSD-3-Clause
"""A packed micro-batch as Megatron-Core sees it: one sequence of its thd format, with the layout beside it."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ... import checks
from ...data.batch import PackedBatch
from ...errors import SharedPromptLayoutError
from ...layout import SharedPromptLayout
from ...parallel.context import ContextLayout
from ...parallel.sharded import check_divided


class SharedPackedSeqParams(PackedSeqParams):
    """`packed_seq_params` of a packed micro-batch: thd, one run of T rows, and the layout that says who sees whom.

    Megatron hands the object on to every layer, through recomputation and pipeline stages, and reads `cu_seqlens_q`,
    `cu_seqlens_kv` = [0, T]. Nothing that knows of layouts reads `max_seqlen_q` or `max_seqlen_kv`. Attention of
    Transformer Engine does, and so does a RoPE that was not installed: to them the row would be one long sequence, so
    that they get an error instead.

    With context parallelism each rank has some runs of the T rows; `divided_layout` says which.

    Attributes:
        layout: of the row, divided or not. L: how many of its rows this rank has, T if it is not divided.
        position_ids: (L,) int64, or (n, L), of these rows; without division a view of the batch's.

    Args:
        batch: from `pack_shared_prompts` or `pack_prefix_tree`, or its layout; on the model's device.
        layout: of the batch, divided among the ranks of Megatron's context-parallel group; an even number of rows each.

    Raises:
        SharedPromptError: an argument is not as described.
        SharedPromptLayoutError: a layout that does not know the positions of its batch; from what attends or rotates
            without the layout.
    """

    def __init__(self, batch: PackedBatch | SharedPromptLayout, layout: ContextLayout | None = None) -> None:
        if isinstance(batch, SharedPromptLayout):
            whole = batch
        else:
            whole = checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts) or its layout").layout
        if whole.position_ids is None:
            expected = "one that knows the positions of its batch (batch.layout of batch.to(device))"
            raise SharedPromptLayoutError("layout", expected, "a copy without them")
        self.layout: SharedPromptLayout = whole
        self.position_ids: Tensor = whole.position_ids
        self.num_ranks = 1
        if layout is not None:
            checks.instance("layout", layout, ContextLayout, " (of ContextLayout.of)")
            check_divided(layout, whole)
            if layout.num_local_tokens % 2:
                expected = "an even number of rows a rank (pad_to_multiple_of=2), which Megatron's RoPE halves"
                raise SharedPromptLayoutError("layout", expected, layout.num_local_tokens)
            self.layout, self.num_ranks = layout, layout.num_ranks
            self.position_ids = layout.shard(whole.position_ids, dim=-1)
        # Megatron counts the rows of all ranks. A copy from the host would wait for the GPU.
        rows = self.layout.num_local_tokens * self.num_ranks
        ends = torch.arange(2, dtype=torch.int32, device=whole.device) * rows
        self.qkv_format = "thd"
        self.cu_seqlens_q = self.cu_seqlens_kv = ends

    def rotary_positions(self) -> Tensor:
        """(rows of all ranks,) positions, of which Megatron's RoPE takes two slices, those of this rank.

        Of 2 R slices rank r takes the r-th and the r-th from the end; others are never read.
        """
        own = self.position_ids
        if own.dim() != 1:
            raise SharedPromptLayoutError("layout", "positions of text for this RoPE", "several a token")
        if not isinstance(self.layout, ContextLayout):
            return own
        rank = torch.distributed.get_rank(self.layout.group)
        slices = own.new_zeros(2 * self.num_ranks, len(own) // 2)
        slices[rank], slices[-1 - rank] = own.chunk(2)
        return slices.flatten()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout.num_tokens} rows of {self.layout.num_nodes} nodes)"

    def _unknown(self) -> NoReturn:
        expected = "layers that flash_attn_dualkv.integrations.megatron.install(model_chunks) has prepared"
        got = "an attention or a RoPE that knows nothing of the layout, for which the row is one long sequence"
        raise SharedPromptLayoutError("packed_seq_params", expected, got)

    # AttributeError would be taken for a missing attribute by some; this one is seen.
    max_seqlen_q: Any = property(_unknown)
    max_seqlen_kv: Any = property(_unknown)


def divided_layout(batch: PackedBatch, group: Any, tensor_parallel: int = 1) -> ContextLayout:
    """A batch's rows, divided among Megatron's context-parallel ranks.

    Args:
        group: `parallel_state.get_context_parallel_group()`.
        tensor_parallel: ranks of sequence parallelism, which divide the rows of each; 1 without.
    """
    return ContextLayout.of(batch.layout, group, pad_to_multiple_of=math.lcm(2, tensor_parallel))
