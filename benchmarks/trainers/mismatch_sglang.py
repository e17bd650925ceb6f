#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how far log-probabilities of SGLang's sampler are from `shared_prompt_forward`'s on the same weights: 0.

    python benchmarks/trainers/mismatch_sglang.py --repeat 4             # Qwen3-0.6B, 10^6 tokens; three minutes
    python benchmarks/trainers/mismatch_sglang.py --features gather --model qwen3-8b --layers 36

SGLang runs with --rl-on-policy-target fsdp, and the trainer, transformers' Qwen3 in this process, in
`on_policy_operators`; it sends SGLang its random weights. Prompts and responses are ragged. together: siblings that
arrive at once. again: their prompts are in the radix cache. apart: prompts that share nothing. Log-probabilities are
rounded to bf16, as SGLang rounds them, but for the feature float32: there they are those of its logits by themselves.
stock is SGLang's FlashAttention-3, which has other bits. Ends with 1 if a difference of another engine is not 0.
"""

from __future__ import annotations

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
GROUPS, N, NEW = 15, 16, (256, 512)  # prompts, responses of each, tokens of a response
PACK = 16  # samples in a forward
TEMPERATURE = 0.7
ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
FEATURES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"environment": {ORIGINAL: "1"}},
    "gather": {"environment": {"DUALKV_SGLANG": '{"boundary": "gather", "log_interval": 2}'}},
    **{name: OPTIONS[name] for name in ("chunks, mixed steps", "retraction, no overlap")},
}


def trainer(folder: str) -> Any:
    """transformers' model of a configuration in float32, on the device of the engine."""
    import transformers

    from flash_attn_dualkv.integrations.transformers import register

    register()
    config, device = transformers.AutoConfig.from_pretrained(folder), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv", dtype=torch.float32)
    model.to_empty(device=device).tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    rig.set_weights(model)
    return model.eval()


@torch.no_grad()
def trained(
    model: Any, prompts: list[list[int]], responses: list[list[int]], is_rounded: bool, boundary: Any
) -> Tensor:
    """Log-probabilities of the responses, one after the other."""
    from flash_attn_dualkv import pack_shared_prompts
    from flash_attn_dualkv.integrations.sglang.on_policy import on_policy_operators
    from flash_attn_dualkv.integrations.transformers import shared_prompt_forward, shared_prompt_logits

    found = []
    with on_policy_operators(model):
        for begin in range(0, len(prompts), PACK):
            parts = prompts[begin : begin + PACK], responses[begin : begin + PACK]
            batch = pack_shared_prompts(*parts, boundary=boundary, device=model.device)
            if is_rounded:
                logps, _ = shared_prompt_forward(model, batch, temperature=TEMPERATURE, rounding=torch.bfloat16)
            else:
                targets = batch.targets

                def score(logits: Tensor, at: slice, targets: Tensor = targets) -> tuple[Tensor, ...]:
                    return (logits.float().log_softmax(-1).gather(-1, targets[at, None])[:, 0],)

                (logps,) = shared_prompt_logits(model, batch, batch.token_index, score)
            found.append(logps)
    return torch.cat(found)


def cases_of(seed: int) -> dict[str, list[list[int]]]:
    """Prompts of the requests of each case, siblings one after the other."""
    lengths = [LENGTHS[group % len(LENGTHS)] for group in range(GROUPS)]
    prompts = [rig.draw_prompts(1, length, seed=seed * GROUPS + at)[0] for at, length in enumerate(lengths)]
    together = [prompt for prompt in prompts for _ in range(N)]
    apart = [[1000 + at, *prompt[1:]] for at, prompt in enumerate(together)]
    return {"together": together, "again": together, "apart": apart}


def child(engine: Engine) -> None:
    """An engine's process: tells differences."""
    import json
    import os

    is_rounded = os.environ.get(ORIGINAL) != "1"
    boundary = json.loads(os.environ.get("DUALKV_SGLANG", "{}")).get("boundary", "replicate")
    with sglang_rig.running(engine, GROUPS * N, max(LENGTHS) + NEW[1] + 16) as llm:
        model, counts = trainer(llm.server_args.model_path), Counter[str]()
        llm.update_weights_from_tensor([(name, weight.detach()) for name, weight in model.named_parameters()])
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for seed in range(engine.repeat):
            for case, prompts in cases_of(seed).items():
                draw = random.Random(f"{seed} {case}")
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
                pairs.setdefault(case, []).append(
                    (sampler, trained(model, prompts, tokens, is_rounded, boundary).cpu())
                )
        told = sglang_rig.told(llm)["about"] | counts
        for case, found in pairs.items():
            sampler, trainer_ = map(torch.cat, zip(*found))
            rig.refuse_certain(sampler.mean().item())
            rig.tell({"case": case, **mismatch(sampler, trainer_), "logprob": sampler.mean().item(), **told})


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--features", nargs="+", default=["defaults"], choices=[*FEATURES])
    parser.add_argument("--engines", nargs="+", default=["dualkv"], choices=["dualkv", "stock"])
    parser.add_argument("--model", default="qwen3-0.6b", choices=rig.MODELS)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeat", type=int, default=1)
    options, own = rig.parsed(parser, arguments, limit=400.0)
    if own is not None:
        child(own)
        return 0
    cases = [(feature, name) for feature in options.features for name in options.engines]
    result, is_zero = None, True
    for feature, name in cases:
        engine = sglang_rig.ENGINES[name]
        known = {name: engine | {"environment": engine["environment"] | FEATURES[feature].get("environment", {})}}
        more = {"rl_on_policy_target": "fsdp", "mem_fraction_static": 0.5} | FEATURES[feature].get("options", {})
        settings = {"model": options.model, "layers": options.layers, "repeat": options.repeat, "options": more}
        (rows,) = rig.run_engines(__file__, [(name, settings)], options.limit_s, known=known)
        if rows:
            gpu = rows[0]["device"]
            result = result or Result(options, FOLDER, gpu_folder(gpu), gpu)
            result.add(*({"who": name, "feature": feature, "model": options.model} | row for row in rows))
        is_zero &= bool(rows) and (name == "stock" or all(row["max"] == 0.0 for row in rows))
    return int(not is_zero)


if __name__ == "__main__":
    sys.exit(main())
