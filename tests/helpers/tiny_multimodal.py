# SPDX-License-Identifier: BSD-3-Clause
"""Tiny random models of more than text: those of transformers' mapping from images and text to text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import models_page
import pytest
import torch
from sweep import OPTIONS, OWN
from tiny_models import VERSION, Samples, random_model, transformers, wide_softmax
from torch import Tensor

from flash_attn_dualkv import PackedBatch

HIDDEN: int = OPTIONS["hidden_size"]
# Of the parts that are no decoder of text, by the names that their configurations have for sizes.
TOWER = dict(
    hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    depth=1, num_heads=2, patch_size=8, image_size=32, out_hidden_size=HIDDEN, embed_dim=HIDDEN, head_dim=16,
    num_position_embeddings=16, deepstack_visual_indexes=[0], fullatt_block_indexes=[0], d_model=HIDDEN,
    encoder_attention_heads=2, encoder_ffn_dim=32, encoder_layers=1, output_dim=HIDDEN, num_mel_bins=16,
    max_source_positions=64, downsample_hidden_size=16, mlp_dim=32, output_channels=32, base_channels=32,
    channel_multiplier=[1], num_embeddings=16, image_token_embed_dim=HIDDEN, latent_channels=32, projection_dim=HIDDEN,
    projector_input_dim=HIDDEN, projector_output_dim=HIDDEN, vision_output_dim=HIDDEN, text_hidden_size=HIDDEN,
    downsample_channels=[16, 32], global_attn_indexes=[0], max_position_embeddings=64, pos_emb_height=4,
    pos_emb_width=4, resolution=32, num_res_blocks=1, codebook_size=16, layer_types=None,
)  # fmt: skip
# Of the whole, beside its parts.
WHOLE = dict(hidden_size=HIDDEN, out_hidden_size=HIDDEN, projector_hidden_size=HIDDEN, projection_dim=HIDDEN)
_ALL_HEADS = dict(num_key_value_heads=4)


def _mrope(*sections: int) -> dict[str, Any]:
    """Of models that do not show in their configurations how they divide the dimensions among three positions."""
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[*sections])
    return dict(text_config={"rope_parameters" if VERSION >= (5, 0) else "rope_scaling": rope})


# What single models want to be told, of their parts and of themselves.
OWN_PARTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"),
        _mrope(2, 1, 1),
    ),
    "glm4v_moe": _mrope(1, 1, 0),
    "hunyuan_vl": _mrope(2, 1, 1),
    "llava": dict(image_token_id=90, vision_feature_layer=-1),
    "qwen3_vl": _mrope(2, 1, 1),
    "qwen3_vl_moe": _mrope(2, 1, 1),
    "chameleon": dict(vocabulary_map={"<image>": 90}),
    "emu3": dict(vocabulary_map={"<image>": 90}),
    "deepseek_ocr2": dict(text_config=dict(mlp_layer_types=["dense", "sparse"])),
    "ernie4_5_vl_moe": dict(text_config=dict(moe_intermediate_size=[16, 16], **_mrope(1, 1, 2)["text_config"])),
    "glm5_next": dict(text_config=dict(_ALL_HEADS, index_topk=16)),
    "granite4_vision": dict(deepstack_layer_map=[[0, 0]]),
    "mllama": dict(text_config=dict(cross_attention_layers=[1], num_hidden_layers=3)),
    "molmo2": dict(adapter_config=dict(vision_feature_layer=[-1])),
    "muse_spark": dict(audio_config=dict(num_hidden_layers=1, depths=[1], hidden_sizes=[32], patch_sizes=[16])),
    "nemotron_h_omni": dict(vision_config=dict(video_temporal_patch_size=2)),
}

# Placeholders of the families of Qwen, whose own are beyond a tiny vocabulary, and grids of 2 x 2
# patches a token.
IMAGE, VIDEO = 90, 91
_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=92, vision_end_token_id=93)
QWEN = tuple(
    name
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    # 4.57's Qwen2-VL takes no logits_to_keep.
    if name in transformers.CONFIG_MAPPING and (VERSION >= (5, 0) or name != "qwen2_vl")
)
for _name in QWEN:
    OWN_PARTS[_name] = {**OWN_PARTS.get(_name, {}), **_TOKENS}


def multimodal_config(model_type: str, **options: Any) -> Any:
    """A configuration; options are those of its decoder of text."""
    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config(decoder=True)
    own = dict(OWN_PARTS.get(model_type, {}))
    whole = _text_options(default, options) if text is default else _fitting(default, WHOLE)
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if hasattr(part, "to_dict"):
            whole[name] = {**_part_options(part, text, options), **own.pop(name, {})}
            if part is text:
                whole[name].update(options)
    return kind(**{**whole, **own})


def _part_options(part: Any, text: Any, options: dict[str, Any]) -> dict[str, Any]:
    made = _text_options(part, options) if part is text else _fitting(part, TOWER)
    for name in part.sub_configs:
        inner = getattr(part, name, None)
        if hasattr(inner, "to_dict"):
            made[name] = _part_options(inner, text, options)
    return {"model_type": part.model_type, **made}


def _fitting(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Those options that a configuration has, and has as numbers or lists."""
    known = config.to_dict()
    return {
        name: value
        for name, value in options.items()
        if name in known
        and (value is None or known[name] is None or isinstance(known[name], list) == isinstance(value, list))
    }


