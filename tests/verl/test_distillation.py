# SPDX-License-Identifier: BSD-3-Clause
"""Distillation in real verl 0.9: its loss on a teacher's top-k, of the packed row and of verl's own batch."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import verl_distills
from verl_inputs import Case, Found
from verl_runs import UNEQUAL, both, case, each, ours, run, run_beside

DRIVER = verl_distills.__file__
STOCK = [
    case("beside rewards", batch=UNEQUAL, attention="sdpa", micro=4, balance="none"),
    case("alone", attention="sdpa", engine="fsdp"),
    case("alone, the first step verified", batch=UNEQUAL, attention="sdpa", micro=12),
]
VERIFY = "+actor_rollout_ref.model.override_config.shared_prompt_verify_first_steps=1"


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    shared = [ours(one, *[VERIFY] * ("verified" in one.name)) for one in STOCK]
    return run_beside(STOCK, shared, 1, DRIVER)


@each(STOCK)
def test_losses_on_top_k_equal_verls(one_rank: dict[str, Found], one: Case) -> None:
    pair = both(one_rank, one)
    pair.check_equal() if "verified" in one.name else pair.check_shared()
    for before, after in zip(pair.stock.metrics, pair.ours.metrics, strict=True):
        assert after["distillation/loss"] == pytest.approx(before["distillation/loss"], rel=1e-4)
        assert before["distillation/loss"] > 0.1
    if "verified" in one.name:
        assert pair.ours.metrics[0]["shared_prompt/verify_max_difference"] < 1e-4


def test_losses_of_rows_that_ranks_divide(one_rank: dict[str, Found]) -> None:
    """Under Ulysses a teacher's rows are divided as logits are."""
    one = case("beside rewards, Ulysses", batch=UNEQUAL, sp=2, micro=4, balance="none", shares=True)
    shared = run([one], 2, DRIVER)[one.name]
    assert shared.error is None
    for before, after in zip(one_rank[STOCK[0].name].metrics, shared.metrics, strict=True):
        assert after["shared_prompt/dedup_ratio"] > 1.2 and after["shared_prompt/fallback_micro_batches"] == 0
        for name in ("loss", "grad_norm", "distillation/loss"):
            assert after[name] == pytest.approx(before[name], rel=3e-4), name
