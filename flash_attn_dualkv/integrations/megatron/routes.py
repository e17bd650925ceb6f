# SPDX-License-Identifier: BSD-3-Clause
"""Routes of experts on packed rows: recorded ones by token, and those to be replayed by row.

A row has one route in each layer, so that all tokens that it stands for must have the same ones. Tokens with other
routes must be kept from sharing a row when a batch is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from ... import checks
from ...data.batch import PackedBatch
from ...errors import SharedPromptError
from ...parallel.context import ContextLayout
from ...parallel.sharded import same_on_all_ranks
from .forward import layout_of
from .install import installed_chunk, replayed_routers


@torch.no_grad()
def replay_routes(model: nn.Module, batch: PackedBatch, routes: Tensor, replayed: Tensor | None = None) -> None:
    """Hand routes to the routers of a chunk, for the next forward over a batch. With `moe_enable_routing_replay`.

    All context-parallel ranks must call. What routers do with them, their action says, which stays as it is.

    Args:
        model: a chunk that is installed.
        batch: of the forward.
        routes: (sum L, layers, k) integers on the batch's device, the experts of each token of all sequences: in all
            layers of the whole model, or in all of its layers that have experts. Tokens that share a row have the same.
        replayed: (sum L,) bool, which tokens have routes; the others get those that the router finds. For routers that
            take a mask, which Megatron's own do not. None: all tokens.

    Raises:
        SharedPromptError: an argument is not as described, or the model is not installed.
    """
    chunk = installed_chunk(model)
    routers = sorted(replayed_routers(chunk), key=lambda pair: pair[0])
    with same_on_all_ranks(chunk.pg_collection.cp):
        config, tokens = chunk.config, batch.num_replicated_tokens
        checks.integers("routes", routes, 3)
        layers = _layers_with_experts(chunk)
        if len(routes) != tokens or routes.shape[1] not in (config.num_layers, len(layers)):
            expected = f"{tokens} tokens and {config.num_layers} layers, or {len(layers)} with experts"
            raise SharedPromptError("routes", expected, f"shape {tuple(routes.shape)}")
        if replayed is not None and (replayed.shape != (tokens,) or replayed.dtype != torch.bool):
            raise SharedPromptError("replayed", f"a bool of each of {tokens} tokens", checks.describe(replayed))
        of_all = routes.shape[1] == config.num_layers
        places = [number - 1 if of_all else layers.index(number - 1) for number, _ in routers]
        chosen = routes.index_select(1, torch.tensor(places, dtype=torch.int64, device=routes.device))
        sources = batch.source_index.clamp(min=0)  # any route will do for padding
        rows = chosen.index_select(0, sources)
        differs = (rows.index_select(0, batch.row_index) != chosen).flatten(1).any(1)
        mask = {}
        layout = layout_of(model, batch)
        if replayed is not None:
            of_rows = replayed.index_select(0, sources)
            differs = (differs & replayed) | (of_rows.index_select(0, batch.row_index) != replayed)
            mask["replay_mask"] = _own_rows(chunk, layout, of_rows)
        if differs.any():
            expected = "the same ones for all tokens that share a row"
            raise SharedPromptError("routes", expected, f"others in {int(differs.sum())} tokens")
    own = _own_rows(chunk, layout, rows).long()
    for place, (_, router) in enumerate(routers):
        router.set_target_indices(own[:, place].contiguous(), **mask)


@torch.no_grad()
def recorded_routes(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Routes that the routers of a chunk recorded in a forward over a batch. All ranks that have its rows must call.

    Args:
        model, batch: of that forward.

    Returns:
        (sum L, layers, k) int32, the experts of each token of all sequences in this chunk's layers with experts, in the
        order of the layers; all tokens that share a row have its route.

    Raises:
        SharedPromptError: a router has recorded nothing, or the model is not installed.
    """
    chunk = installed_chunk(model)
    found = []
    for number, router in sorted(replayed_routers(chunk), key=lambda pair: pair[0]):
        if router.recorded_topk_idx is None:
            raise SharedPromptError(f"router of layer {number}", "a forward with the action RECORD", "none")
        found.append(router.recorded_topk_idx.int())
    if not found:
        shape = (batch.num_replicated_tokens, 0, chunk.config.moe_router_topk)
        return batch.input_ids.new_zeros(shape, dtype=torch.int32)
    rows = torch.stack(found, 1)
    if chunk.config.sequence_parallel:
        rows = gather_from_sequence_parallel_region(rows, group=chunk.pg_collection.tp)
    layout = layout_of(model, batch)
    whole: Tensor = rows if layout is None else layout.gather(rows)
    return whole.index_select(0, batch.row_index)


def _layers_with_experts(chunk: Any) -> Sequence[int]:
    """Layers of the whole model that have experts, from 0."""
    pattern = getattr(chunk, "hybrid_layer_pattern", None)  # a letter for each layer, | between stages
    if pattern is not None:
        return [layer for layer, letter in enumerate(pattern.replace("|", "")) if letter == "E"]
    pattern = chunk.config.moe_layer_freq
    if isinstance(pattern, int):
        return range(0, chunk.config.num_layers, pattern)
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]


def _own_rows(chunk: Any, layout: ContextLayout | None, values: Tensor) -> Tensor:
    """This rank's part of the values of all rows."""
    own = values
    if layout is not None:
        # Padding gets the last row's routes. Zeros, as of shard(), would be one expert several
        # times over, which dispatchers count once.
        assert layout.row_index is not None
        own = values.index_select(0, layout.row_index.clamp(max=len(values) - 1))
    group = chunk.pg_collection.tp
    return own.chunk(group.size())[group.rank()] if chunk.config.sequence_parallel else own
