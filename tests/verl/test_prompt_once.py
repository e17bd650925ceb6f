# SPDX-License-Identifier: BSD-3-Clause
"""Prompts once for several micro-batches of verl's FSDP engines, beside verl's own engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl_inputs import Batch, Case, Found, Model, TreeBatch
from verl_runs import (
    ACTOR,
    FUSED,
    MODEL,
    NORM,
    PADDED,
    Common,
    Pair,
    Turns,
    Uneven,
    both,
    case,
    each,
    ours,
    run,
    run_beside,
)

from flash_attn_dualkv.integrations.common.options import Options
from flash_attn_dualkv.integrations.transformers.prompt_once import state_cost
from flash_attn_dualkv.integrations.verl import engine as engines
from flash_attn_dualkv.integrations.verl.sharing import SharedPrompts

NO_SYNC = f"++{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation=True"
SHORT_NODES = f"{MODEL}.shared_prompt_min_shared=4"


TURNS = Turns(prompts=2, responses=6, prompt_tokens=48, response_tokens=24, trained=0.7, shuffled=True)
TREE = TreeBatch.of("tiny")
COMMON = Common(prompts=1, prompt_tokens=40, shortest=1.0)
LONG = Batch(prompts=1, prompt_tokens=1200, shortest=1.0)
ONE_RANK = [
    case("fixed", micro=2, updates=3),
    case("dynamic", tokens=100, updates=3),
    case("single samples, v0", micro=1, trainer="v0", batch=Batch(prompts=3, shuffled=True)),
    case("two optimizer steps", micro=1, batch=Batch(prompts=4), minis=2),
    case("fsdp1", engine="fsdp", micro=2),
    case("padded inputs", PADDED, attention="sdpa", micro=2),
    case("entropy and KL", f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.use_kl_loss=True", micro=1),
    case("GSPO", f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", micro=2),
    case("offloaded activations", "actor_rollout_ref.model.enable_activation_offload=True", model=Model(layers=4),
         micro=2),
    case("LoRA", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16",
         "actor_rollout_ref.model.target_modules=[q_proj,v_proj]", micro=2, updates=3),
    case("MoE", model=Model("qwen3_moe", experts=4, experts_per_token=2), micro=2),
    case("linear attention", PADDED, attention="sdpa", micro=2,
         model=Model("qwen3_next", layers=4, experts=4, experts_per_token=4)),
    case("synchronised at the end", NO_SYNC, micro=2),
    case("a prompt in two passes", tokens=1250, batch=LONG),
    case("scored rows in two passes", tokens=1000, batch=COMMON),
    case("turns", SHORT_NODES, micro=1, batch=TURNS),
    case("trunks in trunks", SHORT_NODES, micro=1, batch=TREE),
    case("trunks in trunks, dynamic", SHORT_NODES, f"{ACTOR}.entropy_coeff=0.1", tokens=80, batch=TREE),
    case("reference", role="ref", engine="fsdp", micro=2),
    case("critic", role="critic", micro=2, updates=3),
    case("critic, dynamic", role="critic", tokens=100),
    case("fused head", "actor_rollout_ref.model.use_fused_kernels=True", micro=1, **FUSED),
]  # fmt: skip
TWO_RANKS = [
    case("2 ranks, single samples", micro=1, batch=Uneven(), balance="none", updates=3),
    case("2 ranks, synchronised at the end", NO_SYNC, micro=1, batch=Uneven(), balance="none"),
    case("2 ranks, fsdp1, synchronised at the end", NO_SYNC, engine="fsdp", micro=2, batch=Uneven(), balance="none"),
    case("2 ranks, trunks of one", micro=2, batch=Uneven(), balance="none"),
    case("2 ranks, fsdp1", engine="fsdp", micro=1, batch=Uneven(), balance="none", trainer="v0"),
    case("2 ranks, dynamic", tokens=110, batch=Batch(prompts=4, responses=5, shuffled=True), updates=3),
    case("2 ranks, critic", role="critic", micro=1, batch=Uneven(), balance="none"),
]
# One micro-batch holds each prompt, or rows have to stay in one pass: as without the option.
AS_WITHOUT = [
    case("whole groups", micro=4),
    case("a loss of micro-batches", f"{ACTOR}.{NORM}", micro=2),
    case("packed inputs rounded up", f"{ACTOR}.pad_to_length=True", f"{ACTOR}.fsdp_config.pad_to_length_bucket=64",
         micro=2),
    case("images", extra="images", micro=2),
]  # fmt: skip
AS_WITHOUT_RANKS = [case("Ulysses", sp=2, micro=2)]
RAISING = case("raising", micro=2)
UNASKED = case("unasked", micro=2)
VERIFIED = case("verified", f"{MODEL}.shared_prompt_verify_first_steps=1", micro=2)
WITH_RAISING = "actor_rollout_ref.model.external_lib=[flash_attn_dualkv.integrations.verl,raising]"


# A worker, whose weights stay, without the option and with it. A call that warms it up has two
# parts.
STAYS = case("a worker that stays", micro=2, warm=4, updates=1, learning_rate=0.0, infers_at_the_end=False)


def once(setup: Case, *overrides: str) -> Case:
    return ours(replace(setup, once=True), *overrides)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    without = [replace(ours(setup), name=f"without, {setup.name}") for setup in [*AS_WITHOUT, STAYS]]
    cases = [*ONE_RANK, *AS_WITHOUT, VERIFIED]
    unasked = replace(ours(UNASKED), once=None)
    shared = [*without, *map(once, [STAYS, *cases]), once(RAISING, WITH_RAISING), unasked]
    return run_beside([*cases, RAISING, UNASKED], shared)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Found]:
    cases = [*TWO_RANKS, *AS_WITHOUT_RANKS]
    return run([*cases, *map(once, cases)], 2)


def tokens_once(setup: Case) -> int:
    """Rows of all prompts and responses, the last token of a prompt before each response."""
    samples = setup.batch.samples(setup.model.vocabulary)
    prompts = {sample.uid: len(sample.prompt) - 1 for sample in samples}
    return sum(prompts.values()) + sum(len(sample.response) + 1 for sample in samples)


@each(ONE_RANK)
def test_one_rank(one_rank: dict[str, Found], one: Case) -> None:
    """verl's gradients, losses, metrics and scores, of as many tokens as if micro-batches held all samples."""
    pair = both(one_rank, one)
    pair.check_equal()
    for metrics in pair.metrics:
        assert metrics["trunks"] > 0
        if isinstance(one.batch, (Common, Turns, TreeBatch)):
            assert metrics["dedup_ratio"] > 1.5
        elif one.minis == 1:
            assert metrics["executed_tokens"] == tokens_once(one)


