"""Models whose layers are not all alike: their public configurations, and how much of their work is counted.

A model is written out with the sizes of its published checkpoint. ``L12`` in front of a shape's name leaves it the
first 12 layers, for what does not fit a GPU whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flash_attn_dualkv.predict import TOKEN_BACKWARD_OVER_FORWARD, ModelShape, attention_flops

FULL, WINDOW, LINEAR = "full", "window", "linear"


@dataclass(frozen=True, kw_only=True)
class FamilyModel(ModelShape):
    """A decoder whose layers mix tokens in several ways.

    Attributes:
        model_type, options: of transformers' configuration, beside the sizes that `ModelShape` has.
        pattern: what the layers mix tokens with, again and again: FULL or WINDOW attention, or LINEAR.
        mixers: weights that mix tokens, of a layer of each kind.
        mlp: weights of a layer's MLP that a token is multiplied with: of experts, those that it is sent to.
        window: keys that a token of a WINDOW layer sees.
        head_dim_v: of values; 0 for that of queries and keys.
        stock: what the stock model is measured on, by transformers' names.
        sequences: of a micro-batch of the stock model.
        largest_difference: between log-probabilities of two implementations, over their spread; of experts more, since
            a rounding can turn over to which of them a token is sent.
    """

    model_type: str
    mixers: Mapping[str, int]
    mlp: int
    pattern: tuple[str, ...] = (FULL,)
    window: int = 0
    head_dim_v: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    stock: tuple[str, ...] = ("sdpa",)
    sequences: int = 4
    largest_difference: float = 0.2

    @property
    def kinds(self) -> list[str]:
        """Of every layer."""
        return [self.pattern[index % len(self.pattern)] for index in range(self.layers)]

    def layers_flops(self, tokens: int, pairs: int, direction: str) -> float:
        """Of all layers. Not counted: what is element-wise, the recurrence of LINEAR layers.

        In a WINDOW layer every token counts with a whole window, if there are that many pairs.
        """
        kinds = self.kinds
        weights = sum(self.mixers[kind] + self.mlp for kind in kinds)
        seen = kinds.count(FULL) * pairs + kinds.count(WINDOW) * min(pairs, tokens * self.window)
        value_dim = self.head_dim_v or self.head_dim
        of_qk, of_v, factor = (1, 1, 1.0) if direction == "forward" else (3, 2, TOKEN_BACKWARD_OVER_FORWARD)
        width = (of_qk * self.head_dim + of_v * value_dim) / ((of_qk + of_v) * self.head_dim)
        return 2 * weights * tokens * factor + width * attention_flops(self.heads, self.head_dim, seen, direction)


def with_layers(model: ModelShape, layers: int) -> ModelShape:
    """The model's first layers.

    Raises:
        ValueError: it has not so many.
    """
    if not 1 <= layers <= model.layers:
        raise ValueError(f"layers: expected 1 to {model.layers}, got {layers}")
    return replace(model, layers=layers)


GPT_OSS_20B = FamilyModel(
    24, 2880, 2880, heads=64, kv_heads=8, head_dim=64, qk_norm=False, vocab=201088,
    model_type="gpt_oss",
    pattern=(WINDOW, FULL),
    window=128,
    mixers=dict.fromkeys((WINDOW, FULL), 2880 * (64 + 2 * 8 + 64) * 64),
    mlp=4 * 3 * 2880 * 2880 + 2880 * 32,
    options=dict(
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072
    ),
    # sdpa has no sinks, and eager attention keeps every score; transformers names FlashAttention-4 for this model.
    stock=("flash_attention_4", "flex_attention"),
    sequences=2,
    largest_difference=0.5,
)  # fmt: skip
GEMMA3_4B = FamilyModel(
    34, 2560, 10240, heads=8, kv_heads=4, head_dim=256, vocab=262208, tied=True,
    model_type="gemma3_text",
    pattern=(WINDOW,) * 5 + (FULL,),
    window=1024,
    mixers=dict.fromkeys((WINDOW, FULL), 2560 * (8 + 2 * 4 + 8) * 256),
    mlp=3 * 2560 * 10240,
    options=dict(sliding_window=1024, query_pre_attn_scalar=256),
    stock=("sdpa", "flex_attention"),  # transformers takes sdpa, which computes all pairs of a window's mask
)  # fmt: skip
QWEN35_4B = FamilyModel(
    32, 2560, 9216, heads=16, kv_heads=4, head_dim=256, vocab=248320, tied=True,
    model_type="qwen3_5_text",
    pattern=(LINEAR,) * 3 + (FULL,),
    # Queries come with a gate of the same width.
    mixers={FULL: 2560 * (2 * 16 + 2 * 4 + 16) * 256, LINEAR: 2560 * (2 * 16 + 3 * 32) * 128 + 2 * 2560 * 32},
    mlp=3 * 2560 * 9216,
    options=dict(
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
)  # fmt: skip
# The sizes of Moonlight-16B-A3B. Its first layer is dense, of as many weights as a token's experts have.
DEEPSEEK_16B = FamilyModel(
    27, 2048, 11264, heads=16, kv_heads=16, head_dim=192, qk_norm=False, vocab=163840,
    model_type="deepseek_v3",
    head_dim_v=128,
    mixers={FULL: 2048 * (16 * 192 + 512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048},
    mlp=3 * 2048 * 1408 * (6 + 2) + 2048 * 64,
    options=dict(
        head_dim=64, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=512, q_lora_rank=None,
        n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, n_group=1,
        topk_group=1, first_k_dense_replace=1, num_mtp_layers=0,
    ),
    largest_difference=0.5,
)  # fmt: skip
FAMILIES: dict[str, FamilyModel] = {
    "gpt-oss-20b": GPT_OSS_20B,
    "gemma3-4b": GEMMA3_4B,
    "qwen3.5-4b": QWEN35_4B,
    "deepseek-16b-a3b": DEEPSEEK_16B,
}

_TINY: dict[str, Any] = dict(
    hidden=48, intermediate=32, heads=4, kv_heads=2, head_dim=16, vocab=97, sequences=2,
    mixers={FULL: 4096, WINDOW: 4096, LINEAR: 4096}, mlp=4608,
)  # fmt: skip
TINY: dict[str, FamilyModel] = {
    "tiny-gpt-oss": replace(
        GPT_OSS_20B, **_TINY, layers=2, window=20, stock=("eager",),
        options=dict(
            num_local_experts=4, num_experts_per_tok=2, sliding_window=20, max_position_embeddings=131072
        ),
    ),
    "tiny-gemma3": replace(
        GEMMA3_4B, **_TINY, layers=6, window=20, stock=("sdpa",),
        options=dict(sliding_window=20, query_pre_attn_scalar=16),
    ),
    "tiny-qwen3.5": replace(
        QWEN35_4B, **_TINY, layers=4,
        options=dict(
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
        ),
    ),
    "tiny-deepseek": replace(
        DEEPSEEK_16B, **{**_TINY, "kv_heads": 4, "head_dim": 24}, layers=2, head_dim_v=16,
        options=dict(
            head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, kv_lora_rank=16, q_lora_rank=None,
            n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16, n_group=1,
            topk_group=1, first_k_dense_replace=1, num_mtp_layers=0,
        ),
    ),
}  # fmt: skip
