# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in in verl's Megatron engines with mbridge's models, beside verl's own engines.

Layers are Megatron's local ones, as Transformer Engine needs a GPU: tests/helpers/verl_megatron.py.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")
pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/trainers.md")
pytest.importorskip("mbridge", reason="mbridge is not installed: see docs/trainers.md")

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl_inputs import Batch, Case, Found, Model
from verl_runs import ACTOR, MODEL, UNEQUAL, Routed, Turns, Unusual, both, each, ours, run_beside

from flash_attn_dualkv import SharedPromptUnsupportedError, pack_shared_prompts
from flash_attn_dualkv.integrations.common.options import Options

ENGINE = f"{ACTOR}.megatron"
PLUGIN = "flash_attn_dualkv.integrations.verl.megatron"


def case(name: str, *overrides: str, **settings: Any) -> Case:
    if "micro" not in settings:
        settings.setdefault("tokens", 200)
    return Case(name, engine="megatron", overrides=overrides, updates=settings.pop("updates", 2), **settings)


RECOMPUTED = tuple(
    f"{ENGINE}.override_transformer_config.recompute_{one}"
    for one in ("granularity=full", "method=uniform", "num_layers=1")
)


def divided(names: str, size: int = 2) -> tuple[str, ...]:
    """Over so many ranks: "tensor", "pipeline", "context"."""
    return tuple(
        f"{ENGINE}.{name}_{'' if name == 'context' else 'model_'}parallel_size={size}" for name in names.split()
    )


def virtual(role: str = ACTOR) -> tuple[str, ...]:
    """Two stages of two virtual ones each, which want an even number of micro-batches."""
    sizes = ("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2")
    return tuple(f"{role}.megatron.{size}" for size in sizes)


DEEP: dict[str, Any] = dict(sp=2, model=Model(layers=4))