@each(TWO_RANKS)
def test_two_ranks(two_ranks: dict[str, Found], one: Case) -> None:
    pair = both(two_ranks, one)
    is_uneven = isinstance(one.batch, Uneven)
    pair.check_shared(1.1, fallbacks=1.0 * is_uneven)  # what shares nothing is verl's own
    trunks = 2.0 if not is_uneven else 0.5 if one.micro == 2 else 1.5
    assert {metrics["trunks"] for metrics in pair.metrics} == {trunks}


@each(AS_WITHOUT)
def test_as_without(one_rank: dict[str, Found], one: Case) -> None:
    """To the bit."""
    pair = both(one_rank, one)
    pair.check_equal()
    without = one_rank[f"without, {one.name}"]
    for expected, got in zip(without.metrics, pair.ours.metrics, strict=True):
        names = ("loss", "grad_norm", "shared_prompt/executed_tokens", "shared_prompt/micro_batches")
        assert [got[name] for name in names] == [expected[name] for name in names]
        assert got["shared_prompt/trunks"] == 0.0


@each(AS_WITHOUT_RANKS)
def test_ranks_as_without(two_ranks: dict[str, Found], one: Case) -> None:
    pair = both(two_ranks, one)
    pair.check_equal()
    assert {metrics["trunks"] for metrics in pair.metrics} == {0.0}


def test_verified(one_rank: dict[str, Found]) -> None:
    """The first step is verl's, beside which that of prompts once agrees."""
    pair = both(one_rank, VERIFIED)
    pair.check_equal()
    first, second = pair.ours.metrics
    assert first["shared_prompt/verify_failed"] == 0 and first["shared_prompt/verify_grad_norm_difference"] < 1e-5
    assert second["shared_prompt/trunks"] == 2.0


