# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of verl's whole steps: what is set, and what is read from verl's file logger."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import bench_step


def fake_run(command: list[str], env: dict[str, str], **options: Any) -> None:
    """verl, by its file logger: steps of 9, 4, 2 and 3 s, of which verl alone is cut behind the second."""
    is_stock = "actor_rollout_ref.model.external_lib=null" in command
    seconds = [9.0, 4.0] if is_stock else [9.0, 4.0, 2.0, 3.0]
    rows = [{"step": step, "data": {"timing_s/step": s, "timing_s/gen": s / 2}} for step, s in enumerate(seconds)]
    Path(env["VERL_FILE_LOGGER_PATH"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert os.access(command[0], os.X_OK) and "trainer.total_training_steps=4" in command and command[-2] == "a.b=1"
    assert (env["ROUTER"] == "") == ("ATTENTION" in env) == is_stock and Path(env["ROUTER"] or ".").exists()
    assert env["MODEL"].endswith("task/model") and env["N"] == "16"
    if is_stock:
        raise bench_step.subprocess.TimeoutExpired(command, options["timeout"])


def test_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expired = bench_step.subprocess.TimeoutExpired
    fake = SimpleNamespace(run=fake_run, TimeoutExpired=expired, CalledProcessError=OSError)
    monkeypatch.setattr(bench_step, "subprocess", fake)
    given = ["--task", str(tmp_path / "task"), "--out", str(tmp_path), "--name", "found", "--commit", "0" * 40]
    assert bench_step.main([*given, "--limit", "7", "--", "a.b=1"]) == 1
    stock, ours = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (stock["who"], stock["steps"], stock["step"], stock["error"]) == ("verl", 1, 4.0, "did not end within 7 s")
    assert (ours["who"], ours["steps"], ours["step"], ours["gen"]) == ("plug-in", 3, 3.0, 1.5)
    assert ours["step_s"] == [9.0, 4.0, 2.0, 3.0] and "error" not in ours
