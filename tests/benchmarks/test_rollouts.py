# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of rollouts and training: a trial run, and its rows on the page."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", "5.17")

import bench_mismatch
import trainers_report
from pages import SECTIONS

COMMIT = ["--commit", "0123456789ab"]


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
