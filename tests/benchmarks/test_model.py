# SPDX-License-Identifier: BSD-3-Clause
"""The model benchmark: that all ways of packing give the same training step, and what is counted."""

from __future__ import annotations

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
from shapes import Shape, nodes_of, parse

TWO_GROUPS = Shape("two groups", nodes_of([(50, (20, 31)), (64, (64,))]), 4, 2, 16, model=shapes.ALL_MODELS["tiny"])
SMALL = (parse("tiny-3x70x1-90"), parse("tiny-4x64x24"), TWO_GROUPS, TREES[2])


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
