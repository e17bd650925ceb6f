# SPDX-License-Identifier: BSD-3-Clause
"""examples/fused_kv.py: models whose layers share keys, against each sequence alone with fused keys made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fused_kv
import pytest
import torch
from fused_kv import KINDS, Model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tree_cases import dense

from flash_attn_dualkv import pack_shared_prompts

SHAPE = fused_kv.PRESETS["cpu"]
kinds = pytest.mark.parametrize("kind", KINDS)


def model_of(kind: str, **changes: Any) -> Model:
    torch.manual_seed(0)
    return Model(replace(SHAPE, kind=kind, **changes)).double()


def alone(model: Model, ids: Tensor) -> Tensor:
    """Logits of one sequence, (tokens, vocabulary), by ordinary attention in every row of every layer."""
    positions, x, owned = torch.arange(len(ids)), model.embedding(ids), []
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for layer in model.layers:
        if layer.kv_proj is not None:
            owned.append(layer.keys(x, positions))
        k, v = owned[-1] if layer.kv_proj is not None else model.shared(layer, owned)
        x = layer.finish(x, dense(layer.queries(x, positions), k, v, mask, SHAPE.head_dim**-0.5)[0])
    return model.head(model.norm(x))


@kinds
def test_training_is_that_of_each_sequence_alone(kind: str) -> None:
    """Log-probabilities and the gradient of every parameter; rows that score nothing have left on the way."""
    model = model_of(kind)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, (length,), generator=draw) for length in (150, 150, 150, 70)]
    prompts[1] = prompts[2] = prompts[0]
    responses = [torch.randint(64, (length,), generator=draw) for length in (5, 1, 9, 30)]
    weights = torch.randn(sum(map(len, responses)), generator=draw, dtype=torch.float64)
    batch = pack_shared_prompts(prompts, responses)
    assert batch.late_layout is not None and len(batch.late_layout.query_rows) < batch.layout.num_tokens - 200
    got = model.logps(batch)
    gradients = torch.autograd.grad(got @ weights, [*model.parameters()])
    expected = torch.cat(
        [
            alone(model, torch.cat([prompt, response]))[len(prompt) - 1 : -1]
            .log_softmax(-1)
            .gather(-1, response[:, None])[:, 0]
            for prompt, response in zip(prompts, responses)
        ]
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    wanted = torch.autograd.grad(expected @ weights, [*model.parameters()])
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-11)


@kinds
@pytest.mark.parametrize("layers", [4, 6])
def test_generation_continues_each_sequence(kind: str, layers: int) -> None:
    """Greedy tokens are those of the whole sequence computed anew, with pages that requests share."""
    model = model_of(kind, layers=layers)
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(64, (length,), generator=draw) for length in (160, 16)]
    tokens, _, seconds = fused_kv.generate(model, prompts, requests=2, new=20)
    assert tokens.shape == (4, 20) and len(seconds) == 20
    for index, own in enumerate(tokens):
        sequence = torch.cat([prompts[index // 2], own])
        logits = alone(model, sequence)[len(sequence) - 21 : -1]
        assert torch.equal(logits.argmax(-1), own)
        assert (logits.topk(2, -1).values.diff(dim=-1).abs() > 1e-9).all()  # no tie decides
    assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[2])


def test_the_cache_is_half_and_so_is_the_work_of_a_prompt() -> None:
    """To the byte; of the products with weights, all but the last rows leave half of the layers."""
    costs = {}
    for kind in KINDS:
        model = model_of(kind, layers=8)
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            cache, _ = fused_kv.prefill(model, [torch.arange(512) % 64], 1, 16)
        costs[kind] = cache.bytes, counted.get_total_flops()
    whole_bytes, whole_flops = costs.pop("vanilla")
    for kind, (size, flops) in costs.items():
        assert 2 * size == whole_bytes, kind
        assert flops < 0.6 * whole_flops, kind  # 64 rows stay in front of the last: they would be a tile of their own


@pytest.mark.parametrize("new", [1, 2, 4])
def test_the_table(new: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fused_kv.py", "--steps", "1", "--requests", "1", "--new", str(new)])
    fused_kv.main()
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(KINDS)
    assert [row.split()[-1] == "nan" for row in rows] == [new == 1] * len(KINDS)  # there is no later token