EQUAL = [
    case("dynamic", updates=3),
    case("fixed, v0, several prompts, any order", micro=4, trainer="v0", batch=UNEQUAL),
    case("a group over the budget", tokens=100),
    case("two optimizer steps", batch=Batch(prompts=4), minis=2),
    case("entropy and KL", f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1"),
    case("rounded up", f"{ENGINE}.pad_to_length=True", f"{ENGINE}.pad_to_length_bucket=64"),
    case("recomputed", *RECOMPUTED),
    case("agents", tokens=400, batch=Turns(responses=4)),
    case("reference", role="ref"),
    case("critic", role="critic", updates=3),
]
EQUAL_RANKS = [
    case("2 ranks", batch=UNEQUAL, updates=3),
    case("tensor, fixed", *divided("tensor"), sp=2, micro=4, batch=UNEQUAL),
    case("pipeline", *divided("pipeline"), sp=2, tokens=100),
    case("pipeline, critic", "critic.megatron.pipeline_model_parallel_size=2", sp=2, role="critic"),
    case("virtual stages", *virtual(), tokens=1000, updates=3, **DEEP),
    case("virtual stages, fixed", *virtual(), micro=3, batch=UNEQUAL, **DEEP),
    case("virtual stages, recomputed, critic", *virtual("critic"), *RECOMPUTED, tokens=100, role="critic", **DEEP),
]
# verl's own path has no context parallelism on local layers: its results are those of one rank.
# Losses by token: verl divides a micro-batch's tokens by the ranks in whole numbers, so they are
# even here.
CONTEXT = [
    case("context", *divided("context"), sp=2),
    case("context, entropy, fixed", *divided("context"), f"{ACTOR}.entropy_coeff=0.1", sp=2, micro=4, batch=UNEQUAL),
    case("context, losses by token", *divided("context"),
         f"+{ENGINE}.override_transformer_config.calculate_per_token_loss=True",
         sp=2, tokens=400, batch=Batch(shortest=1.0)),
    case("context, critic", "critic.megatron.context_parallel_size=2", sp=2, role="critic"),
]  # fmt: skip
# Routes of experts: recorded by verl's forward (R2), or by the sampler (R3).
EXPERTS = tuple(
    f"+{ENGINE}.override_transformer_config.{one}"
    for one in ("moe_grouped_gemm=False", "persist_layer_norm=False", "moe_router_bias_update_rate=0.0")
)


def routed(name: str, *overrides: str, mode: str = "R2", layers: int = 2, **settings: Any) -> Case:
    model = Model("qwen3_moe", layers=layers, experts=4, experts_per_token=2)
    replay = f"{ENGINE}.router_replay.mode={mode}"
    return case(f"{mode}, {name}", *EXPERTS, replay, *overrides, model=model, **settings)


R3: dict[str, Any] = dict(mode="R3", batch=Routed())
REPLAYED = [
    routed("dynamic", updates=3),
    routed("fixed, v0, several prompts, any order", micro=4, trainer="v0", batch=UNEQUAL),
    routed("recomputed, agents, several micro-batches", *RECOMPUTED, tokens=150, batch=Turns(responses=4)),
    routed("dynamic", updates=3, **R3),
    routed("recomputed, several micro-batches", *RECOMPUTED, tokens=100, **R3),
    routed("agents", mode="R3", tokens=400, batch=Routed(responses=4, agents=True)),
    routed("any order", mode="R3", batch=Routed(prompts=3, shuffled=True, trained=0.7)),
]
REPLAYED_ON_RANKS = [
    routed("tensor", *divided("tensor"), sp=2),
    routed("2 ranks", mode="R3", batch=Routed(prompts=4)),
    routed("tensor", *divided("tensor"), sp=2, **R3),
    routed("pipeline, recomputed", *divided("pipeline"), *RECOMPUTED, sp=2, tokens=100, **R3),
    routed("virtual stages", *virtual(), sp=2, tokens=100, layers=4),
]
REPLAYED_IN_CONTEXT = [routed("context", *divided("context"), sp=2), routed("context", *divided("context"), sp=2, **R3)]
DIVIDED = [*CONTEXT, *REPLAYED_IN_CONTEXT]
# Samples of one prompt of which one has other routes.
LONG = Routed(prompt_tokens=192, shortest=1.0, other=150)
OTHER_ROUTES = [
    (routed("one token, in the middle", mode="R3", tokens=1200, batch=LONG), 2.7),
    (routed("the first token", mode="R3", batch=Routed(other=0)), 1.3),
    (routed("nothing is trained", mode="R3", batch=Routed(untrained=True)), 1.3),
]
VERIFIED_ROUTES = routed("verified", f"{MODEL}.shared_prompt_verify_first_steps=1")
FALLBACKS = [
    (case("temperatures", batch=Unusual(extra="temperatures")), "temperature"),
    (case("nothing to share", batch=Batch(prompts=8, responses=1)), "dedup_ratio"),
    (case("dropout", f"+{ENGINE}.override_transformer_config.hidden_dropout=0.1", updates=1), "unsupported"),
]
STAGES_FALL_BACK = case("virtual stages, temperatures", *virtual(), batch=Unusual(extra="temperatures"), **DEEP)
# mbridge reads the weights of no other model behind this one.
TIED = case("tied", model=Model(tied=True))
SWITCHED_OFF = case("switched off", f"{MODEL}.shared_prompt=false")
VERIFIED = case("verified", f"{MODEL}.shared_prompt_verify_first_steps=2", updates=3)
STAGES_VERIFIED = case("virtual stages, verified", *virtual(), f"{MODEL}.shared_prompt_verify_first_steps=1", **DEEP)


def alone(one: Case) -> Case:
    """On one rank."""
    kept = tuple(override for override in one.overrides if "context_parallel" not in override)
    return replace(one, sp=1, overrides=kept)


RUN = dict(VERL_USE_EXTERNAL_MODULES="cpu_platform,verl_megatron")


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    others = [one for one, _ in (*FALLBACKS, *OTHER_ROUTES)]
    cases = [*EQUAL, *REPLAYED, *others, SWITCHED_OFF, VERIFIED, VERIFIED_ROUTES]
    return run_beside([*cases, *map(alone, DIVIDED), TIED], list(map(ours, [*cases, TIED])), **RUN)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Found]:
    cases = [*EQUAL_RANKS, *REPLAYED_ON_RANKS, STAGES_FALL_BACK, STAGES_VERIFIED]
    return run_beside(cases, list(map(ours, [*cases, *DIVIDED])), 2, **RUN)


@each([*EQUAL, TIED])
def test_equals_verl(one_rank: dict[str, Found], one: Case) -> None:
    pair = both(one_rank, one)
    pair.check_shared()
    assert pair.ours.engine.startswith(PLUGIN)


@each(EQUAL_RANKS)
def test_equals_verl_on_two_ranks(two_ranks: dict[str, Found], one: Case) -> None:
    both(two_ranks, one).check_shared()


@each([one for one in EQUAL_RANKS if "virtual" in one.name])
def test_micro_batches_of_virtual_stages(two_ranks: dict[str, Found], one: Case) -> None:
    """Their number, and each is counted once."""
    pair = both(two_ranks, one)
    least = {"virtual stages": 2}.get(one.name, 4)  # else by budget, size or the micro-batches of three
    for metrics in pair.metrics:
        assert metrics["micro_batches"] == least
        assert metrics["executed_tokens"] + metrics["tokens_saved"] == pair.ours.tokens


