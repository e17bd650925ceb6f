# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of batches in pieces equal those of the batch in one, and of each sequence by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuts import random_cut
from tiny_models import (
    MASKS,
    SEQUENCES,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    tiny_model,
)
from torch import Tensor

from flash_attn_dualkv import PackedBatch, pack_prefix_tree
from flash_attn_dualkv.data.parts import Cut
from flash_attn_dualkv.integrations.transformers import prompt_once

GROUP = Samples.random([(30, [6, 9, 4, 8, 3]), (7, [5])])
Options = dict[str, Any]


def losses(batch: PackedBatch) -> Callable[[Any], Tensor]:
    """A sum over tokens, one over entropies, and for each sequence a term that couples all of its tokens."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(len(batch.token_index), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(batch.response_lens), generator=generator, dtype=torch.float64)

    def loss_of(part: Any) -> Tensor:
        total = (part.logps * weights[part.tokens]).sum()
        if part.entropy is not None:
            total = total + (part.entropy * weights[part.tokens] ** 2).sum()
        lens = torch.tensor(part.response_lens)
        means = part.unpack(part.logps).sum(1) / lens.clamp(min=1)
        ratios = (0.3 * means).exp() * lens * advantages[list(part.sequences)]
        return total + ratios.sum()

    return loss_of


def whole(batch: PackedBatch, logps: Tensor, entropy: Tensor | None = None) -> Any:
    """The scores of all sequences, as a part has them."""
    lens = batch.response_lens
    return dualkv.PartScores(tuple(range(len(lens))), torch.arange(len(logps)), lens, logps, entropy)


def expected_of(model: Any, batch: PackedBatch, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the batch in one pass."""
    logps, entropy = dualkv.shared_prompt_forward(model, batch, drop_unread=False, **options)
    losses(batch)(whole(batch, logps, entropy)).backward()
    return logps.detach(), gradients(model)


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
