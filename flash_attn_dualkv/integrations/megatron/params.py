# SPDX-License-Identifier: BSD-3-Clause
"""What a packed micro-batch is to Megatron-Core: one sequence of its thd format, with the layout beside it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ... import checks
from ...checks import explain
from ...data.batch import PackedBatch
from ...errors import SharedPromptLayoutError
from ...layout import SharedPromptLayout


class SharedPackedSeqParams(PackedSeqParams):
    """`packed_seq_params` of a packed micro-batch: thd, one run of T rows, and the layout that says who sees whom.

    Megatron hands the object on to every layer, through recomputation and pipeline stages, and reads `cu_seqlens_q`,
    `cu_seqlens_kv` = [0, T]. Nothing that knows of layouts reads `max_seqlen_q` or `max_seqlen_kv`. Attention of
    Transformer Engine does, and so does a RoPE that was not installed: to them the row would be one long sequence, so
    that they get an error instead.

    Args:
        batch: from `pack_shared_prompts` or `pack_prefix_tree`, or its layout; on the model's device.

    Raises:
        SharedPromptError: an argument is not as described.
        SharedPromptLayoutError: a layout that does not know the positions of its batch; from what attends or rotates
            without the layout.
    """

    def __init__(self, batch: PackedBatch | SharedPromptLayout) -> None:
        if isinstance(batch, SharedPromptLayout):
            layout = batch
        else:
            layout = checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts) or its layout").layout
        if layout.position_ids is None:
            expected = "one that knows the positions of its batch (batch.layout of batch.to(device))"
            raise SharedPromptLayoutError(explain("layout", expected, "a copy without them"))
        # No copy from the host, which would wait for the GPU.
        ends = torch.arange(2, dtype=torch.int32, device=layout.device) * layout.num_tokens
        self.qkv_format = "thd"
        self.cu_seqlens_q = self.cu_seqlens_kv = ends
        self.layout = layout

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout.num_tokens} rows of {self.layout.num_nodes} nodes)"

    def _unknown(self) -> NoReturn:
        expected = "layers that flash_attn_dualkv.integrations.megatron.install(model_chunks) has prepared"
        got = "an attention or a RoPE that knows nothing of the layout, for which the row is one long sequence"
        raise SharedPromptLayoutError(explain("packed_seq_params", expected, got))

    # AttributeError would be taken for a missing attribute by some; this one is seen.
    max_seqlen_q: Any = property(_unknown)
    max_seqlen_kv: Any = property(_unknown)
