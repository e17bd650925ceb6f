#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that log-probabilities of SGLang on this package are those of SGLang, of forced tokens that are decoded.

    python benchmarks/trainers/check_sglang.py                # on a GPU; three engines at a time, a minute for three
    python benchmarks/trainers/check_sglang.py --features defaults

Samplers are told which tokens to take, by the last one of a request, so that engines decode the same tokens whatever
their rounding, in CUDA graphs, and every log-probability is compared. Differences from SGLang's FlashAttention-3 must
not be larger than those of its Triton backend.
together: siblings, whose prompts differ in their last token alone. again: out of the radix cache. apart: prompts that
differ in their first token, too, so that nothing is shared. behind sleep: released and resumed, with other weights.
Each engine is a process of its own, with a model of four layers, Qwen3-1.7B-shaped, and random weights.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import sglang_rig
import vllm_rig as rig
from check_vllm import BASE, LENGTHS, MODEL_LENGTH, NAMES, NEW, RESPONSES, Sampled, compared
from vllm_rig import Engine

# Options of SGLang's Engine, and its environment, in which it retracts requests now and then.
FEATURES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sleep": {"options": {"enable_memory_saver": True}, "sleeps": [1]},
    "chunks, mixed steps": {"options": {"chunked_prefill_size": 512, "enable_mixed_chunk": True}},
    "retraction, no overlap": {
        "options": {"disable_overlap_schedule": True},
        "environment": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"},
    },
    "no graphs": {"options": {"disable_cuda_graph": True}},
    "prompts on FlashInfer": {"options": {"prefill_attention_backend": "flashinfer", "page_size": 64}},
}


def prompts_of(are_apart: bool) -> list[list[int]]:
    """Requests in a random order that is the same everywhere."""
    found = []
    for number, tokens in enumerate(LENGTHS):
        (common,) = rig.draw_prompts(1, tokens, seed=number)
        for copy in range(RESPONSES):
            own = 1000 + number * RESPONSES + copy
            found.append([own if are_apart else common[0], *common[1:-1], own])
    random.Random(0).shuffle(found)
    return found


def sample(llm: Any, prompts: list[list[int]], counts: Counter[str], own: Any = None) -> Sampled:
    """Tokens of a response to each prompt, and their log-probabilities; counts cached tokens and retractions.

    own: options of each request's sampling.
    """
    common = {"temperature": 1.0, "max_new_tokens": NEW, "ignore_eos": True}
    sampling = [common | options for options in own or [{}] * len(prompts)]
    outputs = llm.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    for name in ("cached_tokens", "num_retractions"):
        counts[name] += sum(output["meta_info"][name] for output in outputs)
    rows = [output["meta_info"]["output_token_logprobs"] for output in outputs]
    return [[token for _, token, _ in row] for row in rows], [[logprob for logprob, *_ in row] for row in rows]


def child(engine: Engine) -> None:
    """An engine's process: tells what it has sampled."""
    with sglang_rig.running(engine, len(LENGTHS) * RESPONSES, MODEL_LENGTH) as llm:
        llm.collective_rpc("rig_force")
        llm.collective_rpc("rig_weights", seed=0)
        counts, shared, apart = Counter[str](), prompts_of(False), prompts_of(True)
        cases = (("together", shared), ("again", shared), ("apart", apart))
        found = {case: sample(llm, prompts, counts) for case, prompts in cases}
        for seed in engine.sleeps:
            sglang_rig.settle(llm)
            llm.release_memory_occupation()
            llm.resume_memory_occupation()
            llm.collective_rpc("rig_weights", seed=seed)
            found["behind sleep"] = sample(llm, shared, counts)
        rig.tell({"found": found, "about": sglang_rig.told(llm)["about"] | counts})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", default=[*FEATURES], choices=[*FEATURES], help="of those")
    parser.add_argument("--stock", default="stock", choices=("stock", "unscheduled"), help="SGLang's own")
    parser.add_argument("--engines-per-gpu", type=int, default=3, help="at a time")
    options, own = rig.parsed(parser, arguments)
    if own is not None:
        child(own)
        return 0
    cases = [(feature, name) for feature in options.features for name in NAMES]
    engines = [(feature, options.stock if name == "stock" else name) for feature, name in cases]
    base = BASE | {"options": sglang_rig.ROOM}
    rows = sglang_rig.run_cases(
        __file__, engines, FEATURES, base, options.limit_s, engines_per_gpu=options.engines_per_gpu
    )
    told, is_good = dict(zip(cases, rows)), True
    for feature in options.features:
        print(f"{feature}:", flush=True)
        found = {name: told[feature, name][0] for name in NAMES if told[feature, name]}
        is_good &= compared(found) and len(found) == len(NAMES)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
