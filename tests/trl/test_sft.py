# SPDX-License-Identifier: BSD-3-Clause
"""TRL's SFTTrainer on shared beginnings: losses, metrics and every parameter as of the stock trainer."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from tiny_tokenizer import tokenizer
from tiny_trl import SLOW, Dataset, check_runs, lora, model_on_disk, quiet, shared, train, trl

pytestmark = pytest.mark.usefixtures("restored_registry")
Ours = shared.SharedPromptSFTTrainer


def data(kind: str) -> Dataset:
    """Samples behind one of two system prompts; those of some begin alike for longer, one is the beginning of another.

    kind: what is trained: "completions", the assistant's two "turns", or "everything".
    """
    generator = torch.Generator().manual_seed(4)

    def words(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    systems, question = [words(24), words(17)], words(6)
    rows = []
    for at, length in enumerate((5, 9, 4, 7) * 4):
        prompt = [*systems[at % 2], *(question if at % 3 else words(length))]
        answer, more, last = words(length), words(3), words(length + 1)
        tokens = [*prompt, *answer, *more, *last]
        labels = {
            "completions": [-100] * (len(tokens) - len(last)) + last,
            "turns": [-100] * len(prompt) + answer + [-100] * len(more) + last,
            "everything": list(tokens),
        }[kind]
        rows.append(dict(input_ids=tokens, labels=labels))
    if kind == "everything":
        rows[4] = {name: value[:30] for name, value in rows[0].items()}
    return Dataset.from_list(rows)


def trainer(cls: Any, model: str, out: Path, kind: str, *, arguments: Any = None, **config: Any) -> Any:
    given = dict(
        output_dir=str(out), per_device_train_batch_size=4, max_steps=4, learning_rate=0.2, optim="sgd",
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", bf16=False, disable_tqdm=True,
        model_init_kwargs=dict(dtype="float32"),
    )  # fmt: skip
    arguments = {**(dict(min_shared=4) if cls is Ours else {}), **(arguments or {})}
    peft_config = config.pop("peft_config", None)
    torch.manual_seed(0)
    with quiet():
        args = trl.SFTConfig(**{**given, **config})
        both = dict(model=model, args=args, train_dataset=data(kind), processing_class=tokenizer())
        return cls(**both, peft_config=peft_config, **arguments)


RUNS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": dict(gradient_accumulation_steps=2, max_steps=2),
    "dft and cut": dict(loss_type="dft", max_length=40),
}
KINDS = ["completions", "turns", "everything"]
# Each kind and each run once; the other pairs are behind -m slow.
QUICK = [*zip(RUNS, KINDS)]
PAIRS = [one if one in QUICK else SLOW(*one) for one in product(RUNS, KINDS)]


@pytest.mark.parametrize(("run", "kind"), PAIRS)
def test_training_equals_stock(run: str, kind: str, tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    expected = train(trainer(trl.SFTTrainer, model, tmp_path, kind, **RUNS[run]))
    got = train(trainer(Ours, model, tmp_path, kind, **RUNS[run]))
    check_runs(got, expected)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= expected.logs[0].keys()
    assert sum(got.metric("fallbacks")) == 0
    assert min(got.metric("dedup_ratio")) > 1.15


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_training_of_other_models(name: str, tmp_path: Path) -> None:
    options = dict(router_aux_loss_coef=0.1, output_router_logits=True) if name == "mixtral" else {}
    model = model_on_disk(tmp_path, name, "eager" if name == "gemma2" else "sdpa", **options)
    expected = train(trainer(trl.SFTTrainer, model, tmp_path, "turns"))
    got = train(trainer(Ours, model, tmp_path, "turns"))
    check_runs(got, expected)
    assert sum(got.metric("fallbacks")) == 0


def test_lora_and_evaluation(tmp_path: Path) -> None:
    model = model_on_disk(tmp_path)
    losses = []
    for cls in (trl.SFTTrainer, Ours):
        torch.manual_seed(2)
        made = trainer(cls, model, tmp_path, "turns", peft_config=lora())
        train(made)
        with quiet():
            losses.append(made.evaluate(data("turns"))["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)


@pytest.mark.parametrize(
    ("reason", "kind", "config", "arguments", "share"),
    [
        SLOW("arguments", "everything", dict(padding_free=True, max_length=None), {}, 1.0),
        ("arguments", "turns", dict(label_smoothing_factor=0.1), {}, 0.5),
        ("samples", "turns", {}, dict(min_shared=None), 1.0),
        ("dedup_ratio", "turns", {}, dict(min_dedup_ratio=9.0), 1.0),
    ],
)
def test_fallbacks(reason: str, kind: str, config: Any, arguments: Any, share: float, tmp_path: Path) -> None:
    """With label smoothing the loss is made of logits, and a second forward scores tokens for the metrics."""
    model = model_on_disk(tmp_path)
    expected = train(trainer(trl.SFTTrainer, model, tmp_path, kind, **config))
    got = train(trainer(Ours, model, tmp_path, kind, arguments=arguments, **config))
    check_runs(got, expected)
    assert got.metric(f"fallbacks/{reason}") == got.metric("fallbacks") == [share] * 4