def _text_options(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    made = {**OPTIONS, **OWN.get(config.model_type, {}), **options}
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        head_dim = made["head_dim"] if hasattr(config, "head_dim") else HIDDEN // made["num_attention_heads"]
        head_dim = made["qk_rope_head_dim"] if hasattr(config, "qk_rope_head_dim") else head_dim
        half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        made.setdefault("rope_parameters", {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]})
    return made


def multimodal_model(
    model_type: str, *, attention: str | None = "dualkv", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    model = random_model(lambda: _make(model_type, attention, options))
    with contextlib.suppress(Exception):  # a model that has no such choice
        model.set_experts_implementation("eager")
    return model.to(dtype)


def any_multimodal(model_type: str) -> Any:
    """A model, or a skip: some configurations want to be told more."""
    try:
        with torch.device("meta"):
            elements = sum(one.numel() for one in _make(model_type, "dualkv", {}).parameters())
        if elements < 10_000_000:
            return multimodal_model(model_type)
    except Exception as error:
        pytest.skip(f"cannot be made: {type(error).__name__}")
    pytest.skip(f"is not tiny: {elements} parameters")


IMAGES = ("llava", "qwen3_vl")


def image(model_type: str) -> dict[str, Tensor]:
    """A prompt with an image, as a model of `IMAGES` takes it."""
    generator = torch.Generator().manual_seed(1)
    if model_type == "llava":
        ids = torch.tensor([[5, *[90] * 16, 6, 7]])
        return dict(input_ids=ids, pixel_values=torch.randn((1, 3, 32, 32), generator=generator))
    ids = torch.tensor([[5, 92, 90, 90, 90, 90, 93, 6, 7]])
    pixels = torch.randn((16, 3 * 2 * 8 * 8), generator=generator)
    grid = torch.tensor([[1, 4, 4]])
    marks = dict(mm_token_type_ids=(ids == 90).long()) if VERSION >= (5, 0) else {}
    return dict(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, **marks)


def _make(model_type: str, attention: str | None, options: dict[str, Any]) -> Any:
    config = multimodal_config(model_type, **options)
    chosen = {} if attention is None else dict(attn_implementation=attention)
    return transformers.AutoModelForImageTextToText.from_config(config, **chosen)


EXACT = models_page.exact(models_page.MULTIMODAL)


@dataclass(frozen=True)
class Pictured:
    """Samples with images in their prompts, as a model of Qwen takes them.

    `images`: by the names of a model's inputs, of each sample; None for a sample of text.
    """

    samples: Samples
    images: dict[str, list[Tensor | None]]

    @staticmethod
    def random(
        groups: list[tuple[list[tuple[int, int, int]], list[int]]], seed: int = 0, video: bool = False
    ) -> Pictured:
        """Groups given as (grids of images, response lengths): each image between two tokens of text."""
        generator = torch.Generator().manual_seed(seed)

        def text(length: int) -> list[int]:
            return torch.randint(3, 90, (length,), generator=generator).tolist()

        prompts, responses = [], []
        pixels, grids = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        images: dict[str, list[Tensor | None]] = {pixels: [], grids: []}
        for shapes, lengths in groups:
            prompt = text(2)
            for frames, height, width in shapes:
                for _ in range(frames if video else 1):  # of a video each frame stands alone
                    tokens = height * width // 4 * (1 if video else frames)
                    prompt += [92, *[VIDEO if video else IMAGE] * tokens, 93, *text(1)]
            prompt += text(2)
            grid = torch.tensor(shapes) if shapes else None
            values = torch.randn(int(grid.prod(-1).sum()), PATCH, generator=generator) if shapes else None
            prompts += [prompt] * len(lengths)
            responses += [text(length) for length in lengths]
            images[pixels] += [values] * len(lengths)
            images[grids] += [grid] * len(lengths)
        return Pictured(Samples(prompts, responses), images)

    def take(self, indices: Sequence[int]) -> Pictured:
        images = {name: [values[index] for index in indices] for name, values in self.images.items()}
        return Pictured(self.samples.take(indices), images)

    def pack(self, **options: Any) -> PackedBatch:
        """Each sample with a copy of its tensors, as a data loader gives them."""
        own = {
            name: [one.clone() if isinstance(one, Tensor) else one for one in values]
            for name, values in self.images.items()
        }
        return self.samples.pack(images=own, **options)

    def of(self, index: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The images of one sample, for a model."""
        given = {name: values[index] for name, values in self.images.items()}
        return {
            name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items() if one is not None
        }

    def stock_logps(self, model: Any) -> Tensor:
        """Log-probabilities of all response tokens, each sequence alone with images of its own."""
        found = []
        for index, (prompt, response) in enumerate(zip(self.samples.prompts, self.samples.responses)):
            ids = torch.tensor([prompt + response], device=model.device)
            images = {name: one.to(ids.device) for name, one in self.of(index, model.dtype).items()}
            # Without a mask 4.57 takes the positions of an image for those of other sequences.
            marks = (
                dict(mm_token_type_ids=marks_of(ids))
                if VERSION >= (5, 0)
                else dict(attention_mask=ids.new_ones(ids.shape))
            )
            with wide_softmax():
                logits = model(input_ids=ids, use_cache=False, **marks, **images).logits[0]
            logps = logits[len(prompt) - 1 : -1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            found.append(logps.gather(-1, ids[0, len(prompt) :, None])[:, 0])
        return torch.cat(found)


def marks_of(ids: Tensor) -> Tensor:
    """Which tokens are images, 1, or videos, 2."""
    return (ids == IMAGE).long() + 2 * (ids == VIDEO)


# Two frames of 8 x 8 pixels in three colours.
PATCH = 3 * 2 * 8 * 8
