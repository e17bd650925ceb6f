# SPDX-License-Identifier: BSD-3-Clause
"""Cases of verl's workers, run beside the plug-in's, and their comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import verl_rig
from verl_inputs import Batch, Case, Found, Model, Sample

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
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
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
PATIENCE = 2400.0  # seconds of all cases of a call: hosts with other work stand still for minutes
PADDED = "actor_rollout_ref.model.use_remove_padding=False"
NORM = "loss_agg_mode=seq-mean-token-sum-norm"
# verl patches the model's class, for as long as the process lives: of no other case.
FUSED: dict[str, Any] = dict(engine="fsdp", model=Model("qwen2"))
UNEQUAL = Batch(prompts=3, responses=4, shuffled=True, trained=0.7)


# A picture of 4 x 4 patches: tokens of an id above those of text, and the values of its patches.
PICTURE_TOKEN, PICTURE_TOKENS, PATCHES, PATCH_VALUES = 512, 4, 16, 96


@dataclass(frozen=True)
class Unusual(Batch):
    """A batch with more than text.

    Attributes:
        extra: "temperatures" of each sample, "images" beside its text that no model looks at, "pictures" in every
            second prompt, "late" pictures in responses, "stretched" position ids, in the last row of a sample.
        position_rows: of position ids; verl has several where the processor knows of images.
    """

    extra: str | None = None
    position_rows: int = 1

    def samples(self, vocabulary: int) -> list[Sample]:
        found = super().samples(vocabulary)
        return [self.changed(one, index / (len(found) - 1)) for index, one in enumerate(found)]

    def changed(self, sample: Sample, place: float) -> Sample:
        """`place`: of the sample in the batch, 0 to 1."""
        positions = torch.arange(len(sample.prompt) + len(sample.response))
        positions = positions.repeat(self.position_rows, 1) if self.position_rows > 1 else positions
        others: dict[str, Any] = {"position_ids": positions}
        if self.extra == "stretched" and 0 < place < 0.2:
            positions[-1] *= 2
        if self.extra == "temperatures":
            others["temperature"] = torch.tensor(0.7 + 0.6 * place)
        if self.extra == "images":
            others["multi_modal_inputs"] = {"grid": torch.ones(1)}
        if self.extra in ("pictures", "late"):
            others["multi_modal_inputs"] = {}
            if int(sample.uid.removeprefix("prompt")) % 2:
                source = torch.Generator().manual_seed(0)
                grid, values = torch.tensor([[1, 4, 4]]), torch.randn(PATCHES, PATCH_VALUES, generator=source)
                others["multi_modal_inputs"] = {"pixel_values": values, "image_grid_thw": grid}
                sample = sample._replace(prompt=sample.prompt.clone(), response=sample.response.clone())
                begin = len(sample.prompt) if self.extra == "late" else 1
                tokens = sample.response if self.extra == "late" else sample.prompt[1:]
                tokens[:PICTURE_TOKENS] = PICTURE_TOKEN
                positions[1:, begin : begin + PICTURE_TOKENS] -= torch.arange(PICTURE_TOKENS)
        return sample._replace(others=others)


@dataclass(frozen=True)
class Uneven(Batch):
    """Of three prompts one rank has 4, 1 and 1 of the responses, the other 0, 3 and 3."""

    prompts: int = 3

    def samples(self, vocabulary: int) -> list[Sample]:
        found = super().samples(vocabulary)
        return [found[at] for at in (0, 4, 1, 8, 2, 3, 5, 9, 6, 10, 7, 11)]


@dataclass(frozen=True)
class Common(Batch):
    """Responses that begin alike.

    Attributes:
        common: tokens of them that do.
    """

    common: int = 900

    def samples(self, vocabulary: int) -> list[Sample]:
        begin = torch.randint(vocabulary, (self.common,), generator=torch.Generator().manual_seed(2))
        return [
            sample._replace(
                response=torch.cat((begin, sample.response)), mask=torch.cat((torch.ones_like(begin), sample.mask))
            )
            for sample in super().samples(vocabulary)
        ]


@dataclass(frozen=True)
class Turns(Batch):
    """Rollouts of agents, of each prompt `responses`: steps that the later ones begin with, the last step tried again
    from its middle on, and the transcript of all turns.
    """

    def samples(self, vocabulary: int) -> list[Sample]:
        source = torch.Generator().manual_seed(1)

        def tokens(count: int) -> torch.Tensor:
            return torch.randint(vocabulary, (count,), generator=source)

        found: list[Sample] = []
        for index in range(self.prompts):
            prompt = context = tokens(self.prompt_tokens - 5 * index)
            steps = []
            for turn in range(self.responses - 2):
                steps.append((context, tokens(self.response_tokens - 3 * turn)))
                context = torch.cat((*steps[-1], tokens(6)))  # what a tool has answered
            context, last = steps[-1]
            steps.append((context, torch.cat((last[:5], tokens(9)))))
            steps.append((prompt, torch.cat((context, last))[len(prompt) :]))
            for context, response in steps:
                mask = (torch.rand(len(response), generator=source) < self.trained).long()
                mask[-1] = 1
                advantage = float(torch.randn((), generator=source))
                found.append(Sample(f"prompt{index}", context, response, mask, advantage))
        order = torch.randperm(len(found), generator=source) if self.shuffled else range(len(found))
        return [found[at] for at in order]


@dataclass(frozen=True)
class Routed(Turns):
    """Rollouts with the experts that the sampler has chosen for each token but the last, by the tokens before it.

    Attributes:
        agents: as of `Turns`; else one response for each sample.
        other: in the first prompt, one sample's token has other experts; -1: none.
        untrained: the second sample has no trained token.
    """

    agents: bool = False
    layers: int = 2
    experts: int = 4
    other: int = -1
    untrained: bool = False

    def samples(self, vocabulary: int) -> list[Sample]:
        found = super().samples(vocabulary) if self.agents else Batch.samples(self, vocabulary)
        if self.untrained:
            found[1] = found[1]._replace(mask=torch.zeros_like(found[1].mask))
        return [self.routed(one, index) for index, one in enumerate(found)]

    def routed(self, sample: Sample, index: int) -> Sample:
        tokens = torch.cat((sample.prompt, sample.response))[:-1].double()
        # Of equal beginnings the same sums.
        sums = (tokens * torch.arange(1.0, len(tokens) + 1)).cumsum(0)
        scores = torch.sin(sums[:, None] + torch.arange(self.layers * self.experts)).view(-1, self.layers, self.experts)
        routes = scores.topk(2).indices.to(torch.int16)
        if index == 0 and self.other >= 0:
            routes[self.other] = (routes[self.other] + 1) % self.experts
        # The form of verl's agent loop.
        routes = torch.cat((routes, routes.new_zeros(1, *routes.shape[1:])))
        return sample._replace(others={"routed_experts": routes})


def case(name: str, *overrides: str, updates: int = 2, **settings: Any) -> Case:
    if "micro" not in settings:
        settings.setdefault("tokens", 200)
    if unusual := {key: settings.pop(key) for key in ("extra", "position_rows") if key in settings}:
        settings["batch"] = Unusual(**asdict(settings.get("batch", Batch())), **unusual)
    return Case(name, overrides=(*FP32, *overrides), updates=updates, **settings)


def run(cases: Sequence[Case], ranks: int = 1, driver: str | None = None, **environment: str) -> dict[str, Found]:
    return verl_rig.run(cases, ranks, ENVIRONMENT | environment, PATIENCE, driver)


def run_beside(stock: Sequence[Case], ours: Sequence[Case], *args: Any, **environment: str) -> dict[str, Found]:
    """verl's engines and the plug-in in processes of their own: it must be there before verl patches models."""
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda cases: run(cases, *args, **environment), [stock, ours])
        return {name: found for part in parts for name, found in part.items()}


