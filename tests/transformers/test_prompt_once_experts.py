# SPDX-License-Identifier: BSD-3-Clause
"""Losses that balance experts, of batches in pieces: those of each part's sequences, each with a copy of its prompt."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hybrid_models import hybrid_model
from piece_runs import losses, turns, use_cut, whole
from tiny_models import Samples, check_equal, check_gradients, dualkv, gradients, tiny_model
from torch import Tensor

from flash_attn_dualkv import PackedBatch, SharedPromptError
from flash_attn_dualkv.data.parts import Cut, Piece, walk
from flash_attn_dualkv.integrations.transformers.forward import check_router_losses

FACTOR = 0.7
GROUP = Samples.random([(30, [6, 9, 4, 8, 3]), (7, [5])])


def model_of(name: str = "qwen3_moe", **options: Any) -> Any:
    make = hybrid_model if name == "qwen3_next" else tiny_model
    model = make(name, **{"num_experts_per_tok": 2, **options}).train()
    model.config.output_router_logits = True
    return model


def balance_of(model: Any, logits: Any, weights: Tensor) -> Tensor:
    """The model file's own, of rows that count so often."""
    loss = sys.modules[type(model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
    found: Tensor = loss(logits, model.num_experts, model.num_experts_per_tok, weights[None])
    return found


def weights_of(batch: PackedBatch, sequences: list[int]) -> Tensor:
    """How many of these sequences each row is in."""
    firsts = batch.jagged_offsets
    rows = [batch.rows_of(torch.arange(int(firsts[index]), int(firsts[index + 1]))) for index in sequences]
    return torch.cat(rows).bincount(minlength=batch.layout.num_tokens).double()


def expected_of(model: Any, batch: PackedBatch, pieces: list[list[int]]) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Scores and gradients in one pass, whose routers' loss is the sum over some sequences each."""
    logits: list[Any] = []
    hook = model.model.register_forward_hook(lambda module, args, output: logits.append(output.router_logits))
    logps, _ = dualkv.shared_prompt_forward(model, batch)
    hook.remove()
    parts = [balance_of(model, logits[-1], weights_of(batch, sequences)) for sequences in pieces if sequences]
    (losses(batch)(whole(batch, logps)) + FACTOR * sum(parts)).backward()
    return logps.detach(), gradients(model), [float(part.detach()) for part in parts]


def compare(model: Any, batch: PackedBatch, cut: Cut, tolerance: float) -> None:
    pieces = dualkv.Pieces(model, batch, cut)
    chosen = [pieces.sequences_of(piece) for piece in walk(cut.pieces)]
    logps, expected, values = expected_of(model, batch, chosen)
    of_tokens, found = losses(batch), []

    def loss_of(part: Any) -> Tensor:
        found.append(float(part.balance.detach()))
        return of_tokens(part) + FACTOR * part.balance

    got = dualkv.shared_prompt_backward(model, batch, loss_of, max_tokens=1)
    check_equal(got.logps, logps, 1e-9 if logps.dtype == torch.float64 else 1e-5)
    assert sorted(found) == pytest.approx(sorted(values), rel=1e-6)
    check_gradients(gradients(model), expected, tolerance)


@pytest.mark.parametrize("keep", ["kv", "graph"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_balancing_losses(name: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trunk in a trunk, in which a sequence ends: probabilities of its rows count as often as sequences have them."""
    model = model_of(name)
    if keep == "kv":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    batch, cut = turns()
    use_cut(monkeypatch, cut, keep)
    # The model file's loss is in float32.
    compare(model, batch, cut, 1e-5 if name == "qwen3_next" else 2e-6)


def test_a_group_and_its_prompt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that lie between others, a prompt that is cut, a batch that one pass holds."""
    model, batch = model_of(), GROUP.pack(boundary="gather")
    prompt, *lens = batch.layout.node_lens
    cut = Cut((prompt - 7, 7, *lens), (-1, 0, *[1] * 5, -1, 7), (
        Piece((0,), (Piece((1,), (Piece((2, 4)), Piece((3, 5, 6)))),)), Piece((7, 8)),
    ))  # fmt: skip
    for own in (cut, Cut(batch.layout.node_lens, batch.layout.node_parents, (Piece(tuple(range(len(lens) + 1))),))):
        use_cut(monkeypatch, own)
        compare(model, batch, own, 2e-6)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, cut = turns()
    use_cut(monkeypatch, cut)
    model = model_of()
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    with pytest.raises(SharedPromptError, match="use_reentrant: expected False, or the gradients of routers"):
        dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
    model.gradient_checkpointing_disable()
    with pytest.raises(NotImplementedError, match="a load_balancing_loss_func"):
        check_router_losses(tiny_model("qwen3"))
    model.config.output_router_logits = False
    with pytest.raises(TypeError):
        dualkv.shared_prompt_backward(model, batch, lambda part: 0.1 * part.balance, max_tokens=1)
