# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of one long tree on several ranks: a trial run, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", "4.57")

import bench_context
from processes import run_ranks


def _run_rank(rank: int, folder: str, results: Any) -> None:
    given = ["--device", "cpu", "--tokens", "600", "--steps", "1", "--out", folder, "--name", f"rank{rank}"]
    given += ["--commit", "0" * 40]
    results[rank] = bench_context.main([*given, "--modes", *bench_context.MODES])


@pytest.mark.slow
def test_a_trial_run(tmp_path: Path) -> None:
    assert run_ranks(_run_rank, 4, str(tmp_path)) == dict.fromkeys(range(4), 0)
    # One rank writes.
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["header"]["ranks"] == 4
    rows = {row["mode"]: row for row in found["rows"]}
    assert [*rows] == [*bench_context.MODES]
    tokens = sum(length for length, _ in bench_context.long_tree(600, "tiny", None).nodes)
    assert {row["tokens"] for row in rows.values()} == {tokens}
    assert rows["one"]["rows_per_rank"] == tokens
    for mode in bench_context.DIVIDED:
        assert tokens / 4 <= rows[mode]["rows_per_rank"] < tokens / 2
        assert rows[mode]["ranks"] == 4
    for row in [*rows.values()][1:]:
        assert row["rate_of_one"] == pytest.approx(rows["one"]["step_ms"] / row["step_ms"])
        if row["mode"] != "stock":
            assert row["logps_difference"] < 1e-5
            assert row["gradient_difference"] < 1e-5
            assert row["norm_difference"] < 1e-5
    assert "logps_difference" not in rows["stock"]
    assert rows["stock"]["rows_per_rank"] > 2 * tokens
    import pages  # which the ranks do without
    import trainers_report

    page = pages.SECTIONS["context"]._replace(folder=".").of(tmp_path, trainers_report.changed)
    assert all(f"| {name} " in page for name in trainers_report.ROWS.values())


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
