# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of hybrid models' batches in pieces, whose parts begin with the end states of their trunks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cuts import random_cut
from hybrid_models import EXACT, HYBRIDS, KINDS, hybrid_model, in_float64
from piece_runs import compare, losses, use_cut, whole
from tiny_models import (
    MASKS,
    SEQUENCES,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
)
from torch import Tensor

from flash_attn_dualkv import PackedBatch, SharedPromptError, pack_prefix_tree
from flash_attn_dualkv.data.parts import Cut, Piece, plan_parts, walk
from flash_attn_dualkv.integrations.transformers import prompt_once

GROUP = Samples.random([(70, [5, 66, 2, 64, 1]), (2, [1, 7])])


def cut_of(draw: random.Random, batch: PackedBatch) -> Cut:
    while True:
        cut = random_cut(draw, batch.layout.node_lens, batch.layout.node_parents, 3)
        if not cut.is_whole:
            return cut


def transcripts() -> PackedBatch:
    return pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1)


@pytest.mark.parametrize("keep", ["kv", "graph"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", KINDS)
def test_random_cuts(name: str, seed: int, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With turns shorter than a convolution, prompts below a chunk, roots beside kept rows; checkpointed too."""
    draw = random.Random(seed)
    batch = transcripts() if seed % 2 else GROUP.pack(boundary=draw.choice(["gather", "replicate"]))
    model = hybrid_model(name).train()
    if seed > 1:
        model.gradient_checkpointing_enable(dict(use_reentrant=seed > 3))
        model.enable_input_require_grads()
    use_cut(monkeypatch, cut_of(draw, batch), keep)
    with in_float64():
        compare(model, batch, EXACT.gradient)


@pytest.mark.parametrize("keep", ["kv", "graph"])
def test_a_root_beside_kept_states(keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part continues a node without rows, by a turn that answers continue, and has a prompt of its own."""
    turn = [*range(5, 25), *range(30, 35)]
    sequences = [[*turn, 40, 41], [*turn, 50], [*range(60, 70), 80], [*range(60, 70), 81, 82]]
    batch = pack_prefix_tree([[*range(5, 25), 90], *sequences], min_shared=1)
    assert batch.layout.node_parents == (-1, 0, 1, 1, 0, -1, 5, 5)
    first, *lens = batch.layout.node_lens
    parts = Piece((5,)), Piece((2, 3, 4, 6, 7, 8))
    use_cut(monkeypatch, Cut((first, 0, *lens), (-1, 0, 1, 2, 2, 1, -1, 6, 6), (Piece((0, 1), parts),)), keep)
    with in_float64():
        compare(hybrid_model(KINDS[0]).train(), batch, EXACT.gradient)


@pytest.mark.parametrize("targets", ["[qv]_proj", r"in_proj_qkv\w*", "out_proj"])
def test_lora(targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of the first layer need no gradient, those of later ones do."""
    peft = pytest.importorskip("peft")
    options = dict(r=4, target_modules=rf".*\.{targets}", task_type="CAUSAL_LM", init_lora_weights=False)
    layers = ["linear_attention", "full_attention", "linear_attention"]
    stock = hybrid_model(KINDS[0], layer_types=layers, num_hidden_layers=3)
    model = peft.get_peft_model(stock, peft.LoraConfig(**options)).double().train()
    batch = transcripts()
    use_cut(monkeypatch, cut_of(random.Random(2), batch))
    with in_float64():
        compare(model, batch, EXACT.gradient)


@pytest.mark.parametrize("name", KINDS)
def test_equals_each_sequence_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are cut at any row, on levels."""
    model, batch = hybrid_model(name).train(), GROUP.pack()
    cut = plan_parts(batch.tree, 90, kept=0.5, tile=8)
    assert max(len(piece.parts) for piece in walk(cut.pieces)) > 1
    assert any(part.parts for piece in cut.pieces for part in piece.parts)
    use_cut(monkeypatch, cut)
    with in_float64():
        found = dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
        got, twin = gradients(model), stock_twin(model, "eager")
        logps, _ = replicated_logps(twin, GROUP)
        losses(batch)(whole(batch, logps)).backward()
    check_equal(found.logps, logps.detach(), EXACT.value)
    check_gradients(got, gradients(twin), EXACT.gradient)


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_kept(name: str) -> None:
    """The states of nodes that parts continue, those of the path alone; and a budget that counts their bytes."""
    batch = GROUP.pack(boundary="replicate")
    lens, parents = batch.layout.node_lens, batch.layout.node_parents
    assert parents == (-1, 0, 0, 0, 0, 0, -1, 6, 6)
    inner = Piece((1, 2), (Piece((3, 4)), Piece((5, 6))))
    model = hybrid_model(name, torch.float32)
    cut = Cut((66, lens[0] - 66, *lens[1:]), (-1, 0, 1, 1, 1, 1, 1, -1, 7, 7), (Piece((0, 7), (Piece((8, 9)), inner)),))
    pieces = dualkv.Pieces(model, batch, cut)
    assert pieces.continued == {0, 1, 7}
    if name == "zamba2":
        with pytest.raises(SharedPromptError, match="layers that run once"):
            pieces.outermost.inner(0).keep()
        return
    with torch.no_grad(), pieces.outermost.inner(0) as trunk:

        def states() -> list[Tensor]:
            kept = {name: own.tensors for name, own in pieces.keys._layers.items()}
            return [tensor for name, tensors in kept.items() if isinstance(name, str) for tensor in tensors]

        trunk.keep()
        assert {len(state) for state in states()} == {2}
        with trunk.inner(1) as below:
            below.keep()
            assert {len(state) for state in states()} == {3}
            pieces.keys.let_go(trunk._last_pass)
        assert {len(state) for state in states()} == {2}
        size = sum(state[0].numel() for state in states())
        keys = sum(key[0].numel() for own in pieces.keys._layers.values() for key in own.tensors if len(key) > 2)
    row = prompt_once.kept_cost(model) / keys
    assert prompt_once.state_cost(model) == pytest.approx(row * size)


def test_states_of_a_second_pass_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last layer, so that no key has other bits."""
    model = hybrid_model(KINDS[0], layer_types=["full_attention", "linear_attention"]).train()
    batch = transcripts()
    use_cut(
        monkeypatch, Cut(batch.layout.node_lens, batch.layout.node_parents, plan_parts(batch.tree, 40, kept=0.1).pieces)
    )
    weight = next(own for name, own in model.named_parameters() if "conv" in name)

    def loss_of(part: Any) -> Tensor:
        weight.data += 1e-3
        return part.logps.sum().detach() + 0 * part.logps.sum()

    with pytest.raises(SharedPromptError, match="values and states with the same bits in both passes of a trunk"):
        dualkv.shared_prompt_backward(model, batch, loss_of, max_tokens=1)


def test_a_backward_that_is_forgotten() -> None:
    """A missing pass of a layer with a state is seen, though attention's has run."""
    model, batch = hybrid_model(KINDS[0], torch.float32).train(), GROUP.take(range(5)).pack()
    cut = plan_parts(batch.tree, 140, kept=0.1)
    trunk = dualkv.Pieces(model, batch, cut).outermost.inner(0)
    trunk.keep()
    for index in range(trunk.num_parts):
        with trunk.part(index) as part:
            if index != 1:
                part.logps.sum().backward()
    expected = r"gradients of layer 0, call 1: causal_conv1d_fn: expected one .* got 0 of part 1"
    with pytest.raises(SharedPromptError, match=expected):
        trunk.finish()
