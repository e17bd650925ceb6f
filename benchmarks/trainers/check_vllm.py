#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that vLLM on this package samples what vLLM samples, and the same bits in any batch.

    python benchmarks/trainers/check_vllm.py                      # on GPUs; a minute for each of twenty engines
    python benchmarks/trainers/check_vllm.py --only invariant

greedy: greedy tokens and their log-probabilities of an engine on this package against one of vLLM's own, up to the
first token that differs. Differences must not be larger than those between two of vLLM's own backends.
features: the same with a Gemma-2-like model (softcaps, windows), a gpt-oss-like one (sinks, windows, experts), a
Qwen2.5-like one, with speculation by n-grams, behind sleep at both levels with other weights, with two adapters of LoRA
in chunks of prompts and a cache so small that requests are preempted, with hybrids of which one layer attends
(Qwen3-Next-like with states of bf16 and of fp32, Nemotron-H-like; the second runner of vLLM before 0.30 refuses the
first two), and with tensor parallelism over two GPUs, where there are two (vllm_engines.json).
invariant: with VLLM_BATCH_INVARIANT=1, log-probabilities of a request alone, among its siblings, and among copies of
its prompt that share nothing, are equal to the bit; so are those of prompts that come in chunks. vLLM's own backend may
differ.
Each engine is a process of its own, with a model of four layers, Qwen3-1.7B-shaped unless said, and random weights.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import vllm_rig as rig
from vllm_rig import ENGINES, FEATURES, Engine

LENGTHS = (40, 333, 1024, 2049, 3001)  # of the prompts
RESPONSES, NEW, MODEL_LENGTH = 4, 48, 4096
# Differences of log-probabilities may be so many times those between two of vLLM's own backends.
# Largest ones of some hundred tokens scatter by a factor of two; a fault's are ten times as large.
MEAN_RATIO, LARGEST_RATIO = 1.5, 3.0
FLOOR = 2e-3
NAMES = ("stock", "triton", "dualkv")
# Options of engines that do nothing while a counter of vLLM's is 0.
COUNTED = {
    "speculative_config": "vllm:spec_decode_num_draft_tokens",
    "num_gpu_blocks_override": "vllm:num_preemptions",
}
BASE: dict[str, Any] = {"model": "qwen3-1.7b", "layers": 4}
Sampled = tuple[list[list[int]], list[list[float]]]  # tokens and log-probabilities of each request


def prompts_of(salted: bool, vocabulary: int = 151936) -> list[dict[str, Any]]:
    """Requests in a random order that is the same everywhere. Salted ones share nothing in vLLM's cache."""
    found: list[dict[str, Any]] = []
    for number, tokens in enumerate(LENGTHS):
        for copy in range(RESPONSES):
            request = {
                "prompt_token_ids": [token % vocabulary for token in rig.draw_prompts(1, tokens, seed=number)[0]]
            }
            found.append(request | ({"cache_salt": f"{number}.{copy}"} if salted else {}))
    random.Random(0).shuffle(found)
    return found


def child(engine: Engine, kind: str) -> None:
    """An engine's process: tells what it has sampled."""
    with TemporaryDirectory() as folder, rig.running(engine, len(LENGTHS) * RESPONSES, MODEL_LENGTH) as llm:
        llm.apply_model(rig.set_weights)
        prompts = prompts_of(False, llm.llm_engine.model_config.get_vocab_size())
        greedy = partial(rig.sample, llm, tokens=NEW, temperature=0.0, adapters=adapters_of(engine, folder))
        found = {"together": greedy(prompts)}
        for option, metric in COUNTED.items():
            if option in engine.options and not sum(m.value for m in llm.get_metrics() if m.name == metric) > 0:
                raise ValueError(f"{option}, and {metric} is 0")
        for seed, level in enumerate(engine.sleeps, 1):
            llm.sleep(level=level)
            llm.wake_up(tags=["weights"])
            llm.apply_model(partial(rig.set_weights, seed=seed))
            llm.wake_up(tags=["kv_cache"])
            found[f"behind sleep at level {level}"] = greedy(prompts)
        if kind == "invariant":
            found |= {"again": greedy(prompts), "unshared": greedy(prompts_of(salted=True))}  # first from the cache
            alone: Sampled = ([], [])
            for prompt in prompts:
                llm.reset_prefix_cache()
                tokens, logprobs = greedy([prompt])
                alone[0].extend(tokens)
                alone[1].extend(logprobs)
            found["alone"] = alone
        rig.refuse_certain(statistics.fmean(itertools.chain.from_iterable(found["together"][1])))
        rig.tell({"found": found, "about": rig.describe(llm)})


def adapters_of(engine: Engine, folder: str) -> list[Any] | None:
    """vLLM's LoRARequest of each request, or None; None for an engine without adapters."""
    if not engine.adapters:
        return None
    from vllm.lora.request import LoRARequest

    paths = [rig.write_adapter(engine, Path(folder), seed) for seed in range(engine.adapters)]
    made = [*(LoRARequest(f"adapter-{at}", at + 1, path) for at, path in enumerate(paths)), None]
    return [made[at % len(made)] for at in range(len(LENGTHS) * RESPONSES)]