def test_virtual_stages_that_fall_back(two_ranks: dict[str, Found]) -> None:
    pair = both(two_ranks, STAGES_FALL_BACK)
    pair.check_equal()
    for metrics in pair.metrics:
        assert metrics["fallback/temperature"] == metrics["micro_batches"] > 0
        assert metrics["executed_tokens"] == pair.ours.tokens


@each(DIVIDED)
def test_context_parallelism(one_rank: dict[str, Found], two_ranks: dict[str, Found], one: Case) -> None:
    both(two_ranks, one, one_rank).check_shared()


@each(REPLAYED)
def test_routes_are_replayed(one_rank: dict[str, Found], one: Case) -> None:
    pair = both(one_rank, one)
    pair.check_shared()
    assert bool(pair.ours.routes) == one.name.startswith("R2")
    assert all(metrics["fallback_prompts"] == 0 for metrics in pair.metrics)


def test_replayed_routes_are_others(one_rank: dict[str, Found]) -> None:
    """Than those that routers find: the cases above could not fail otherwise."""
    recorded = one_rank["R2, dynamic"]
    sampled = [one.others["routed_experts"] for one in Routed().samples(Model().vocabulary)]
    assert not all(map(torch.equal, recorded.routes, sampled))
    difference = one_rank["ours, R3, dynamic"].log_probs - one_rank["ours, R2, dynamic"].log_probs
    assert difference.abs().max() > 1e-3


@each(REPLAYED_ON_RANKS)
def test_routes_are_replayed_on_two_ranks(two_ranks: dict[str, Found], one: Case) -> None:
    pair = both(two_ranks, one)
    pair.check_shared()
    assert bool(pair.ours.routes) == one.name.startswith("R2")


@pytest.mark.parametrize(("one", "least_ratio"), OTHER_ROUTES, ids=lambda one: getattr(one, "name", one))
def test_samples_with_other_routes(one_rank: dict[str, Found], one: Case, least_ratio: float) -> None:
    """They share the tokens before those alone, which is counted."""
    pair = both(one_rank, one)
    pair.check_shared(least_ratio)
    samples = one.batch.samples(one.model.vocabulary)
    whole = pack_shared_prompts([one.prompt for one in samples], [one.response for one in samples])
    assert pair.ours.metrics[0]["shared_prompt/executed_tokens"] > whole.layout.num_tokens
    assert all(metrics["fallback_prompts"] == 1 for metrics in pair.metrics)


@pytest.mark.parametrize(("one", "reason"), FALLBACKS, ids=lambda one: getattr(one, "name", one))
def test_fallbacks(one_rank: dict[str, Found], one: Case, reason: str) -> None:
    pair = both(one_rank, one)
    if one.name != "dropout":  # of which there are other draws
        pair.check_equal()
    assert pair.ours.error is None
    metrics = pair.ours.metrics[0]
    assert metrics[f"shared_prompt/fallback/{reason}"] == metrics["shared_prompt/micro_batches"] > 0


def test_switched_off(one_rank: dict[str, Found]) -> None:
    pair = both(one_rank, SWITCHED_OFF)
    pair.check_equal()
    assert not any(name.startswith("shared_prompt") for name in pair.ours.metrics[0])


@each([VERIFIED, VERIFIED_ROUTES, STAGES_VERIFIED])
def test_verification(one_rank: dict[str, Found], two_ranks: dict[str, Found], one: Case) -> None:
    pair = both(two_ranks if one is STAGES_VERIFIED else one_rank, one)
    pair.check_equal()
    *verified, after = pair.metrics[len(pair.ours.infer_metrics) :]
    for metrics in verified:
        assert metrics["verify_failed"] == 0
        assert 0 < metrics["verify_max_difference"] < 1e-4
        assert metrics["verify_grad_norm_difference"] < 1e-4
    assert "verify_failed" not in after and after["dedup_ratio"] > 1.2


@pytest.fixture
def engine() -> Any:
    """The plug-in's, without what verl makes for it."""
    made = object.__new__(importlib.import_module(PLUGIN).SharedPromptMegatronEngine)
    made.engine_config = SimpleNamespace(
        dynamic_context_parallel=False, use_fused_kernels=False, router_replay=SimpleNamespace(mode="disabled")
    )
    made.model_config, made.module, made.announced = SimpleNamespace(hf_config=SimpleNamespace()), [], set()
    return made


