# SPDX-License-Identifier: BSD-3-Clause
"""Shared prompts in Megatron-Core: its GPTModel on packed rows, over tensor, pipeline and context parallelism.

    install(model_chunks)  # once, after the model is built; calls without a layout do not change

    def forward_step(batches, chunk):
        batch = next(batches)  # of pack_shared_prompts or pack_prefix_tree
        return shared_prompt_forward(chunk, batch), lambda scores: loss_of(*scores)

Programs that call the model themselves pass packed_seq_params=SharedPackedSeqParams(batch). Made for megatron-core 0.18
and 0.19; docs/megatron.md.
"""

from ..common.versions import MEGATRON_CORE

MEGATRON_CORE.check_version()  # first: another version may lack what is imported below

from .attention import SharedPromptAttention, get_gpt_layer_shared_prompt_spec  # noqa: E402
from .forward import score_logits, shared_prompt_forward, shared_prompt_values  # noqa: E402
from .install import install  # noqa: E402
from .params import SharedPackedSeqParams, divided_layout  # noqa: E402
from .routes import recorded_routes, replay_routes  # noqa: E402

__all__ = [
    "SharedPackedSeqParams",
    "SharedPromptAttention",
    "divided_layout",
    "get_gpt_layer_shared_prompt_spec",
    "install",
    "recorded_routes",
    "replay_routes",
    "score_logits",
    "shared_prompt_forward",
    "shared_prompt_values",
]
