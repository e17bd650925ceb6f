# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of one long tree: a trial run in micro-batches, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", "4.57")

import bench_context
from processes import run_ranks


def _run_budgeted(rank: int, folder: str, results: Any) -> None:
    given = ["--device", "cpu", "--shape", "tiny-6x90x20", "--max-tokens", "150", "--steps", "1", "--out", folder]
    results[rank] = bench_context.main([*given, "--modes", "budget", "once", "--commit", "0" * 40])


def test_a_prompt_once_and_in_each_micro_batch(tmp_path: Path) -> None:
    assert run_ranks(_run_budgeted, 1, str(tmp_path)) == {0: 0}
    (path,) = tmp_path.iterdir()
    budget, once = json.loads(path.read_text())["rows"]
    assert budget["rows_per_rank"] > once["rows_per_rank"] == once["tokens"]
    assert once["rate_of_one"] == pytest.approx(budget["step_ms"] / once["step_ms"])
    assert max(once["logps_difference"], once["gradient_difference"], once["norm_difference"]) < 1e-5
