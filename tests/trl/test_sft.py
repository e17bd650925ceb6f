# SPDX-License-Identifier: BSD-3-Clause
"""TRL's SFTTrainer on shared beginnings: losses, metrics and every parameter as of the stock trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_trl
from tiny_trl import SLOW, Dataset, both, check_runs, drawing, model_on_disk, shared, train, trl

pytestmark = pytest.mark.usefixtures("restored_registry")
Ours = shared.SharedPromptSFTTrainer


def data(kind: str) -> Dataset:
    """Samples behind one of two system prompts; those of some begin alike for longer, one is the beginning of another.

    kind: what is trained: "completions", the assistant's two "turns", or "everything".
    """
    words = drawing(4)
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


RUNS: dict[str, dict[str, Any]] = {
    "completions": {},
    "turns": dict(gradient_accumulation_steps=2, max_steps=2),
    "everything": dict(loss_type="dft", max_length=40),
}


def trainer(cls: Any, model: str, out: Path, kind: str, arguments: Any = None, **config: Any) -> Any:
    given = dict(train_dataset=data(kind), peft_config=config.pop("peft_config", None), **(arguments or {}))
    if cls is Ours:
        given.setdefault("min_shared", 4)
    config = dict(per_device_train_batch_size=4) | config
    return tiny_trl.trainer(cls, model, out, arguments=given, **config)


@pytest.mark.parametrize("kind", RUNS)
def test_training_equals_stock(kind: str, tmp_path: Path) -> None:
    got, expected = both(Ours, trl.SFTTrainer, model_on_disk(tmp_path), tmp_path, make=trainer, kind=kind, **RUNS[kind])
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= expected.logs[0].keys()
    assert min(got.metric("dedup_ratio")) > 1.15


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
    assert got.metric(f"fallbacks/{reason}") == got.metric("fallbacks") == [share] * 3
