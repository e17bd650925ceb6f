#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how far log-probabilities of rollouts are from those that training computes for the same tokens.

    python benchmarks/trainers/bench_mismatch.py                  # Qwen3-1.7B's shape, bf16, random weights; one GPU
    python benchmarks/trainers/bench_mismatch.py --device cpu     # a tiny model in fp32, a trial run
    python benchmarks/report.py                                   # the page of trainers, of the result files

Rollouts are sampled by transformers' continuous batching, from its own attention or after `register_decode()`; training
is a forward of the same weights over prompts and completions, replicated or shared. The last row has products and norms
in fp64, rounded, which do not depend on the rows of a batch: what is left there is attention's.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, Result, gpu_folder, parser_of, place_of
from measure import Row
from models import make_model
from shapes import Shape, parse

FOLDER = RESULTS / "trainers" / "mismatch"
OURS = "this library"
STOCK = "transformers"
# Rollouts, training, whether layers other than attention depend on rows alone.
PAIRS = ((STOCK, STOCK, False), (STOCK, OURS, False), (OURS, OURS, False), (OURS, OURS, True))


@contextlib.contextmanager
def rowwise(norm_class: type) -> Iterator[None]:
    """Products and norms in float64, rounded; the rest of Qwen3 works element by element."""
    linear = nn.functional.linear

    def wide(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    def norm(module: Any, x: Tensor) -> Tensor:
        exact = x.double()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return (module.weight.double() * exact * scale).to(x.dtype)

    with mock.patch.object(nn.functional, "linear", wide), mock.patch.object(norm_class, "forward", norm):
        yield


def rollouts(model: Any, prompts: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Sampled tokens, as many for each request, and what the rollouts say of their log-probabilities: (N, R)."""
    import transformers

    config = transformers.GenerationConfig(
        max_new_tokens=shape.responses[0], do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1
    )
    requests = [prompt for prompt in prompts.tolist() for _ in shape.responses]
    keys = len(requests) * (prompts.shape[1] + shape.responses[0])
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=keys // 256 + len(requests), max_batch_tokens=4096, return_logprobs=True
    )
    torch.manual_seed(7)
    found = model.generate_batch(requests, generation_config=config, continuous_batching_config=batching)
    results = [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]
    if errors := {one.error for one in results if one.error}:
        raise RuntimeError(f"generate_batch: {errors}")
    tokens, logps = ([getattr(one, name) for one in results] for name in ("generated_tokens", "logprobs"))
    return torch.tensor(tokens, device=prompts.device), torch.tensor(logps, device=prompts.device)


def scores_of_rollouts(logits: Tensor) -> Tensor:
    """Logarithms by the softmax of transformers' continuous batching."""
    return logits.softmax(-1).log()


@torch.no_grad()
def trained(model: Any, prompt: Tensor, responses: Tensor, is_shared: bool, score: Any = scores_of_rollouts) -> Tensor:
    """Log-probabilities of the responses to a prompt in one forward: (N, R)."""
    from flash_attn_dualkv import pack_shared_prompts

    if is_shared:
        batch = pack_shared_prompts([prompt] * len(responses), [*responses])
        inputs: dict[str, Any] = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
        inputs |= {"shared_prompt_layout": batch.layout, "logits_to_keep": batch.token_index}
        logits, targets = model(**inputs, use_cache=False).logits[0], batch.targets
    else:
        ids = torch.cat([prompt.expand(len(responses), -1), responses], dim=1)
        kept = model(ids, use_cache=False, logits_to_keep=responses.shape[1] + 1).logits[:, :-1]
        logits, targets = kept.flatten(0, 1), responses.flatten()
    logps = [
        score(part.float()).gather(-1, which[:, None])[:, 0]
        for part, which in zip(logits.split(1024), targets.split(1024))
    ]
    return torch.cat(logps).view_as(responses)


def mismatch(rolled: Tensor, trainer: Tensor) -> Row:
    """Figures of the difference: its size, the k3 estimate of the divergence, how many are equal to the bit."""
    ratio = (trainer.double() - rolled.double()).flatten()
    return {
        "mean": ratio.abs().mean().item(),
        "max": ratio.abs().max().item(),
        "k3": (ratio.exp() - 1 - ratio).mean().item(),
        "equal": (trainer == rolled).double().mean().item(),
        "tokens": ratio.numel(),
    }


def measure(pair: tuple[str, str, bool], prompts: Tensor, shape: Shape, dtype: torch.dtype) -> Row:
    from flash_attn_dualkv.integrations.transformers import register, register_decode, unregister_decode

    (rolls, trains, is_rowwise), device = pair, prompts.device
    register()
    model = make_model(shape.model, "sdpa", dtype, device).eval()
    model.gradient_checkpointing_disable()
    with contextlib.ExitStack() as stack:
        if is_rowwise:
            stack.enter_context(rowwise(type(model.model.norm)))
        if rolls == OURS:
            register_decode()
            stack.callback(unregister_decode)
        tokens, rolled = rollouts(model, prompts, shape)
        if trains == OURS:
            model.set_attn_implementation("dualkv")
        groups = zip(prompts, tokens.split(len(shape.responses)))
        found = torch.cat([trained(model, prompt, responses, trains == OURS) for prompt, responses in groups])
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"rollouts": rolls, "training": trains, "rowwise": is_rowwise, **mismatch(rolled, found)}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, on_cpu=True)
    parser.add_argument("--shape", type=parse, help="one group of responses of one length, as in other benchmarks")
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args(arguments)
    device, dtype, gpu = place_of(options.device)
    shape = options.shape or parse("qwen3-1.7b-8x1Kx256" if device.type == "cuda" else "tiny-4x300x24")
    generator = torch.Generator().manual_seed(3)
    (length, _), *_ = shape.nodes
    prompts = torch.randint(shape.model.vocab, (options.prompts, length), generator=generator).to(device)
    result = Result(options, FOLDER, gpu_folder(gpu), gpu, shape=shape.name, prompts=options.prompts)
    for pair in PAIRS:
        result.add(measure(pair, prompts, shape, dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
