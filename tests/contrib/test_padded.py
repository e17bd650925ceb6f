# SPDX-License-Identifier: BSD-3-Clause
"""Padded batches under DeepSpeed's ZeRO: ranks whose micro-batches share, and ranks whose do not."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
import transformers
from processes import run_ranks, start_deepspeed
from tiny_models import Samples, replicated_logps, tiny_model

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

padded = importlib.import_module("flash_attn_dualkv.contrib.padded")
# Sharing wraps the attention of "sdpa".
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("restored_registry")]

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


def _rows_of(model: Any) -> list[int]:
    """Filled with the tokens of each forward."""
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return rows


def _opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=2, word_embed_proj_dim=32,
        max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def _with_a_head_apart() -> Any:
    model = tiny_model("qwen3", attention="sdpa")
    model.lm_head.set_reshard_after_forward = None  # as FSDP 2 marks its units
    return model


UNSUPPORTED: dict[str, tuple[Any, int, str]] = {  # forwards that find it
    "another backbone": (_opt, 1, "calls its backbone once"),
    "a wide head": (lambda: tiny_model("qwen3", attention="sdpa", head_dim=520), 1, "at most 512"),
    "a head apart": (_with_a_head_apart, 0, "the root's FSDP unit"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_share_is_the_trainers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever finds it, and once for each model: the same object has the policy's and the reference's scores."""
    make, forwards, message = UNSUPPORTED[name]
    models = make(), make()
    rows = [_rows_of(model) for model in models]
    scores = padded.PaddedScores.of(min_dedup_ratio=1.1, self_check=False, min_shared=1)
    for _ in range(2):
        for model in models:
            assert scores.score(model, *_padded(_SHARED)) is None
    assert [len(one) for one in rows] == [forwards] * 2
    assert scores.tally.fallbacks == {"unsupported": 4} and scores.tally.calls == 4
    assert scores.tally.tokens == scores.tally.replicated == 4 * (3 * 9 + 20)
    (said,) = [one.getMessage() for one in caplog.records]
    assert "(unsupported)" in said and message in said
    assert scores.score(tiny_model("qwen3", attention="sdpa"), *_padded(_SHARED)) is not None
    assert scores.tally.calls == 5 and "Prompts are shared" in caplog.text


def test_tokens_beside_padding_are_the_trainers() -> None:
    """The stock forward scores a token behind a gap by the row of the gap."""
    ids, mask, scored = _padded(_SHARED)
    mask[0, 10] = scored[0, 10] = 0
    scores = padded.PaddedScores.of(min_dedup_ratio=1.1, self_check=True, min_shared=1)
    assert scores.score(tiny_model("qwen3", attention="sdpa"), ids, mask, scored) is None
    assert scores.tally.fallbacks == {"samples": 1}


def test_the_type_that_a_forward_computes_in() -> None:
    """The kernels' is asked of accelerate: its autocast is not to be seen around a model, but inside."""
    model = tiny_model("qwen3", dtype=torch.float32)
    gpu = torch.device("cuda")
    with pytest.raises(padded.Refused, match="16 bits; the model has torch.float32"):
        padded.check_model(model, gpu, self_check=False)
    padded.check_model(model, gpu, self_check=False, dtype=torch.bfloat16)
    with pytest.raises(padded.Refused, match="16 bits; the model has torch.float32"):
        padded.check_model(model.bfloat16(), gpu, self_check=False, dtype=torch.float32)


def _run_rank(rank: int, results: Any) -> None:
    deepspeed = start_deepspeed(rank, 2)
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
        scores = padded.PaddedScores.of(min_dedup_ratio=1.1, self_check=True, min_shared=1)
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
