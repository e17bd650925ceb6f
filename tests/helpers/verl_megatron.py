# SPDX-License-Identifier: BSD-3-Clause
"""verl's Megatron engine on the CPU, for tests, behind cpu_platform: what it and mbridge ask of Transformer Engine.

mbridge builds layers of Transformer Engine, which needs a GPU. Here it gets Megatron's local ones, whose norms are
modules of their own; and their attention, which refuses packed rows, takes them: each sequence by itself.

VERL_USE_EXTERNAL_MODULES=cpu_platform,verl_megatron
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import types
from typing import Any

import torch
from megatron_cpu import without_a_gpu
from megatron_layers import local_norms

_for_good = contextlib.ExitStack()
_for_good.enter_context(without_a_gpu())
_for_good.enter_context(local_norms())

from mbridge.core import llm_bridge, util  # noqa: E402
from mbridge.models import qwen2, qwen2moe  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from verl.utils.torch_dtypes import PrecisionType  # noqa: E402

_stock_spec, _stock_attention = llm_bridge.get_gpt_decoder_block_spec, DotProductAttention.forward
_stock_start = parallel_state.initialize_model_parallel


def _spec(config: Any, use_transformer_engine: bool, vp_stage: int | None = None) -> Any:
    assert use_transformer_engine
    spec = _stock_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    if config.context_parallel_size > 1:  # the local attention cannot be built then
        shared = importlib.import_module("flash_attn_dualkv.integrations.megatron").SharedPromptAttention
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = shared
    return spec


@functools.wraps(_stock_attention)
def _attention(
    self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, packed_seq_params: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    if packed_seq_params is None:
        return _stock_attention(self, query, key, value, attention_mask, *args, **options)
    ends = packed_seq_params.cu_seqlens_q_padded.tolist()
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(one[begin:end].transpose(0, 1) for one in (query, key, value)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts)


def _start(*args: Any, **options: Any) -> None:
    _stock_start(*args, **options)
    random.model_parallel_cuda_manual_seed(1)  # verl leaves it out where it sees no GPU


llm_bridge.get_gpt_decoder_block_spec = _spec
DotProductAttention.forward = _attention
parallel_state.initialize_model_parallel = _start
PrecisionType.to_dtype = staticmethod(lambda precision: torch.float32)  # verl's configuration wants 16 bits
# A name that mbridge 0.15 compares with and megatron-core 0.19 no longer has.
util.ModelType = types.SimpleNamespace(encoder_or_decoder=util.ModelType.encoder_or_decoder, encoder_and_decoder=None)
_layer = "model.layers.{layer_number}."
qwen2.Qwen2Bridge._OTHER_MAPPING = {"input_layernorm.weight": [f"{_layer}input_layernorm.weight"]}
qwen2.Qwen2Bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = [f"{_layer}post_attention_layernorm.weight"]

# Experts: of Transformer Engine they are one module, whose weights are numbered; local ones are
# modules.
_stock_names = qwen2moe.Qwen2MoEBridge._weight_name_mapping_mlp


def _as_grouped(name: str) -> str:
    return re.sub(r"\.local_experts\.(\d+)\.(.*)$", r".\2\1", name)


def _expert_names(self: Any, name: str) -> Any:
    return _stock_names(self, _as_grouped(name))


qwen2moe.Qwen2MoEBridge._OTHER_MAPPING = qwen2.Qwen2Bridge._OTHER_MAPPING
qwen2moe.Qwen2MoEBridge._weight_name_mapping_mlp = _expert_names
