# SPDX-License-Identifier: BSD-3-Clause
"""Models that are measured: those of `flash_attn_dualkv.predict`, and families of transformers whose layers differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flash_attn_dualkv.cli.predict import MODELS, ModelShape


@dataclass(frozen=True, kw_only=True)
class FamilyModel(ModelShape):
    """A decoder of transformers that is compared with itself, prompts replicated. Sizes are the published checkpoint's.

    Attributes:
        model_type, options: of transformers' configuration, beside the sizes that `ModelShape` has.
        stock: attention of the stock model, by transformers' names.
        sequences: of a micro-batch of the stock model.
        largest_difference: between log-probabilities of two implementations, over their spread; larger for experts,
            where a rounding changes which of them a token is sent to.
    """

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stock: tuple[str, ...] = ("sdpa",)
    sequences: int = 4
    largest_difference: float = 0.2


@dataclass(frozen=True, kw_only=True)
class VisionModel(FamilyModel):
    """One that sees images too, with its tower: each prompt has them at these places.

    Attributes:
        vision: of the tower's configuration.
        places: where in a prompt an image's tokens begin.
        grid: the patches of each image: frames, rows and columns.
    """

    vision: Mapping[str, Any]
    places: tuple[int, ...] = (256, 1536)
    grid: tuple[int, int, int] = (1, 64, 64)

    @property
    def placeholder(self) -> int:
        """The last token of the vocabulary; that of videos is in front of it, and text has neither."""
        return self.vocab - 1

    @property
    def patch_values(self) -> int:
        """Values of a patch: two frames in three colours."""
        return 3 * 2 * int(self.vision["patch_size"]) ** 2


FAMILIES = {
    "gpt-oss-20b": FamilyModel(
        24, 2880, 2880, heads=64, kv_heads=8, head_dim=64, qk_norm=False, vocab=201088,
        model_type="gpt_oss",
        options=dict(
            num_local_experts=32, num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072
        ),
        # sdpa has no sinks, and eager attention keeps every score; transformers names
        # FlashAttention-4 for this model.
        stock=("flash_attention_4",),
        sequences=2,
        largest_difference=0.5,
    ),
    "gemma3-4b": FamilyModel(
        34, 2560, 10240, heads=8, kv_heads=4, head_dim=256, vocab=262208, tied=True,
        model_type="gemma3_text",
        options=dict(sliding_window=1024, query_pre_attn_scalar=256),
    ),
    "qwen3.5-4b": FamilyModel(
        32, 2560, 9216, heads=16, kv_heads=4, head_dim=256, vocab=248320, tied=True,
        model_type="qwen3_5_text",
        options=dict(
            linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        ),
    ),
    # The sizes of Moonlight-16B-A3B.
    "deepseek-16b-a3b": FamilyModel(
        27, 2048, 11264, heads=16, kv_heads=16, head_dim=192, qk_norm=False, vocab=163840,
        model_type="deepseek_v3",
        options=dict(
            head_dim=64, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=512, q_lora_rank=None,
            n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, n_group=1,
            topk_group=1, first_k_dense_replace=1, num_mtp_layers=0,
        ),
        largest_difference=0.5,
    ),
}  # fmt: skip
# Layers before which rows leave that nobody reads: those that have the keys of earlier ones, or
# the last one.
UNREAD = {
    "llama3.2-1b": FamilyModel(
        16, 2048, 8192, heads=32, kv_heads=8, head_dim=64, qk_norm=False, vocab=128256, tied=True,
        model_type="llama",
    ),
    "gemma4-e2b": FamilyModel(
        35, 1536, 6144, heads=8, kv_heads=1, head_dim=256, vocab=262144, tied=True,
        model_type="gemma4_text",
        options=dict(
            global_head_dim=512, sliding_window=512, layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
            num_kv_shared_layers=20, use_double_wide_mlp=True, hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=262144, final_logit_softcapping=30.0,
        ),
    ),
}  # fmt: skip
# Two images of 1K tokens in a prompt of 4K.
VISION = {
    "qwen3-vl-8b": VisionModel(
        36, 4096, 12288, heads=32, kv_heads=8, head_dim=128, vocab=151936,
        model_type="qwen3_vl",
        options=dict(rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20])),
        vision=dict(
            depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16, out_hidden_size=4096,
            num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24],
        ),
        sequences=16,  # as many as are packed: the memory of one is compared with that of the other
    ),
}  # fmt: skip
ALL_MODELS: dict[str, ModelShape] = {
    **MODELS,
    **FAMILIES,
    **UNREAD,
    **VISION,
    "tiny": ModelShape(2, 48, 80, heads=4, kv_heads=2, head_dim=16, vocab=97),
}
DEFAULT_MODEL = "qwen3-8b"
