# SPDX-License-Identifier: BSD-3-Clause
"""Tiny random models of Megatron-Core, and what they compute of each sequence alone.

Importing this skips the test module when megatron-core is not installed.
"""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_layers import hybrid_spec, local_norms, with_delta_net
from torch import Tensor, nn

from flash_attn_dualkv import PackedBatch, pack_prefix_tree, pack_shared_prompts

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")
warnings.filterwarnings("ignore", module="megatron")
logging.getLogger("megatron").setLevel(logging.ERROR)
megatron = importlib.import_module("flash_attn_dualkv.integrations.megatron")

from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

VOCABULARY = 96
_COMMON = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=48,
    use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
    gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False, masked_softmax_fusion=False,
    bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, pipeline_dtype=torch.float32,
    attention_softmax_in_fp32=True, gradient_accumulation_fusion=False, persist_layer_norm=False,
    moe_token_dispatcher_type="alltoall",
)  # fmt: skip
_EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_router_load_balancing_type="none",
    moe_layer_freq=[0, 1], moe_router_dtype="fp32",
)  # fmt: skip
_YARN = dict(
    yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
    yarn_mscale=1.0, yarn_mscale_all_dim=0.0, yarn_correction_range_round_to_int=True,
)  # fmt: skip
_LATENT = dict(
    num_query_groups=4, qk_layernorm=True, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
    v_head_dim=16, kv_channels=16, rotary_scaling_factor=4.0, original_max_position_embeddings=16,
)  # fmt: skip
_DELTA_NET = dict(
    num_layers=4, experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 1, 0, 1],
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=4, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
_MAMBA = dict(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=4)
_NEMOTRON = dict(
    _MAMBA, num_layers=6, gated_linear_unit=False, activation_func=squared_relu, num_moe_experts=4, moe_router_topk=2,
    moe_ffn_hidden_size=16, moe_router_load_balancing_type="none", moe_router_dtype="fp32",
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0,
    moe_shared_expert_intermediate_size=16,
)  # fmt: skip
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@dataclass(frozen=True)
class Kind:
    """A kind of model: options of its configuration, of its layers and of GPTModel, or of HybridModel."""

    config: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "gqa, q/k norm": Kind(dict(qk_layernorm=True), dict(qk_layernorm=True)),
    "half rotary, interleaved, llama 3 scaling": Kind(
        dict(rotary_interleaved=True), model=dict(rotary_percent=0.5, rope_scaling=True)
    ),
    "query groups of 1": Kind(dict(num_query_groups=1)),
    "multi-head, biases, gpt 2": Kind(
        dict(num_query_groups=4, add_bias_linear=True, normalization="LayerNorm", gated_linear_unit=False),
        dict(normalization="LayerNorm"),
        dict(position_embedding_type="learned_absolute"),
    ),
    "yarn": Kind(model=dict(position_embedding_type="yarn")),
    "mrope": Kind(dict(mrope_section=[2, 1, 1]), model=dict(position_embedding_type="mrope")),
    "no positions": Kind(model=dict(position_embedding_type="none")),
    "layers without rope": Kind(dict(no_rope_freq=[0, 1])),
    "window": Kind(dict(window_size=(4, 0))),
    "windows and full": Kind(dict(num_layers=4, window_size=(2, 0), window_attn_skip_freq=2)),
    "sinks": Kind(dict(softmax_type="learnable", window_size=(4, 0), window_attn_skip_freq=[0, 1])),
    "off by one": Kind(dict(softmax_type="off-by-one")),
    "scale by layer": Kind(dict(apply_query_key_layer_scaling=True)),
    "scale": Kind(dict(softmax_scale=0.7)),
    "output gate": Kind(dict(attention_output_gate=True)),
    "tied": Kind(model=dict(share_embeddings_and_output_weights=True)),
    "experts": Kind(_EXPERTS, dict(num_experts=4)),
    "experts, sigmoid, shared": Kind(
        dict(
            **_EXPERTS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0, moe_shared_expert_intermediate_size=16,
        ),
        dict(num_experts=4),
    ),
    "delta nets": Kind(_DELTA_NET),
    "qwen3 next": Kind(
        dict(
            _EXPERTS, **_DELTA_NET, moe_layer_freq=[0, 1, 1, 1], moe_shared_expert_intermediate_size=16,
            moe_shared_expert_gate=True, attention_output_gate=True, qk_layernorm=True,
        ),
        model=dict(rotary_percent=0.25),
    ),
    # Stages of two ranks and two virtual stages.
    "nemotron": Kind(_NEMOTRON, model=dict(hybrid_layer_pattern="ME|*E|M|M", position_embedding_type="none")),
    "mamba, delta nets, rotary, tied": Kind(
        dict(_MAMBA, **{name: _DELTA_NET[name] for name in _DELTA_NET if "linear" in name}, num_layers=5),
        dict(rmsnorm=False, D_has_hdim=True, chunk_size=16),
        dict(hybrid_layer_pattern="M*MG-", share_embeddings_and_output_weights=True),
    ),
    "latent": Kind(dict(_LATENT, rope_type="rope"), dict(multi_latent_attention=True, qk_layernorm=True)),
    "latent, yarn": Kind(dict(_LATENT, rope_type="yarn"), dict(multi_latent_attention=True, qk_layernorm=True)),
    "latent, yarn, experts": Kind(
        dict(_LATENT, rope_type="yarn", **_EXPERTS),
        dict(multi_latent_attention=True, qk_layernorm=True, num_experts=4),
    ),
}  # fmt: skip


