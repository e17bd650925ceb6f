# SPDX-License-Identifier: BSD-3-Clause
"""Batches in pieces whose prompts have images: towers run in the passes of these prompts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from piece_runs import compare, expected_of, losses, use_cut
from tiny_models import check_equal, check_gradients, dualkv, gradients, tiny_model
from tiny_multimodal import IMAGE, QWEN, Pictured, multimodal_model

from flash_attn_dualkv import PackedBatch, SharedPromptError
from flash_attn_dualkv.data.parts import Cut, Piece
from flash_attn_dualkv.integrations.transformers import prompt_once
from flash_attn_dualkv.integrations.transformers.images import row_positions

pytestmark = pytest.mark.usefixtures("restored_registry")
# Prompts of one image, of none, and of two of other sizes.
MIXED = Pictured.random([([(1, 4, 4)], [5, 3, 4]), ([], [2, 4]), ([(1, 4, 6), (1, 2, 4)], [3, 1])])


def cut_of(batch: PackedBatch) -> Cut:
    """A trunk of the first two prompts, below which the second's responses are in one part; the third's own."""
    parents = batch.layout.node_parents
    assert parents == (-1, 0, 0, 0, -1, 4, 4, -1, 7, 7)
    first = Piece((0, 4), (Piece((1, 5, 6)), Piece((2, 3))))
    return Cut(batch.layout.node_lens, parents, (first, Piece((7,), (Piece((8,)), Piece((9,))))))


def patches_of(model: Any) -> list[tuple[int, bool]]:
    """Patches of each call of the tower, and whether it has gradients."""
    found: list[tuple[int, bool]] = []
    tower = next(module for name, module in model.named_modules() if name.endswith("visual"))
    tower.register_forward_pre_hook(lambda _, args: found.append((len(args[0]), torch.is_grad_enabled())))
    return found


@pytest.mark.parametrize("keep", ["kv", "graph"])
@pytest.mark.parametrize("model_type", QWEN)
def test_images(model_type: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the tower, too, which runs as often as each prompt."""
    is_wide = "moe" not in model_type  # experts have no float64
    options: dict[str, Any] = dict(dtype=torch.float64) if is_wide else dict(num_experts_per_tok=4)
    model = multimodal_model(model_type, **options).train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    batch = MIXED.pack(boundary="replicate" if keep == "kv" else "gather")
    use_cut(monkeypatch, cut_of(batch), keep)
    # Model files compute in float32 what rounding of other numbers of rows moves.
    compare(model, batch, 2e-6 if is_wide else 2e-5)
    assert "visual" in "".join(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    seen = patches_of(model)
    dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
    assert [*dict.fromkeys(seen)] == (
        [(16, False), (16, True), (32, False), (32, True)] if keep == "kv" else [(16, True), (32, True)]
    )


def test_a_frozen_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower learns alone: keys of a trunk need gradients where those of parts do not."""
    model = multimodal_model("qwen3_vl", dtype=torch.float64).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" in name)
    batch = MIXED.pack()
    use_cut(monkeypatch, cut_of(batch))
    compare(model, batch, 2e-6)


def test_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that a batch gives its rows reach all passes, those of several dimensions too."""
    model = multimodal_model("qwen3_vl", dtype=torch.float64).train()
    batch = MIXED.pack()
    use_cut(monkeypatch, cut_of(batch))
    _, expected = expected_of(model, batch)
    batch.row_values["position_ids"] = row_positions(model, batch)
    dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
    check_gradients(gradients(model), expected, 2e-6)
    text = tiny_model("qwen3").train()
    batch = Pictured.random([([], [5, 3, 4]), ([], [2, 4]), ([], [3, 1])]).pack()
    batch.row_values["position_ids"] = batch.position_ids[None] + 3
    use_cut(monkeypatch, cut_of(batch))
    compare(text, batch)


def test_a_plan() -> None:
    """A budget that holds a prompt with its images; one that would divide these is refused."""
    model = multimodal_model("qwen3_vl", dtype=torch.float64).train()
    batch = Pictured.random([([(1, 4, 4)], [40, 30, 50])]).pack()
    logps, expected = expected_of(model, batch)
    found = dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=100)
    check_equal(found.logps, logps, 2e-6)
    check_gradients(gradients(model), expected, 2e-6)
    first = int((batch.input_ids == IMAGE).nonzero()[0, 0])
    lens = (first + 1, batch.layout.node_lens[0] - first - 1, *batch.layout.node_lens[1:])
    cut = Cut(lens, (-1, 0, 1, 1, 1), (Piece((0,), (Piece((1, 2)), Piece((3, 4)))),))
    with pytest.raises(SharedPromptError, match="room for all images of a prompt, got .* prompt 0"):
        dualkv.Pieces(model, batch, cut)


def test_what_is_refused() -> None:
    batch = MIXED.pack()
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module, wrapped.require_backward_grad_sync = multimodal_model("qwen3_vl"), True
    with pytest.raises(NotImplementedError, match="text, to be cut inside of a wrapper, got"):
        prompt_once.plan_backward(wrapped, batch, 30, "auto", False, prompt_once.Wrapper.of(wrapped, None))
    with pytest.raises(NotImplementedError, match="images: expected text alone"):
        dualkv.shared_prompt_backward(tiny_model("qwen3"), batch, losses(batch), max_tokens=30)
