# SPDX-License-Identifier: BSD-3-Clause
"""Distillation in real verl 0.9: its loss on a teacher's top-k, of the packed row and of verl's own batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import verl_distills
import verl_rig
from verl_inputs import Case, Found
from verl_runs import ENVIRONMENT, PATIENCE, UNEQUAL, case, check_equal, check_shared, run_beside

DRIVER = verl_distills.__file__
STOCK = [
    case("beside rewards", batch=UNEQUAL, attention="sdpa", micro=4, balance="none"),
    case("alone", attention="sdpa", engine="fsdp"),
    case("alone, the first step verified", batch=UNEQUAL, attention="sdpa", micro=12),
]
VERIFY = "+actor_rollout_ref.model.override_config.shared_prompt_verify_first_steps=1"


def ours(one: Case) -> Case:
    overrides = (*one.overrides, VERIFY) if "verified" in one.name else one.overrides
    return replace(one, name=f"ours, {one.name}", shares=True, balance="groups", overrides=overrides)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    return run_beside(STOCK, [*map(ours, STOCK)], driver=DRIVER)


@pytest.mark.parametrize("one", STOCK, ids=lambda one: one.name)
def test_losses_on_top_k_equal_verls(one_rank: dict[str, Found], one: Case) -> None:
    stock, shared = one_rank[one.name], one_rank[f"ours, {one.name}"]
    (check_equal if "verified" in one.name else check_shared)(stock, shared)
    for before, after in zip(stock.metrics, shared.metrics, strict=True):
        assert after["distillation/loss"] == pytest.approx(before["distillation/loss"], rel=1e-4)
        assert before["distillation/loss"] > 0.1
    if "verified" in one.name:
        assert shared.metrics[0]["shared_prompt/verify_max_difference"] < 1e-4
    else:
        assert shared.metrics[0]["shared_prompt/fallback_micro_batches"] == 0


def test_losses_of_rows_that_ranks_divide(one_rank: dict[str, Found]) -> None:
    """Under Ulysses a teacher's rows are divided as logits are."""
    one = case("beside rewards, Ulysses", batch=UNEQUAL, sp=2, micro=4, balance="none", shares=True)
    shared = verl_rig.run([one], 2, ENVIRONMENT, PATIENCE, DRIVER)[one.name]
    assert shared.error is None
    for before, after in zip(one_rank[STOCK[0].name].metrics, shared.metrics, strict=True):
        assert after["shared_prompt/dedup_ratio"] > 1.2 and after["shared_prompt/fallback_micro_batches"] == 0
        for name in ("loss", "grad_norm", "distillation/loss"):
            assert after[name] == pytest.approx(before[name], rel=3e-4), name
