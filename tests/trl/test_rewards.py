# SPDX-License-Identifier: BSD-3-Clause
"""TRL's RewardTrainer on shared prefixes: losses, metrics and every parameter as of the stock trainer."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, check_gradients, gradients, tiny_config, transformers
from tiny_tokenizer import tokenizer
from tiny_trl import SLOW, Dataset, check_runs, lora, quiet, shared, train, trl
from torch import Tensor

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.common.options import Options

sharing_module = importlib.import_module("flash_attn_dualkv.integrations.trl.sharing")

pytestmark = pytest.mark.usefixtures("restored_registry")
Ours = shared.SharedPromptRewardTrainer


class Mine(shared.SharedPromptMixin, trl.RewardTrainer):
    pass


def model(name: str = "qwen3", attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(1)
    config = tiny_config(name, num_labels=1, **options)
    return transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)


def pairs(with_margin: bool = False) -> Dataset:
    """Prompts of several lengths, with completions that end as TRL ends them; one pair shares nothing."""
    generator = torch.Generator().manual_seed(4)

    def words(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    rows: list[dict[str, Any]] = []
    for length in (20, 33, 17, 26) * 4:
        prompt = words(length)
        rows.append(dict(chosen_ids=[*prompt, *words(length // 4), 2], rejected_ids=[*prompt, *words(7), 2]))
        rows[-1] |= dict(margin=0.1 * (length % 7)) if with_margin else {}
    rows[3]["rejected_ids"] = [*words(9), 2]
    return Dataset.from_list(rows)


def trainer(cls: Any, made: Any, out: Path, *, arguments: dict[str, Any] | None = None, **config: Any) -> Any:
    given = dict(
        output_dir=str(out), per_device_train_batch_size=4, max_steps=4, learning_rate=0.2, optim="sgd",
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", bf16=False, disable_tqdm=True,
    )  # fmt: skip
    data = pairs(with_margin=config.pop("with_margin", False))
    torch.manual_seed(0)
    with quiet():
        arguments = {"min_shared": 4, **(arguments or {})} if issubclass(cls, shared.SharedPromptMixin) else {}
        peft_config = config.pop("peft_config", None)
        args = trl.RewardConfig(**{**given, **config})
        given_to_both = dict(model=made, args=args, train_dataset=data, processing_class=tokenizer())
        return cls(**given_to_both, peft_config=peft_config, **arguments)


RUNS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "margin": dict(with_margin=True, center_rewards_coefficient=0.01),
    "accumulation": dict(gradient_accumulation_steps=2, gradient_checkpointing=False, max_steps=2),
    "padded": dict(pad_to_multiple_of=32),
}


# What they show, others show as well.
ALIKE = {"defaults", "padded"}


@pytest.mark.parametrize("name", [SLOW(name) if name in ALIKE else name for name in RUNS])
def test_training_equals_stock(name: str, tmp_path: Path) -> None:
    expected = train(trainer(trl.RewardTrainer, model(), tmp_path, **RUNS[name]))
    got = train(trainer(Ours, model(), tmp_path, **RUNS[name]))
    check_runs(got, expected)
    assert {"accuracy", "margin", "min_reward"} <= expected.logs[0].keys()
    assert sum(got.metric("fallbacks")) == 0
    assert min(got.metric("dedup_ratio")) > 1.3


@pytest.mark.parametrize("name", ["llama", SLOW("mistral"), "gemma2"])
def test_training_of_other_models(name: str, tmp_path: Path) -> None:
    attention = "eager" if name == "gemma2" else "sdpa"
    made = [trainer(cls, model(name, attention), tmp_path) for cls in (trl.RewardTrainer, Ours)]
    expected, got = map(train, made)
    check_runs(got, expected)
    assert sum(got.metric("fallbacks")) == 0


def test_lora(tmp_path: Path) -> None:
    adapter = lora()
    adapter.task_type = "SEQ_CLS"
    made = [trainer(cls, model(), tmp_path, peft_config=adapter) for cls in (trl.RewardTrainer, Ours)]
    expected, got = map(train, made)
    check_runs(got, expected)
    assert sum(got.metric("fallbacks")) == 0
    assert any("lora" in name for name in got.before)


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


class Observed(torch.nn.Linear):
    """A projection whose output follows the largest magnitude that it has seen, moved by each forward."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.register_buffer("largest", torch.tensor(1.0))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.largest += 0.1 * (x.abs().max() - self.largest)
        return super().forward(x / self.largest)


@pytest.mark.parametrize("layer", [0, -1])
def test_a_module_with_state_runs_as_often_as_in_stock(layer: int, tmp_path: Path) -> None:
    """Its state after training, in the last layer too, whose rows are hardly read."""
    found = []
    for cls in (trl.RewardTrainer, Ours):
        made = model("llama")
        attention = made.model.layers[layer].self_attn
        attention.k_proj = observed = Observed(attention.k_proj)
        ours = trainer(cls, made, tmp_path, gradient_checkpointing=False)
        ours.train()
        found.append((observed.calls, float(observed.largest), observed.weight.detach()))
    (calls, largest, weight), (own_calls, own_largest, own_weight) = found
    assert own_calls == calls
    shared_steps = [one for one in ours.state.log_history if "shared_prompt/dedup_ratio" in one]
    assert shared_steps and all(one["shared_prompt/dedup_ratio"] > 1.1 for one in shared_steps)
    assert abs(own_largest / largest - 1) < 1e-5
    torch.testing.assert_close(own_weight, weight, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("cls", [Ours, Mine])
def test_a_head_of_ones_own(cls: Any, tmp_path: Path) -> None:
    other = model("gpt2", hidden_size=32)
    other.config.pad_token_id = 0
    with pytest.raises(SharedPromptError, match="generic head"):
        trainer(cls, other, tmp_path)


def test_a_head_on_every_token() -> None:
    other = transformers.AutoModelForTokenClassification.from_config(tiny_config("qwen3"))
    sharing = sharing_module.Sharing(Options(), SimpleNamespace(use_liger_kernel=False))
    with pytest.raises(SharedPromptError, match=r"a \*ForSequenceClassification, got Qwen3ForTokenClassification"):
        sharing.install(other)
