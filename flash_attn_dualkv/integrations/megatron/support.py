# SPDX-License-Identifier: BSD-3-Clause
"""Models of Megatron-Core that are exact on packed rows; refusals are decided here and only here.

One row of a prompt stands for all of its copies if what a row computes depends on its path and on nothing else, and if
every sum over rows is one that our caller weights. Random numbers a row, statistics of routers over all rows and
experts with a capacity break that; so does what shifts labels by a row or reads one fixed shape of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import SharedPromptError, SharedPromptUnsupportedError


def check_config(config: Any) -> None:
    """Refuse what no packed row can be computed with, in any mode.

    Raises:
        SharedPromptUnsupportedError: names the setting, and what it must be.
    """
    _check(config, _unsupported(config))
    if getattr(config, "experimental_attention_variant", None) is not None:
        check_delta_nets(config)


def check_delta_nets(config: Any) -> None:
    """Refuse what gated delta nets cannot be computed with.

    Raises:
        SharedPromptUnsupportedError: names the setting, and what it must be.
    """
    _check(config, _unsupported_by_delta_nets(config))


def check_mamba(config: Any) -> None:
    """Refuse what Mamba mixers cannot be computed with.

    Raises:
        SharedPromptUnsupportedError: names the setting, and what it must be.
    """
    _check(config, _unsupported_by_mamba(config))


def _check(config: Any, unsupported: Iterator[tuple[str, str]]) -> None:
    wrong = next(unsupported, None)
    if wrong is not None:
        name, expected = wrong
        raise SharedPromptUnsupportedError(name, f"{expected} with shared prompts", getattr(config, name))


def _unsupported(config: Any) -> Iterator[tuple[str, str]]:
    """Settings that a model has and must not have, and what they must be."""

    def has(name: str) -> bool:
        return bool(getattr(config, name, None))

    if has("hybrid_context_parallel"):
        yield "hybrid_context_parallel", "False (every micro-batch is divided among all ranks)"
    for name in ("qk_clip", "log_max_attention_logit"):
        if has(name):
            yield name, "False (the largest scores are never formed)"
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if has(name):
            yield name, "False (attention in fp16 or bf16; other layers may compute in FP8)"
    if has("mtp_num_layers"):
        yield "mtp_num_layers", "None (multi-token prediction shifts tokens and labels by a row)"
    if getattr(config, "cuda_graph_impl", None) not in (None, "none"):
        yield "cuda_graph_impl", "'none' (every micro-batch has another layout)"
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if has(name):
            yield name, "False (every micro-batch has another layout)"
    if getattr(config, "experimental_attention_variant", None) not in (None, "gated_delta_net"):
        yield "experimental_attention_variant", "None or 'gated_delta_net'"
    if has("defer_embedding_wgrad_compute"):
        yield "defer_embedding_wgrad_compute", "False (the head runs over some rows at a time)"
    if has("moe_input_jitter_eps"):
        yield "moe_input_jitter_eps", "None (routers draw in eval mode, too: one row cannot have several draws)"
    if has("moe_router_force_load_balancing"):
        yield "moe_router_force_load_balancing", "False (routes are random)"
    if getattr(config, "moe_router_force_biased", None) is not None:
        yield "moe_router_force_biased", "None (routes are random)"
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None) is not None:
            yield name, "None (which tokens an expert drops depends on all rows)"
    if "quantile_balancing" in _balancing(config):
        yield "moe_router_load_balancing_type", "another (routes depend on all rows)"


def _unsupported_by_delta_nets(config: Any) -> Iterator[tuple[str, str]]:
    if config.context_parallel_size > 1:
        yield "context_parallel_size", "1 for gated delta nets (ranks divide the length of every sequence)"
    if config.deterministic_mode:
        yield "deterministic_mode", "False for gated delta nets (Megatron packs no rows with it)"


def _unsupported_by_mamba(config: Any) -> Iterator[tuple[str, str]]:
    if config.context_parallel_size > 1:
        yield "context_parallel_size", "1 for Mamba-2 (ranks exchange rows for heads)"
    if not config.use_mamba_mem_eff_path:
        yield "use_mamba_mem_eff_path", "True for Mamba-2 (Megatron packs no rows without it)"


def check_training(model: nn.Module, config: Any) -> None:
    """Refuse what a model in training mode cannot compute with packed rows.

    Raises:
        SharedPromptError: names the setting or the module, and what it must be.
    """
    if not model.training:
        return
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(config, name, None):
            expected = "0 in training mode (one row of a prompt cannot have a draw for each response)"
            raise SharedPromptError(name, expected, getattr(config, name))
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise SharedPromptError(f"dropout of {name}", "0 in training mode", module.p)
    if not config.num_moe_experts:
        return
    # Prompts count once in what routers sum over tokens, not once for each response.
    advice = "with shared prompts: routers would count a prompt's tokens once, not once for each response"
    coefficients = config.moe_aux_loss_coeff
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    if set(_balancing(config)) - {"none"} and any(coefficients):
        raise SharedPromptError("moe_aux_loss_coeff", f"0 {advice}", config.moe_aux_loss_coeff)
    if config.moe_z_loss_coeff:
        raise SharedPromptError("moe_z_loss_coeff", f"None {advice}", config.moe_z_loss_coeff)
    if "sinkhorn" in _balancing(config):
        expected = "another in training mode (routes depend on all rows)"
        raise SharedPromptError("moe_router_load_balancing_type", expected, "sinkhorn")
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        raise SharedPromptError("moe_router_bias_update_rate", f"0 {advice}", config.moe_router_bias_update_rate)


def _balancing(config: Any) -> list[str]:
    kinds = config.moe_router_load_balancing_type if config.num_moe_experts else "none"
    return [kinds] if isinstance(kinds, str) else list(kinds)
