# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of scoring: both implementations answer alike, and what is counted is what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
import bench_scoring
import torch
from lm_eval.models.huggingface import HFLM


def test_tiny_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of hf are the forward's, rows of ours the packed ones; fixed shots share more."""
    padded: list[int] = []
    stock = HFLM._model_call

    def counted(self: Any, inps: torch.Tensor, *args: Any, **options: Any) -> Any:
        padded.append(inps.numel())
        return stock(self, inps, *args, **options)

    monkeypatch.setattr(HFLM, "_model_call", counted)
    words = ["--preset", "tiny", "--device", "cpu", "--warm-up", "0", "--batch-size", "1", "--out", str(tmp_path)]
    assert bench_scoring.main(words) == 0
    found = json.loads((tmp_path / "CPU.json").read_text())
    own, first = found["rows"]
    assert (own["task"], first["task"]) == ("tiny", "tiny-first_n")
    assert own["tokens_hf"] + first["tokens_hf"] == sum(padded)
    for row in found["rows"]:
        assert row["questions"] == 6 and row["requests"] == 24
        assert row["largest_difference"] <= 1e-5 and row["same_choices"] == 1.0
        assert row["time_ratio"] == row["hf_seconds"] / row["dualkv_seconds"]
    assert 3 < own["token_ratio"] < 4 < first["token_ratio"]
