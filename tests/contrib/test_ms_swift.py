# SPDX-License-Identifier: BSD-3-Clause
"""ms-swift's own GRPO trainer, with shared prompts and without: what its loss is made of, on tiny models."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from stand_ins import stand_ins
from tiny_models import Samples, check_gradients, gradients, tiny_model
from torch import Tensor

from flash_attn_dualkv.errors import SharedPromptError

pytest.importorskip("swift.version", reason="needs ms-swift")

plugin = importlib.import_module("flash_attn_dualkv.contrib.ms_swift")
pytestmark = pytest.mark.slow


def load() -> Any:
    """ms-swift's trainer, imported after the plug-in has run, as from the command line."""
    plugin.share_prompts(min_shared=1)
    assert "swift.rlhf_trainers.grpo_trainer" not in sys.modules
    with stand_ins("modelscope", "modelscope_hub", "msgspec", "dacite", "json_repair", "aiohttp"):
        return importlib.import_module("swift.rlhf_trainers.grpo_trainer")


swift = load()
NAME = "_get_per_token_logps_and_entropies_single"
stock = getattr(swift.GRPOTrainer, NAME).dualkv_stock
data = importlib.import_module("swift.rl_core.data")
utils = importlib.import_module("swift.rlhf_trainers.utils")

SAMPLES = Samples.random([(30, [5, 9, 7]), (12, [1, 7]), (21, [4, 6])], seed=3).take([0, 3, 1, 5, 2, 4, 6])


def make_trainer(model: Any, padding_free: bool = False, **options: Any) -> Any:
    """The trainer without what it needs for rollouts, rewards and optimizers."""
    trainer = object.__new__(swift.GRPOTrainer)
    trainer.template = SimpleNamespace(padding_free=padding_free, sequence_parallel_size=1)
    trainer.accelerator = SimpleNamespace(is_main_process=False, mixed_precision="no")
    trainer.args = SimpleNamespace(report_to=[], per_device_train_batch_size=99, per_device_eval_batch_size=99)
    trainer.model, trainer.temperature, trainer.is_multimodal = model, 0.7, False
    trainer.dynamic_num_samples = False
    trainer.model_kwarg_keys = {"use_cache", "logits_to_keep"}
    trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    trainer.__dict__.update(options)
    return trainer


def batch_of(samples: Samples, padding: str, *, whole: bool = True) -> tuple[dict[str, Any], Any]:
    """Inputs of the model and of the loss, padded "left" or "right" or not at all ("none"), by ms-swift's functions."""
    rows = [torch.tensor(prompt + response) for prompt, response in zip(samples.prompts, samples.responses)]
    labels = [row.clone() for row in rows]
    for label, prompt in zip(labels, samples.prompts):
        label[: len(prompt)] = -100
        if not whole and len(label) > len(prompt) + 4:  # what a tool has said
            label[len(prompt) + 1 : len(prompt) + 3] = -100
    if padding == "none":
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        inputs = dict(input_ids=torch.cat(rows)[None], labels=torch.cat(labels)[None], position_ids=positions)
    else:
        pad = torch.nn.utils.rnn.pad_sequence
        masks = [torch.ones_like(row) for row in rows]
        inputs = {
            name: pad(values, batch_first=True, padding_value=fill, padding_side=padding)
            for name, values, fill in (("input_ids", rows, 0), ("labels", labels, -100), ("attention_mask", masks, 0))
        }
        if padding == "left":
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = inputs.pop("labels")
    kept = int((found.shape[-1] - found.ne(-100).int().argmax(-1)).max())
    mask, lengths, _ = utils.build_completion_mask_and_seq_lengths(
        found, len(samples), padding_free=padding == "none", encoded_batch=inputs, logits_to_keep=kept
    )
    empty = torch.zeros(len(samples), dtype=torch.bool)
    return inputs, data.GRPOBatch(completion_mask=mask, truncated_mask=empty, seq_lengths=lengths, logits_to_keep=kept)


