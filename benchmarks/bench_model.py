#!/usr/bin/env python
"""Measure a training step in stock transformers: log-probabilities of all responses, and all gradients.

    python benchmarks/bench_model.py                              # Qwen3-8B at 16 x 8K, 8 x 16K and 8 x 1K
    python benchmarks/bench_model.py --preset qwen3-0.6b
    python benchmarks/bench_model.py --shape 8x1Kx131-2048 --rounds 5
    python benchmarks/bench_model.py --preset tree --rounds 1 --limit-s 300  # Qwen3-1.7B on the agentic tree
    python benchmarks/bench_model.py --preset models --impls sm90 stock  # gpt-oss, Gemma 3, Qwen3.5, DeepSeek-V3

All layers, bf16, random weights, activation checkpointing, the LM head in chunks over the response tokens; without
an optimizer. This library goes through `shared_prompt_forward`, peers through the same model on their attention; models
beside Qwen3 are compared with themselves, prompts replicated, on the attention that transformers has for them. The
forward keeps the input of each layer and no more: its time is that of log-probabilities without gradients. Peak memory
includes weights and gradients. TFLOP/s count what an implementation computes, with what checkpointing repeats.
"""

import sys
from functools import partial

import command
from model import implementations
from peers import Implementation
from shapes import MODEL_PRESETS, StepShape, parse
from stock import run_of, stock_implementations


def all_implementations(families: list[str] | None) -> list[Implementation]:
    """Ours first; peers of Qwen3, and other models as they are."""
    return [*implementations(families), *stock_implementations()]


BENCHMARK = command.Benchmark(
    name="model",
    description=__doc__ or "",
    presets=MODEL_PRESETS,
    default="qwen3-8b",
    parse=partial(parse, kind=StepShape),
    implementations=all_implementations,
    run_type=run_of,
    # A pass of replicated prompts takes half a minute.
    settings={"target_ms": 250.0, "max_calls": 5, "assumed_tflops": 400.0},
    rounds=2,
    limit_s=120.0,
)
main = partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