def test_unasked(one_rank: dict[str, Found]) -> None:
    """By default a model whose keys take less memory than other rows keeps prompts."""
    pair = both(one_rank, UNASKED)
    pair.check_equal()
    assert {metrics["trunks"] for metrics in pair.metrics} == {2.0}


def test_a_worker_that_stays(one_rank: dict[str, Found]) -> None:
    """The option alone differs."""
    pair = Pair(*(one_rank[f"{name}, {STAYS.name}"] for name in ("without", "ours")))
    torch.testing.assert_close(pair.ours.values, pair.stock.values, rtol=0, atol=1e-5)
    (without,), (got,) = pair.stock.metrics, pair.ours.metrics
    assert got["loss"] == pytest.approx(without["loss"], rel=1e-5, abs=1e-6)
    assert got["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-5)
    assert (without["shared_prompt/trunks"], got["shared_prompt/trunks"]) == (0.0, 2.0)
    assert got["shared_prompt/executed_tokens"] == tokens_once(STAYS)


def test_a_part_that_raises(one_rank: dict[str, Found]) -> None:
    """It leaves nothing: the same update is right afterwards."""
    both(one_rank, RAISING).check_shared()


class _Engine(engines._SharedPrompts):
    """What the reasons against a cut read of an engine."""

    def __init__(self, family: str = "qwen3", **options: Any) -> None:
        config = AutoConfig.for_model(family, **options.pop("config", {}))
        with torch.device("meta"):
            self.stock_module = AutoModelForCausalLM.from_config(config)
        self.use_ulysses_sp, self.ulysses_sequence_parallel_size = options.pop("ranks", 1) > 1, 2
        self.pad_to_length = options.pop("pad", False)
        self.options, self.announced, self.is_forward_only = Options(prompt_once=True, **options), set(), False


def samples(**others: Any) -> TensorDict:
    ids = torch.nested.nested_tensor([torch.arange(5), torch.arange(7)], layout=torch.jagged)
    flags = {name: value for name, value in others.items() if isinstance(value, bool)}
    data = TensorDict({"input_ids": ids, "prompts": ids}, batch_size=2)
    tu.assign_non_tensor(data, **flags)
    if "media" in others:
        data["multi_modal_inputs"] = [{"pixels": torch.ones(1)}, {}]
    return data


SMALL = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
             intermediate_size=8, vocab_size=8)  # fmt: skip
ROPE = dict(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, max_position_embeddings=4)
HYBRID = SMALL | dict(num_hidden_layers=4, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=8,
                      linear_value_head_dim=8, num_experts=2, moe_intermediate_size=8)  # fmt: skip
REASONS = [
    (dict(), dict(), None),
    (dict(ranks=2), dict(), "Ulysses divides rows"),
    (dict(pad=True), dict(), "pad_to_length"),
    (dict(share_lora_dropout=True), dict(), "LoRA's dropout"),
    (dict(), dict(distillation_use_topk=True), "a teacher"),
    (dict(config=SMALL | ROPE), dict(), "expected sequences of at most 3 tokens"),
]


@pytest.mark.parametrize(("options", "others", "reason"), REASONS)
def test_reasons(options: Any, others: Any, reason: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Each is said once."""
    engine = _Engine(**{"config": SMALL, **options})
    for _ in range(2):
        trunks = engine._trunks(samples(**others), None, None)
    assert (trunks is None) == (reason is not None)
    said = [record.message for record in caplog.records if "prompt_once" in record.message]
    assert len(said) == (reason is not None) and all(str(reason) in message for message in said)
    assert engine._trunks(samples(), "dropout", None) is None and len(caplog.records) == len(said)


def test_budgets_count_states_of_hybrids() -> None:
    """A delta net's state is heads x 8 x 8 in float32, as is its sum."""
    engine = _Engine("qwen3_next", config=HYBRID)
    engine.options = Options(prompt_once=None)
    trunks = engine._trunks(samples(), None, None)
    assert trunks.is_bounded and trunks.state == state_cost(engine.stock_module) > 8 * trunks.kept > 0


def test_engines_that_have_no_passes(caplog: pytest.LogCaptureFixture) -> None:
    engine = SharedPrompts()
    for asked in (None, True):
        engine.announced, engine.options = set(), Options(prompt_once=asked)
        assert engine._trunks(samples(), None, None) is None
        assert ("prompt_once is for verl's FSDP engines" in caplog.text) == bool(asked)
