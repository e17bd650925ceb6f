# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks of rollouts: TRL's runs on every way to generate, and the mismatch of log-probabilities."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.17")

import bench_mismatch
import trainers_report
from pages import SECTIONS, WORDS

from flash_attn_dualkv.integrations.transformers import rollout, unregister_decode

COMMIT = ["--commit", "0123456789ab"]


@pytest.mark.usefixtures("restored_registry")
def test_runs_of_trl(tmp_path, monkeypatch):
    """Each has its phases; rollouts by continuous batching are the same with this package; one does not end."""
    pytest.importorskip("trl")
    import bench_trl

    def in_process(command: list[str], check: bool, timeout: float) -> None:
        if "shared-batching" in running:
            raise subprocess.TimeoutExpired(command, timeout)
        monkeypatch.setattr(sys, "argv", [str(one) for one in command[1:]])
        names: dict[str, Any] = {"__name__": "example"}
        exec(compile(bench_trl.EXAMPLE.read_text(), str(bench_trl.EXAMPLE), "exec"), names)
        try:
            names["main"]()
        finally:
            unregister_decode()

    running: list[str] = []
    one_run = bench_trl.one_run
    monkeypatch.setattr(bench_trl, "one_run", lambda name, *rest: running.append(name) or one_run(name, *rest))
    monkeypatch.setattr(subprocess, "run", in_process)
    # Queued as stock rollouts are, so that all draw the same random numbers.
    monkeypatch.setattr(rollout._Queued, "__lt__", list.__lt__)
    example = [
        "--preset",
        "cpu",
        "--steps",
        "2",
        "--completion",
        "4",
        "--prompts",
        "2",
        "--micro-batch",
        "8",
        "--trainer",
        "rloo",
    ]
    runs = ["stock", "stock-batching", "shared-decode", "shared-batching"]
    given = ["--out", str(tmp_path), "--limit", "9", *COMMIT, "--runs", *runs, "--", *example]
    assert bench_trl.main(given) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["who"] for row in rows] == runs and rows[3] == {"who": runs[3], "error": "did not end within 9 s"}
    for row in rows[:3]:
        assert row["arguments"]["rollouts"] == (row["who"].partition("-")[2] or "generate")
        assert all(len(seconds) == 2 and min(seconds) >= 0 for seconds in row["phases"].values())
        assert min(row["phases"]["rollout"] + row["phases"]["update"]) > 0
        assert len(row["rewards"]) == 2
    assert rows[1]["rewards"] == rows[2]["rewards"]
    assert [row["dedup_ratio"][0] for row in rows[:2]] == [None, None] and rows[2]["dedup_ratio"][0] > 3
    page = trainers_report.runs_of_trl(tmp_path)
    assert page.startswith("### RLOO: 2 steps of 2 prompts, 8 x 128 x 4, 2 layers of width 64, CPU")
    assert "shared prompts, continuous batching did not end within 9 s: 0 steps." in page
    header = next(line for line in page.splitlines() if line.startswith("|"))
    assert [one.strip() for one in header.split("|")[2:-2]] == [WORDS["trl"][one] for one in runs[:3]]
    cells = next(line for line in page.splitlines() if line.startswith("| rollout, s")).split("|")[2:5]
    second = [row["phases"]["rollout"][1] for row in rows[:3]]  # the first step is left out
    assert [float(cell) for cell in cells] == pytest.approx(second, abs=6e-4)


def test_mismatch(tmp_path):
    """All pairs are measured; a row of the page is a pair."""
    given = ["--device", "cpu", "--shape", "tiny-2x270x5", "--prompts", "2", "--out", str(tmp_path)]
    assert bench_mismatch.main([*given, *COMMIT]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["rollouts"], row["training"], row["rowwise"]) for row in rows] == [*bench_mismatch.PAIRS]
    for row in rows:
        assert row["tokens"] == 20 and 0 <= row["mean"] <= row["max"] < 5e-6 and row["k3"] < 1e-11
    page = SECTIONS["mismatch"]._replace(folder=".").of(tmp_path, trainers_report.changed)
    assert page.count("| this library") == 5 and "2 x tiny-2x270x5" in page and "in fp64, rounded" in page


def test_figures_of_a_mismatch():
    rolled = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    found = bench_mismatch.mismatch(rolled, rolled + torch.tensor([[0.0, 0.5], [-0.25, 0.0]]))
    k3 = (math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 4
    assert found == {"mean": 0.1875, "max": 0.5, "k3": pytest.approx(k3), "equal": 0.5, "tokens": 4}