def tiny_config(kind: str, **options: Any) -> Any:
    own = KINDS[kind]
    latent = own.spec.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(**{**_COMMON, **own.config, **options})
    if own.model.get("position_embedding_type") == "yarn":
        for name, value in _YARN.items():
            setattr(config, name, value)
    return config


def tiny_chunk(kind: str, config: Any, **options: Any) -> Any:
    """A GPTModel or HybridModel, or a stage of one, whose parameters have the values of their names."""
    own = KINDS[kind]
    defaults: dict[str, Any] = dict(position_embedding_type="rope", vocab_size=VOCABULARY, max_sequence_length=128)
    options = {**defaults, **own.model, **options}
    if "hybrid_layer_pattern" in options:
        if config.virtual_pipeline_model_parallel_size is None:  # stages of equally many layers
            options["hybrid_layer_pattern"] = options["hybrid_layer_pattern"].replace("|", "")
        with local_norms():
            model = HybridModel(config, hybrid_spec(**own.spec), **options)
        return _filled(model)
    latent = own.spec.get("multi_latent_attention", False)
    # The local attention takes neither MLA nor context parallelism.
    is_shared = latent or config.context_parallel_size > 1
    make_spec = megatron.get_gpt_layer_shared_prompt_spec if is_shared else get_gpt_layer_local_spec
    spec: Any = make_spec(**{"normalization": "RMSNorm", **own.spec})
    if "moe_layer_freq" in own.config or "linear_attention_freq" in own.config:
        stage = {name: options[name] for name in ("vp_stage",) if name in options}
        attending = copy.copy(config)
        attending.experimental_attention_variant = None
        spec = get_gpt_decoder_block_spec(attending, use_transformer_engine=False, normalization="RMSNorm", **stage)
        if is_shared:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = megatron.SharedPromptAttention
        if "linear_attention_freq" in own.config:
            first = get_transformer_layer_offset(config, **stage)
            own_layers = config.linear_attention_freq[first : first + len(spec.layer_specs)]
            spec.layer_specs = [
                with_delta_net(layer) if linear else layer for layer, linear in zip(spec.layer_specs, own_layers)
            ]
    with local_norms():
        return _filled(GPTModel(config=config, transformer_layer_spec=spec, **options))


def _filled(model: Any) -> Any:
    for name, one in model.named_parameters():
        fill(name, one)
    return model.train()