def differences(first: Sampled, second: Sampled, *more: Sampled) -> tuple[int, float, float]:
    """Tokens that all of them share before the first that differs, and how much the first two differ there.

    Returns:
        How many, and mean and largest difference of the log-probabilities, or NaN, which fits nowhere, where there are
        none.
    """
    gaps = []
    for requests, left, right in zip(zip(*(tokens for tokens, _ in (first, second, *more))), first[1], second[1]):
        same = itertools.takewhile(lambda place: len(set(place[0])) == 1, zip(zip(*requests), left, right))
        gaps += [abs(a - b) for _, a, b in same]
    return (len(gaps), statistics.fmean(gaps), max(gaps)) if gaps else (0, math.nan, math.nan)


def check_features(
    features: Sequence[str], limit: float, runners: Sequence[str | None] = (None,), engines_per_gpu: int = 1
) -> bool:
    """Compares engines that run side by side, of each feature in each runner; "greedy" has those of both modes."""
    good, wide = True, [feature for feature in features if "tensor_parallel_size" in options_of(feature)]
    if wide and len(rig.gpus()) < 2:
        print(f"{', '.join(wide)}: left out: takes two GPUs, and there is one", flush=True)
        wide = []
    # Engines that share a GPU cannot measure what is free.
    part = {"gpu_memory_utilization": 0.8 / engines_per_gpu, "kv_cache_memory_bytes": 4 << 30}
    for alike in (wide, [feature for feature in features if "tensor_parallel_size" not in options_of(feature)]):
        cases = [*itertools.product(alike, runners)]
        engines = []
        for feature, runner in cases:
            options = options_of(feature) | (part if engines_per_gpu > 1 else {})
            settings = BASE | FEATURES[feature] | {"runner": runner, "options": options}
            engines += [(name, settings) for name in names_of(feature)]
        if engines:
            arguments = "--only", "features"
            found = iter(rig.run_engines(__file__, engines, limit, *arguments, engines_per_gpu=engines_per_gpu))
        for feature, runner in cases:
            print(f"{feature}, runner {runner or 'of vLLM'}:", flush=True)
            rows = {name: next(found) for name in names_of(feature)}
            good &= compared({name: row[0] for name, row in rows.items() if row}) and all(rows.values())
    return good


def options_of(feature: str) -> dict[str, Any]:
    options: dict[str, Any] = FEATURES[feature].get("options", {})
    return options


def names_of(feature: str) -> tuple[str, ...]:
    return (*NAMES, "trainer") if feature == "greedy" else NAMES


def compared(found: dict[str, dict[str, Any]]) -> bool:
    """Compares what engines, "stock" and "triton" among them, have sampled: True if it is the same."""
    if not {"stock", "triton"} <= found.keys():
        print("nothing to compare with", flush=True)
        return False
    good = True
    for case, name in itertools.product(found["stock"]["found"], found):
        stock, triton, sampled = (found[engine]["found"][case] for engine in ("stock", "triton", name))
        _, mean, _ = differences(stock, triton)
        tokens, own_mean, _ = differences(stock, sampled)
        # The largest grows with the number of tokens: both are of those that all three share.
        _, _, own_largest = differences(stock, sampled, triton)
        _, _, largest = differences(stock, triton, sampled)
        fits = own_mean <= max(MEAN_RATIO * mean, FLOOR) and own_largest <= max(LARGEST_RATIO * largest, 10 * FLOOR)
        verdict = "good" if fits else "WRONG"
        if ENGINES[name]["settings"].get("backend") == "CUSTOM" and not found[name]["about"].get("steps"):
            fits, verdict = False, "WRONG: no step ran on this package"
        good &= fits
        print(
            f"{name:8} against stock, {case}: {tokens} of {sum(map(len, stock[0]))} tokens before the first that "
            f"differs; log-probabilities mean {own_mean:.2e}, largest {own_largest:.2e}: {verdict}; "
            f"{found[name]['about']}",
            flush=True,
        )
    return good


def check_invariant(limit: float) -> bool:
    good, chunks = True, {"options": {"max_num_batched_tokens": 512}}  # of prompts
    engines = [("dualkv_invariant", BASE), ("dualkv_invariant", BASE | chunks), ("stock_invariant", BASE)]
    for (name, _), rows in zip(engines, rig.run_engines(__file__, engines, limit, "--only", "invariant")):
        good &= bool(rows)
        for row in rows:
            together = row["found"]["together"]
            for case, sampled in row["found"].items():
                apart = sum(left != right for left, right in zip(sampled[1], together[1]))
                good &= sampled == together or name.startswith("stock")
                verdict = "equal to the bit" if sampled == together else f"DIFFERENT in {apart} requests"
                print(f"{name}: {case} {verdict}", flush=True)
            print(row["about"], flush=True)
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("greedy", "features", "invariant"))
    parser.add_argument("--features", nargs="+", default=[*FEATURES], choices=[*FEATURES], help="of those")
    parser.add_argument("--runners", nargs="+", default=[None], choices=["1", "2"], help="of vLLM (default: its own)")
    parser.add_argument("--engines-per-gpu", type=int, default=1, help="at a time")
    options, own = rig.parsed(parser, arguments)
    if own is not None:
        child(own, options.only)
        return 0
    first, *others = FEATURES
    where = {"runners": options.runners, "engines_per_gpu": options.engines_per_gpu}
    wanted = [feature for feature in others if feature in options.features]
    checks: dict[str, Callable[[float], bool]] = {
        "greedy": partial(check_features, [first], **where),
        "features": partial(check_features, wanted, **where),
        "invariant": check_invariant,
    }
    verdicts = [check(options.limit_s) for kind, check in checks.items() if options.only in (None, kind)]
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
