#!/usr/bin/env python
"""Measure shared-prompt attention against its peers, on the same tokens and in the same run.

    python benchmarks/bench_kernel.py --preset paper         # the DualKV paper's kernel table
    python benchmarks/bench_kernel.py --preset performance   # ragged and short responses, few heads, head dims, scaling
    python benchmarks/bench_kernel.py --shape 28x16Kx2K --impls dualkv flex
    python benchmarks/bench_kernel.py --render benchmarks/results/NVIDIA-H200/paper.json
    python benchmarks/bench_kernel.py --readme               # fill the README's results section

The work of every implementation is prompt self-attention and all responses. TFLOP/s count visible (query, key) pairs of
the deduplicated micro-batch, 4 H d operations per pair forward and 2.5 times that backward, whatever an implementation
computes. Times are medians of CUDA events. Results are written after every shape: a run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import functools
import sys

import command
from measure import ShapeRun
from peers import Implementation, cpu_implementations, cuda_implementations
from schema import Row
from shapes import PRESETS

from flash_attn_dualkv.predict import DIRECTIONS


def implementations(families: command.Families | None) -> list[Implementation]:
    return cpu_implementations() if families is None else cuda_implementations(families)


def summary(row: Row) -> str:
    name = f"{row['shape']:<22} {row['impl']:<26} {row['direction']:<8}"
    if row["ms"] is None:
        return f"{name} {command.why_no_figure(row)}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:8.2f} GiB"
    share = "" if row["fraction"] is None else f"{100 * row['fraction']:5.1f}% of matmul"
    return f"{name} {row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s {share} {memory}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))


BENCHMARK = command.Benchmark(
    name="kernel",
    description=__doc__ or "",
    presets=PRESETS,
    default="quick",
    implementations=implementations,
    run_type=ShapeRun,
    summary=summary,
    packages=("flash_attn", "fa3"),
    add_arguments=add_arguments,
    settings=lambda options: {"directions": tuple(options.directions)},
)


parse = functools.partial(command.parse, BENCHMARK)
main = functools.partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
