# SPDX-License-Identifier: BSD-3-Clause
"""Steps of TRL's trainers: losses, gradient norms, metrics and reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import pytest

pytest.importorskip("trl", "1.16", reason="needs TRL 1.16 or newer")
import tiny_trl
from tiny_models import tiny_model
from tiny_trl import model_on_disk, shared, train

pytestmark = pytest.mark.usefixtures("restored_registry")


def _run(cls: str, folder: Path, name: str = "qwen3", arguments: Any = None, **config: Any) -> Any:
    kind = getattr(shared, f"SharedPrompt{cls}Trainer")
    made = tiny_trl.trainer(kind, model_on_disk(folder, name), folder / "out", arguments=arguments, **config)
    run = train(made)
    return dict(logs=run.logs, parameters=run.after)


def _dropout(folder: Path) -> Any:
    model = tiny_model("qwen3", dtype=None, attention="sdpa", attention_dropout=0.1).float()
    kind = shared.SharedPromptGRPOTrainer
    return train(tiny_trl.trainer(kind, model, folder / "out", disable_dropout=False)).logs


SETUPS: dict[str, Callable[[Path], Any]] = {
    "GRPO": lambda folder: _run("GRPO", folder, beta=0.1),
    "GRPO, accumulation": lambda folder: _run("GRPO", folder, gradient_accumulation_steps=2),
    "GRPO, MoE": lambda folder: _run("GRPO", folder, "qwen3_moe"),
    "GRPO, high threshold": lambda folder: _run("GRPO", folder, arguments=dict(min_dedup_ratio=9.0)),
    "GRPO, verified": lambda folder: _run("GRPO", folder, arguments=dict(verify_first_steps=1)),
    "GRPO, dropout": _dropout,
    "RLOO": lambda folder: _run("RLOO", folder, beta=0.1),
    "DPO": lambda folder: _run("DPO", folder),
}


@pytest.mark.parametrize("name", SETUPS)
def test_numbers_stay(name: str, tmp_path: Path) -> None:
    golden.check("trl", name, SETUPS[name](tmp_path))
