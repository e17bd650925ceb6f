#!/usr/bin/env python
"""Measure the peak memory of one decoder layer of Qwen3-8B over prompt length and micro-batch size, and fit its law.

    python benchmarks/bench_memory.py                                  # P from 4K to 32K, micro-batches of 4 to 16
    python benchmarks/bench_memory.py --preset paper --budget-s 300    # the DualKV paper's grid
    python benchmarks/bench_memory.py --impls dualkv fa2
    python benchmarks/bench_memory.py --render benchmarks/results/NVIDIA-H200/memory-grid.json

Forward and backward in bf16 without checkpointing, weights and all gradients included. With the prompt P stored once
for a micro-batch of mb responses the peak is M0 + cP * P + cR * mb * R, with replicated prompts it is
M0 + cP * mb * P + cR * mb * R; the coefficients are a least-squares fit over all shapes. FlexAttention has to be
compiled for every shape, so it is measured at the corners of the grid only. The run ends after --budget-s: the law is
fitted to what has been measured by then.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import command
from layer import cpu_layers, cuda_layers
from measure_layer import MemoryRun
from peers import Implementation
from schema import Row
from shapes import MEMORY_PRESETS, Shape

MEASURED = ("dualkv", "fa2", "math", "flex")


def implementations(families: command.Families | None) -> list[Implementation]:
    found = cpu_layers() if families is None else cuda_layers(families)
    return [implementation for implementation in found if implementation.name.startswith(MEASURED)]


def choose(found: list[Implementation], shapes: list[Shape]) -> list[Implementation]:
    """FlexAttention at the corners of the grid only, and last: what a budget cuts off is the slowest."""
    prompts, sizes = ([min(ends), max(ends)] for ends in zip(*((s.mean_prompt, s.num_responses) for s in shapes)))

    def refuses(shape: Shape) -> str | None:
        is_corner = shape.mean_prompt in prompts and shape.num_responses in sizes
        return None if is_corner else "not at a corner of the grid"

    flex = [one for one in found if one.name == "flex_packed"]
    others = [one for one in found if one.name != "flex_packed"]
    return [*others, *(dataclasses.replace(one, refuses=refuses) for one in flex)]


def summary(row: Row) -> str:
    figure = command.why_no_figure(row) if row["peak_gib"] is None else f"{row['peak_gib']:8.2f} GiB"
    return f"{row['shape']:<22} {row['impl']:<22} {figure}"


BENCHMARK = command.Benchmark(
    name="memory",
    description=__doc__ or "",
    presets=MEMORY_PRESETS,
    default="grid",
    implementations=implementations,
    run_type=MemoryRun,
    summary=summary,
    packages=(),
    choose=choose,
    settings=lambda options: {"assumed_tflops": 400.0},
    rounds=1,
    budget_s=60.0,
)


parse = functools.partial(command.parse, BENCHMARK)
main = functools.partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
