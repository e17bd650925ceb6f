# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on the text of multimodal checkpoints: shared as a causal LM's is, and batches with images are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trl
import torch
import trl
from datasets import Dataset
from PIL import Image
from tiny_models import VERSION, Samples, check_equal, gradients, transformers
from tiny_multimodal import EXACT, IMAGE, QWEN, Pictured, image, marks_of, multimodal_config, multimodal_model
from tiny_trl import SLOW, VALUE, StockInGroups, batch, both, compare, lora, refused, score, shared, trainer
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid

from flash_attn_dualkv.integrations.trl.regroup import keep_siblings_together
from flash_attn_dualkv.integrations.trl.trainers import SiblingsTogetherMixin

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


# HunYuan normalizes queries after their rotation: positions that count padding, as TRL's do, are
# other positions.
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


# --- images -----------------------------------------------------------------------------------------------------------

MIXED = Pictured.random([([(1, 4, 4)], [5, 3]), ([(1, 4, 6), (1, 2, 4)], [3, 1]), ([], [2, 4])]).take(
    [0, 2, 4, 1, 5, 3]
)


def as_trl_gives_them(given: Pictured) -> tuple[tuple[Tensor, Tensor, int], dict[str, Any]]:
    """Padded tokens, and the images of all samples in one tensor."""
    samples = given.samples
    left, right = (max(map(len, one)) for one in (samples.prompts, samples.responses))
    ids, mask = torch.zeros((2, len(samples), left + right), dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(samples.prompts, samples.responses)):
        span = slice(left - len(prompt), left + len(response))
        ids[row, span], mask[row, span] = torch.tensor(prompt + response), 1
    present = {name: [one for one in values if one is not None] for name, values in given.images.items()}
    counts = [0 if one is None else len(one) for one in given.images["image_grid_thw"]]
    joined = {name: torch.cat(values) for name, values in present.items()}
    return (ids, mask, right), {**joined, "num_images": counts, "mm_token_type_ids": marks_of(ids)}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", [one if one == "qwen3_vl" else SLOW(one) for one in QWEN])
