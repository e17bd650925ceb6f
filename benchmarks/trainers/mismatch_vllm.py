#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""How far log-probabilities of vLLM's sampler are from those of a training forward on the same weights and tokens.

    python benchmarks/trainers/mismatch_vllm.py        # on GPUs; about a minute for each of five engines
    python benchmarks/report.py                        # the page, of the result files

Training forwards are of transformers' model: this package's on shared prompts, and stock's, of whole sequences on sdpa.
Engines differ in attention, and in whether vLLM's other operators are batch-invariant: then both sides take its matrix
products. Differences are trainer - sampler; k3 is the mean of exp(d) - 1 - d, as losses estimate the KL divergence.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench_vllm import ENGINES
from command import RESULTS, Result, gpu_folder, parser_of
from measure import Row
from vllm_rig import (
    MARK,
    Engine,
    draw_prompts,
    refuse_certain,
    run_child,
    runner_of,
    running,
    set_weights,
    side_by_side,
)

FOLDER = RESULTS / "trainers" / "vllm_mismatch"
GROUPS, N, PROMPT, NEW = 8, 4, 1000, 256
DEFAULT = ("stock", "dualkv", "trainer", "stock_invariant", "dualkv_invariant")


def sampled(llm: Any, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of N responses to each prompt, one after the other, and their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0, seed=1)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(N)]
    several = [sampling.clone() for _ in requests]
    for seed, one in enumerate(several):
        one.seed = seed
    outputs = [output.outputs[0] for output in llm.generate(requests, several, use_tqdm=False)]
    rows = [[step[token].logprob for token, step in zip(one.token_ids, one.logprobs)] for one in outputs]
    return [list(one.token_ids) for one in outputs], torch.tensor(rows)


@torch.no_grad()
def copied_model(llm: Any) -> Any:
    """transformers' model on the kernels of training, with the engine's weights."""
    import transformers

    from flash_attn_dualkv.integrations.transformers import register

    register()
    config = llm.llm_engine.vllm_config.model_config.hf_config
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="dualkv", dtype=torch.bfloat16
        )
    weights = dict(runner_of(llm).model.named_parameters())
    heads, kv_heads = (config.head_dim * one for one in (config.num_attention_heads, config.num_key_value_heads))
    for name, one in model.named_parameters():
        for part, fused, sizes in (
            (("q_proj", "k_proj", "v_proj"), "qkv_proj", (heads, kv_heads, kv_heads)),
            (("gate_proj", "up_proj"), "gate_up_proj", (config.intermediate_size,) * 2),
        ):
            found = [place for place, own in enumerate(part) if own in name]
            if found:
                whole = weights[name.replace(part[found[0]], fused)]
                one.copy_(whole.split(sizes)[found[0]])
                break
        else:
            one.copy_(weights[name][: one.shape[0]])
    return model.eval()


@contextlib.contextmanager
def training_operators() -> Iterator[None]:
    """PyTorch's own, beside an engine that is batch-invariant, but for its matrix products with weights.

    For vLLM's mode replaces operators of the whole process, torch.bmm by one in TF32 for one: transformers' angles of
    RoPE came out of it, and log-probabilities were 0.64 apart.
    """
    from vllm.model_executor.layers import batch_invariant

    if not batch_invariant._batch_invariant_MODE:
        yield
        return
    batch_invariant._batch_invariant_LIB._destroy()
    functional = torch.nn.functional
    with (
        patch.object(torch, "bmm", torch.Tensor.bmm),
        patch.object(functional, "linear", batch_invariant.linear_batch_invariant),
    ):
        yield


@torch.no_grad()
def stock_logps(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of N responses of one length to each prompt, each in a row with it: (responses, length)."""
    model.set_attn_implementation("sdpa")
    found = []
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + one for one in tokens[number * N : (number + 1) * N]], device=model.device)
        targets = ids[:, len(prompt) :]
        logits = model(ids, use_cache=False, logits_to_keep=targets.shape[1] + 1).logits[:, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0])
    return torch.cat(found)


def differences(trainer: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    gaps = trainer.double().cpu() - sampler.double()
    return {
        "mean": gaps.abs().mean().item(), "largest": gaps.abs().max().item(),
        "k3": (gaps.exp() - 1.0 - gaps).mean().item(), "equal": (gaps == 0).double().mean().item(),
        "first_token": gaps[:, 0].abs().mean().item(),
    }  # fmt: skip


def child(settings: dict[str, Any]) -> None:
    """An engine's process: prints differences."""
    engine = Engine(**settings)
    prompts = draw_prompts(GROUPS, PROMPT, seed=3)
    with running(engine, GROUPS * N, PROMPT + NEW + 16) as llm:
        llm.apply_model(set_weights)
        tokens, chances = sampled(llm, prompts)
        from flash_attn_dualkv import pack_shared_prompts, unpack_logprobs
        from flash_attn_dualkv.integrations.transformers import shared_prompt_forward

        batch = pack_shared_prompts([one for one in prompts for _ in range(N)], tokens, device="cuda")
        model = copied_model(llm)
        with torch.no_grad(), training_operators():
            logps, _ = shared_prompt_forward(model, batch)
            stock = stock_logps(model, prompts, tokens)
        row: dict[str, Any] = differences(unpack_logprobs(logps, batch), chances)
        row |= {"stock_trainer": differences(stock, chances), "logprob": chances.mean().item()}
        row |= {"device": torch.cuda.get_device_name(), "vllm": sys.modules["vllm"].__version__}
        refuse_certain(row["logprob"])
        print(MARK + json.dumps(row), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=DEFAULT, choices=list(ENGINES))
    parser.add_argument("--model", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--limit-s", type=float, default=200.0, help="of an engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(json.loads(options.child))
        return 0

    def one(name: str, gpu: dict[str, str]) -> list[Row]:
        own, environment = ENGINES[name]
        settings = {"model": options.model, "layers": options.layers, "options": {"gpu_memory_utilization": 0.5}} | own
        given = ["--child", json.dumps(settings)]
        rows, output, end = run_child(__file__, given, environment | gpu, options.limit_s)
        found = json.dumps(rows[0]) if rows else f"{end}\n{output[-5000:]}"
        print(f"{name:16} {found}", flush=True)
        return [{"who": name} | row for row in rows]

    rows = [*itertools.chain.from_iterable(side_by_side([partial(one, name) for name in options.engines]))]
    if rows:
        gpu = rows[0]["device"]
        what = f"{options.model}, {options.layers} layers, {GROUPS} x {N} x {PROMPT} x {NEW}"
        print(Result(options, FOLDER, f"{gpu_folder(gpu)}-{options.model}", gpu, what=what).write(rows))
    return int(len(rows) != len(options.engines))


if __name__ == "__main__":
    sys.exit(main())
