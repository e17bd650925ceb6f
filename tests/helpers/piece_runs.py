# SPDX-License-Identifier: BSD-3-Clause
"""Losses of batches that run in pieces, and what such a batch gives in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import check_equal, check_gradients, dualkv, gradients
from torch import Tensor

from flash_attn_dualkv import PackedBatch, pack_prefix_tree
from flash_attn_dualkv.data.parts import Cut, Piece
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


# A prompt, one of whose responses ends; a turn after it that three answers continue.
TURNS = [[*range(5, 25), *range(30, 39)]] + [
    [*range(5, 25), *range(40, 70), *own] for own in ([80] * 6, [81] * 9, [82] * 4)
]


def turns() -> tuple[PackedBatch, Cut]:
    """The answers are scored; and the cut with a trunk in a trunk."""
    masks = [[0] * 20 + [int(len(own) < 30 or at >= 30) for at in range(len(own) - 20)] for own in TURNS]
    batch = pack_prefix_tree(TURNS, loss_mask=masks, min_shared=1)
    lens, parents = batch.layout.node_lens, batch.layout.node_parents
    assert parents == (-1, 0, 0, 2, 2, 2)
    pieces = (Piece((0,), (Piece((1,)), Piece((2,), (Piece((3, 4)), Piece((5,)))))),)
    return batch, Cut(lens, parents, pieces)
