# SPDX-License-Identifier: BSD-3-Clause
"""Cases of verl's workers, run beside the plug-in's, and their comparison."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from verl_cases import Case, Found
from verl_inputs import Batch

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # for which the FSDP engines are registered
    "VERL_ENGINE_VENDOR": "nvidia",
    "VERL_DISABLE_FLASH_ATTN_CE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": os.pathsep.join(
        str(ROOT / one) for one in (".", "benchmarks", "benchmarks/trainers", "tests/helpers")
    ),
}
ACTOR = "actor_rollout_ref.actor"
MODEL = "+actor_rollout_ref.model.override_config"
FP32 = tuple(
    f"+{role}.mixed_precision.{name}_dtype=fp32"
    for role in (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    for name in ("param", "reduce", "buffer")
) + tuple(f"{role}.fsdp_config.use_torch_compile=False" for role in (ACTOR, "actor_rollout_ref.ref"))
UNEQUAL = Batch(prompts=3, responses=4, shuffled=True, trained=0.7)


def case(name: str, *overrides: str, updates: int = 2, **settings: Any) -> Case:
    if "micro" not in settings:
        settings.setdefault("tokens", 200)
    return Case(name, overrides=(*FP32, *overrides), updates=updates, **settings)


def check_equal(stock: Found, ours: Found) -> None:
    assert (stock.error, ours.error) == (None, None)
    assert stock.engine.startswith("verl.") and ours.engine.startswith("flash_attn_dualkv.")
    # Behind the updates parameters differ by what Adam makes of gradients that are nearly zero.
    for before, after, tolerance in zip(stock.values, ours.values, (1e-5, 5e-4)):
        assert before.keys() == after.keys() and before
        for name in before:
            for one, other in zip(before[name], after[name], strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=tolerance)
    assert len(stock.metrics) == len(ours.metrics)
    for step, (one, other) in enumerate(zip(stock.metrics, ours.metrics)):
        compared = [name for name in one if name in LOSSES]
        assert compared
        for name in compared:
            assert other[name] == pytest.approx(one[name], rel=3e-5 * (1 + 9 * step), abs=3e-6), (step, name)
        assert {name for name in other if not name.startswith("shared_prompt/")} == set(one)


# Equal for any micro-batches; others are means over micro-batches.
LOSSES = ["loss", "grad_norm", "actor/pg_loss", "kl_loss", "actor/entropy_loss", "critic/vf_loss"]


def check_shared(stock: Found, ours: Found, least_ratio: float = 1.2) -> None:
    check_equal(stock, ours)
    for metrics in (*ours.infer_metrics, *ours.metrics):
        assert metrics["shared_prompt/dedup_ratio"] > least_ratio
