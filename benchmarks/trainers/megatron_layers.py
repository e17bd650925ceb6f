# SPDX-License-Identifier: BSD-3-Clause
"""Norms, experts, gated delta nets and hybrid stacks for Megatron's models without Transformer Engine and apex."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
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

    # A hybrid stack has Transformer Engine's norm at its end, whatever its specification says.
    with patch.object(WrappedTorchNorm, "__new__", norm), patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
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


def hybrid_spec(**mixer: Any) -> Any:
    """The specification of a `HybridModel`'s layers, of Megatron's local ones.

    Args:
        mixer: further arguments of its Mamba mixers.
    """
    parts = MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(MambaMixer, params=mixer, submodules=parts),
        mamba_bda=get_bias_dropout_add,
    )  # fmt: skip
    dense, experts = (get_gpt_layer_local_spec(num_experts=some, normalization="RMSNorm") for some in (None, 2))
    no_attention = dict(input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    no_mlp = dict(pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)

    def without(layer: Any, module: Any, parts: dict[str, Any]) -> Any:
        return ModuleSpec(module, submodules=dataclasses.replace(layer.submodules, **parts))

    layers = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
        attention_layer=without(dense, TransformerLayer, no_mlp),
        gdn_layer=without(with_delta_net(dense), TransformerLayer, no_mlp),
        mlp_layer=without(dense, MLPLayer, no_attention),
        moe_layer=without(experts, TransformerLayer, no_attention),
    )
    return ModuleSpec(hybrid_block.HybridStack, submodules=layers)
