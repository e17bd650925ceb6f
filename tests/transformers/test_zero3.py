# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed's ZeRO on two processes, each with samples of its own: a few steps change what stock training changes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from processes import run_ranks, start_deepspeed
from tiny_models import MIXED, VOCABULARY, Samples, dualkv, replicated_logps, row_of, tiny_model

from flash_attn_dualkv import scores as lm_head

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

# The samples of each rank, step by step: other numbers of chunks of the head on each, and in each
# step. ZeRO-3 records the modules that run in a step, compares the records of the ranks and
# prefetches by them in the step after.
_MORE, _LESS = MIXED.take([0, 1, 2, 3]), MIXED.take([4, 5])
STEPS = [[_MORE, _LESS], [_LESS, _MORE], [_MORE, _LESS]]
KINDS = [
    "untied", "tied", "frozen head", "only the head", "lora on the head", "lora elsewhere", "a forward hook",
    "called with the layout hook",
]  # fmt: skip
RUNS = [*((3, kind) for kind in KINDS), (2, "untied"), (2, "lora on the head")]
# A parameter of the head alone, and in an adapter; all others behind -m slow.
QUICK = {(3, "untied"), (3, "lora on the head"), (2, "untied")}


def _model(kind: str) -> Any:
    model = tiny_model("qwen3", dtype=torch.float32, tie_word_embeddings=kind == "tied").train()
    for name, one in model.named_parameters():
        if kind == ("frozen head" if "lm_head" in name else "only the head"):
            one.requires_grad_(False)
    if "forward hook" in kind:
        model.lm_head.register_forward_hook(lambda module, args, logits: 0.5 * logits)
    if "lora" in kind:
        peft = pytest.importorskip("peft", reason="needs peft")
        targets = ["q_proj"] if "elsewhere" in kind else ["q_proj", "lm_head"]
        torch.manual_seed(2)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.005)


def _logps(engine: Any, kind: str, samples: Samples) -> torch.Tensor:
    batch = samples.pack()
    if "layout hook" not in kind:
        logps, entropy = dualkv.shared_prompt_forward(engine, batch, with_entropy=True)
        return logps + 0.1 * entropy
    logits = engine(**row_of(batch, logits_to_keep=batch.token_index)).logits[0]
    logps = logits.log_softmax(-1)
    entropy = torch.special.entr(logps.exp()).sum(-1)
    return logps.gather(-1, batch.targets[:, None])[:, 0] + 0.1 * entropy


def _engine(deepspeed: Any, model: Any, stage: int, threshold: int) -> Any:
    """`threshold`: parameters with fewer elements stay whole."""
    config = dict(
        train_micro_batch_size_per_gpu=1,
        gradient_clipping=0.0,
        zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=threshold),
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )
    return deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)[0]


def _run_rank(rank: int, runs: list[tuple[int, str]], results: Any) -> None:
    deepspeed = start_deepspeed(rank, 2)
    lm_head.LOGIT_ELEMENTS = 4 * VOCABULARY
    for stage, kind in runs:
        model = _model(kind)
        if "layout hook" in kind:
            dualkv.install_layout_hook(model)
        engine = _engine(deepspeed, model, stage, 0)
        with torch.no_grad():
            old = _logps(engine, kind, STEPS[0][rank])
        for count, step in enumerate(STEPS):
            scores = _logps(engine, kind, step[rank])
            assert count > 0 or torch.equal(scores, old)
            engine.backward(scores.sum())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            results[rank, stage, kind] = {name: one.detach().clone() for name, one in model.named_parameters()}
        engine.destroy()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Any, dict[str, torch.Tensor]]:
    """The parameters after all steps, of both ranks in one start of the processes, which do the selected runs."""
    selected = [one.callspec.params for one in request.session.items if one.path == request.path]
    return run_ranks(_run_rank, 2, [(one["stage"], one["kind"]) for one in selected if "kind" in one])


@pytest.mark.parametrize(
    ("stage", "kind"), [pytest.param(*run, marks=[pytest.mark.slow] * (run not in QUICK)) for run in RUNS]
)
def test_steps_equal_stock(stage: int, kind: str, found: Any) -> None:
    model = _model(kind)
    base = model.get_base_model() if "lora" in kind else model
    base.set_attn_implementation("sdpa")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = _optimizer(model)
    for step in STEPS:
        optimizer.zero_grad()
        for samples in step:
            logps, entropy = replicated_logps(model, samples)
            ((logps + 0.1 * entropy).sum() / 2).backward()
        optimizer.step()
    for name, one in model.named_parameters():
        for rank in range(2):
            got = found[rank, stage, kind][name]
            change = (one - before[name]).abs().max().item()
            assert one.requires_grad == (change > 0)
            rounding = torch.finfo(torch.float32).eps * one.abs().max().item()
            assert (got - one).abs().max().item() <= 1e-4 * change + 2 * rounding, name


# DeepSpeed keeps whole copies of parameters with fewer elements; the second is its default.
THRESHOLDS = [0, 100_000]


def _fresh_lora() -> Any:
    """A model with an adapter as PEFT makes it, whose second matrices are zeros."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    return peft.get_peft_model(tiny_model("qwen3", dtype=torch.float32), config).train()


def _changed(model: Any, expected: dict[str, torch.Tensor], rank: int) -> list[str]:
    """What has other bits: this rank's shards of parameters, and whole copies that it keeps."""
    found = []
    for name, one in model.named_parameters():
        size = one.ds_tensor.numel()
        shard = expected[name].flatten()[rank * size : (rank + 1) * size]
        if not torch.equal(one.ds_tensor.flatten()[: len(shard)], shard):
            found.append(f"shard of {name}")
        if one.ds_status.name == "AVAILABLE" and not torch.equal(one, expected[name]):
            found.append(f"copy of {name}")
    return found


def _try_on_rank(rank: int, thresholds: list[int], results: Any) -> None:
    deepspeed = start_deepspeed(rank, 2)
    for threshold in thresholds:
        model = _fresh_lora()
        expected = {name: one.detach().clone() for name, one in model.named_parameters()}
        engine = _engine(deepspeed, model, 3, threshold)
        kept = sum(bool(one.ds_persist) for one in model.parameters())
        batch = STEPS[0][rank].pack()
        with torch.no_grad():
            old = dualkv.shared_prompt_forward(engine, batch)[0]
        changed = _changed(model, expected, rank)
        logps = dualkv.shared_prompt_forward(engine, batch)[0]
        changed += _changed(model, expected, rank)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            changed += [name for name, one in model.named_parameters() if not torch.equal(one, expected[name])]
        results[rank, threshold] = kept, changed, old, logps.detach()
        engine.destroy()


@pytest.fixture(scope="module")
def tried() -> dict[Any, Any]:
    return run_ranks(_try_on_rank, 2, THRESHOLDS)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_the_self_check_leaves_every_bit(threshold: int, tried: Any) -> None:
    model = _fresh_lora()
    model.get_base_model().set_attn_implementation("sdpa")
    for rank in range(2):
        kept, changed, old, logps = tried[rank, threshold]
        assert (kept > 0) == (threshold > 0)
        assert changed == []
        expected = replicated_logps(model, STEPS[0][rank])[0].detach()
        for got in (old, logps):
            assert (got - expected).abs().max().item() <= 1e-5
