# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on the text of multimodal checkpoints: shared as a causal LM's is, and batches with images are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch
import trl
from tiny_models import VERSION, check_equal, gradients, transformers
from tiny_multimodal import EXACT, image, multimodal_config, multimodal_model
from tiny_trl import SLOW, VALUE, StockInGroups, batch, both, compare, lora, quiet, refused, score, shared, trainer

GRPO = shared.SharedPromptGRPOTrainer
FAST = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "gemma4", "mllama", "llava", "glm4v", "got_ocr2")
pytestmark = [
    pytest.mark.usefixtures("restored_registry"),
    pytest.mark.skipif(VERSION < (5, 10), reason="TRL's forward knows other names of backbones"),
]


def on_disk(folder: Path, model_type: str, **options: Any) -> str:
    path = folder / model_type
    multimodal_model(model_type, attention="sdpa", **options).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("model_type", "attention"), [("qwen3_vl", "eager"), ("gemma3", "sdpa"), ("qwen3_5", "sdpa")])
def test_grpo_equals_stock(model_type: str, attention: str, tmp_path: Path) -> None:
    """The class that TRL makes of such a checkpoint, with a reference of its own."""
    path = on_disk(tmp_path, model_type)
    options = dict(max_steps=2, beta=0.1, model_init_kwargs=dict(dtype="float32", attn_implementation=attention))
    got, _ = both(GRPO, StockInGroups, path, tmp_path, **options)
    assert type(got.trainer.model).__name__.endswith("ForConditionalGeneration")
    assert min(got.metric("dedup_ratio")) > 1.2


def test_lora_equals_stock(tmp_path: Path) -> None:
    options = dict(arguments=dict(peft_config=lora()), beta=0.1, max_steps=2)
    both(GRPO, StockInGroups, on_disk(tmp_path, "gemma3"), tmp_path, **options)


# HunYuan normalizes queries after their rotation: positions that count padding, as TRL's do, are other positions.
@pytest.mark.parametrize("model_type", [one if one in FAST else SLOW(one) for one in sorted(EXACT - {"hunyuan_vl"})])
def test_one_forward(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family whose text is exact in float64, here in the float32 of small gradients."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("another transformers")
    monkeypatch.setattr(tiny_trl, "GRADIENT", 5e-4)
    text = multimodal_config(model_type).get_text_config(decoder=True)
    options = dict(router_aux_loss_coef=0.0) if hasattr(text, "router_aux_loss_coef") else {}
    stock, ours = (
        trainer(cls, multimodal_model(model_type, attention="eager"), tmp_path, **options)
        for cls in (trl.GRPOTrainer, GRPO)
    )
    compare(stock, ours, *batch([(9, [5, 9, 3]), (12, [1, 7])]))
    assert ours._sharing.tally.calls == 2
    assert not ours._sharing.tally.fallbacks


@pytest.mark.parametrize(("model_type", "mark"), [("gemma3", "token_type_ids"), ("qwen3_vl", "mm_token_type_ids")])
def test_marks_that_all_tokens_are_text(model_type: str, mark: str, tmp_path: Path) -> None:
    """Processors give them beside the tokens, with and without an image."""
    stock, ours = (
        trainer(cls, multimodal_model(model_type, attention="sdpa"), tmp_path) for cls in (trl.GRPOTrainer, GRPO)
    )
    ids, mask, width = batch([(9, [5, 9, 3]), (12, [1, 7])])
    text = torch.zeros_like(ids)
    expected, *_ = score(stock, ids, mask, width, **{mark: text})
    got, *_ = score(ours, ids, mask, width, **{mark: text})
    check_equal(got, expected, VALUE)
    assert not ours._sharing.tally.fallbacks
    text[:, 3] = 1
    reason, _ = refused(ours, ids, mask, width, **{mark: text})
    assert reason == "multimodal"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_batches_with_images_are_stock(attention: str, tmp_path: Path) -> None:
    """Values and gradients, of the tower too; the next batch of text is shared again."""
    stock, ours = (
        trainer(cls, multimodal_model("qwen3_vl", attention=attention), tmp_path) for cls in (trl.GRPOTrainer, GRPO)
    )
    one = image("qwen3_vl")
    prompt = one["input_ids"].shape[1]
    ids = torch.cat([one["input_ids"].expand(2, -1), torch.tensor([[3, 4, 5], [6, 7, 8]])], 1)
    marks = torch.cat([one["mm_token_type_ids"].expand(2, -1), torch.zeros((2, 3), dtype=torch.int64)], 1)
    labels = ids.clone()
    labels[:, :prompt] = -100
    inputs = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, mm_token_type_ids=marks,
        pixel_values=one["pixel_values"].repeat(2, 1), image_grid_thw=one["image_grid_thw"].repeat(2, 1),
    )  # fmt: skip
    found = []
    for made in (stock, ours):
        made.model.train()
        with quiet():
            logps = made.model(**inputs, fused_lm_head=True).log_probs
        logps.square().sum().backward()
        found.append((logps.detach(), gradients(made.model)))
    (expected, of_stock), (got, own) = found
    assert torch.equal(got, expected)
    assert any("visual" in name for name in own) and own.keys() == of_stock.keys()
    assert all(torch.equal(own[name], of_stock[name]) for name in own)
    assert ours._sharing.tally.fallbacks == {"multimodal": 1}
    assert ours.model.config.vision_config._attn_implementation == attention
    ours._sharing.take(torch.device("cpu"))
    compare(stock, ours, *batch([(9, [5, 9, 3])]))
    assert not ours._sharing.tally.fallbacks
