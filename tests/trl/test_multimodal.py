# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on multimodal checkpoints: the text and the images of prompts are shared, other images are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trl
import torch
from datasets import Dataset
from PIL import Image
from tiny_models import VERSION, Samples, check_equal, transformers
from tiny_multimodal import IMAGE, Pictured, marks_of, multimodal_model
from tiny_trl import StockInGroups, batch, both, compare, lora, padded, pair, refused, score, shared
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid

from flash_attn_dualkv.integrations.trl.regroup import keep_siblings_together

GRPO = shared.SharedPromptGRPOTrainer
pytestmark = [
    pytest.mark.usefixtures("restored_registry"),
    pytest.mark.skipif(VERSION < (5, 10), reason="TRL's forward knows other names of backbones"),
]


def both_of(model_type: str, folder: Path, attention: str = "sdpa") -> tuple[Any, Any]:
    return pair(lambda: multimodal_model(model_type, attention=attention), folder)


def test_marks_that_all_tokens_are_text(tmp_path: Path) -> None:
    """Processors give them beside the tokens, with and without an image."""
    stock, ours = both_of("gemma3", tmp_path)
    ids, mask, width = batch([(9, [5, 9, 3]), (12, [1, 7])])
    text = torch.zeros_like(ids)
    compare(stock, ours, ids, mask, width, token_type_ids=text)
    assert not ours._sharing.tally.fallbacks
    text[:, 3] = 1
    assert refused(ours, ids, mask, width, token_type_ids=text)[0] == "multimodal"


# --- images -----------------------------------------------------------------------------------------------------------

MIXED = Pictured.random([([(1, 4, 4)], [5, 3]), ([(1, 4, 6), (1, 2, 4)], [3, 1]), ([], [2, 4])]).take(
    [0, 2, 4, 1, 5, 3]
)


def as_trl_gives_them(given: Pictured) -> tuple[tuple[Tensor, Tensor, int], dict[str, Any]]:
    """Padded tokens, and the images of all samples in one tensor."""
    ids, mask, width = padded([*zip(given.samples.prompts, given.samples.responses)])
    present = {name: [one for one in values if one is not None] for name, values in given.images.items()}
    counts = [0 if one is None else len(one) for one in given.images["image_grid_thw"]]
    joined = {name: torch.cat(values) for name, values in present.items()}
    return (ids, mask, width), {**joined, "num_images": counts, "mm_token_type_ids": marks_of(ids)}


def test_images_in_responses_are_stock(tmp_path: Path) -> None:
    stock, ours = both_of("qwen3_vl", tmp_path)
    # The same sequences; the second image of a prompt is in its response.
    pairs = zip(MIXED.samples.prompts, MIXED.samples.responses)
    early = Samples(*map(list, zip(*((one[:10], one[10:] + other) for one, other in pairs))))
    call, images = as_trl_gives_them(Pictured(early, MIXED.images))
    reason, got = refused(ours, *call, **images)
    assert reason == "multimodal"
    check_equal(got[0], score(stock, *call, **images)[0], 0.0)


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


@pytest.mark.parametrize("adapter", [None, lora])
def test_training_with_images_equals_stock(adapter: Any, tmp_path: Path) -> None:
    """Rollouts of TRL from its images column, divided into micro-batches; siblings are those of an image."""
    arguments = dict(processing_class=Processor(), train_dataset=pictures(), reward_funcs=of_chats)
    if adapter:
        arguments["peft_config"] = adapter()
    options = dict(max_steps=2, beta=0.1, gradient_accumulation_steps=2)
    multimodal_model("qwen3_vl", attention="sdpa").save_pretrained(tmp_path / "model")
    got, _ = both(GRPO, StockInGroups, str(tmp_path / "model"), tmp_path, arguments=arguments, **options)
    assert type(got.trainer.model).__name__.endswith("ForConditionalGeneration") or adapter
    assert min(got.metric("dedup_ratio")) > 1.2
    moved = [one for one, value in got.after.items() if not torch.equal(value, got.before[one])]
    assert adapter or any("visual" in one for one in moved)
