# SPDX-License-Identifier: BSD-3-Clause
"""The model benchmark: that all ways of packing give the same training step, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "4.57")

import bench_model
import measure
import packing
import peers
import shapes
from bench_cases import CPU, TREES
from bench_cases import packages as packages
from bench_cases import several_micro_batches as several_micro_batches
from models import FAMILIES, UNREAD, VISION, FamilyModel
from shapes import Shape, nodes_of, parse
from tiny_models import VERSION
from transformers import CONFIG_MAPPING

from flash_attn_dualkv import layout

TWO_GROUPS = Shape("two groups", nodes_of([(50, (20, 31)), (64, (64,))]), 4, 2, 16, model=shapes.ALL_MODELS["tiny"])
SMALL = (parse("tiny-3x70x1-90"), parse("tiny-4x64x24"), TWO_GROUPS, TREES[2])


def tiny(name: str) -> FamilyModel:
    """The family with small sizes."""
    sizes: dict[str, Any] = dict(layers=2, hidden=48, intermediate=32, heads=4, kv_heads=2, head_dim=16, vocab=97)
    sizes |= {"gpt-oss-20b": dict(stock=("eager",)), "gemma3-4b": dict(layers=6, stock=("sdpa",))}.get(name, {})
    kinds = dict(layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2)
    sizes |= {"gemma4-e2b": dict(layers=4, kv_heads=1)}.get(name, {})
    sizes |= {"qwen3.5-4b": dict(layers=4), "deepseek-16b-a3b": dict(kv_heads=4, head_dim=24)}.get(name, {})
    small = dict(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=20, query_pre_attn_scalar=16, head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, kv_lora_rank=16, n_routed_experts=4,
        n_shared_experts=1, moe_intermediate_size=16, global_head_dim=32, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97, **kinds,
    )  # fmt: skip
    family = {**FAMILIES, **UNREAD, **VISION}[name]
    if name in VISION:
        rope, tower = dict(rope_type="default", mrope_section=[4, 2, 2]), dict(depth=2, hidden_size=16, num_heads=2)
        tower |= dict(intermediate_size=16, patch_size=2, out_hidden_size=48, num_position_embeddings=16)
        sizes |= dict(vision=dict(tower, deepstack_visual_indexes=[0]), places=(3, 20), grid=(1, 4, 8))
        return replace(
            family,
            **{"sequences": 3, **sizes},
            options={"rope_parameters" if VERSION >= (5, 0) else "rope_scaling": rope},
        )
    options = {**family.options, **{key: value for key, value in small.items() if key in family.options}}
    return replace(family, **{"sequences": 2, **sizes}, options=options)


FAMILY_SHAPES = [
    replace(parse("5x70x1-90"), name=name, model=tiny(name))
    for name in FAMILIES
    if FAMILIES[name].model_type in CONFIG_MAPPING
]
LATE_SHAPES = [replace(TWO_GROUPS, name=name, model=tiny(name)) for name in UNREAD if VERSION >= (5, 17)]
IMAGES = replace(TWO_GROUPS, name="images", model=tiny("qwen3-vl-8b"))


def step_outcomes(shape: Shape, *more: peers.Implementation, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Log-probabilities in the order of the responses, and all gradients, by each implementation."""
    config, outcomes = measure.Config(CPU, dtype=dtype), []
    found = [one for one in bench_model.implementations(None) if not one.refuses(shape) and not one.missing()]
    for impl in [*found, *more]:
        run, sums = bench_model.StepRun(shape, [impl], config, measure.Matmul(config)), list[torch.Tensor]()
        for prepared in run.prepared(impl):
            out = prepared.run()
            gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout.to(dtype))
            share = [*prepared.sampled(out, gradients, torch.arange(sum(shape.responses))), *gradients]
            sums = [one + other for one, other in zip(sums, share)] if sums else share
        outcomes.append(sums)
    return outcomes


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_all_compute_the_same_step(shape: Shape, packages: None) -> None:
    """Of trees, the last node of every sequence. One that forgets the prompt would be noticed, with a margin."""

    def forgetful(shape: Shape, device: torch.device) -> list[packing.Arrangement]:
        pieces = [len(one) for pair in packing.response_rows(shape) for one in pair]
        rows = torch.cat(packing.path_rows(shape, shape.leaves))
        return [packing.Arrangement(rows, peers.varlen_attention(peers.fa4_varlen(), pieces, device))]

    wrong = peers.Implementation("forgetful", forgetful)
    expected, *others, forgot = step_outcomes(shape, wrong)
    assert len(others) == 2 + shape.is_tree
    for outs in others:
        for got, right in zip(outs, expected):
            assert (got - right).abs().max() <= 2e-6 * right.abs().max()
    right, got = (outs[0] - outs[0].mean() for outs in (expected, forgot))
    assert measure.relative_difference(got, right) > 2 * bench_model.StepRun.largest_difference


@pytest.mark.parametrize("shape", [*FAMILY_SHAPES, IMAGES], ids=lambda shape: shape.name)
def test_other_models_compute_the_same_step(shape: Shape) -> None:
    """Ours and the stock model's micro-batches: log-probabilities, and the sum of all gradients."""
    assert len(bench_model.padded_batches(shape, CPU)) == (1 if shape is IMAGES else 3)
    (expected, *all_expected), (got, *all_got) = step_outcomes(shape, dtype=torch.float32)
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
    whole, other = (torch.cat([one.flatten() for one in gradients]) for gradients in (all_expected, all_got))
    assert (other - whole).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize("shape", LATE_SHAPES, ids=lambda shape: shape.name)
def test_a_step_with_and_without_unread_rows(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, ours with all rows, and the stock model."""
    monkeypatch.setattr(layout, "MIN_LEAVING", 16)
    outcomes = step_outcomes(shape)
    assert len(outcomes) == 3
    for got in outcomes[1:]:
        for one, right in zip(got, outcomes[0], strict=True):
            assert (one - right).abs().max() <= 1e-4 * right.abs().max()
