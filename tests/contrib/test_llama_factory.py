# SPDX-License-Identifier: BSD-3-Clause
"""LLaMA-Factory's own DPO trainer, with shared prompts and without: losses and gradients on tiny models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from stand_ins import stand_ins
from tiny_models import Samples, check_gradients, gradients, tiny_model
from torch import Tensor

from flash_attn_dualkv.errors import SharedPromptError

if importlib.util.find_spec("llamafactory") is None:
    pytest.skip("needs LLaMA-Factory", allow_module_level=True)

plugin = importlib.import_module("flash_attn_dualkv.contrib.llama_factory")
pytestmark = pytest.mark.slow


def load() -> Any:
    """LLaMA-Factory's trainer, imported after `share_prompts` has been called, as by the command."""
    plugin.share_prompts(min_shared=1)
    assert "llamafactory.train.dpo.trainer" not in sys.modules
    # The newest releases of datasets and accelerate are installed, which nothing here is about.
    with pytest.MonkeyPatch.context() as environment, stand_ins("gradio", "torchaudio", "omegaconf"):
        environment.setenv("DISABLE_VERSION_CHECK", "1")
        return importlib.import_module("llamafactory.train.dpo.trainer")


Trainer = load().CustomDPOTrainer
stock = Trainer.concatenated_forward.dualkv_stock

# Chosen answers, then rejected ones.
SAMPLES = Samples.random([(30, [5, 9]), (12, [1, 7]), (21, [4, 6])], seed=3).take([0, 2, 4, 1, 3, 5])


def make_trainer(loss: str, reference: Any = None, **options: Any) -> Any:
    """The trainer without data and optimizer."""
    made = object.__new__(Trainer)
    made.finetuning_args = SimpleNamespace(use_ref_model=loss not in ("orpo", "simpo"))
    made.accelerator = SimpleNamespace(
        device=torch.device("cpu"), unwrap_model=lambda model: model, mixed_precision="no"
    )
    made.loss_type, made.ref_model, made.beta, made.simpo_gamma = loss, reference, 0.1, 0.5
    made.f_divergence_type, made.reference_free, made.label_smoothing = "reverse_kl", False, 0.0
    made.ld_alpha, made.bco_gemma, made.ftx_gamma = None, 0.0, 0.3
    made.__dict__.update(options)
    return made


def batch_of(samples: Samples) -> dict[str, Tensor]:
    rows = [torch.tensor(prompt + response) for prompt, response in zip(samples.prompts, samples.responses)]
    labels = [row.clone() for row in rows]
    for label, prompt in zip(labels, samples.prompts):
        label[: len(prompt)] = -100
    pad = torch.nn.utils.rnn.pad_sequence
    return dict(
        input_ids=pad(rows, batch_first=True),
        attention_mask=pad([torch.ones_like(row) for row in rows], batch_first=True),
        labels=pad(labels, batch_first=True, padding_value=-100),
    )


@contextmanager
def as_stock() -> Iterator[None]:
    with patch.object(Trainer, "concatenated_forward", stock):
        yield


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "orpo", "simpo"])
def test_losses_equal_stock(loss: str) -> None:
    model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa").train()
    reference = tiny_model("qwen3", dtype=torch.float32, attention="sdpa", initializer_range=0.05)
    rows: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    trainer = make_trainer(loss, reference)
    found = []
    for using in (nullcontext, as_stock):
        with using():
            value, metrics = trainer.get_batch_loss_metrics(model, batch_of(SAMPLES))
        value.backward()
        found.append((value.item(), metrics, gradients(model), rows[-1]))
    (got, ours, grads, shared_rows), (expected, theirs, expected_grads, stock_rows) = found
    assert got == pytest.approx(expected, abs=1e-5)
    check_gradients(grads, expected_grads, 5e-6)
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert ours[name] == pytest.approx(one, abs=5e-5) if "logits" not in name else ours[name] != ours[name]
    # Each response has a copy of its prompt's last token.
    assert shared_rows == 30 + 12 + 21 - 3 + len(SAMPLES) + sum(map(len, SAMPLES.responses)) < stock_rows


@pytest.mark.parametrize(
    ("reason", "options", "more"),
    [
        ("arguments", {}, dict(pixel_values=torch.zeros(1))),
        ("arguments", dict(ld_alpha=0.5), {}),
        ("arguments", {}, dict(attention_mask=torch.ones(6, 1, 39, 39))),
        ("dedup_ratio", {}, {}),
    ],
)
def test_fallbacks(reason: str, options: Any, more: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa")
    batch = batch_of(SAMPLES.take([0, 1]) if reason == "dedup_ratio" else SAMPLES) | more
    scores = plugin.PaddedScores.of(min_dedup_ratio=1.1, self_check=True, min_shared=1)
    forward = MagicMock(return_value="stock")
    trainer = make_trainer("sigmoid", **options)
    for _ in range(2):
        assert plugin._forward(forward, scores)(trainer, model, batch) == "stock"
    assert forward.call_args.args == (trainer, model, batch, False)
    assert [f"({reason})" in one.getMessage() for one in caplog.records] == [True]  # said once
    assert scores.tally.fallbacks == {reason: 2}


@pytest.mark.parametrize(("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_is_accelerates(precision: str, dtype: torch.dtype | None) -> None:
    """Weights in float32 compute in 16 bits inside a prepared model's forward, which the check comes before."""
    trainer, scores = make_trainer("sigmoid"), MagicMock()
    trainer.accelerator.mixed_precision = precision
    scores.score.return_value = None
    plugin._forward(MagicMock(), scores)(trainer, None, batch_of(SAMPLES))
    assert scores.score.call_args.kwargs["dtype"] is dtype


def test_wrong_uses() -> None:
    with pytest.raises(SharedPromptError, match="self_check: expected"):
        plugin.share_prompts(self_check="no")
    batch = batch_of(SAMPLES)
    batch["labels"][0, 33] += 1
    with pytest.raises(SharedPromptError, match="labels: expected the tokens themselves or -100, got others"):
        make_trainer("sigmoid").concatenated_forward(tiny_model("qwen3", attention="sdpa"), batch)


def test_the_command_trains_by_llama_factory() -> None:
    tuner = MagicMock()
    with patch.dict(sys.modules, {"llamafactory.train.tuner": tuner}):
        plugin.main()
    tuner.run_exp.assert_called_once_with()
