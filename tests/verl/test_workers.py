# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in in real verl 0.9, its config, worker, engine, loss and dispatch, beside verl's own engines."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
from tensordict import TensorDict
from transformers import AutoConfig
from verl_inputs import Batch, Case, Found, Model
from verl_runs import ACTOR, FUSED, MODEL, NORM, PADDED, ROOT, UNEQUAL, Pair, both, case, each, ours, run, run_beside

from flash_attn_dualkv.integrations.common.pipeline import Verification
from flash_attn_dualkv.integrations.verl import sharing, verify
from flash_attn_dualkv.integrations.verl.sharing import SharedPrompts

EQUAL = [
    case("dynamic, v1", updates=3),
    case("fixed, v0, several prompts, any order", micro=6, trainer="v0", batch=UNEQUAL),
    case("a group over the budget", tokens=100),
    case("two optimizer steps", batch=Batch(prompts=4), minis=2),
    case("fsdp1", engine="fsdp"),
    case("padded inputs", PADDED, attention="sdpa", micro=4),
    case("packed inputs rounded up", f"{ACTOR}.pad_to_length=True", f"{ACTOR}.fsdp_config.pad_to_length_bucket=64"),
    case("entropy in the loss", f"{ACTOR}.entropy_coeff=0.1"),
    case("KL in the loss", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1"),
    case("GSPO", f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", batch=UNEQUAL),
    case("offloaded activations", "actor_rollout_ref.model.enable_activation_offload=True", model=Model(layers=4)),
    case("LoRA", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16", updates=3),
    case("MoE", model=Model("qwen3_moe", experts=4, experts_per_token=2)),
    # Padded: packed rows of verl mix the tokens of neighbours in such layers where
    # flash-linear-attention is missing.
    case("linear attention", PADDED, attention="sdpa", micro=4,
         model=Model("qwen3_next", layers=4, experts=4, experts_per_token=4)),
    case("reference", role="ref", engine="fsdp"),
    case("critic, dynamic", role="critic", updates=3),
]  # fmt: skip
# Losses that depend on what is in a micro-batch: with other ones than verl makes they are others.
OF_MICRO_BATCHES = [
    case("Dr. GRPO, dynamic", f"{ACTOR}.{NORM}", tokens=400, batch=UNEQUAL),
    case("Dr. GRPO, fixed", f"{ACTOR}.{NORM}", micro=6, batch=UNEQUAL),
    case("Dr. GRPO, critic", f"critic.{NORM}", role="critic", micro=6, batch=UNEQUAL),
    case("GMPO", f"{ACTOR}.policy_loss.loss_mode=geo_mean", micro=6, batch=UNEQUAL),
]
EQUAL.append(case("fused head", "actor_rollout_ref.model.use_fused_kernels=True", micro=4, batch=UNEQUAL, **FUSED))
APART = Batch(prompts=6, responses=2, shuffled=True)
EQUAL_RANKS = [
    case("2 ranks, dynamic", batch=UNEQUAL, updates=3),
    case("2 ranks, fsdp1, v0, fixed", engine="fsdp", batch=UNEQUAL, trainer="v0", micro=2),
    case("2 ranks, siblings apart", batch=APART, balance="none"),
    case("2 ranks, critic", role="critic", batch=UNEQUAL),
    case("2 ranks, drawn", model=Model("qwen3_moe", experts=4, experts_per_token=2, has_file=False), batch=UNEQUAL),
    case("Ulysses", sp=2, tokens=100, updates=3),
    case("Ulysses, fixed, v0, fsdp1", sp=2, micro=4, engine="fsdp", trainer="v0", batch=UNEQUAL),
    case("Ulysses, fused head", "actor_rollout_ref.model.use_fused_kernels=True", sp=2, batch=UNEQUAL, **FUSED),
    case("Ulysses, critic", sp=2, role="critic"),
]

# Cases that verl's own path computes, and what the metrics call the reason.
FALLBACKS = [
    (case("images", extra="images"), "multimodal"),
    (case("temperatures", extra="temperatures"), "temperature"),
    (case("nothing to share", batch=Batch(prompts=8, responses=1)), "dedup_ratio"),
    (case("a high threshold", f"{MODEL}.shared_prompt_min_dedup_ratio=9", micro=4), "dedup_ratio"),
    (case("dropout", f"{MODEL}.attention_dropout=0.1"), "dropout"),
]
# Ranks of Ulysses would take dynamic angles from their own parts of a row.
ROPE = '{"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}'
DYNAMIC = Model(others=f'{{"max_position_embeddings": 16, "rope_parameters": {ROPE}}}')
DYNAMIC_RANKS = case("Ulysses, dynamic RoPE", sp=2, model=DYNAMIC)
SWITCHED_OFF = case("switched off", f"{MODEL}.shared_prompt=false")
VERIFIED = case("verified", f"{MODEL}.shared_prompt_verify_first_steps=2", updates=3)
SPOILED = case("spoiled", f"{MODEL}.shared_prompt_verify_first_steps=1", batch=UNEQUAL)
WITH_SPOILED = "actor_rollout_ref.model.external_lib=[flash_attn_dualkv.integrations.verl,spoiled]"
ERRORS = [
    (
        case("no option", f"{MODEL}.shared_prompt_ratio=2"),
        "override_config.*shared_prompt_min_dedup_ratio.*got shared_prompt_ratio",
    ),
    (
        case("no number", f"{MODEL}.shared_prompt_min_dedup_ratio=much"),
        "override_config.shared_prompt_min_dedup_ratio.*a float > 0.*'much'",
    ),
    (case("budget too small", tokens=40), "ppo_max_token_len_per_gpu.*longest sequence"),
    (case("micro-batch size", micro=3), "micro_batch_size_per_gpu.*a divisor of the 8 samples"),
]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    cases = [*EQUAL, *OF_MICRO_BATCHES, *(one for one, _ in FALLBACKS), SWITCHED_OFF, VERIFIED]
    return run_beside(cases, [*map(ours, cases), *(replace(one, shares=True) for one, _ in ERRORS)])


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Found]:
    cases = [*EQUAL_RANKS, DYNAMIC_RANKS]
    shared = [*map(ours, cases), ours(SPOILED, WITH_SPOILED)]
    return run([*cases, SPOILED, *shared], 2)


@each(EQUAL)
def test_one_rank(one_rank: dict[str, Found], one: Case) -> None:
    pair = both(one_rank, one)
    pair.check_shared()
    metrics = pair.ours.metrics
    # The same micro-batches for both: no difference at all.
    if metrics and "actor/ppo_kl" in metrics[0] and one.name != "two optimizer steps":
        assert metrics[0]["actor/ppo_kl"] == 0.0


@each(OF_MICRO_BATCHES)
def test_losses_of_micro_batches(one_rank: dict[str, Found], one: Case) -> None:
    """Micro-batches stay verl's, and those share what their samples have in common."""
    both(one_rank, one).check_shared(least_ratio=1.05)


@each(EQUAL_RANKS)
def test_two_ranks(two_ranks: dict[str, Found], one: Case) -> None:
    both(two_ranks, one).check_shared()


def test_angles_of_the_longest_sequence(two_ranks: dict[str, Found]) -> None:
    """They run on verl's own path, which the console and the metrics say."""
    pair = both(two_ranks, DYNAMIC_RANKS)
    pair.check_equal()
    metrics = pair.ours.metrics[0]
    assert metrics["shared_prompt/fallback/positions"] == metrics["shared_prompt/micro_batches"] > 0


def test_ray(two_ranks: dict[str, Found]) -> None:
    """Under Ray, where verl's dispatch cuts the batch for two workers, what verl computes without Ray."""
    stock = "2 ranks, dynamic"
    shared = next(replace(one, name="Ray", shares=True) for one in EQUAL_RANKS if one.name == stock)
    verl_ray = str(ROOT / "tests/helpers/verl_ray.py")
    Pair(two_ranks[stock], run([shared], 2, driver=verl_ray)["Ray"]).check_shared()


@pytest.mark.parametrize(("one", "reason"), FALLBACKS, ids=lambda one: getattr(one, "name", one))
def test_fallbacks(one_rank: dict[str, Found], one: Case, reason: str) -> None:
    """To the bit what verl computes, counted under its reason."""
    stock, shared = both(one_rank, one)
    assert shared.error is None
    for expected, got in zip(stock.metrics, shared.metrics, strict=True):
        same = (expected["loss"], expected["grad_norm"])
        # Dropout draws in training only: old log-probabilities are shared.
        assert (got["loss"], got["grad_norm"]) == (same if reason != "dropout" else pytest.approx(same, rel=1e-5))
        assert got["shared_prompt/dedup_ratio"] == 1.0
        assert got[f"shared_prompt/fallback/{reason}"] == got["shared_prompt/micro_batches"] > 0
    assert (shared.infer_metrics[0]["shared_prompt/dedup_ratio"] > 1.0) == (reason == "dropout")


def test_a_hybrid_model_is_not_divided() -> None:
    """By Ulysses: verl's own path has an answer of its own to that, or none."""
    from flash_attn_dualkv.integrations.verl import engine

    module = SimpleNamespace(config=AutoConfig.for_model("qwen3_next"))
    reason = engine._SharedPrompts._attach(SimpleNamespace(ulysses_sequence_parallel_size=2), module)  # type: ignore[arg-type]
    assert reason is not None and "needs the whole row on one GPU" in reason


def test_switched_off(one_rank: dict[str, Found]) -> None:
    stock, shared = both(one_rank, SWITCHED_OFF)
    assert shared.error is None
    assert [one["grad_norm"] for one in shared.metrics] == [one["grad_norm"] for one in stock.metrics]
    assert not any(name.startswith("shared_prompt/") for name in shared.metrics[0])


def test_verified(one_rank: dict[str, Found]) -> None:
    """The first two steps are verl's to the bit; then the plug-in goes on alone."""
    stock, shared = pair = both(one_rank, VERIFIED)
    pair.check_equal()
    assert [one["grad_norm"] for one in shared.metrics[:2]] == [one["grad_norm"] for one in stock.metrics[:2]]
    for metrics in (*shared.infer_metrics, *shared.metrics[:2]):
        assert 0 <= metrics["shared_prompt/verify_max_difference"] < 1e-5
        assert metrics["shared_prompt/verify_failed"] == 0
    assert "shared_prompt/verify_failed" not in shared.metrics[2]
    assert shared.metrics[2]["shared_prompt/dedup_ratio"] > 1.2


def test_verification_fails(two_ranks: dict[str, Found]) -> None:
    """One rank is wrong: all take verl's results, then and later."""
    _, shared = pair = both(two_ranks, SPOILED)
    pair.check_equal()
    assert shared.infer_metrics[0]["shared_prompt/verify_failed"] == 1
    for metrics in (shared.infer_metrics[1], *shared.metrics):
        assert metrics["shared_prompt/dedup_ratio"] == 1.0
        assert metrics["shared_prompt/fallback/verification"] == metrics["shared_prompt/micro_batches"] > 0


@pytest.mark.parametrize(("one", "message"), ERRORS, ids=lambda one: getattr(one, "name", ""))
def test_errors(one_rank: dict[str, Found], one: Case, message: str) -> None:
    error = one_rank[one.name].error or ""
    assert re.search(message, error, re.DOTALL), error


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("norms", "agree", "failed"),
    [
        ((1.0, 1.0), True, 0),
        ((2.0, 1.0), False, 1),
        *((norms, None, 0) for norms in ((INF, INF), (NAN, INF))),
        *((norms, False, 1) for norms in ((1.0, INF), (1.0, NAN), (INF, 1.0), (NAN, 1.0))),
    ],
)
def test_a_step_whose_gradients_overflow_is_not_verified(
    norms: tuple[float, float], agree: bool | None, failed: int
) -> None:
    """Norms that overflow on both paths say nothing where scores agree; on one of them they differ."""
    left = [*norms]
    engine = SimpleNamespace(gradient_norm=lambda: left.pop(0), optimizer_zero_grad=lambda: None)
    scores = torch.nested.nested_tensor([torch.zeros(5)], layout=torch.jagged)
    data = TensorDict({}, batch_size=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "Lengths", SimpleNamespace(of=lambda _: ([2], [3])))
        found, is_same = verify.run_both(
            engine, data, False, lambda _: {"model_output": {"log_probs": scores}, "metrics": {}}
        )
    assert is_same is agree and found["metrics"]["shared_prompt/verify_failed"] == [failed]


class _Engine:
    """What of verl's engines has gradients, to which each call adds 1."""

    gradient = 0.0

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        self.ran.append(self.shares)
        self.gradient += not forward_only
        scores = torch.nested.nested_tensor([torch.zeros(5)], layout=torch.jagged)
        return {"model_output": {"log_probs": scores}, "metrics": {}}

    def optimizer_zero_grad(self) -> None:
        self.gradient = 0.0


class _Verified(SharedPrompts, _Engine):
    def __init__(self) -> None:
        self.options = SimpleNamespace(enabled=True)
        self.verification = Verification(2, "train", "infer")
        self.statistics = SimpleNamespace(begin=lambda: None, metrics=lambda *_: {})
        self.ran: list[bool] = []

    def _refusal_now(self, data: Any) -> str | None:
        return None

    def gradient_norm(self) -> float:
        return self.gradient


def test_verification_keeps_gradients_of_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers of `forward_backward` add up several calls to a step: the first one of a step can be verified."""
    monkeypatch.setattr(verify, "Lengths", SimpleNamespace(of=lambda _: ([2], [3])))
    monkeypatch.setattr(sharing, "of_micro_batches", lambda *_: None)
    monkeypatch.setattr(sharing, "get_torch_device", lambda: torch.cpu)
    engine, data = _Verified(), TensorDict({}, batch_size=[])
    for _ in range(3):
        engine.optimizer_zero_grad()
        for _ in range(2):
            engine.forward_backward_batch(data, None)
        assert engine.gradient == 2.0
    # Both paths in the first call of two steps.
    assert engine.ran == [True, False, True] * 2 + [True, True]
    engine.forward_backward_batch(data, None, forward_only=True)
    assert engine.ran[-2:] == [True, False] and engine.gradient == 2.0
