# SPDX-License-Identifier: BSD-3-Clause
"""Losses of batches that run in pieces, and what such a batch gives in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import check_equal, check_gradients, dualkv, gradients
from torch import Tensor

from flash_attn_dualkv import PackedBatch
from flash_attn_dualkv.data.parts import Cut
from flash_attn_dualkv.integrations.transformers import prompt_once


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


def use_cut(monkeypatch: pytest.MonkeyPatch, cut: Cut, keep: str = "kv") -> None:
    """Let a cut take the place of the plan."""
    monkeypatch.setattr(prompt_once, "plan_backward", lambda *_, **__: prompt_once.Plan(cut, keep))


def compare(model: Any, batch: PackedBatch, tolerance: float = 1e-9, **options: Any) -> None:
    """Scores and gradients of the batch in pieces with those of one pass."""
    scoring = {name: value for name, value in options.items() if name in ("temperature", "with_entropy")}
    logps, expected = expected_of(model, batch, **scoring)
    options = dict(max_tokens=1) | options
    found = dualkv.shared_prompt_backward(model, batch, losses(batch), **options)
    assert not found.logps.requires_grad and found.sequences == tuple(range(len(batch.response_lens)))
    check_equal(found.logps, logps, tolerance)
    check_gradients(gradients(model), expected, tolerance)
