# SPDX-License-Identifier: BSD-3-Clause
"""The step of a model by each implementation of the benchmarks."""

from __future__ import annotations

import bench_model
import measure
import peers
import torch
from bench_cases import CPU
from shapes import Shape


def step_outcomes(
    shape: Shape, *more: peers.Implementation, dtype: torch.dtype = torch.float64
) -> list[list[torch.Tensor]]:
    """Log-probabilities in the order of the responses, and all gradients, by each implementation."""
    config, outcomes = measure.Config(CPU, dtype=dtype), []
    found = [one for one in bench_model.implementations(None) if not one.refuses(shape) and not one.missing()]
    for impl in [*found, *more]:
        run, sums = bench_model.StepRun(shape, [impl], config, measure.Matmul(config)), list[torch.Tensor]()
        for prepared in run.prepared(impl):
            out = prepared.run()
            gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout.to(dtype))
            share = [prepared.take(out.detach(), torch.arange(sum(shape.responses))), *gradients]
            sums = [one + other for one, other in zip(sums, share)] if sums else share
        outcomes.append(sums)
    return outcomes
