# SPDX-License-Identifier: BSD-3-Clause
"""Scores of padded batches, as the adapters of trainers ask for them; and why others stay as they are."""

from __future__ import annotations

import importlib
from typing import Any

import golden
import pytest
import torch
from tiny_models import MIXED, Samples, gradients, tiny_model

padded = importlib.import_module("flash_attn_dualkv.contrib.padded")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("restored_registry")]
ALONE = Samples.random([(9, [5]), (7, [4])])
SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shared": (MIXED, {}),
    "nothing shared": (ALONE, {}),
    "dropout": (MIXED, dict(attention_dropout=0.1)),
}


@pytest.mark.parametrize("name", SETUPS)
def test_numbers_stay(name: str) -> None:
    samples, options = SETUPS[name]
    rows = [prompt + response for prompt, response in zip(samples.prompts, samples.responses)]
    ids, mask, scored = (torch.zeros(len(rows), 24, dtype=torch.int64) for _ in range(3))
    for at, (row, prompt) in enumerate(zip(rows, samples.prompts)):
        ids[at, : len(row)], mask[at, : len(row)], scored[at, len(prompt) : len(row)] = torch.tensor(row), 1, 1
    scores = padded.PaddedScores.of(min_dedup_ratio=1.1, min_shared=1)
    model = tiny_model("qwen3", attention="sdpa", **options).train()
    found = scores.score(model, ids, mask, scored.bool(), temperature=0.7, with_entropy=True)
    if found is not None:
        (found[0].sum() + found[1].sum()).backward()
    tally = {name: int(value) for name, value in vars(scores.tally).items() if name != "fallbacks"}
    kept = dict(scores=found, gradients=gradients(model), tally=tally, reasons=dict(scores.tally.fallbacks))
    golden.check("padded", name, kept)
