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

    python benchmarks/trainers/bench_vllm.py --routers verl siblings --shape 128x16x8192x512 --layers 12 --repeat 1
    python benchmarks/trainers/bench_vllm.py --routers verl siblings --replicas 2 --live --shape 32x16x8192x512

replay what one of eight replicas gets in a step of verl under each router: the one that ends last, by a count of bytes
and operations. New tokens are then the mean of log-normal lengths, clipped at twice that; the cache has the part of a
whole model's that its layers are. --live runs all replicas at once, and the last one's seconds count.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import replicas
from command import RESULTS, Result, gpu_folder, parser_of
from replicas import Request
from vllm_rig import ENGINES, HYBRIDS, Engine, describe, draw_prompts, gpus, parsed, run_engines, running, tell

from flash_attn_dualkv.model_shape import MODELS

FOLDER = RESULTS / "trainers" / "vllm"
WARM_UP_TOKENS, WARM_UP_REQUESTS = 8, 32
CACHE_AND_WEIGHTS = 119e9  # bytes of an H200, of which vLLM takes nine tenths


def rollout(text: str) -> list[int]:
    """Groups, responses, prompt tokens, and fewest and most new tokens."""
    *sizes, new = text.split("x")
    least, _, most = new.partition("-")
    return [*map(int, sizes), int(least), int(most or least)]


def requests_of(groups: int, n: int, least: int, most: int, seed: int) -> list[Request]:
    """Requests in a random order, of random lengths."""
    draw = random.Random(seed)
    prompts = [prompt for prompt in range(groups) for _ in range(n)]
    draw.shuffle(prompts)
    return [(prompt, draw.randint(least, most)) for prompt in prompts]


def roll_out(llm: Any, requests: Sequence[Request], prompt: int, seed: int) -> dict[str, Any]:
    """Times of a rollout, whose requests are submitted one by one. `prompt`: tokens of each."""
    from vllm import SamplingParams

    tokens_of = draw_prompts(1 + max(number for number, _ in requests), prompt, seed)
    prompts = [{"prompt_token_ids": tokens_of[number]} for number, _ in requests]
    lengths = [new for _, new in requests]
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
    return timed_rollout(seconds, steps, tokens, lengths)


