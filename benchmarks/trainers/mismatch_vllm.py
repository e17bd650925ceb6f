#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how far log-probabilities of vLLM's sampler are from a training forward's on the same weights and tokens.

    python benchmarks/trainers/mismatch_vllm.py        # on GPUs; about a minute for each of five engines
    python benchmarks/report.py                        # the page, of the result files

Training forwards are of transformers' model: this package's on shared prompts, and stock's, of whole sequences on sdpa.
Engines differ in attention, and in whether vLLM's other operators are batch-invariant: then both sides take its matrix
products. Differences are trainer - sampler; k3 is the mean of exp(d) - 1 - d, as losses estimate the KL divergence.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import vllm_rig as rig
from bench_mismatch import mismatch, trained
from command import RESULTS, Result, gpu_folder, parser_of
from measure import Row
from vllm_rig import ENGINES, Engine

FOLDER = RESULTS / "trainers" / "vllm_mismatch"
GROUPS, N, PROMPT, NEW = 8, 4, 1000, 256
DEFAULT = ("stock", "dualkv", "trainer", "stock_invariant", "dualkv_invariant")


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
    weights = dict(rig.runner_of(llm).model.named_parameters())
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


def child(engine: Engine) -> None:
    """An engine's process: tells differences."""
    prompts = rig.draw_prompts(GROUPS, PROMPT, seed=3)
    with rig.running(engine, GROUPS * N, PROMPT + NEW + 16) as llm:
        llm.apply_model(rig.set_weights)
        found = rig.sample(llm, [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(N)], NEW, 1.0)
        model = copied_model(llm)
        tokens, chances = torch.tensor(found[0], device=model.device), torch.tensor(found[1], device=model.device)
        rows = []
        log_softmax = partial(torch.log_softmax, dim=-1)  # as vLLM
        with training_operators():
            for attention in ("dualkv", "sdpa"):
                model.set_attn_implementation(attention)
                groups = zip(torch.tensor(prompts, device=model.device), tokens.split(N))
                logps = [
                    trained(model, prompt, responses, attention == "dualkv", log_softmax)
                    for prompt, responses in groups
                ]
                rows.append(differences(chances, torch.cat(logps)))
        row = rows[0] | {"stock_trainer": rows[1], "logprob": chances.mean().item()}
        row |= {"device": torch.cuda.get_device_name(), "vllm": sys.modules["vllm"].__version__}
        rig.refuse_certain(row["logprob"])
        rig.tell(row)


def differences(sampler: torch.Tensor, trainer: torch.Tensor) -> Row:
    """As of the other rollouts, and the mean of each response's first token."""
    row = mismatch(sampler, trainer)
    return {"largest": row.pop("max"), **row, "first_token": mismatch(sampler[:, :1], trainer[:, :1])["mean"]}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engines", nargs="+", default=DEFAULT, choices=list(ENGINES))
    parser.add_argument("--model", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=28)
    options, own = rig.parsed(parser, arguments, limit=200.0)
    if own is not None:
        child(own)
        return 0
    settings = {"model": options.model, "layers": options.layers, "options": {"gpu_memory_utilization": 0.5}}
    found = rig.run_engines(__file__, [(name, settings) for name in options.engines], options.limit_s)
    rows = [{"who": name} | row for name, told in zip(options.engines, found) for row in told]
    if rows:
        gpu = rows[0]["device"]
        what = f"{options.model}, {options.layers} layers, {GROUPS} x {N} x {PROMPT} x {NEW}"
        Result(options, FOLDER, f"{gpu_folder(gpu)}-{options.model}", gpu, what=what).add(*rows)
    return int(len(rows) != len(options.engines))


if __name__ == "__main__":
    sys.exit(main())
