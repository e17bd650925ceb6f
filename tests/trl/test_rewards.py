# SPDX-License-Identifier: BSD-3-Clause
"""TRL's RewardTrainer on shared prefixes: losses, metrics and every parameter as of the stock trainer."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trl
import torch
from tiny_models import check_gradients, gradients, tiny_config, transformers
from tiny_trl import Dataset, both, drawing, lora, shared, trl
from torch import Tensor

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.common.options import Options

sharing_module = importlib.import_module("flash_attn_dualkv.integrations.trl.sharing")

pytestmark = pytest.mark.usefixtures("restored_registry")
Ours = shared.SharedPromptRewardTrainer


class Mine(shared.SharedPromptMixin, trl.RewardTrainer):
    pass


def model(name: str = "qwen3", **options: Any) -> Any:
    torch.manual_seed(1)
    config = tiny_config(name, num_labels=1, **options)
    return transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")


def trainer(cls: Any, made: Any, out: Path, arguments: Any = None, with_margin: bool = False, **config: Any) -> Any:
    given = dict(train_dataset=pairs(with_margin), peft_config=config.pop("peft_config", None))
    if issubclass(cls, shared.SharedPromptMixin):
        given |= {"min_shared": 4, **(arguments or {})}
    config = dict(per_device_train_batch_size=4) | config
    return tiny_trl.trainer(cls, made, out, arguments=given, **config)


def pairs(with_margin: bool) -> Dataset:
    """Prompts of several lengths, with completions that end as TRL ends them; one pair shares nothing."""
    words = drawing(4)
    rows: list[dict[str, Any]] = []
    for length in (20, 33, 17, 26) * 4:
        prompt = words(length)
        rows.append(dict(chosen_ids=[*prompt, *words(length // 4), 2], rejected_ids=[*prompt, *words(7), 2]))
        rows[-1] |= dict(margin=0.1 * (length % 7)) if with_margin else {}
    rows[3]["rejected_ids"] = [*words(9), 2]
    return Dataset.from_list(rows)


RUNS: dict[str, dict[str, Any]] = {
    "margin": dict(with_margin=True, center_rewards_coefficient=0.01),
    "accumulation": dict(gradient_accumulation_steps=2, gradient_checkpointing=False, max_steps=2),
    "LoRA": dict(peft_config=lora("SEQ_CLS"), pad_to_multiple_of=32),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_stock(name: str, tmp_path: Path) -> None:
    got, expected = both(Ours, trl.RewardTrainer, model, tmp_path, make=trainer, **RUNS[name])
    assert {"accuracy", "margin", "min_reward"} <= expected.logs[0].keys()
    assert min(got.metric("dedup_ratio")) > 1.3
    assert any("lora" in parameter for parameter in got.before) == (name == "LoRA")


def inputs_of(rows: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*one, *[0] * (width - len(one))] for one in rows])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in rows])
    return {"input_ids": ids, "attention_mask": mask}


PROMPT = [*range(3, 33)]
PADDED = inputs_of([[*PROMPT, 40, 41], [*PROMPT, 42], [*PROMPT, 50, 0, 0], [0, 0]])  # some end with the padding token


def test_every_gradient_of_a_call(tmp_path: Path) -> None:
    """In float64; where sequences end with the token of padding, the row is the one that the stock forward takes."""
    found = []
    for cls in (trl.RewardTrainer, Ours):
        made = trainer(cls, model().double(), tmp_path)
        made.model.train()
        values = made.model(**PADDED, use_cache=False).logits
        (values[:, 0] * torch.tensor([1.0, -2.0, 3.0, 0.5]).double()).sum().backward()
        found.append((values.detach(), gradients(made.model)))
    (expected, wanted), (got, own) = found
    assert got.shape == (4, 1) and made._sharing.tally.calls == 1 and not made._sharing.tally.fallbacks
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
    check_gradients(own, wanted, 2e-6)


LEFT = {name: one.flip(1) for name, one in PADDED.items()}
ALONE = inputs_of([[3, 4, 5], [6, 7, 8]])
# The stock forward reads the last token that is none of padding, whatever the mask says.
BEHIND = PADDED | dict(input_ids=PADDED["input_ids"].masked_fill(PADDED["attention_mask"] == 0, 9))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (LEFT, "samples"),
        (BEHIND, "samples"),
        (ALONE, "dedup_ratio"),
        ({**PADDED, "output_hidden_states": True}, "arguments"),
        ({**PADDED, "position_ids": torch.arange(33)[None]}, "arguments"),
    ],
    ids=["padding on the left", "tokens behind the mask", "nothing shared", "hidden states", "positions"],
)
def test_fallback(inputs: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made, stock = (trainer(cls, model(), tmp_path) for cls in (Ours, trl.RewardTrainer))
    with torch.no_grad():
        got, expected = (one.model.eval()(**inputs).logits for one in (made, stock))
    assert torch.equal(got, expected)
    assert dict(made._sharing.tally.fallbacks) == {reason: 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(min_shared=None), "^min_shared: expected a number"),
        (dict(verify_first_steps=1), "^verify_first_steps: expected 0"),
    ],
)
@pytest.mark.parametrize("cls", [Ours, Mine])
def test_refused(cls: Any, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SharedPromptError, match=message):
        trainer(cls, model(), tmp_path, arguments=arguments)


def test_other_heads_are_refused(tmp_path: Path) -> None:
    other = model("gpt2", hidden_size=32)
    other.config.pad_token_id = 0
    with pytest.raises(SharedPromptError, match="generic head"):
        trainer(Ours, other, tmp_path)
    other = transformers.AutoModelForTokenClassification.from_config(tiny_config("qwen3"))
    sharing = sharing_module.Sharing(Options(), SimpleNamespace(use_liger_kernel=False))
    with pytest.raises(SharedPromptError, match=r"a \*ForSequenceClassification, got Qwen3ForTokenClassification"):
        sharing.install(other)
