# SPDX-License-Identifier: BSD-3-Clause
"""Padded batches under DeepSpeed's ZeRO: ranks whose micro-batches share, and ranks whose do not."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from processes import run_ranks
from tiny_models import Samples, replicated_logps, tiny_model

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

padded = importlib.import_module("flash_attn_dualkv.integrations.padded")

_GROUP = Samples.random([(9, [5, 9, 6]), (7, [4])])
_SHARED, _ALONE = _GROUP.take([0, 1, 2]), _GROUP.take([2, 3])
# The samples of each rank, step by step.
STEPS = [[_SHARED, _ALONE], [_SHARED, _SHARED], [_ALONE, _SHARED]]


def _padded(samples: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = [prompt + response for prompt, response in zip(samples.prompts, samples.responses)]
    ids, mask, scored = (torch.zeros(len(rows), 20, dtype=torch.int64) for _ in range(3))
    for at, (row, prompt) in enumerate(zip(rows, samples.prompts)):
        ids[at, : len(row)], mask[at, : len(row)] = torch.tensor(row), 1
        scored[at, len(prompt) : len(row)] = 1
    return ids, mask, scored.bool()


def _run_rank(rank: int, results: Any) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1", LOCAL_RANK=str(rank), LOCAL_SIZE="2")
    import deepspeed  # looks at the environment

    deepspeed.init_distributed("gloo")
    for stage in (2, 3):
        model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa").train()
        config = dict(
            train_micro_batch_size_per_gpu=1,
            gradient_clipping=0.0,
            zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=0),
            zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False,
        )
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.005), config=config
        )
        scores = padded.PaddedScores(padded.PaddedScores.options_of(1.1, True, 1))
        for step in STEPS:
            ids, mask, scored = _padded(step[rank])
            found = scores.score(engine, ids, mask, scored)
            if found is None:
                logits = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
                logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * scored[:, 1:]
            else:
                logps, entropy = found
                assert entropy is None
            engine.backward(logps.sum())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        results[rank, stage] = weights, dict(scores.tally.fallbacks)
        engine.destroy()


def test_ranks_that_share_and_ranks_that_do_not() -> None:
    found = run_ranks(_run_rank, 2)
    model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa").train()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in STEPS:
        optimizer.zero_grad()
        for samples in step:
            (replicated_logps(model, samples)[0].sum() / 2).backward()
        optimizer.step()
    for (rank, stage), (weights, fallbacks) in found.items():
        # With ZeRO-3, a rank that could share does so only where all can.
        alone = {"dedup_ratio": 1}
        assert fallbacks == (alone | {"ranks": 1} if stage == 3 else alone), rank
        for name, one in model.named_parameters():
            change = (one - before[name]).abs().max().item()
            rounding = torch.finfo(torch.float32).eps * one.abs().max().item()
            assert (weights[name] - one).abs().max().item() <= 1e-4 * change + 2 * rounding, name