def timed_rollout(seconds: float, steps: Sequence[float], tokens: int, lengths: Sequence[int]) -> dict[str, Any]:
    """A row's figures of a rollout: its seconds, those of its steps, and the tokens that it has sampled.

    Args:
        lengths: new tokens that were asked for, of each request.
    """
    assert tokens == sum(lengths), f"expected {sum(lengths)} tokens, got {tokens}"
    decoding = sorted(steps[-(min(lengths) // 2) : -3] or steps)  # of equal lengths, all requests decode
    return {
        "seconds": seconds, "tokens_per_s": tokens / seconds, "steps": len(steps),
        "step_ms": 1e3 * statistics.median(decoding),
        "step_ms_10": 1e3 * decoding[len(decoding) // 10], "step_ms_90": 1e3 * decoding[len(decoding) * 9 // 10],
        "decode_tokens_per_s": len(lengths) / statistics.median(decoding),
    }  # fmt: skip


def cases(engine: Engine, sizes: list[int], run: int) -> list[tuple[dict[str, Any], list[Request]]]:
    """Requests of a rollout, under each router, and what a row says of them."""
    groups, n, prompt, least, most = sizes
    if not engine.routers:
        return [({}, requests_of(groups, n, least, most, seed=run))]
    shape, is_shared = MODELS[engine.model], engine.backend == "CUSTOM"
    found = []
    for router in engine.routers:
        lists = replicas.lists_of(router, groups, n, prompt, most, engine.replicas)
        ends = [replicas.model_seconds(requests, prompt, shape, engine.layers, is_shared) for requests in lists]
        replica = ends.index(max(ends)) if engine.replica is None else engine.replica
        requests = lists[replica]
        about = {"router": router, "replicas": engine.replicas, "replica": replica, "model_s": ends[replica]}
        found.append((about | {"requests": len(requests), "prompts": len(dict(requests))}, requests))
    return found


def child(engine: Engine) -> None:
    """An engine's process: tells a row for each rollout."""
    rollouts = [[cases(engine, sizes, run + 1) for run in range(engine.repeat)] for sizes in engine.rollouts]
    ends = [
        (len(requests), sizes[2] + max(new for _, new in requests))
        for sizes, runs in zip(engine.rollouts, rollouts)
        for found in runs
        for _, requests in found
    ]
    count, length = map(max, zip(*ends))
    begin = time.perf_counter()
    with running(engine, count, length + 16) as llm:
        known: dict[str, Any] = {"layers": engine.layers, "backend": engine.backend, "exact": engine.exact}
        known |= {"device": torch.cuda.get_device_name(), "startup_s": time.perf_counter() - begin}
        for (groups, n, prompt, least, most), runs in zip(engine.rollouts, rollouts):
            new = str(most) if least == most else f"{least}-{most}"
            shape = {"groups": groups, "n": n, "prompt": prompt, "new": new}
            warm_up = [(number, WARM_UP_TOKENS) for number, _ in runs[0][0][1]]
            roll_out(llm, warm_up[: WARM_UP_REQUESTS if engine.routers else None], prompt, seed=0)
            for run, found in enumerate(runs):
                for about, requests in found:
                    llm.reset_prefix_cache()
                    result = roll_out(llm, requests, prompt, seed=run + 1)
                    tell({**known, **shape, **about, "run": run, **result, **describe(llm)})


def line(row: dict[str, Any]) -> str:
    shape = "x".join(str(row[name]) for name in ("groups", "n", "prompt", "new"))
    step = f"step {row['step_ms']:8.3f} ms ({row['step_ms_10']:.3f} to {row['step_ms_90']:.3f})"
    text = f"{row['who']:16} {shape:20} {step}, {row['tokens_per_s']:9.0f} tokens/s with the prefill"
    if "router" not in row:
        return text
    return f"{text}; {row['router']:8} {row['seconds']:.1f} s (model {row['model_s']:.1f}), {row['prompts']} prompts"


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=["stock", "dualkv"], choices=list(ENGINES))
    parser.add_argument("--shape", nargs="+", type=rollout, default=[[16, 16, 8192, 128, 128]], metavar="GxNxPxNEW")
    parser.add_argument("--model", default="qwen3-8b", choices=[*MODELS, *HYBRIDS])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--routers", nargs="+", default=[], choices=replicas.ROUTERS, help="see above")
    parser.add_argument("--replicas", type=int, default=8, help="among which they divide a shape's requests")
    parser.add_argument("--live", action="store_true", help="all replicas at once, each on a GPU of its own")
    parser.add_argument("--runner", choices=["1", "2"], help="of vLLM (default: its own)")
    options, own = parsed(parser, arguments)
    if own is not None:
        child(own)
        return 0
    if options.routers and options.model in HYBRIDS:
        parser.error("--routers: expected a model whose layers all attend, whose cache is divided by layers")
    if options.live and len(gpus()) < options.replicas:
        parser.error(f"--live: expected a GPU for each of {options.replicas} replicas, got {len(gpus())}")
    names = ("model", "layers", "repeat", "runner", "routers", "replicas")
    settings = {"rollouts": options.shape} | {name: getattr(options, name) for name in names}
    settings |= HYBRIDS.get(options.model, {})
    if options.routers:
        model = MODELS[options.model]
        cache = (CACHE_AND_WEIGHTS - 2 * model.parameters) * options.layers / model.layers
        settings["options"] = {"kv_cache_memory_bytes": int(cache)}
    rows = []
    for name in options.engines:  # one after another: they would share the host
        placed = [{"replica": replica} for replica in range(options.replicas)] if options.live else [{}]
        engines = [(name, settings | place) for place in placed]
        for found in run_engines(__file__, engines, options.limit_s):
            rows += [{"who": name, "model": options.model} | row for row in found]
    if rows:
        gpu = rows[0]["device"]
        Result(options, FOLDER, gpu_folder(gpu), gpu).add(*rows, line=line)
    if options.live:
        for case in dict.fromkeys((row["who"], row["router"], row["run"]) for row in rows):
            seconds = [row["seconds"] for row in rows if (row["who"], row["router"], row["run"]) == case]
            print(f"{case}: {len(seconds)} replicas, the last one's {max(seconds):.1f} s")
    return int({row["who"] for row in rows} != set(options.engines))


if __name__ == "__main__":
    sys.exit(main())