def both(trainer: Any, model: Any, batch: tuple[dict[str, Any], Any]) -> list[tuple[Tensor, Tensor, Any]]:
    """Log-probabilities, entropies and gradients of a loss with both: with shared prompts, and stock ones."""
    found = []
    mask = batch[1].completion_mask
    torch.manual_seed(0)
    weights = torch.randn(mask.shape)
    for single in (getattr(swift.GRPOTrainer, NAME), stock):
        with patch.object(swift.GRPOTrainer, NAME, single):
            logps, entropies = trainer._get_per_token_logps_and_entropies(
                model, dict(batch[0]), batch[1], compute_entropy=True
            )
        ((logps * weights)[mask].sum() + 0.1 * entropies[mask].sum()).backward()
        found.append((logps.detach(), entropies.detach(), gradients(model)))
    return found


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("whole", [True, False])
def test_equals_stock(padding: str, whole: bool) -> None:
    model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa").train()
    trainer = make_trainer(model, padding == "none")
    batch = batch_of(SAMPLES, padding, whole=whole)
    mask = batch[1].completion_mask
    (logps, entropies, grads), (expected, expected_entropies, expected_grads) = both(trainer, model, batch)
    assert logps.shape == expected.shape and logps.dtype == expected.dtype
    assert (logps - expected)[mask].abs().max() <= 5e-6
    assert (entropies - expected_entropies)[mask].abs().max() <= 5e-6
    check_gradients(grads, expected_grads, 5e-6)
    # What is added as padding is the same value, which differences and ratios meet.
    assert torch.equal(logps == plugin._PADDING, expected == plugin._PADDING)
    metrics = trainer._metrics["train"]
    # Each response has a copy of its prompt's last token.
    executed = 30 + 12 + 21 - 3 + len(SAMPLES) + sum(map(len, SAMPLES.responses))
    replicated = sum(map(len, SAMPLES.prompts)) + sum(map(len, SAMPLES.responses))
    assert metrics["shared_prompt/dedup_ratio"] == [replicated / executed]
    assert metrics["shared_prompt/tokens_saved"] == [replicated - executed]
    assert metrics["shared_prompt/fallbacks"] == [0]


@pytest.mark.parametrize(
    ("reason", "options", "more"),
    [
        ("multimodal", dict(is_multimodal=True), {}),
        ("arguments", dict(template=SimpleNamespace(padding_free=False, sequence_parallel_size=2)), {}),
        ("arguments", {}, dict(routed_experts=torch.zeros(1))),
        ("dedup_ratio", {}, {}),
        ("dropout", {}, {}),
    ],
)
def test_fallbacks(reason: str, options: Any, more: Any, caplog: pytest.LogCaptureFixture) -> None:
    dropped = dict(attention_dropout=0.1) if reason == "dropout" else {}
    model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa", **dropped).train()
    inputs, batch = batch_of(SAMPLES.take([0, 1]) if reason == "dedup_ratio" else SAMPLES, "left")
    trainer = make_trainer(model, **options)
    scores = plugin.PaddedScores.of(min_dedup_ratio=1.1, self_check=True, min_shared=1)
    calls = []
    single = plugin._sharing(lambda *arguments: calls.append(arguments) or ("stock", None), scores)
    for _ in range(2):
        assert single(trainer, model, inputs | more, batch) == ("stock", None)
    assert calls == [(trainer, model, inputs | more, batch, False)] * 2
    assert [f"({reason})" in one.getMessage() for one in caplog.records] == [True]  # said once
    assert trainer._metrics["train"]["shared_prompt/fallbacks"] == [1, 1]


@pytest.mark.parametrize(("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_is_accelerates(precision: str, dtype: torch.dtype | None) -> None:
    """Weights in float32 compute in 16 bits inside a prepared model's forward, which the check comes before."""
    trainer, scores = make_trainer(tiny_model("qwen3", attention="sdpa")), MagicMock()
    trainer.accelerator.mixed_precision = precision
    scores.score.return_value = None
    scores.take.return_value = plugin.PaddedScores.of(min_dedup_ratio=1.1, self_check=True, min_shared=1).tally
    plugin._sharing(MagicMock(), scores)(trainer, trainer.model, *batch_of(SAMPLES, "left"))
    assert scores.score.call_args.kwargs["dtype"] is dtype


def test_wrong_uses() -> None:
    with pytest.raises(SharedPromptError, match="min_dedup_ratio: expected"):
        plugin.share_prompts(min_dedup_ratio=-1)
    before = getattr(swift.GRPOTrainer, NAME)
    plugin.share_prompts()
    assert getattr(swift.GRPOTrainer, NAME) is before
