# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of batches in pieces equal those of the batch in one, and of each sequence by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from cuts import random_cut
from piece_runs import expected_of, losses
from sweep import any_model
from tiny_models import (
    EVERY_EXPERT,
    FAMILIES,
    MASKS,
    SEQUENCES,
    TOLERANCES,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    tiny_model,
)

from flash_attn_dualkv import PackedBatch, pack_prefix_tree
from flash_attn_dualkv.data.parts import Cut, Piece
from flash_attn_dualkv.integrations.transformers import prompt_once

GROUP = Samples.random([(30, [6, 9, 4, 8, 3]), (7, [5])])
Options = dict[str, Any]


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes the place of the plan."""

    def use(cut: Cut, keep: str = "kv") -> None:
        monkeypatch.setattr(prompt_once, "plan_backward", lambda *_, **__: prompt_once.Plan(cut, keep))

    return use


def compare(model: Any, batch: PackedBatch, tolerance: float = 1e-9, **options: Any) -> None:
    scoring = {name: value for name, value in options.items() if name in ("temperature", "with_entropy")}
    logps, expected = expected_of(model, batch, **scoring)
    options = dict(max_tokens=1) | options
    found = dualkv.shared_prompt_backward(model, batch, losses(batch), **options)
    assert not found.logps.requires_grad and found.sequences == tuple(range(len(batch.response_lens)))
    check_equal(found.logps, logps, tolerance)
    check_gradients(gradients(model), expected, tolerance)


def transcripts() -> PackedBatch:
    return pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1)


@pytest.mark.parametrize("keep", ["kv", "graph"])
@pytest.mark.parametrize("seed", range(8))
def test_random_cuts(seed: int, keep: str, cuts: Callable[..., None]) -> None:
    """Of sequences that leave each other anywhere, with scored tokens in trunks, and sequences that end there."""
    draw = random.Random(seed)
    batch = transcripts() if seed % 2 else GROUP.pack(boundary=draw.choice(["gather", "replicate"]))
    model = tiny_model(draw.choice(["qwen3", "mistral"])).train()
    if seed > 4:
        model.gradient_checkpointing_enable(dict(use_reentrant=seed > 6))
        model.enable_input_require_grads()
    cut = random_cut(draw, batch.layout.node_lens, batch.layout.node_parents, 3)
    while cut.is_whole:
        cut = random_cut(draw, batch.layout.node_lens, batch.layout.node_parents, 3)
    cuts(cut, keep)
    compare(model, batch, with_entropy=bool(seed & 2), temperature=0.7)


# A prompt, one of whose responses ends; a turn after it that three answers continue.
TURNS = [[*range(5, 25), *range(30, 39)]] + [
    [*range(5, 25), *range(40, 70), *own] for own in ([9] * 6, [8] * 9, [7] * 4)
]


def turns() -> tuple[PackedBatch, Cut]:
    """The answers are scored; and the cut with a trunk in a trunk."""
    masks = [[0] * 20 + [int(len(own) < 30 or at >= 30) for at in range(len(own) - 20)] for own in TURNS]
    batch = pack_prefix_tree(TURNS, loss_mask=masks, min_shared=1)
    lens, parents = batch.layout.node_lens, batch.layout.node_parents
    assert parents == (-1, 0, 0, 2, 2, 2)
    pieces = (Piece((0,), (Piece((1,)), Piece((2,), (Piece((3, 4)), Piece((5,)))))),)
    return batch, Cut(lens, parents, pieces)


@pytest.mark.parametrize(
    "name", ["qwen3", "mistral", "gpt_oss", "gemma2", "gemma3n_text", "gemma4_text", "qwen3_moe", "deepseek_v3"]
)
def test_families(name: str, cuts: Callable[..., None]) -> None:
    """Windows, sinks, softcap, keys of other layers, experts, latent attention; a trunk in a trunk."""
    model = tiny_model(name, **EVERY_EXPERT.get(name, {})) if name in FAMILIES else any_model(name).double()
    batch, cut = turns()
    cuts(cut)
    compare(model.train(), batch, TOLERANCES[model.dtype].gradient)
