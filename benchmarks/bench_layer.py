#!/usr/bin/env python
"""Measure one decoder layer of Qwen3-8B, forward and backward, with shared and with replicated prompts.

    python benchmarks/bench_layer.py                                   # 16 x 8K and 8 x 16K, all implementations
    python benchmarks/bench_layer.py --preset table11 --budget-s 500   # the DualKV paper's layer table
    python benchmarks/bench_layer.py --preset memory --rounds 0        # peak memory alone, for the law that it follows
    python benchmarks/bench_layer.py --preset tree                     # the agentic tree, against flattened sequences

Plain PyTorch around the attention, bf16, no checkpointing. Replicated implementations run the whole layer over
N (P + R) tokens, the others over P + N R; TFLOP/s count what an implementation computes. Times are those of a forward
and of the backward that follows it, medians of CUDA events; peak memory includes weights and all gradients.
FlexAttention is compiled anew for every shape, which takes longer than measuring it.
"""

import sys
from functools import partial

import command
from measure import LayerRun
from peers import layer_implementations
from shapes import LAYER_PRESETS, LayerShape, parse

BENCHMARK = command.Benchmark(
    name="layer",
    description=__doc__ or "",
    presets=LAYER_PRESETS,
    default="quick",
    parse=partial(parse, kind=LayerShape),
    implementations=layer_implementations,
    run_type=LayerRun,
    # A pass is long: a few in a round give the median enough samples.
    settings={"target_ms": 250.0, "max_calls": 5, "assumed_tflops": 400.0},
    rounds=3,
)
main = partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
