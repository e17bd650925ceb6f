#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Whether vLLM on this package samples what vLLM samples, and the same bits in any batch.

    python benchmarks/trainers/check_vllm.py                      # on GPUs; a minute for each of twenty engines
    python benchmarks/trainers/check_vllm.py --only invariant

greedy: greedy tokens and their log-probabilities of an engine on this package against one of vLLM's own, up to the
first token that differs. Differences must not be larger than those between two of vLLM's own backends.
features: the same with a Gemma-2-like model (softcaps, windows), a gpt-oss-like one (sinks, windows, experts), with
speculation by n-grams, and with tensor parallelism over two GPUs, where there are two.
invariant: with VLLM_BATCH_INVARIANT=1, log-probabilities of a request alone, among its siblings, and among copies of
its prompt that share nothing, are equal to the bit; so are those of prompts that come in chunks. Said beside that is
which of vLLM's other operators depend on the batch. vLLM's own backend may differ, and is also run with norms that are
computed by the row (`row_norms`), as this package computes them.
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
from collections import ChainMap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench_vllm import ENGINES
from vllm_rig import (
    MARK,
    Engine,
    describe,
    draw_prompts,
    gpus,
    refuse_certain,
    run_child,
    runner_of,
    running,
    set_weights,
    side_by_side,
)

LENGTHS = (40, 333, 1024, 2049, 3001)  # of the prompts
RESPONSES, NEW, MODEL_LENGTH = 4, 48, 4096
LARGEST_RATIO = 1.5  # of differences of log-probabilities to those between two of vLLM's own backends
FLOOR = 2e-3

WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_2 = WINDOWED | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 512,
}  # fmt: skip
GPT_OSS = WINDOWED | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 128, "attention_bias": True,
    "tie_word_embeddings": False, "intermediate_size": 1024, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
# Tokens are few, so that one that is sampled has been in the prompt and n-grams are proposed.
FEW_TOKENS = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
N_GRAMS = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
FEATURES: dict[str, dict[str, Any]] = {
    "softcaps and windows": {"config": GEMMA_2},
    "sinks and windows": {"config": GPT_OSS},
    "speculation": {
        "config": FEW_TOKENS, "options": {"speculative_config": N_GRAMS, "disable_log_stats": False},
    },
    "two GPUs": {"options": {"tensor_parallel_size": 2}},
}  # fmt: skip

Sampled = dict[str, list[list[float]]]  # tokens and log-probabilities of each request


def prompts_of(salted: bool, vocabulary: int = 151936) -> list[dict[str, Any]]:
    """Requests in a random order that is the same everywhere. Salted ones share nothing in vLLM's cache."""
    found: list[dict[str, Any]] = []
    for number, tokens in enumerate(LENGTHS):
        for copy in range(RESPONSES):
            request = {"prompt_token_ids": [token % vocabulary for token in draw_prompts(1, tokens, seed=number)[0]]}
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
        llm.apply_model(set_weights)
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        found = {"together": sample(llm, prompts_of(False, vocabulary))}
        if "speculative_config" in engine.options:
            drafted = [one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_draft_tokens"]
            if not sum(drafted) > 0:
                raise ValueError("no token was proposed")
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
        if kind == "invariant":
            print(MARK + json.dumps({"operators": dependent_operators(llm)}), flush=True)


@torch.inference_mode()
def dependent_operators(llm: Any) -> list[str]:
    """Operators of vLLM's own whose rows depend on how many there are, without attention."""
    model = runner_of(llm).model
    layer = model.model.layers[0]
    qkv, norm, head_norm, mlp = (
        layer.self_attn.qkv_proj,
        layer.post_attention_layernorm,
        layer.self_attn.q_norm,
        layer.mlp,
    )
    draw = torch.Generator(qkv.weight.device).manual_seed(0)
    # A sum in another order changes one row of a hundred, after rounding to 16 bits.
    rows, residual = qkv.weight.new_empty(2, 20480, qkv.weight.shape[-1]).normal_(generator=draw)
    operators: dict[str, tuple[int, Callable[[slice], torch.Tensor]]] = {
        "projection": (2048, lambda part: qkv(rows[part])[0]),
        "norm": (20480, lambda part: norm(rows[part].clone())),
        "norm with residual": (20480, lambda part: norm(rows[part].clone(), residual[part].clone())[0]),
        "norm of heads": (2048, lambda part: head_norm(rows[part].unflatten(-1, (-1, layer.self_attn.head_dim)))),
        "MLP": (2048, lambda part: mlp(rows[part])),
        "logits": (256, lambda part: model.compute_logits(rows[part])),
    }
    found = []
    for name, (count, run) in operators.items():
        whole = run(slice(0, count))
        for size in (1, 20, 200):
            starts = range(0, min(count, 100 * size), size)
            pieces = [slice(start, min(start + size, count)) for start in starts]
            if not all(torch.equal(run(piece), whole[piece]) for piece in pieces):
                found.append(f"{name} of {size} rows")
    return found


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
        return dict(ChainMap(*rows))

    width = max(more.get("options", {}).get("tensor_parallel_size", 1) for _, more in engines)
    return side_by_side([partial(one, *engine) for engine in engines], width)


def differences(one: Sampled, other: Sampled, *more: Sampled) -> tuple[int, float, float]:
    """Tokens that all of them share before the first that differs, and how much the first two differ there.

    Returns:
        How many, and mean and largest difference of the log-probabilities, or NaN, which fits nowhere, where there are
        none.
    """
    gaps = []
    tokens = zip(*(found["tokens"] for found in (one, other, *more)))
    for requests, left, right in zip(tokens, one["logprobs"], other["logprobs"]):
        same = itertools.takewhile(lambda place: len(set(place[0])) == 1, zip(zip(*requests), left, right))
        gaps += [abs(a - b) for _, a, b in same]
    return (len(gaps), statistics.fmean(gaps), max(gaps)) if gaps else (0, math.nan, math.nan)


def where_different(one: Sampled, other: Sampled) -> str:
    """The first place that differs in the requests of each length."""
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts_of(salted=False)]
    first: dict[int, list[str]] = {}
    for index, (left, right) in enumerate(zip(one["logprobs"], other["logprobs"])):
        places = [place for place, (a, b) in enumerate(zip(left, right)) if a != b]
        if places:
            gap = abs(left[places[0]] - right[places[0]])
            first.setdefault(lengths[index], []).append(f"{places[0]} ({gap:.1e})")
    return "; ".join(f"prompts of {length} tokens from token {', '.join(first[length])}" for length in sorted(first))


