# SPDX-License-Identifier: BSD-3-Clause
"""Routes of experts that Megatron records and replays, on packed rows, beside each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import tiny_megatron as tiny
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import (
    alone,
    check_close,
    check_gradients,
    drawn,
    gradients,
    megatron,
    replayed_alone,
    tiny_chunk,
    tiny_config,
    weights_of,
)  # fmt: skip

from flash_attn_dualkv import SharedPromptError, SharedPromptLayoutError

KINDS = ("experts", "experts, sigmoid, shared", "latent, yarn, experts")
BATCHES = {"prompts": tiny.prompts_and_responses, "tree": tiny.tree}


@pytest.fixture(autouse=True)
def _cpu() -> Iterator[None]:
    with megatron_on_the_cpu():
        yield
    RouterReplay.clear_global_router_replay_instances()


def chunk(kind: str = "experts", **options: Any) -> Any:
    """With one layer without experts, and one with 4, of which a token has 2."""
    return tiny_chunk(kind, tiny_config(kind, moe_enable_routing_replay=True, **options))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_routes(kind: str, batch: str) -> None:
    """Those that each sequence alone has."""
    sequences, packed = BATCHES[batch]()
    model = chunk(kind)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    expected = []
    for tokens, mask in zip(sequences.tokens, sequences.masks):
        alone(model, tiny.Sequences([tokens], [mask]))
        expected.append(RouterReplay.get_recorded_data()[0])
    megatron.install(model)
    megatron.shared_prompt_forward(model, packed)
    found = megatron.recorded_routes(model, packed)
    assert found.dtype == torch.int32
    assert torch.equal(found[:, 0].long(), torch.cat(expected))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_replayed_routes(kind: str, batch: str, layers: int) -> None:
    """Of the layers with experts, or of all; recomputed in the backward, too."""
    sequences, packed = BATCHES[batch]()
    routes, model = drawn(packed, layers), chunk(kind)
    expected = replayed_alone(model, sequences, routes)
    (expected * weights_of(len(expected))).sum().backward()
    expected_gradients = gradients(model)
    for options in ({}, tiny.RECOMPUTED):
        RouterReplay.clear_global_router_replay_instances()
        model = chunk(kind, **options)
        megatron.install(model)
        natural, _ = megatron.shared_prompt_forward(model, packed)
        assert (natural - expected).abs().max() > 1e-3
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        megatron.replay_routes(model, packed, routes.to(torch.int16))
        logps, _ = megatron.shared_prompt_forward(model, packed)
        check_close(logps.detach(), expected.detach(), 5e-6)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        (logps * weights_of(len(logps))).sum().backward()
        check_gradients(gradients(model), expected_gradients, 2e-5)


DENSE_BETWEEN: dict[str, dict[str, Any]] = {"experts": dict(num_layers=4, moe_layer_freq=[0, 1, 0, 1]), "nemotron": {}}


@pytest.mark.parametrize(
    ("kind", "columns"), [("experts", (0, 1)), ("experts", (1, 3)), ("nemotron", (0, 1)), ("nemotron", (1, 3))]
)
def test_each_layer_gets_its_own_routes(kind: str, columns: tuple[int, int]) -> None:
    """Of the layers with experts, or of all, between which others lie."""
    _, batch = tiny.tree()
    model = chunk(kind, **DENSE_BETWEEN[kind])
    routes = drawn(batch, 2 if columns == (0, 1) else model.config.num_layers)
    megatron.install(model)
    megatron.replay_routes(model, batch, routes)
    found = [one.target_topk_idx[batch.row_index] for one in RouterReplay.global_router_replay_instances]
    assert torch.equal(torch.stack(found, 1), routes[:, columns])


def test_routes_that_are_refused() -> None:
    _, batch = tiny.tree()
    model, routes = chunk(), drawn(batch, 2)
    with pytest.raises(SharedPromptError, match="install"):
        megatron.replay_routes(model, batch, routes)
    megatron.install(model)
    with pytest.raises(SharedPromptError, match="RECORD"):
        megatron.recorded_routes(model, batch)
    for wrong in (routes[1:], routes.repeat(1, 2, 1)):
        with pytest.raises(SharedPromptError, match="routes: expected .* 2 layers, or 1 with experts"):
            megatron.replay_routes(model, batch, wrong)
    for mask in (torch.ones(len(routes) - 1, dtype=torch.bool), torch.ones(len(routes))):
        with pytest.raises(SharedPromptError, match="replayed"):
            megatron.replay_routes(model, batch, routes, mask)
    other = routes.clone()
    other[0] = (other[0] + 1) % 4  # the first token of four sequences
    with pytest.raises(SharedPromptError, match="the same ones for all tokens that share a row"):
        megatron.replay_routes(model, batch, other)
    mask = torch.ones(len(routes), dtype=torch.bool)
    mask[0] = False
    with pytest.raises(SharedPromptError, match="the same ones for all tokens that share a row"):
        megatron.replay_routes(model, batch, routes, mask)


def test_a_forward_without_its_routes_is_refused() -> None:
    _, batch = tiny.tree()
    model = chunk()
    megatron.install(model)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(SharedPromptLayoutError, match="router of layer 2: expected .*replay_routes.* got none"):
        megatron.shared_prompt_forward(model, batch)
    RouterReplay.set_replay_data([drawn(batch, 1)[:, 0]])  # by tokens
    with pytest.raises(SharedPromptLayoutError, match=f"routes of {batch.layout.num_tokens} rows"):
        megatron.shared_prompt_forward(model, batch)
