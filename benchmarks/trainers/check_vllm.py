#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that vLLM on this package samples what vLLM samples, and the same bits in any batch.

    python benchmarks/trainers/check_vllm.py                      # on GPUs; a minute for each of twenty engines
    python benchmarks/trainers/check_vllm.py --only invariant

greedy: greedy tokens and their log-probabilities of an engine on this package against one of vLLM's own, up to the
first token that differs. Differences must not be larger than those between two of vLLM's own backends.
features: the same with a Gemma-2-like model (softcaps, windows), a gpt-oss-like one (sinks, windows, experts), with
speculation by n-grams, and with tensor parallelism over two GPUs, where there are two (vllm_engines.json).
invariant: with VLLM_BATCH_INVARIANT=1, log-probabilities of a request alone, among its siblings, and among copies of
its prompt that share nothing, are equal to the bit; so are those of prompts that come in chunks. vLLM's own backend may
differ.
Each engine is a process of its own, with a model of four layers, Qwen3-1.7B-shaped unless said, and random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import vllm_rig as rig
from vllm_rig import ENGINES, FEATURES, Engine

LENGTHS = (40, 333, 1024, 2049, 3001)  # of the prompts
RESPONSES, NEW, MODEL_LENGTH = 4, 48, 4096
LARGEST_RATIO = 1.5  # of differences of log-probabilities to those between two of vLLM's own backends
FLOOR = 2e-3
NAMES = ("stock", "triton", "dualkv")
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
    with rig.running(engine, len(LENGTHS) * RESPONSES, MODEL_LENGTH) as llm:
        llm.apply_model(rig.set_weights)
        prompts = prompts_of(False, llm.llm_engine.model_config.get_vocab_size())
        greedy = partial(rig.sample, llm, tokens=NEW, temperature=0.0)
        found = {"together": greedy(prompts)}
        if "speculative_config" in engine.options:
            drafted = [each.value for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_draft_tokens"]
            if not sum(drafted) > 0:
                raise ValueError("no token was proposed")
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


def check_features(features: list[str], limit: float) -> bool:
    """Compares engines that run side by side, feature after feature; greedy tokens are those of both modes, too."""
    good = True
    for feature in features:
        settings, names = BASE | FEATURES[feature], [*NAMES, *(["trainer"] if feature == "greedy" else [])]
        if "tensor_parallel_size" in settings.get("options", {}) and len(rig.gpus()) < 2:
            print(f"{feature}: left out: takes two GPUs, and there is one", flush=True)
            continue
        print(f"{feature}:", flush=True)
        found = rig.run_engines(__file__, [(name, settings) for name in names], limit, "--only", "features")
        good &= compared({name: rows[0] for name, rows in zip(names, found) if rows}) and all(found)
    return good


def compared(found: dict[str, dict[str, Any]]) -> bool:
    """Compares what engines, "stock" and "triton" among them, have sampled: True if it is the same."""
    if not {"stock", "triton"} <= found.keys():
        print("nothing to compare with", flush=True)
        return False
    together = {name: row["found"]["together"] for name, row in found.items()}
    stock, triton = together["stock"], together["triton"]
    count, (_, mean, _), good = sum(map(len, stock[0])), differences(stock, triton), True
    for name, sampled in together.items():
        tokens, own_mean, _ = differences(stock, sampled)
        # The largest grows with the number of tokens: both are of those that all three share.
        _, _, own_largest = differences(stock, sampled, triton)
        _, _, largest = differences(stock, triton, sampled)
        fits = own_mean <= max(LARGEST_RATIO * mean, FLOOR) and own_largest <= max(LARGEST_RATIO * largest, 10 * FLOOR)
        verdict = "good" if fits else "WRONG"
        if ENGINES[name]["settings"].get("backend") == "CUSTOM" and not found[name]["about"].get("steps"):
            fits, verdict = False, "WRONG: no step ran on this package"
        good &= fits
        print(
            f"{name:8} against stock: {tokens} of {count} tokens before the first that differs; log-probabilities "
            f"mean {own_mean:.2e}, largest {own_largest:.2e}: {verdict}; {found[name]['about']}",
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
    parser.add_argument("--limit-s", type=float, default=240.0, help="of an engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(Engine(**json.loads(options.child)), options.only)
        return 0
    first, *others = FEATURES
    checks: dict[str, Callable[[float], bool]] = {
        "greedy": partial(check_features, [first]),
        "features": partial(check_features, others),
        "invariant": check_invariant,
    }
    verdicts = [check(options.limit_s) for kind, check in checks.items() if options.only in (None, kind)]
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
