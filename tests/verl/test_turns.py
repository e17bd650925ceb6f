# SPDX-License-Identifier: BSD-3-Clause
"""Rollouts of agents in verl: what is shared behind prompts, beside verl's own engines."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
from verl.utils import tensordict_utils as tu
from verl_inputs import Case, Found, worker_input
from verl_runs import ACTOR, MODEL, Turns, both, case, each, ours, run, run_beside

from flash_attn_dualkv import group_by_prefix
from flash_attn_dualkv.integrations.verl import Options
from flash_attn_dualkv.integrations.verl.micro_batches import grouped_micro_batches, pack_micro_batch

TURNS = Turns(prompts=2, responses=6, prompt_tokens=48, response_tokens=24, trained=0.7, shuffled=True)
SHORT_NODES = f"{MODEL}.shared_prompt_min_shared=4"
ONE_RANK = [
    case("dynamic", tokens=2000, batch=TURNS, updates=3),
    case("short nodes", SHORT_NODES, tokens=2000, batch=TURNS),
    case("over the budget", SHORT_NODES, tokens=250, batch=TURNS),
    case("fixed, v0", SHORT_NODES, micro=6, batch=TURNS, trainer="v0"),
    case("two optimizer steps", SHORT_NODES, f"{ACTOR}.entropy_coeff=0.1", tokens=2000, batch=TURNS, minis=2),
    case("prompts alone", f"{MODEL}.shared_prompt_min_shared=", tokens=2000, batch=TURNS),
    case("critic", "+critic.model.override_config.shared_prompt_min_shared=4", role="critic", tokens=300, batch=TURNS),
]  # fmt: skip
TWO_RANKS = [
    case("2 ranks", SHORT_NODES, tokens=250, batch=TURNS),
    case("Ulysses", SHORT_NODES, sp=2, tokens=200, batch=TURNS),
]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    return run_beside(ONE_RANK, [*map(ours, ONE_RANK)])


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Found]:
    return run([*TWO_RANKS, *map(ours, TWO_RANKS)], 2)


@each(ONE_RANK)
def test_one_rank(one_rank: dict[str, Found], one: Case) -> None:
    both(one_rank, one).check_shared(1.0 if one.name == "prompts alone" else 1.8)


@each(TWO_RANKS)
def test_two_ranks(two_ranks: dict[str, Found], one: Case) -> None:
    both(two_ranks, one).check_shared(1.8)


@pytest.mark.parametrize(("one", "least"), [(ONE_RANK[0], 64), (ONE_RANK[1], 4)], ids=["dynamic", "short nodes"])
def test_what_is_run(one_rank: dict[str, Found], one: Case, least: int) -> None:
    """Each token of the tree once."""
    whole = [torch.cat((one.prompt, one.response)) for one in TURNS.samples(512)]
    tree = group_by_prefix(whole, boundary="replicate", min_shared=least)
    for metrics in both(one_rank, one).metrics:
        assert metrics["executed_tokens"] == sum(tree.node_lens)
        assert metrics["dedup_ratio"] == sum(map(len, whole)) / sum(tree.node_lens)


def mini_batch(**settings: Any) -> Any:
    return worker_input(TURNS.samples(512), {}, "v1", **settings)


@pytest.mark.parametrize("budget", [150, 200, 300, 1000])
def test_budgets_hold(budget: int) -> None:
    """Of packed rows, when each micro-batch is packed; the nodes of a sample begin where they do in the whole tree."""
    options = Options(min_shared=4)
    data = mini_batch(use_dynamic_bsz=True, max_token_len_per_gpu=budget)
    whole = group_by_prefix([*data["input_ids"].unbind()], boundary="replicate", min_shared=4)
    found = grouped_micro_batches(data, None, options, None)
    assert found is not None and found.indices is not None
    assert sorted(index for part in found.indices for index in part) == [*range(12)]
    assert (len(found.indices) == 1) == (budget == 1000)
    for micro_batch, part in zip(found.micro_batches, found.indices, strict=True):
        plan = pack_micro_batch(micro_batch, 1, options, scored_rows=True)
        assert plan.layout.num_tokens <= budget
        assert plan.batch.tree.borders == tuple(whole.borders[index] for index in part)
        own = plan.batch.rows_of(plan.batch.jagged_index + 1)  # a turn of several samples is scored once
        assert plan.scored is not None and len(plan.scored["input_ids"].values()) == len(own.unique())
        assert budget < 1000 or len(own.unique()) < len(own)


@pytest.mark.parametrize("what", ["images", "teacher"])
def test_what_is_of_a_sample_alone(what: str) -> None:
    """A teacher has scored each sample by itself: they share prompts alone, whose tokens have no loss."""
    data = mini_batch(use_dynamic_bsz=True, max_token_len_per_gpu=2000)
    if what == "teacher":
        data["teacher_logprobs"] = tu.nested_tensor_from_tensor_list(
            [torch.zeros(len(one)) for one in data["input_ids"]]
        )
        data["teacher_ids"] = data["input_ids"]
    else:
        data["multi_modal_inputs"] = tu.get_tensordict(
            {"multi_modal_inputs": [{"pixel_values": torch.ones(1, 2)}] * 12}, {}
        )["multi_modal_inputs"]
    found = grouped_micro_batches(data, None, Options(min_shared=4), None)
    assert found is not None
    (micro_batch,) = found.micro_batches
    assert pack_micro_batch(micro_batch, 1, Options(min_shared=4)).layout.depth == 2
    assert pack_micro_batch(data, 1, Options(min_shared=4)).layout.depth == 2
