# SPDX-License-Identifier: BSD-3-Clause
"""Settings of TRL's trainers around shared prompts: compilers, micro-batches, logs, noise and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch
from tiny_trl import StockInGroups, check_runs, model_on_disk, shared, train, trainer

pytestmark = pytest.mark.usefixtures("restored_registry")
GRPO = shared.SharedPromptGRPOTrainer
sharing = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.trl.sharing")


def test_compiled_models(tmp_path: Path, fresh_compiler: None) -> None:
    """The model is compiled as a stock one is, and packing is not: against what is computed without a compiler.

    Stock forwards too, of verified steps.
    """
    torch._dynamo.utils.clear_compilation_metrics()
    model = model_on_disk(tmp_path, num_hidden_layers=1)
    stock = train(trainer(StockInGroups, model, tmp_path, max_steps=2, beta=0.1))
    options = dict(torch_compile=True, torch_compile_backend="eager", arguments=dict(verify_first_steps=1))
    got = train(trainer(GRPO, model, tmp_path, max_steps=2, beta=0.1, **options))
    check_runs(got, stock)
    assert sum(got.metric("fallbacks")) == 0
    compiled = [str(one.co_filename) for one in torch._dynamo.utils.get_compilation_metrics()]
    assert any("modeling_qwen3" in one for one in compiled)
    assert not any("flash_attn_dualkv/data" in one or "flash_attn_dualkv/layout" in one for one in compiled)


@pytest.mark.parametrize(("accumulated", "logged"), [(2, 2), (4, 1)])
def test_tokens_are_counted_over_all_forwards(
    accumulated: int, logged: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums, whatever the trainer makes means of: of all micro-batches, and of the passes without gradients."""
    counts: list[tuple[int, int]] = []
    add = sharing.pipeline.Tally.add

    def counting(tally: Any, replicated: Any, tokens: Any, *rest: Any, **others: Any) -> None:
        counts.append((int(replicated), int(tokens)))
        add(tally, replicated, tokens, *rest, **others)

    monkeypatch.setattr(sharing.pipeline.Tally, "add", counting)
    made = trainer(
        GRPO, model_on_disk(tmp_path), tmp_path, max_steps=2, per_device_train_batch_size=4, beta=0.1,
        gradient_accumulation_steps=accumulated, logging_steps=logged, arguments=dict(min_dedup_ratio=1.4),
    )  # fmt: skip
    with tiny_trl.quiet():
        made.train()
    logs = [one for one in made.state.log_history if "loss" in one]
    assert len(logs) == 2 // logged
    tokens, saved = (sum(one[f"shared_prompt/{name}"] for one in logs) for name in ("tokens", "tokens_saved"))
    assert tokens == sum(tokens for _, tokens in counts)
    assert saved == sum(replicated - tokens for replicated, tokens in counts) > 0
    for one in logs:
        run, not_run = (one[f"shared_prompt/{name}"] for name in ("tokens", "tokens_saved"))
        assert one["shared_prompt/dedup_ratio"] == pytest.approx((run + not_run) / run)


@pytest.mark.parametrize(
    ("cls", "arguments", "config", "message"),
    [
        (GRPO, {}, dict(steps_per_generation=4), "nothing is shared"),
        (GRPO, {}, dict(gradient_accumulation_steps=4), None),
        (
            shared.SharedPromptRLOOTrainer, dict(prompt_once=False),
            dict(per_device_train_batch_size=2, gradient_accumulation_steps=4),
            "at most 2 of a prompt's 4 completions share it",
        ),
        (shared.SharedPromptDPOTrainer, {}, {}, None),
    ],
)  # fmt: skip
def test_small_micro_batches_are_told_before_the_training(
    cls: Any, arguments: Any, config: Any, message: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(cls, model_on_disk(tmp_path), tmp_path, arguments=arguments, **dict(per_device_train_batch_size=1) | config)
    assert ("per_device_train_batch_size" in caplog.text) == (message is not None)
    assert message is None or message in caplog.text
