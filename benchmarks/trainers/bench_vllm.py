#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Rollouts of vLLM with its own attention and with this package's, by decoding step and tokens a second.

    python benchmarks/trainers/bench_vllm.py --shape 16x16x8192x128 --layers 8     # three minutes on one H200
    python benchmarks/trainers/bench_vllm.py --engines stock dualkv trainer --shape 16x16x1024x512 256x1x8192x128
    python benchmarks/trainers/bench_vllm.py --runner 1 --repeat 3           # vLLM's first model runner
    python benchmarks/trainers/bench_vllm.py --model qwen3.5-27b --shape 16x16x8192x128 16x16x16384x128    # a hybrid

A shape is groups x responses x prompt tokens x new tokens, or fewest-most of these. Each engine is a process of its own
with a time limit, with random weights; requests are submitted one by one in a random order, and prompts are random
tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, Result, gpu_folder, parser_of
from vllm_rig import ENGINES, HYBRIDS, Engine, describe, draw_prompts, run_engines, running, tell

from flash_attn_dualkv.model_shape import MODELS

FOLDER = RESULTS / "trainers" / "vllm"
WARM_UP_TOKENS = 8


def rollout(text: str) -> list[int]:
    """Groups, responses, prompt tokens, and fewest and most new tokens."""
    *sizes, new = text.split("x")
    least, _, most = new.partition("-")
    return [*map(int, sizes), int(least), int(most or least)]


def roll_out(llm: Any, groups: int, n: int, prompt: int, least: int, most: int, seed: int) -> dict[str, Any]:
    """Times of a rollout: requests are submitted one by one in a random order, and have random lengths."""
    from vllm import SamplingParams

    draw = random.Random(seed)
    prompts = [{"prompt_token_ids": tokens} for tokens in draw_prompts(groups, prompt, seed) for _ in range(n)]
    draw.shuffle(prompts)
    lengths = [draw.randint(least, most) for _ in prompts]
    sampling = [SamplingParams(temperature=1.0, max_tokens=most, ignore_eos=True, detokenize=False) for most in lengths]
    steps: list[float] = []
    step = llm.llm_engine.step

    def timed() -> Any:
        begin = time.perf_counter()
        outputs = step()
        steps.append(time.perf_counter() - begin)
        return outputs

    llm.llm_engine.step = timed
    try:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
    finally:
        llm.llm_engine.step = step
    tokens = sum(len(found.token_ids) for output in outputs for found in output.outputs)
    assert tokens == sum(lengths), f"expected {sum(lengths)} tokens, got {tokens}"
    decoding = sorted(steps[-(least // 2) : -3] or steps)  # of equal lengths, all requests decode
    return {
        "seconds": seconds, "tokens_per_s": tokens / seconds, "steps": len(steps),
        "step_ms": 1e3 * statistics.median(decoding),
        "step_ms_10": 1e3 * decoding[len(decoding) // 10], "step_ms_90": 1e3 * decoding[len(decoding) * 9 // 10],
        "decode_tokens_per_s": groups * n / statistics.median(decoding),
    }  # fmt: skip


def child(engine: Engine) -> None:
    """An engine's process: tells a row for each rollout."""
    requests = max(groups * n for groups, n, *_ in engine.rollouts)
    length = max(prompt + most for _, _, prompt, _, most in engine.rollouts) + 16
    begin = time.perf_counter()
    with running(engine, requests, length) as llm:
        known: dict[str, Any] = {"layers": engine.layers, "backend": engine.backend, "exact": engine.exact}
        known |= {"device": torch.cuda.get_device_name(), "startup_s": time.perf_counter() - begin}
        for groups, n, prompt, least, most in engine.rollouts:
            roll_out(llm, groups, n, prompt, WARM_UP_TOKENS, WARM_UP_TOKENS, seed=0)
            shape = {
                "groups": groups,
                "n": n,
                "prompt": prompt,
                "new": str(most) if least == most else f"{least}-{most}",
            }
            for run in range(engine.repeat):
                found = roll_out(llm, groups, n, prompt, least, most, seed=run + 1)
                tell({**known, **shape, "run": run, **found, **describe(llm)})


def line(row: dict[str, Any]) -> str:
    shape = "x".join(str(row[name]) for name in ("groups", "n", "prompt", "new"))
    step = f"step {row['step_ms']:8.3f} ms ({row['step_ms_10']:.3f} to {row['step_ms_90']:.3f})"
    return f"{row['who']:16} {shape:20} {step}, {row['tokens_per_s']:9.0f} tokens/s with the prefill"


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=["stock", "dualkv"], choices=list(ENGINES))
    parser.add_argument("--shape", nargs="+", type=rollout, default=[[16, 16, 8192, 128, 128]], metavar="GxNxPxNEW")
    parser.add_argument("--model", default="qwen3-8b", choices=[*MODELS, *HYBRIDS])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--runner", choices=["1", "2"], help="of vLLM (default: its own)")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of an engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(Engine(**json.loads(options.child)))
        return 0
    names = ("model", "layers", "repeat", "runner")
    settings = {"rollouts": options.shape} | {name: getattr(options, name) for name in names}
    settings |= HYBRIDS.get(options.model, {})
    rows = []
    for name in options.engines:  # one after another: they would share the host
        (found,) = run_engines(__file__, [(name, settings)], options.limit_s)
        rows += [{"who": name, "model": options.model} | row for row in found]
    if rows:
        gpu = rows[0]["device"]
        Result(options, FOLDER, gpu_folder(gpu), gpu).add(*rows, line=line)
    return int({row["who"] for row in rows} != set(options.engines))


if __name__ == "__main__":
    sys.exit(main())
