# SPDX-License-Identifier: BSD-3-Clause
"""Steps of verl's workers, of both engines: values, losses, gradient norms, metrics and reasons."""

from __future__ import annotations

import importlib.util
from typing import Any

import golden
import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")
from verl_inputs import Batch, Case, Found, Model
from verl_runs import ACTOR, MODEL, UNEQUAL, Turns, Unusual, case, ours, run

HAS_MEGATRON = all(importlib.util.find_spec(one) is not None for one in ("megatron", "mbridge"))


FSDP = [
    case("dynamic", updates=2),
    case("fixed, any order", micro=6, batch=UNEQUAL),
    case("a group over the budget", tokens=100),
    case("entropy and KL", f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1"),
    case("LoRA", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=16"),
    case("MoE", model=Model("qwen3_moe", experts=4, experts_per_token=2)),
    case("agents", tokens=400, batch=Turns(responses=4)),
    case("critic", role="critic"),
    case("nothing to share", batch=Batch(prompts=8, responses=1)),
    case("temperatures", batch=Unusual(extra="temperatures")),
    case("dropout", f"{MODEL}.attention_dropout=0.1"),
]
MEGATRON = [
    Case("Megatron, dynamic", engine="megatron", tokens=200, updates=2),
    Case("Megatron, fixed, any order", engine="megatron", micro=4, updates=2, batch=UNEQUAL),
    Case("Megatron, critic", engine="megatron", role="critic", tokens=200, updates=2),
]


@pytest.fixture(scope="module")
def fsdp() -> dict[str, Found]:
    return run([*map(ours, FSDP)])


@pytest.fixture(scope="module")
def megatron() -> dict[str, Found]:
    return run([*map(ours, MEGATRON)], VERL_USE_EXTERNAL_MODULES="cpu_platform,verl_megatron")


def _numbers(found: Found) -> Any:
    values = [{name: [one.double() for one in many] for name, many in step.items()} for step in found.values]
    return dict(engine=found.engine, values=values, metrics=found.metrics, infer=found.infer_metrics, error=found.error)


@pytest.mark.parametrize("name", [one.name for one in FSDP])
def test_numbers_stay(name: str, fsdp: dict[str, Found]) -> None:
    golden.check("verl", name, _numbers(fsdp[f"ours, {name}"]))


@pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core or mbridge is not installed: see docs/trainers.md")
@pytest.mark.parametrize("name", [one.name for one in MEGATRON])
def test_numbers_of_megatron_stay(name: str, megatron: dict[str, Found]) -> None:
    golden.check("verl_megatron", name, _numbers(megatron[f"ours, {name}"]))
