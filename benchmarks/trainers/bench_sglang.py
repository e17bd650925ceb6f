#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Rollouts of SGLang with its own attention and with this package's, by decoding step and tokens a second.

    python benchmarks/trainers/bench_sglang.py --shape 16x16x8192x128 --layers 8     # three minutes on one H200
    python benchmarks/trainers/bench_sglang.py --engines stock dualkv stock dualkv --layers 36 --repeat 1

A shape is groups x responses x prompt tokens x new tokens. Each engine is a process of its own with a time limit, with
random weights, in the order given; prompts are random tokens. A prompt's responses are one request of so many samples,
so that SGLang computes the prompt first.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import sglang_rig
from bench_vllm import line, rollout, timed_rollout
from command import RESULTS, Result, gpu_folder, parser_of
from vllm_rig import Engine, draw_prompts, parsed, run_engines, tell

from flash_attn_dualkv.model_shape import MODELS

FOLDER = RESULTS / "trainers" / "sglang"
WARM_UP_TOKENS = 8


def roll_out(llm: Any, groups: int, n: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
    """Times of a rollout."""
    prompts = draw_prompts(groups, prompt, seed)
    sglang_rig.settle(llm)
    sglang_rig.told(llm)
    begin = time.perf_counter()
    sampling = {"n": n, "temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
    outputs = llm.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.perf_counter() - begin
    told = sglang_rig.told(llm)
    tokens = sum(len(output["output_ids"]) for output in outputs)
    cached = sum(output["meta_info"]["cached_tokens"] for output in outputs) / len(outputs)
    found = timed_rollout(seconds, told["steps"], tokens, [new] * groups * n)
    return {**found, "cached_tokens": cached, **told["about"]}


def child(engine: Engine) -> None:
    """An engine's process: tells a row for each rollout."""
    count = max(groups * n for groups, n, *_ in engine.rollouts)
    length = max(prompt + new for _, _, prompt, _, new in engine.rollouts)
    begin = time.perf_counter()
    with sglang_rig.running(engine, count, length + 16) as llm:
        known = {"layers": engine.layers, "startup_s": time.perf_counter() - begin}
        for groups, n, prompt, _, new in engine.rollouts:
            shape = {"groups": groups, "n": n, "prompt": prompt, "new": str(new)}
            roll_out(llm, 1, n, prompt, WARM_UP_TOKENS, seed=0)
            for run in range(engine.repeat):
                tell({**known, **shape, "run": run, **roll_out(llm, groups, n, prompt, new, seed=run + 1)})


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=["stock", "dualkv"], choices=list(sglang_rig.ENGINES))
    parser.add_argument("--shape", nargs="+", type=rollout, default=[[16, 16, 8192, 128, 128]], metavar="GxNxPxNEW")
    parser.add_argument("--model", default="qwen3-8b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of SGLang's Engine, as JSON")
    options, own = parsed(parser, arguments)
    if own is not None:
        child(own)
        return 0
    if any(least != most for *_, least, most in options.shape):
        parser.error("--shape: expected one number of new tokens: samples of a request have the same")
    settings = {"rollouts": options.shape}
    settings |= {name: getattr(options, name) for name in ("model", "layers", "repeat", "options")}
    result = None
    for name in options.engines:  # one after another: they would share the host
        (found,) = run_engines(__file__, [(name, settings)], options.limit_s, known=sglang_rig.ENGINES)
        rows = [{"who": name, "model": options.model} | row for row in found]
        if rows:
            gpu = rows[0]["device"]
            result = result or Result(options, FOLDER, gpu_folder(gpu), gpu)
            result.add(*rows, line=line)
    return int({row["who"] for row in (result.rows if result else [])} != set(options.engines))


if __name__ == "__main__":
    sys.exit(main())
