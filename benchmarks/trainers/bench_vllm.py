#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Rollouts of vLLM with its own attention and with this package's, by decoding step and tokens a second.

    python benchmarks/trainers/bench_vllm.py --shape 16x16x8192x128 --layers 8     # three minutes on one H200
    python benchmarks/trainers/bench_vllm.py --engines stock dualkv trainer --shape 16x16x1024x512 256x1x8192x128

A shape is groups x responses x prompt tokens x new tokens, or fewest-most of these. Each engine is a process of its own
with a time limit, with random weights; requests are submitted one by one in a random order, and prompts are random
tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, Result, gpu_folder, parser_of
from vllm_rig import run_child

FOLDER = RESULTS / "trainers" / "vllm"
# Settings of an engine, by the name under which it is measured, and its environment.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "stock": ({}, {}),
    "stock_invariant": ({}, {"VLLM_BATCH_INVARIANT": "1"}),
    "dualkv": ({"backend": "CUSTOM"}, {}),
    "trainer": ({"backend": "CUSTOM", "exact": "trainer"}, {}),
    "dualkv_invariant": ({"backend": "CUSTOM"}, {"VLLM_BATCH_INVARIANT": "1"}),
    "triton": ({"backend": "TRITON_ATTN"}, {}),
    # Arctic Inference's forest cascade takes the first runner, and its graphs leave attention out.
    "arctic": (
        {"graphs": "PIECEWISE", "runner": "1", "options": {"forest_cascade_attn_configs": "{}"}},
        {"ARCTIC_INFERENCE_ENABLED": "1"},
    ),
}


def rollout(text: str) -> list[int]:
    """Groups, responses, prompt tokens, and fewest and most new tokens."""
    *sizes, new = text.split("x")
    least, _, most = new.partition("-")
    return [*map(int, sizes), int(least), int(most or least)]


def run_engine(name: str, settings: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """Rows of an engine's process; those that it has printed if it fails or runs out of time."""
    own, environment = ENGINES[name]
    script = Path(__file__).with_name("vllm_rig.py")
    begin = time.perf_counter()
    rows, output, end = run_child(str(script), [json.dumps(settings | own)], environment, limit)
    print(f"{name}: {len(rows)} rows, {end}, {time.perf_counter() - begin:.0f} s", flush=True)
    if end != "exit status 0":
        print(output[-6000:], flush=True)
    for line in output.splitlines():
        if "flash_attn_dualkv" in line:
            print(f"  {line[:300]}")
    return [{"who": name} | row for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=["stock", "dualkv"], choices=list(ENGINES))
    parser.add_argument("--shape", nargs="+", type=rollout, default=[[16, 16, 8192, 128, 128]], metavar="GxNxPxNEW")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--compile", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--graphs", help="vLLM's mode of CUDA graphs")
    parser.add_argument("--runner", choices=("1", "2"), help="vLLM's model runner")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of an engine")
    options = parser.parse_args(arguments)
    settings = {"rollouts": options.shape} | {
        name: getattr(options, name) for name in ("model", "layers", "repeat", "compile", "graphs", "runner")
    }
    rows = [row for name in options.engines for row in run_engine(name, settings, options.limit_s)]
    for row in rows:
        shape = "x".join(str(row[name]) for name in ("groups", "n", "prompt", "new"))
        spread = f"{row['step_ms_10']:.3f} to {row['step_ms_90']:.3f}"
        print(
            f"{row['who']:16} {shape:20} step {row['step_ms']:8.3f} ms ({spread}), "
            f"{row['tokens_per_s']:9.0f} tokens/s with the prefill, {row['seconds']:.2f} s, {row['steps']} steps"
        )
    if rows:
        gpu = rows[0]["device"]
        print(Result(options, FOLDER, gpu_folder(gpu), gpu).write(rows))
    return 0 if rows and {row["who"] for row in rows} == set(options.engines) else 1


if __name__ == "__main__":
    sys.exit(main())
