# SPDX-License-Identifier: BSD-3-Clause
"""The README's training example, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Samples, check_equal, dualkv, replicated_logps

README = Path(__file__).resolve().parents[2] / "README.md"
MOST_LINES = 40


def test_the_training_example(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Under 40 lines of code; parameters move; what it scores equals replicated prompts."""
    marked = r"^<!-- example: training -->\n```python\n(.*?)^```$"
    (source,) = re.findall(marked, README.read_text(encoding="utf-8"), re.M | re.S)
    code = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) < MOST_LINES
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    losses: list[float] = []
    names: dict[str, Any] = {}
    step = torch.optim.AdamW.step

    def watched_step(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        losses.append(names["loss"].item())
        assert all(one.grad is not None for one in names["model"].parameters())
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched_step)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(source, str(README), "exec"), names)
    assert names["device"] == device
    assert len(losses) == 2
    if device == "cpu":  # 16-bit parameters may swallow a step as small as these
        assert losses[1] < losses[0]
    assert "times fewer tokens" in capsys.readouterr().out

    samples = Samples([one.tolist() for one in names["prompts"]], [one.tolist() for one in names["responses"]])
    model, batch = names["model"], names["batch"]
    assert batch.layout.num_groups == 2
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, batch)
        model.set_attn_implementation("sdpa")
        expected, _ = replicated_logps(model, samples)
    check_equal(got, expected, 5e-6 if device == "cpu" else 0.05)
