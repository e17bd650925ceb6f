#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how far log-probabilities of SGLang's sampler are from `shared_prompt_forward`'s on the same weights: 0.

    python benchmarks/trainers/mismatch_sglang.py --repeat 4             # Qwen3-0.6B, 10^6 tokens; three minutes
    python benchmarks/trainers/mismatch_sglang.py --features gather --model qwen3-8b --layers 36

SGLang runs with --rl-on-policy-target fsdp, and the trainer, transformers' Qwen3 in this process, in
`on_policy_operators`, both with the same random weights. Prompts and responses are ragged. together: siblings that
arrive at once. again: their prompts are in the radix cache, and samples are trained one by one. apart: prompts that
share nothing. Log-probabilities are rounded to bf16, as SGLang rounds them, but for the feature float32: there they are
those of its logits. stock is SGLang's FlashAttention-3, which has other bits. Ends with 1 if a difference of another
engine is not 0.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

import sglang_rig
import vllm_rig as rig
from bench_mismatch import mismatch
from check_sglang import FEATURES as OPTIONS
from check_sglang import sample
from check_vllm import LENGTHS
from command import RESULTS, Result, gpu_folder, parser_of
from vllm_rig import Engine

FOLDER = RESULTS / "trainers" / "sglang_mismatch"
GROUPS, NEW = 15, (256, 512)  # prompts, tokens of a response
PACK = 16  # samples in a forward
TEMPERATURE = 0.7
CASES = ("together", "again", "apart")
ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
FEATURES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"environment": {ORIGINAL: "1"}},
    "gather": {"environment": {"DUALKV_SGLANG": '{"boundary": "gather", "log_interval": 2}'}},
    **{name: OPTIONS[name] for name in ("chunks, mixed steps", "retraction, no overlap")},
}


@torch.no_grad()
def trained(model: Any, prompts: list[list[int]], responses: list[list[int]], pack: int) -> Tensor:
    """Log-probabilities of the responses, one after the other, from forwards of so many samples."""
    from flash_attn_dualkv import pack_shared_prompts
    from flash_attn_dualkv.integrations.sglang.on_policy import on_policy_operators
    from flash_attn_dualkv.integrations.transformers import shared_prompt_forward, shared_prompt_logits

    boundary = json.loads(os.environ.get("DUALKV_SGLANG", "{}")).get("boundary", "replicate")
    found: list[Tensor] = []
    with on_policy_operators(model):
        for begin in range(0, len(prompts), pack):
            parts = prompts[begin : begin + pack], responses[begin : begin + pack]
            batch = pack_shared_prompts(*parts, boundary=boundary, device=model.device)

            def score(logits: Tensor, at: slice, targets: Tensor = batch.targets) -> tuple[Tensor, ...]:
                return (logits.float().log_softmax(-1).gather(-1, targets[at, None])[:, 0],)

            if os.environ.get(ORIGINAL) == "1":
                found += shared_prompt_logits(model, batch, batch.token_index, score)
            else:
                options: dict[str, Any] = {"temperature": TEMPERATURE, "rounding": torch.bfloat16}
                found.append(shared_prompt_forward(model, batch, **options)[0])
    return torch.cat(found).cpu()


def prompts_of(seed: int, samples: int, case: str) -> list[list[int]]:
    """Prompts of the requests of a case, siblings one after the other."""
    lengths = [LENGTHS[group % len(LENGTHS)] for group in range(GROUPS)]
    prompts = [rig.draw_prompts(1, length, seed=seed * GROUPS + at)[0] for at, length in enumerate(lengths)]
    together = [prompt for prompt in prompts for _ in range(samples)]
    return [[1000 + at, *prompt[1:]] for at, prompt in enumerate(together)] if case == "apart" else together


def child(engine: Engine) -> None:
    """An engine's process: tells differences of each case, as often as it repeats them with other prompts."""
    ((groups, samples),) = engine.rollouts
    with sglang_rig.running(engine, groups * samples, max(LENGTHS) + NEW[1] + 16) as llm:
        llm.collective_rpc("rig_train")
        model, counts = sglang_rig.trainer(llm.server_args.model_path), Counter[str]()
        for seed, case in itertools.product(range(engine.repeat), CASES):
            draw, prompts = random.Random(f"{seed} {case}"), prompts_of(seed, samples, case)
            own = [
                {
                    "temperature": TEMPERATURE,
                    "max_new_tokens": draw.randint(*NEW),
                    "sampling_seed": draw.getrandbits(31),
                }
                for _ in prompts
            ]
            tokens, logps = sample(llm, prompts, counts, own)
            sampler = torch.tensor([logp for row in logps for logp in row])
            row = mismatch(sampler, trained(model, prompts, tokens, 1 if case == "again" else PACK))
            row |= {"case": case, "seed": seed, "logprob": sampler.mean().item(), **counts}
            rig.refuse_certain(row["logprob"])
            rig.tell(row | sglang_rig.told(llm)["about"])


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--features", nargs="+", default=["defaults"], choices=[*FEATURES])
    parser.add_argument("--engines", nargs="+", default=["dualkv"], choices=["dualkv", "stock"])
    parser.add_argument("--model", default="qwen3-0.6b", choices=rig.MODELS)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--engines-per-gpu", type=int, default=1, help="at a time, in a quarter of its memory each")
    options, own = rig.parsed(parser, arguments, limit=400.0)
    if own is not None:
        child(own)
        return 0
    cases = [(feature, name) for feature in options.features for name in options.engines]
    room = {"mem_fraction_static": 0.4} if options.engines_per_gpu == 1 else sglang_rig.ROOM
    base = {"rollouts": [[GROUPS, options.samples]], "options": room | {"rl_on_policy_target": "fsdp"}}
    base |= {name: getattr(options, name) for name in ("model", "layers", "repeat")}
    found = sglang_rig.run_cases(
        __file__, cases, FEATURES, base, options.limit_s, engines_per_gpu=options.engines_per_gpu
    )
    rows = [
        {"who": name, "feature": feature, "model": options.model} | row
        for (feature, name), told in zip(cases, found)
        for row in told
    ]
    if rows:
        gpu = rows[0]["device"]
        Result(options, FOLDER, f"{gpu_folder(gpu)}-{options.model}", gpu).add(*rows)
    is_zero = all(row["max"] == 0.0 for row in rows if row["who"] != "stock") and all(found)
    return int(not is_zero)


if __name__ == "__main__":
    sys.exit(main())