def check_greedy(limit: float) -> bool:
    names = ("stock", "triton", "dualkv", "trainer")
    return compared(dict(zip(names, start([(name, {}) for name in names], "greedy", limit))))


def check_features(limit: float) -> bool:
    """Of each feature three engines; all that take one GPU run side by side."""
    names, good = ("stock", "triton", "dualkv"), True
    narrow = [feature for feature, more in FEATURES.items() if "tensor_parallel_size" not in more.get("options", {})]
    for features in (narrow, [feature for feature in FEATURES if feature not in narrow]):
        if features != narrow and len(gpus()) < 2:
            print(f"{', '.join(features)}: left out: takes two GPUs, and there is one", flush=True)
            continue
        found = start([(name, FEATURES[feature]) for feature in features for name in names], "features", limit)
        for place, feature in enumerate(features):
            print(f"{feature}:", flush=True)
            good &= compared(dict(zip(names, found[len(names) * place :])))
    return good


def compared(started: dict[str, dict[str, Any] | None]) -> bool:
    """Whether engines, "stock" and "triton" among them, have sampled the same; None is one that has failed."""
    found = {name: one for name, one in started.items() if one is not None}
    together = {name: one["found"]["together"] for name, one in found.items()}
    if not {"stock", "triton"} <= found.keys():
        print("nothing to compare with", flush=True)
        return False
    stock, triton = together["stock"], together["triton"]
    count, (_, mean, _) = sum(map(len, stock["tokens"])), differences(stock, triton)
    good = found.keys() == started.keys()
    for name, sampled in together.items():
        tokens, own_mean, _ = differences(stock, sampled)
        # The largest grows with the number of tokens: both are of those that all three share.
        _, _, own_largest = differences(stock, sampled, triton)
        _, _, largest = differences(stock, triton, sampled)
        fits = own_mean <= max(LARGEST_RATIO * mean, FLOOR) and own_largest <= max(LARGEST_RATIO * largest, 10 * FLOOR)
        verdict = "good" if fits else "WRONG"
        if ENGINES[name][0].get("backend") == "CUSTOM" and not found[name]["about"].get("steps"):
            fits, verdict = False, "WRONG: no step ran on this package"
        good &= fits
        print(
            f"{name:8} against stock: {tokens} of {count} tokens before the first that differs; log-probabilities "
            f"mean {own_mean:.2e}, largest {own_largest:.2e}: {verdict}; {found[name]['about']}",
            flush=True,
        )
    return good


def check_invariant(limit: float, own: bool = False) -> bool:
    good = True
    engines: list[tuple[str, dict[str, Any]]] = [
        ("dualkv_invariant", {}),
        ("dualkv_invariant", {"options": {"max_num_batched_tokens": 512}}),  # prompts in chunks
        *([] if own else [("stock_invariant", {}), ("stock_invariant", {"row_norms": True})]),
    ]
    for (name, more), answer in zip(engines, start(engines, "invariant", limit)):
        if answer is None:
            good = False
            continue
        together = answer["found"]["together"]
        for case, sampled in answer["found"].items():
            is_equal = sampled == together
            good &= is_equal or name.startswith("stock")
            verdict = "equal to the bit" if is_equal else f"DIFFERENT: {where_different(together, sampled)}"
            print(f"{name} {more}: {case} {verdict}", flush=True)
        print(answer["about"], "operators that depend on the batch:", answer.get("operators"), flush=True)
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("greedy", "features", "invariant"))
    parser.add_argument("--own", action="store_true", help="invariant: no engine on vLLM's own backend")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of an engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(json.loads(options.child), options.only)
        return 0
    good = True
    checks: dict[str, Callable[[float], bool]] = {
        "greedy": check_greedy,
        "features": check_features,
        "invariant": partial(check_invariant, own=options.own),
    }
    for kind, check in checks.items():
        if options.only in (None, kind):
            good &= check(options.limit_s)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
