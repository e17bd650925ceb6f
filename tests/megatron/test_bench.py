# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of Megatron runs on two ranks, and what it compares computes the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import bench_megatron
import torch
from megatron_cpu import megatron_on_the_cpu
from processes import run_ranks

TINY = ["--samples", "6", "--prompt", "12", "--response", "5", "--tokens", "36", "--rounds", "1"]


@pytest.mark.parametrize(("how", "kind", "pad"), [("--tensor", "tiny-experts", 2), ("--pipeline", "tiny", 0)])
def test_two_ranks(how: str, kind: str, pad: int) -> None:
    """pad: of a row of 29 tokens on two ranks, twice."""
    for rows in run_ranks(_run_rank, 2, [*TINY, how, "2", "--model", kind]).values():
        of = {row["who"]: row for row in rows}
        # The last token of the prompt is the first of each response.
        assert of["shared"]["tokens"] == 2 * 11 + 6 * 6 + pad and of["replicated"]["tokens"] == 6 * 17
        assert (of["shared"]["micro_batches"], of["replicated"]["micro_batches"]) == (2, 3)
        assert of["shared"]["token_ratio"] == pytest.approx(102 / (58 + pad))
        assert of["shared"]["log_prob_mean_difference"] < 1e-5
        assert all(of["replicated"][f"{what}_s"] > 0 for what in ("update", "log_probs"))


def _run_rank(rank: int, arguments: list[str], results: Any) -> None:
    options = bench_megatron.parsed(arguments)
    with megatron_on_the_cpu(options.tensor, options.pipeline, options.vpp if options.vpp > 1 else None):
        results[rank] = bench_megatron.measure(options, torch.device("cpu"))


@pytest.mark.parametrize("model", ["tiny-delta-nets", "tiny-hybrid"])
def test_recurrences(model: str) -> None:
    """Those of the replicated run take the sequences of a row; on one rank."""
    options = bench_megatron.parsed([*TINY, "--model", model])
    with megatron_on_the_cpu():
        shared, replicated = bench_megatron.measure(options, torch.device("cpu"))
    assert shared["log_prob_mean_difference"] < 1e-5
    assert (shared["tokens"], replicated["tokens"]) == (2 * 11 + 6 * 6, 6 * 17)
