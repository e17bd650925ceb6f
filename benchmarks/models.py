# SPDX-License-Identifier: BSD-3-Clause
"""Models that are measured: those of `flash_attn_dualkv.predict`, and families of transformers whose layers differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flash_attn_dualkv.model_shape import MODELS, ModelShape


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
    stock: Sequence[str] = ("sdpa",)
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
    places: Sequence[int] = (256, 1536)
    grid: Sequence[int] = (1, 64, 64)

    @property
    def placeholder(self) -> int:
        """The last token of the vocabulary; that of videos is in front of it, and text has neither."""
        return self.vocab - 1

    @property
    def patch_values(self) -> int:
        """Values of a patch: two frames in three colours."""
        return 3 * 2 * int(self.vision["patch_size"]) ** 2


# Published configurations. Of gpt-oss: sdpa has no sinks, and eager attention keeps every score;
# transformers names FlashAttention-4 for it. DeepSeek's are the sizes of Moonlight-16B-A3B. Prompts
# of VISION have two images of 1K tokens in 4K, and as many sequences in a batch as are packed.
CONFIGURATIONS: dict[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text())
FAMILIES = {name: FamilyModel(**facts) for name, facts in CONFIGURATIONS["families"].items()}
# Rows that nobody reads leave before layers that have the keys of earlier ones, or the last one.
UNREAD = {name: FamilyModel(**facts) for name, facts in CONFIGURATIONS["unread"].items()}
VISION = {name: VisionModel(**facts) for name, facts in CONFIGURATIONS["vision"].items()}
ALL_MODELS: dict[str, ModelShape] = {
    **MODELS,
    **FAMILIES,
    **UNREAD,
    **VISION,
    "tiny": ModelShape(**CONFIGURATIONS["tiny"]),
}
DEFAULT_MODEL = "qwen3-8b"
# The mean weight of norms of query and key heads. At 1 the scores of random tokens are nearly equal
# and attention is close to an average of all values, in which an error would be lost.
HEAD_NORM = 1.6


def make_model(sizes: ModelShape, attention: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on an attention of that registered name, with the same random weights every time."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    options: dict[str, Any] = dict(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, tie_word_embeddings=sizes.tied, max_position_embeddings=1 << 18, use_cache=False,
    )  # fmt: skip
    model_type, auto = "qwen3", AutoModelForCausalLM
    if isinstance(sizes, FamilyModel):
        model_type, options = sizes.model_type, {**options, **sizes.options}
    if isinstance(sizes, VisionModel):
        auto, tokens = AutoModelForImageTextToText, (sizes.placeholder, sizes.placeholder - 1)
        options = {"text_config": options, "vision_config": dict(sizes.vision), "tie_word_embeddings": sizes.tied}
        options |= dict(zip(("image_token_id", "video_token_id"), tokens))
    config = AutoConfig.for_model(model_type, **options)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # 1 at first, or 0 where models add 1 themselves
                parameter.add_(HEAD_NORM - 1)
                if model_type == "gemma4_text":  # its scores are not scaled, but by these norms
                    parameter.mul_(parameter.numel() ** -0.25)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()