def ours(one: Case, *overrides: str) -> Case:
    """The same case with the plug-in."""
    balance = "groups" if one.balance == "lengths" else "none"
    return replace(one, name=f"ours, {one.name}", shares=True, balance=balance, overrides=(*one.overrides, *overrides))


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", cases, ids=lambda one: one.name)


class Pair(NamedTuple):
    """What verl's engine and the plug-in have made of a case."""

    stock: Found
    ours: Found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of all calls of the plug-in, without "shared_prompt/"."""
        calls = (*self.ours.infer_metrics, *self.ours.metrics)
        return [{name.removeprefix("shared_prompt/"): value for name, value in call.items()} for call in calls]

    def check_values(self) -> None:
        assert (self.stock.error, self.ours.error) == (None, None)
        assert self.stock.engine.startswith("verl.") and self.ours.engine.startswith("flash_attn_dualkv.")
        # Behind the updates parameters differ by what Adam makes of gradients that are nearly zero.
        for before, after, tolerance in zip(self.stock.values, self.ours.values, (1e-5, 5e-4)):
            assert before
            torch.testing.assert_close(after, before, rtol=0, atol=tolerance)

    def check_equal(self) -> None:
        self.check_values()
        torch.testing.assert_close(self.ours.routes, self.stock.routes, rtol=0, atol=0)
        assert len(self.stock.metrics) == len(self.ours.metrics)
        for step, (stock, ours) in enumerate(zip(self.stock.metrics, self.ours.metrics)):
            compared = [name for name in stock if name in LOSSES]
            assert compared
            for name in compared:
                assert ours[name] == pytest.approx(stock[name], rel=3e-5 * (1 + 9 * step), abs=3e-6), (step, name)
            assert {name for name in ours if not name.startswith("shared_prompt/")} == set(stock)

    def check_shared(self, least_ratio: float = 1.2, fallbacks: float = 0) -> None:
        """`fallbacks`: micro-batches of each call on verl's own path."""
        self.check_equal()
        assert self.ours.infer_metrics
        for metrics in self.metrics:
            assert metrics["dedup_ratio"] > least_ratio and metrics["fallback_micro_batches"] == fallbacks


def both(found: dict[str, Found], one: Case, stock: dict[str, Found] | None = None) -> Pair:
    """`stock`: verl's, if it was not run beside the plug-in."""
    return Pair((stock or found)[one.name], found[f"ours, {one.name}"])


# Equal for any micro-batches; others are means over micro-batches.
LOSSES = ["loss", "grad_norm", "actor/pg_loss", "kl_loss", "actor/entropy_loss", "critic/vf_loss"]