@pytest.mark.parametrize("chained", [False, True])
def test_verification_of_scaled_losses(engine: Any, chained: bool) -> None:
    """In fp16 the optimizer divides the gradients by the scale of losses: in its step, once."""
    optimizers = importlib.import_module("megatron.core.optimizer.optimizer")
    updates: list[bool] = []
    scaler = SimpleNamespace(inv_scale=torch.tensor([1 / 1024]), update=updates.append)
    parameter, main = torch.nn.Parameter(torch.ones(2, dtype=torch.float16)), torch.ones(2, requires_grad=True)
    parameter.main_grad = torch.tensor([3072.0, 4096.0])
    one: Any = object.__new__(optimizers.Float16OptimizerWithFloat16Params)
    one.is_stub_optimizer, one.config = False, SimpleNamespace(timers=None)
    one.float16_groups, one.fp32_from_float16_groups, one.fp32_from_fp32_groups = [[parameter]], [[main]], []
    one.grad_scaler, one.found_inf = scaler, torch.zeros(1)
    chain: Any = object.__new__(optimizers.ChainedOptimizer)
    chain.chained_optimizers = [one]
    optimizer = chain if chained else one
    optimizer.get_grad_norm = lambda: main.grad.norm()
    engine.optimizer = optimizer
    for _ in range(2):
        assert engine.gradient_norm() == 5120.0
    assert parameter.main_grad.tolist() == [3072.0, 4096.0]
    assert one.grad_scaler is scaler
    assert not updates


@pytest.mark.parametrize("wish", ["calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", None])
def test_micro_batches_on_the_path_of_verl_are_those_of_verl(engine: Any, wish: str | None) -> None:
    """Filled by unique tokens they would exceed the budget there."""
    engine.options, engine._kernels_lack = Options(), lambda: None
    prompt, count = torch.arange(50), 8

    def jagged(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    samples = [torch.cat([prompt, 100 + torch.arange(10) + index]) for index in range(count)]
    values = dict(
        input_ids=jagged(samples), prompts=jagged([prompt] * count), position_ids=jagged([torch.arange(60)] * count)
    )
    data = TensorDict({**values, "temperature": torch.ones(count)}, batch_size=count)
    tu.assign_non_tensor(data, max_token_len_per_gpu=140, use_dynamic_bsz=True, sp_size=1)
    if wish is None:
        assert len(engine.micro_batches(data, None, lambda: "verl's")[0]) == 1
    else:
        tu.assign_non_tensor(data, **{wish: True})
        assert engine.micro_batches(data, None, lambda: "verl's") == "verl's"


def test_routes_that_nobody_has_recorded(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As verl's own engine has it, an update of R2 without them is an error."""
    engines = importlib.import_module(PLUGIN)
    router = SimpleNamespace(router_replay_action=engines.RouterReplayAction.REPLAY_FORWARD)
    monkeypatch.setattr(engines, "replayed_routers", lambda chunk: [(1, router)])
    forward = engine._replay(torch.nn.Identity(), None, TensorDict({}, batch_size=2))
    with pytest.raises(ValueError, match="routed_experts: expected routes .*R2.*R3.* got None"), forward:
        pass


PACKAGE, OWN = "flash_attn_dualkv.integrations.verl", "flash_attn_dualkv.integrations.megatron"


@pytest.mark.parametrize("lack", ["a version", "an import"])
def test_another_megatron_core(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lack: str) -> None:
    """Its engines stay verl's, which is said once; those of FSDP are shared all the same."""
    plugin = importlib.import_module(PACKAGE)
    for name in (PLUGIN, OWN):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, f"{OWN}.attention", None)  # an older one has not what this imports
    if lack == "a version":
        monkeypatch.setattr("megatron.core.__version__", "0.14.0")
    caplog.clear()
    importlib.reload(plugin)
    assert len(caplog.messages) == 1
    expected = "got 0.14.0" if lack == "a version" else "megatron.attention"
    assert "stay verl's own" in caplog.text and expected in caplog.text
    if lack == "a version":
        with pytest.raises(SharedPromptUnsupportedError, match=r"0.19.2, .* got 0.14.0"):
            importlib.import_module(OWN)


@pytest.mark.parametrize("ranks", [1, 2])
def test_lengths_with_context_parallelism(engine: Any, caplog: pytest.LogCaptureFixture, ranks: int) -> None:
    """They cannot be rounded up, which is said."""
    engine.engine_config.context_parallel_size, engine.engine_config.pad_to_length = ranks, True
    engine._attach()
    assert ("pad_to_length is not used" in caplog.text) == (ranks > 1)


REFUSED = [
    ("dynamic_context_parallel", True),
    ("use_fused_kernels", True),
    ("lora", "LoRA"),
    ("vision_config", {}),
    ("fp8", "hybrid"),
    ("fp4", "e2m1"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda one: str(one))
def test_engines_that_are_refused(engine: Any, name: str, value: Any) -> None:
    setattr(engine.model_config.hf_config if name == "vision_config" else engine.engine_config, name, value)
    engine.peft_cls = value if name == "lora" else None
    engine.module = [SimpleNamespace(config=SimpleNamespace(**{name: value}))]
    assert engine._attach().startswith(f"{name}: ")
