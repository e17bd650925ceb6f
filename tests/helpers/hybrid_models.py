# SPDX-License-Identifier: BSD-3-Clause
"""Tiny random hybrid models, and what they compute in float64 throughout."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from tiny_models import (
    COMMON,
    VERSION,
    Outcome,
    Samples,
    Tolerance,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    transformers,
)
from torch import Tensor

from flash_attn_dualkv.integrations.transformers.hybrid.families import FAMILIES

_DELTA_NET = dict(
    layer_types=["linear_attention", "full_attention"], head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
)  # fmt: skip
_MAMBA2 = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2,
    mamba_chunk_size=16,
)  # fmt: skip
# Every expert gets every token: see EVERY_EXPERT of tiny_models.
_EXPERTS = dict(
    num_experts=4, num_local_experts=4, num_experts_per_tok=4, moe_intermediate_size=16, n_group=1, topk_group=1,
)  # fmt: skip
_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    head_dim=8, linear_num_heads=2, linear_head_dim=8, linear_conv_kernel_dim=4, n_shared_experts=1,
    layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
_CONVOLUTION = dict(layer_types=["conv", "full_attention"], conv_L_cache=3)
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(shared_expert_intermediate_size=16, **_DELTA_NET, **_EXPERTS),
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": dict(shared_expert_intermediate_size=16, **_DELTA_NET, **_EXPERTS),
    "lfm2": _CONVOLUTION,
    "lfm2_moe": dict(num_dense_layers=1, **_CONVOLUTION, **_EXPERTS),
    "lfm3": dict(head_dim=8, **_CONVOLUTION),
    "falcon_h1": dict(mamba_d_ssm=64, **_MAMBA2),
    "granitemoehybrid": dict(
        layer_types=["linear_attention", "full_attention"], shared_intermediate_size=16, **_MAMBA2, **_EXPERTS
    ),
    "bamba": dict(attn_layer_indices=[1], **_MAMBA2),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention", "moe", "linear_attention"], num_hidden_layers=4,
        mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, conv_kernel=4, chunk_size=16, head_dim=8,
        n_routed_experts=4, moe_shared_expert_intermediate_size=16, **_EXPERTS,
    ),
    # The second layer has attention as well, in a block that layers may share.
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid", "hybrid"], num_hidden_layers=3, num_key_value_heads=4,
        mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=2, n_mamba_heads=4, mamba_headdim=16,
        chunk_size=16, num_mem_blocks=1, attention_hidden_size=64, adapter_rank=4, use_mem_rope=True,
    ),
    "olmo_hybrid": _DELTA_NET,
    "kimi_linear": dict(**_LATENT, **_EXPERTS),
    "bailing_hybrid": dict(num_experts_per_token=4, num_expert_group=1, **_LATENT, **_EXPERTS),
}  # fmt: skip
# Those that this version of transformers lets hand states on.
HYBRIDS = [name for name in OPTIONS if name in transformers.CONFIG_MAPPING and FAMILIES[name].refusal() is None]
# Of each kind of layer one.
KINDS = [name for name in ("qwen3_5_text", "kimi_linear", "bamba", "lfm2") if name in HYBRIDS] or ["qwen3_next"]

# Prompts and responses on both sides of a chunk of 64 and of a convolution's inputs, in mixed
# order.
RAGGED = Samples.random([(70, [5, 66, 0]), (9, [64, 1, 3, 0]), (2, [1, 7]), (1, [4, 65])]).take(
    [0, 3, 1, 5, 2, 4, 6, 9, 8, 7, 10]
)
# All is computed in float64: what is left is rounding, of some hundred terms.
EXACT = Tolerance(1e-11, 1e-10)


def hybrid_config(name: str, **options: Any) -> Any:
    return transformers.AutoConfig.for_model(name, **{**COMMON, **OPTIONS[name], **options})


def hybrid_model(name: str, dtype: torch.dtype = torch.float64, attention: str = "dualkv", **options: Any) -> Any:
    """A causal LM with random parameters, the same ones in every call, in eval mode; its states forget slowly."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = hybrid_config(name, **options)
        # Experts are multiplied by kernels that have no float64.
        choices = dict(experts_implementation="eager") if VERSION >= (5, 0) else {}
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, **choices)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("A_log"):
                    parameter.uniform_(-3.0, -1.0)
                elif parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif "conv" in parameter_name and parameter.shape[1] == 1:
                    parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@contextmanager
