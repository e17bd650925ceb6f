#!/usr/bin/env python
"""Measure a training step of Qwen3 in stock transformers: log-probabilities of all responses, and all gradients.

    python benchmarks/bench_model.py                              # Qwen3-8B at 16 x 8K, 8 x 16K and 8 x 1K
    python benchmarks/bench_model.py --preset qwen3-0.6b
    python benchmarks/bench_model.py --shape 8x1Kx131-2048 --rounds 5
    python benchmarks/bench_model.py --preset tree --rounds 1 --limit-s 300  # Qwen3-1.7B on the agentic tree

All layers, bf16, random weights, activation checkpointing, the LM head in chunks over the response tokens; without
an optimizer. This library goes through `shared_prompt_forward`, peers through the same model on their attention.
Peak memory includes weights and gradients. TFLOP/s count what an implementation computes, with what checkpointing
repeats.
"""

import sys
from functools import partial

import command
from model import StepRun, implementations
from shapes import MODEL_PRESETS, StepShape, parse

BENCHMARK = command.Benchmark(
    name="model",
    description=__doc__ or "",
    presets=MODEL_PRESETS,
    default="qwen3-8b",
    parse=partial(parse, kind=StepShape),
    implementations=implementations,
    run_type=StepRun,
    # A pass of replicated prompts takes half a minute.
    settings={"target_ms": 250.0, "max_calls": 5, "assumed_tflops": 400.0},
    rounds=2,
    limit_s=120.0,
)
main = partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
