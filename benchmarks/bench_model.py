#!/usr/bin/env python
"""Measure a training step of Qwen3 in stock transformers: log-probabilities of all responses, and all gradients.

    python benchmarks/bench_model.py                              # Qwen3-8B at 16 x 8K, 8 x 16K and 8 x 1K
    python benchmarks/bench_model.py --preset qwen3-0.6b
    python benchmarks/bench_model.py --shape "8x1KxU(131,2048)" --rounds 5
    python benchmarks/bench_model.py --render benchmarks/results/NVIDIA-H200/model-qwen3-8b.json

All layers, bf16, random weights, activation checkpointing, the LM head in chunks over the response tokens; without
an optimizer. Shared prompts go through `shared_prompt_forward`, replicated ones in one packed row through the same
model on FlashAttention. Peak memory includes weights and gradients. Executed operations include those that
checkpointing repeats; effective throughput counts the replicated tokens for every implementation.
"""

from __future__ import annotations

import functools
import sys

import command
from bench_layer import summary
from measure import DTYPES
from measure_layer import LayerRun
from model import cpu_steps, cuda_steps, make_step_source
from packing import Prepared
from peers import Implementation
from schema import Row
from shapes import STEP_PRESETS, StepShape


class StepRun(LayerRun):
    """All measurements of one model's step over one micro-batch."""

    shape: StepShape
    # Roundings to bf16 over 36 layers: shared and replicated prompts differ by 6 to 8% of the spread on an H200.
    largest_difference = 0.1

    def prepare(self, impl: Implementation) -> Prepared:
        dtype = DTYPES[self.config.dtype]
        return impl.build(make_step_source(self.shape, dtype, self.config.device, self.config.seed))

    def beside(self) -> Row:
        return {}

    def more(self, impl: Implementation, direction: str) -> Row:
        return {
            **super().more(impl, direction),
            "vocab": self.shape.model.vocab,
            "response_tokens": sum(self.shape.responses),
        }


def implementations(families: command.Families | None) -> list[Implementation]:
    return cpu_steps() if families is None else cuda_steps(families)


BENCHMARK = command.Benchmark(
    name="model",
    description=__doc__ or "",
    presets=STEP_PRESETS,
    default="qwen3-8b",
    implementations=implementations,
    run_type=StepRun,
    summary=summary,
    packages=("flash_attn", "fa3"),
    # A pass of replicated prompts takes half a minute.
    settings=lambda options: {"target_ms": 250.0, "max_calls": 5, "assumed_tflops": 400.0},
    rounds=2,
    limit_s=120.0,
)


parse = functools.partial(command.parse, BENCHMARK)
main = functools.partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