def without_packages(name: str) -> Iterator[None]:
    """The functions of a model file that mix tokens in PyTorch, whatever package stands behind them."""
    family = FAMILIES[name]
    # Older files have no such functions of their own.
    functions = {one: inspect.unwrap(getattr(family.file, one)) for one in family.functions} if family.is_global else {}
    with patch.multiple(family.file, **functions) if functions else nullcontext():
        yield


def drawn_gradients(
    model: Any, samples: Samples, batch: Any = None, draws: int = 8
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and of every parameter the gradients (draws, ...) of random sums of them, in float64.

    Args:
        batch: the samples packed; None for each sequence alone.
        draws: sums; the gradients of a few parameters are a handful of numbers, of which one error is chance.
    """
    if batch is None:
        logps, _ = replicated_logps(model, samples)
    else:
        logps, _ = dualkv.shared_prompt_forward(model, batch)
    return drawn_gradients_of(model, logps, draws)


def drawn_gradients_of(model: Any, logps: Tensor, draws: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Likewise, of log-probabilities that a model has computed."""
    weights = torch.randn(draws, len(logps), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found: dict[str, list[Tensor]] = {}
    for one in weights.to(logps):
        (one @ logps).backward(retain_graph=True)
        for name, gradient in gradients(model).items():
            found.setdefault(name, []).append(gradient.double())
    return logps.detach().double(), {name: torch.stack(one) for name, one in found.items()}


def error_ratios(
    got: tuple[Tensor, dict[str, Tensor]],
    stock: tuple[Tensor, dict[str, Tensor]],
    exact: tuple[Tensor, dict[str, Tensor]],
) -> dict[str, float]:
    """Errors as multiples of the stock model's: of log-probabilities, and of the gradients of every parameter."""

    def ratio(one: Tensor, other: Tensor, expected: Tensor) -> float:
        return ((one - expected).norm() / (other - expected).norm()).item()

    assert got[1].keys() == stock[1].keys() == exact[1].keys()
    found = {name: ratio(got[1][name], stock[1][name], one) for name, one in exact[1].items()}
    return {"log-probabilities": ratio(got[0], stock[0], exact[0]), **found}


class _WiderTorch:
    """The module torch, but for the type that model files compute in whatever their own is."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64() -> Iterator[None]:
    """Let model files compute in float64 what they compute in float32, which would be the larger error by far."""
    narrower = torch.Tensor.float

    def wider(tensor: torch.Tensor) -> torch.Tensor:
        return narrower(tensor) if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.double()

    with ExitStack() as stack:
        for name, file in list(sys.modules.items()):
            is_model = name.startswith("transformers.models.") and ".modeling_" in name
            if (is_model or name.startswith("peft.tuners.")) and hasattr(file, "torch"):
                stack.enter_context(patch.object(file, "torch", _WiderTorch()))
        stack.enter_context(patch.object(torch.Tensor, "float", wider))
        yield


def alone(model: Any, samples: Samples, scored: Any = slice(None)) -> Outcome:
    """Of each sequence alone; the loss is one of the tokens that are scored."""
    twin = stock_twin(model, "eager")
    return Outcome.of(twin, replicated_logps(twin, samples)[0][scored])


def shared(model: Any, batch: Any) -> Outcome:
    return Outcome.of(model, dualkv.shared_prompt_forward(model, batch)[0])
