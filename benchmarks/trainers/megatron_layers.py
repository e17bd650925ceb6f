# SPDX-License-Identifier: BSD-3-Clause
"""Norms, experts and gated delta nets for Megatron's models without Transformer Engine and apex."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.nn import functional


@contextlib.contextmanager
def local_norms() -> Iterator[None]:
    """Megatron's local norm refuses sequence parallelism; its gradient is summed as that of others."""
    stock = WrappedTorchNorm.__new__

    def norm(kind: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        made = stock(kind, alone, *args, **kwargs)
        for one in made.parameters():
            one.sequence_parallel = config.sequence_parallel
        return made

    with patch.object(WrappedTorchNorm, "__new__", norm):
        yield


class GroupedExperts(MegatronModule):
    """A rank's part of all experts as two grouped products, as Transformer Engine's have it.

    Megatron's own, one after another, wait for the host: a micro-batch takes as long with half of its tokens.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None, name: str | None = None) -> None:
        super().__init__(config=config)
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        where = dict(dtype=config.params_dtype, device=None if config.use_cpu_initialization else "cuda")
        self.first = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden, **where))
        self.second = nn.Parameter(torch.empty(num_local_experts, hidden, width, **where))
        config.init_method(self.first)
        config.output_layer_init_method(self.second)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Tokens (T, H) in the order of experts, and the router's weights (T,); a part of the sum over ranks."""
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
        gate, up = functional.grouped_mm(tokens, self.first.transpose(1, 2), offs=ends).chunk(2, -1)
        inner = (functional.silu(gate) * up * weights[:, None]).to(tokens.dtype)
        return functional.grouped_mm(inner, self.second.transpose(1, 2), offs=ends), None


@contextlib.contextmanager
def grouped_experts() -> Iterator[None]:
    """All layers of experts that are built have `GroupedExperts`."""
    stock = MoELayer.__init__

    def init(self: Any, config: Any, submodules: Any, *args: Any, **more: Any) -> None:
        stock(self, config, dataclasses.replace(submodules, experts=GroupedExperts), *args, **more)

    with patch.object(MoELayer, "__init__", init):
        yield


def with_delta_net(layer: Any) -> Any:
    """The layer of this specification with a gated delta net for its attention."""
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    mixer = ModuleSpec(GatedDeltaNet, submodules=parts)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=mixer))
