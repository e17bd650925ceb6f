#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Whether vLLM on this package samples what vLLM samples, and the same bits in any batch.

    python benchmarks/trainers/check_vllm.py                      # on GPUs; a minute for each of seven engines
    python benchmarks/trainers/check_vllm.py --only invariant

greedy: greedy tokens and their log-probabilities of an engine on this package against one of vLLM's own, up to the
first token that differs. Differences must not be larger than those between two of vLLM's own backends.
invariant: with VLLM_BATCH_INVARIANT=1, log-probabilities of a request alone, among its siblings, and among copies of
its prompt that share nothing, are equal to the bit; so are those of prompts that come in chunks.
Each engine is a process of its own, with a Qwen3-1.7B-shaped model of four layers and random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench_vllm import ENGINES
from vllm_rig import MARK, Engine, describe, draw_prompts, refuse_certain, run_child, running, set_weights, side_by_side

LENGTHS = (40, 333, 1024, 2049, 3001)  # of the prompts
RESPONSES, NEW, MODEL_LENGTH = 4, 48, 4096
LARGEST_RATIO = 1.5  # of differences of log-probabilities to those between two of vLLM's own backends
FLOOR = 2e-3

Sampled = dict[str, list[list[float]]]  # tokens and log-probabilities of each request


def prompts_of(salted: bool) -> list[dict[str, Any]]:
    """Requests in a random order that is the same everywhere. Salted ones share nothing in vLLM's cache."""
    found: list[dict[str, Any]] = []
    for number, tokens in enumerate(LENGTHS):
        for copy in range(RESPONSES):
            request = {"prompt_token_ids": draw_prompts(1, tokens, seed=number)[0]}
            found.append(request | ({"cache_salt": f"{number}.{copy}"} if salted else {}))
    random.Random(0).shuffle(found)
    return found


def sample(llm: Any, prompts: list[dict[str, Any]]) -> Sampled:
    """Greedy tokens and their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    chances = [[step[token].logprob for token, step in zip(one.token_ids, one.logprobs)] for one in outputs]
    return {"tokens": [list(one.token_ids) for one in outputs], "logprobs": chances}


def child(settings: dict[str, Any], kind: str) -> None:
    """An engine's process: prints what it has sampled."""
    engine = Engine(**settings)
    with running(engine, len(LENGTHS) * RESPONSES, MODEL_LENGTH) as llm:
        set_weights(llm)
        found = {"together": sample(llm, prompts_of(salted=False))}
        if kind == "invariant":
            found["again"] = sample(llm, prompts_of(salted=False))  # all prompts are in the cache
            found["unshared"] = sample(llm, prompts_of(salted=True))
            alone = []
            for prompt in prompts_of(salted=False):
                llm.reset_prefix_cache()
                alone.append(sample(llm, [prompt]))
            found["alone"] = {name: [one[name][0] for one in alone] for name in ("tokens", "logprobs")}
        refuse_certain(statistics.fmean(itertools.chain.from_iterable(found["together"]["logprobs"])))
        print(MARK + json.dumps({"found": found, "about": describe(llm)}), flush=True)


def start(engines: list[tuple[str, dict[str, Any]]], kind: str, limit: float) -> list[dict[str, Any] | None]:
    """What engines, of a name and more settings, have sampled; None, with its output, for one that has failed."""

    def one(name: str, more: dict[str, Any], gpu: dict[str, str]) -> dict[str, Any] | None:
        own, environment = ENGINES[name]
        settings = {"model": "qwen3-1.7b", "layers": 4} | own | more
        given = ["--child", json.dumps(settings), "--only", kind]
        rows, output, end = run_child(__file__, given, environment | gpu, limit)
        if not rows:
            print(f"{name} {more} has FAILED: {end}\n{output[-6000:]}", flush=True)
            return None
        return dict(rows[0])

    return side_by_side([partial(one, *engine) for engine in engines])


def differences(one: Sampled, other: Sampled) -> tuple[int, int, float, float]:
    """Tokens until the first that differs, all tokens, and mean and largest difference of the log-probabilities."""
    gaps = []
    for first, second, left, right in zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"]):
        for token, peer, a, b in zip(first, second, left, right):
            gaps.append(abs(a - b) if token == peer else 0.0)
            if token != peer:
                break
    return len(gaps), sum(map(len, one["tokens"])), sum(gaps) / len(gaps), max(gaps)


def check_greedy(limit: float) -> bool:
    names = ("stock", "triton", "dualkv", "trainer")
    started = dict(zip(names, start([(name, {}) for name in names], "greedy", limit)))
    found = {name: one for name, one in started.items() if one is not None}
    together = {name: one["found"]["together"] for name, one in found.items()}
    if not {"stock", "triton"} <= found.keys():
        print("greedy: nothing to compare with", flush=True)
        return False
    _, _, mean, largest = differences(together["stock"], together["triton"])
    good = found.keys() == started.keys()
    for name, sampled in together.items():
        tokens, all_tokens, own_mean, own_largest = differences(together["stock"], sampled)
        fits = own_mean <= max(LARGEST_RATIO * mean, FLOOR) and own_largest <= max(LARGEST_RATIO * largest, 10 * FLOOR)
        good &= fits
        print(
            f"{name:8} against stock: {tokens} of {all_tokens} tokens before the first that differs; log-probabilities "
            f"mean {own_mean:.2e}, largest {own_largest:.2e}: {'good' if fits else 'WRONG'}; {found[name]['about']}",
            flush=True,
        )
    return good


def check_invariant(limit: float) -> bool:
    good = True
    engines: list[tuple[str, dict[str, Any]]] = [
        ("dualkv_invariant", {}),
        ("dualkv_invariant", {"options": {"max_num_batched_tokens": 512}}),  # prompts in chunks
        ("stock_invariant", {}),
    ]
    for (name, more), answer in zip(engines, start(engines, "invariant", limit)):
        if answer is None:
            good = False
            continue
        together = answer["found"]["together"]
        for case, sampled in answer["found"].items():
            is_equal = sampled == together
            good &= is_equal or name.startswith("stock")
            print(f"{name} {more}: {case} {'equal to the bit' if is_equal else 'DIFFERENT'}", flush=True)
        print(answer["about"], flush=True)
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("greedy", "invariant"))
    parser.add_argument("--limit-s", type=float, default=240.0, help="of an engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(json.loads(options.child), options.only)
        return 0
    good = True
    for kind, check in (("greedy", check_greedy), ("invariant", check_invariant)):
        if options.only in (None, kind):
            good &= check(options.limit_s)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
