#!/usr/bin/env python
"""Measure one decoder layer of Qwen3-8B, forward and backward, with shared and with replicated prompts.

    python benchmarks/bench_layer.py                                   # 16 x 8K and 8 x 16K, all implementations
    python benchmarks/bench_layer.py --preset table11 --budget-s 500   # the DualKV paper's layer table
    python benchmarks/bench_layer.py --shape "32x5059xU(131,2048)" --impls dualkv fa2
    python benchmarks/bench_layer.py --render benchmarks/results/NVIDIA-H200/layer-quick.json

Plain PyTorch around the attention, bf16, no checkpointing; responses have lengths from U(131, 2048), drawn once and for
all. Replicated implementations run the whole layer over N (P + R) tokens, the others over P + N R. Times are those of a
forward and of the backward that follows it, medians of CUDA events; peak memory includes weights and all gradients.
Executed throughput counts what an implementation computes, effective throughput the replicated tokens for every one.
FlexAttention is compiled anew for every shape, which takes longer than measuring it.
"""

from __future__ import annotations

import functools
import sys

import command
from layer import cpu_layers, cuda_layers
from measure_layer import LayerRun
from peers import Implementation
from schema import Row
from shapes import LAYER_PRESETS


def implementations(families: command.Families | None) -> list[Implementation]:
    return cpu_layers() if families is None else cuda_layers(families)


def summary(row: Row) -> str:
    name = f"{row['shape']:<22} {row['impl']:<22} {row['direction']:<8}"
    if row["ms"] is None:
        return f"{name} {command.why_no_figure(row)}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:8.2f} GiB"
    effective = row["replicated_tokens"] / row["ms"]
    return f"{name} {row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s executed {effective:10.0f} ktok/s {memory}"


BENCHMARK = command.Benchmark(
    name="layer",
    description=__doc__ or "",
    presets=LAYER_PRESETS,
    default="quick",
    implementations=implementations,
    run_type=LayerRun,
    summary=summary,
    packages=("flash_attn", "fa3", "prefix_grouper"),
    # A pass is long: a few in a round give the median enough samples.
    settings=lambda options: {"target_ms": 250.0, "max_calls": 5, "assumed_tflops": 400.0},
    rounds=3,
)


parse = functools.partial(command.parse, BENCHMARK)
main = functools.partial(command.main, BENCHMARK)

if __name__ == "__main__":
    sys.exit(main())
