#!/usr/bin/env python
"""Measure shared-prompt attention against its peers, on the same tokens and in the same run.

    python benchmarks/bench_kernel.py --preset paper         # the DualKV paper's kernel table
    python benchmarks/bench_kernel.py --preset responses     # where responses are longer than their prompts
    python benchmarks/bench_kernel.py --shape 28x16Kx2K --impls dualkv flex

The work of every implementation is prompt self-attention and all responses. TFLOP/s count visible (query, key) pairs of
the deduplicated micro-batch, 4 H d operations per pair forward and 2.5 times that backward, whatever an implementation
computes. Times are medians of CUDA events.
"""

import sys
from functools import partial

import command
from measure import ShapeRun
from peers import kernel_implementations
from shapes import KERNEL_PRESETS, parse

BENCHMARK = command.Benchmark(
    name="kernel",
    description=__doc__ or "",
    presets=KERNEL_PRESETS,
    default="quick",
    parse=parse,
    implementations=kernel_implementations,
    run_type=ShapeRun,
)
main = partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