def fill(name: str, parameter: Tensor, rank: int = 0) -> None:
    """Random values, by a parameter's name and the rank that has this part of it."""
    seed = torch.Generator().manual_seed(rank + sum(ord(one) * place for place, one in enumerate(name, 1)))
    values = torch.randn(parameter.shape, generator=seed) * (0.2 if parameter.dim() > 1 else 0.1)
    # Norms are around 1; other vectors, sinks and biases, around 0.
    parameter.data.copy_(values + (1.0 if "norm" in name and name.endswith("weight") else 0.0))


@dataclass(frozen=True)
class Sequences:
    """Sequences of token ids, and which of their tokens are scored."""

    tokens: list[list[int]]
    masks: list[list[int]]

    def pack(self, **options: Any) -> PackedBatch:
        return pack_prefix_tree(self.tokens, loss_mask=self.masks, **options)


def draw(seed: int, length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts_and_responses() -> tuple[Sequences, PackedBatch]:
    """Two prompts, of three and of two samples."""
    shapes = [(9, [5, 2, 7]), (3, [4, 6])]
    prompts, responses = [], []
    for group, (prompt, lengths) in enumerate(shapes):
        for sample, length in enumerate(lengths):
            prompts.append(draw(group, prompt))
            responses.append(draw(10 * group + sample + 5, length))
    sequences = Sequences(
        [p + r for p, r in zip(prompts, responses)], [[0] * len(p) + [1] * len(r) for p, r in zip(prompts, responses)]
    )
    return sequences, pack_shared_prompts(prompts, responses, pad_to_multiple_of=4)


def tree() -> tuple[Sequences, PackedBatch]:
    """Transcripts that leave each other at several depths."""
    stem, turn = draw(30, 8), draw(31, 4)
    tokens = [
        stem + turn + draw(32, 3), stem + turn + draw(33, 5), stem + draw(34, 6), stem[:3] + draw(35, 4), draw(36, 5),
    ]  # fmt: skip
    masks = [[int(place > 0 and place % 4 != 1) for place in range(len(one))] for one in tokens]
    sequences = Sequences(tokens, masks)
    return sequences, sequences.pack(pad_to_multiple_of=4, min_shared=1)


def weights_of(count: int) -> Tensor:
    """Of each scored token in a loss that no symmetry makes small."""
    return torch.linspace(-1.0, 1.0, count)


def alone(model: Any, sequences: Sequences) -> Tensor:
    """Log-probabilities of all scored tokens: each sequence by itself on stock attention with a mask."""
    found = []
    for tokens, mask in zip(sequences.tokens, sequences.masks):
        ids = torch.tensor(tokens)
        length = len(ids)
        positions = torch.arange(length)[None]
        if model.position_embedding_type == "mrope":
            positions = positions.expand(3, 1, -1)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logps = model(ids[None], positions, hidden, runtime_gather_output=True)[0].float().log_softmax(-1)
        places = torch.tensor(mask).nonzero()[:, 0]
        found.append(logps[places - 1].gather(-1, ids[places][:, None])[:, 0])
    return torch.cat(found)


def drawn(batch: PackedBatch, layers: int) -> Tensor:
    """Routes of all tokens, the same for those that share a row: (sum L, layers, 2)."""
    scores = torch.rand(batch.layout.num_tokens, layers, 4, generator=torch.Generator().manual_seed(3))
    return scores.topk(2).indices[batch.row_index]


def replayed_alone(model: Any, sequences: Sequences, routes: Tensor) -> Tensor:
    """`alone`, with the routes of all tokens in the last layer of a model."""
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    found = []
    lengths = [len(one) for one in sequences.tokens]
    for tokens, mask, own in zip(sequences.tokens, sequences.masks, routes.split(lengths)):
        RouterReplay.set_replay_data([own[:, -1]])
        found.append(alone(model, Sequences([tokens], [mask])))
    return torch.cat(found)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of all parameters, which are then cleared; none may lack one."""
    missing = [name for name, one in model.named_parameters() if one.grad is None and one.requires_grad]
    assert not missing, missing
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def check_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    error = (got - expected).abs().max().item()
    assert error <= tolerance, error


def check_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    errors = {
        name: ((got[name] - one).abs().max() / one.abs().max().clamp(min=1e-3)).item() for name, one in expected.items()
    }
    too_large = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not too_large, too_large