def test_images_of_prompts_are_shared(
    model_type: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, of the tower too, whose attention stays what it is; then text again."""
    monkeypatch.setattr(tiny_trl, "GRADIENT", 5e-5)
    options = dict(num_experts_per_tok=4) if "moe" in model_type else {}
    stock, ours = (
        trainer(cls, multimodal_model(model_type, attention=attention, **options), tmp_path)
        for cls in (trl.GRPOTrainer, GRPO)
    )
    padded, images = as_trl_gives_them(MIXED)
    patches: list[int] = []
    tower = next(one for name, one in ours.model.named_modules() if name.endswith("visual"))
    tower.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    compare(stock, ours, *padded, **images)
    assert patches == [16 + 24 + 8] * 2  # of the two groups with images, once each
    assert ours._sharing.tally.calls == 2 and not ours._sharing.tally.fallbacks
    assert ours._sharing.tally.replicated > 1.5 * ours._sharing.tally.tokens
    assert ours.model.config.vision_config._attn_implementation == attention
    compare(stock, ours, *batch([(9, [5, 9, 3])]))
    assert not ours._sharing.tally.fallbacks


def test_one_pixel_changed(tmp_path: Path) -> None:
    """Equal tokens are no equal prompt: each group then has its own image."""
    stock, ours = (
        trainer(cls, multimodal_model("qwen3_vl", attention="sdpa"), tmp_path) for cls in (trl.GRPOTrainer, GRPO)
    )
    padded, images = as_trl_gives_them(MIXED.take([0, 3, 0, 3]))
    compare(stock, ours, *padded, **images)
    before = ours._sharing.take().tokens
    images["pixel_values"][40, 7] += 1.0  # of the third sample
    images["pixel_values"][48:64] = images["pixel_values"][32:48]
    compare(stock, ours, *padded, **images)
    assert not ours._sharing.tally.fallbacks and ours._sharing.tally.tokens > before


def test_images_in_responses_are_stock(tmp_path: Path) -> None:
    stock, ours = (
        trainer(cls, multimodal_model("qwen3_vl", attention="sdpa"), tmp_path) for cls in (trl.GRPOTrainer, GRPO)
    )
    # The same sequences; the second image of a prompt is in its response.
    pairs = zip(MIXED.samples.prompts, MIXED.samples.responses)
    early = Samples(*map(list, zip(*((one[:10], one[10:] + other) for one, other in pairs))))
    padded, images = as_trl_gives_them(Pictured(early, MIXED.images))
    reason, got = refused(ours, *padded, **images)
    assert reason == "multimodal"
    check_equal(got[0], score(stock, *padded, **images)[0], 0.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_images_of_other_families_are_stock(attention: str, tmp_path: Path) -> None:
    """Values and gradients, of the tower too; the next batch of text is shared again."""
    stock, ours = (
        trainer(cls, multimodal_model("llava", attention=attention), tmp_path) for cls in (trl.GRPOTrainer, GRPO)
    )
    one = image("llava")
    ids = torch.cat([one["input_ids"].expand(2, -1), torch.tensor([[3, 4, 5], [6, 7, 8]])], 1)
    call = (ids, torch.ones_like(ids), 3)
    images = dict(pixel_values=one["pixel_values"].repeat(2, 1, 1, 1), num_images=[1, 1])
    found = []
    for made in (stock, ours):
        made.model.train()
        logps, *_ = score(made, *call, **images)
        logps.square().sum().backward()
        found.append((logps.detach(), gradients(made.model)))
    (expected, of_stock), (got, own) = found
    assert torch.equal(got, expected)
    assert any("vision" in name for name in own) and own.keys() == of_stock.keys()
    assert all(torch.equal(own[name], of_stock[name]) for name in own)
    assert ours._sharing.tally.fallbacks == {"multimodal": 1}
    assert ours.model.config.vision_config._attn_implementation == attention
    ours._sharing.take()
    compare(stock, ours, *batch([(9, [5, 9, 3])]))
    assert not ours._sharing.tally.fallbacks


class Processor(transformers.ProcessorMixin):
    """Turns messages of numbers and images of 8 x 8 pixels a patch into what Qwen3-VL takes; transformers' own needs
    torchvision."""

    def __init__(self) -> None:
        self.tokenizer = tiny_trl.tokenizer()
        self.chat_template = None

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **_: Any) -> Any:
        chats = conversation if isinstance(conversation[0], list) else [conversation]
        parts = [[part for message in chat for part in message["content"]] for chat in chats]
        texts = [" ".join(part.get("text", "<image>") for part in one) for one in parts]
        if tokenize:
            return self(texts, [[part["image"] for part in one if part["type"] == "image"] for one in parts])
        return texts if isinstance(conversation[0], list) else texts[0]

    def __call__(self, text: Any, images: Any, padding: bool = False, **_: Any) -> Any:
        pixels, grids, rows = [], [], []
        for words, given in zip(text, images, strict=True):
            for one in given:
                patches = torch.tensor(np.asarray(one) / 255).float().unfold(0, 8, 8).unfold(1, 8, 8)
                grids.append([1, *patches.shape[:2]])
                pixels.append(patches.flatten(0, 1).flatten(1).repeat(1, 2))
                placeholders = " ".join(["92", *[str(IMAGE)] * (len(pixels[-1]) // 4), "93"])
                words = words.replace("<image>", placeholders, 1)
            rows.append(self.tokenizer(words)["input_ids"])
        marks = [[int(token == IMAGE) for token in row] for row in rows]
        found: dict[str, Any] = {"input_ids": rows, "mm_token_type_ids": marks}
        if padding:
            width = max(map(len, rows))
            found = {
                key: torch.tensor([[0] * (width - len(one)) + one for one in value]) for key, value in found.items()
            }
        return {**found, "pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def pictures() -> Dataset:
    """Four prompts, the first two of which differ in a pixel alone."""
    generator = np.random.default_rng(0)
    first, *others = (generator.integers(0, 255, (16, width, 3), dtype=np.uint8) for width in (32, 16, 16, 48))
    second = first.copy()
    second[9, 3, 1] ^= 128
    rows = [("5 7 9", [first]), ("5 7 9", [second]), ("11", others[:2]), ("3 4 5 6", others[2:])]
    prompts = [[dict(role="user", content=text)] for text, _ in rows]
    return Dataset.from_dict(
        {"prompt": prompts, "images": [[Image.fromarray(one) for one in some] for _, some in rows]}
    )


def of_chats(completions: list[Any], **_: Any) -> list[float]:
    return tiny_trl.reward([one[0]["content"] for one in completions])


def test_images_move_with_their_samples() -> None:
    """Siblings are those of equal images: each sample's pixels say which prompt it has."""
    kinds = [0, 1, 2, 0, 2, 1, 1, 0]  # 0 and 1 have equal tokens; 2 has no image
    slices = []
    for rows in (range(4), range(4, 8)):
        given = [torch.full((0 if kinds[row] == 2 else 4 + 4 * kinds[row], 6), float(kinds[row])) for row in rows]
        grids = [torch.tensor([[1, 2, len(one) // 2]])[: len(one)] for one in given]
        ids = torch.tensor([[5, 6] if kinds[row] < 2 else [5, 7] for row in rows])
        one = dict(prompt_ids=ids, prompt_mask=torch.ones_like(ids), row=torch.tensor([*rows]))
        one |= dict(num_images=[min(1, len(each)) for each in given])
        slices.append({**one, "pixel_values": torch.cat(given), "image_grid_thw": torch.cat(grids)})
    moved = keep_siblings_together(slices)
    assert sorted(kinds[row] for row in moved[0]["row"]) in ([0, 0, 0, 2], [1, 1, 1, 2])
    for one in moved:
        values = split_pixel_values_by_grid(one)
        for row, pixels, grid in zip(one["row"].tolist(), values["pixel_values"], values["image_grid_thw"]):
            assert len(pixels) == grid.prod(-1).sum() == (0 if kinds[row] == 2 else 4 + 4 * kinds[row])
            assert (pixels == kinds[row]).all()


class StockRLOOInGroups(SiblingsTogetherMixin, trl.RLOOTrainer): ...


TRAINERS = {
    "GRPO": (GRPO, StockInGroups),
    "GRPO, LoRA": (GRPO, StockInGroups),
    "RLOO": (shared.SharedPromptRLOOTrainer, StockRLOOInGroups),
}


@pytest.mark.parametrize("name", ["GRPO", "GRPO, LoRA", SLOW("RLOO")])
def test_training_with_images_equals_stock(name: str, tmp_path: Path) -> None:
    """Rollouts of TRL from its images column, divided into micro-batches; siblings are those of an image."""
    arguments = dict(processing_class=Processor(), train_dataset=pictures(), reward_funcs=of_chats)
    if "LoRA" in name:
        arguments["peft_config"] = lora()
    options = dict(max_steps=2, beta=0.1, gradient_accumulation_steps=2)
    got, _ = both(*TRAINERS[name], on_disk(tmp_path, "qwen3_vl"), tmp_path, arguments=arguments, **options)
    assert min(got.metric("dedup_ratio")) > 1.2
    moved = [one for one, value in got.after.items() if not torch.equal(value, got.before[one])]
    assert "LoRA" in name or any("visual" in one for one in moved)
