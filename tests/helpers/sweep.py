# SPDX-License-Identifier: BSD-3-Clause
"""What became of a model on shared prompts: exact, refused or wrong; and tiny models of every causal LM.

The tests assert it, and tools/models_page.py writes it down.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import models_page
import pytest
import torch
from hybrid_models import OPTIONS as HYBRID_OPTIONS
from hybrid_models import in_float64
from tiny_models import COMMON, Samples, Tolerance, dualkv, gradients, replicated_logps, stock_twin, transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from flash_attn_dualkv import SharedPromptError

CAUSAL_LMS = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL = sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
# Sizes and switches by the names that configurations have for them; those that a model does not
# know are ignored.
OPTIONS = dict(
    **COMMON,
    d_model=32, n_embd=32, n_head=4, n_layer=2, n_positions=2048, ffn_dim=48, decoder_layers=2, encoder_layers=2,
    decoder_attention_heads=4, encoder_attention_heads=4, decoder_ffn_dim=48, encoder_ffn_dim=48, head_dim=8,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_topk=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, sliding_window=5,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=97, is_decoder=True, dropout=0.0, hidden_dropout=0.0,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, activation_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, residual_dropout=0.0, embedding_dropout=0.0, router_jitter_noise=0.0, n_shared_experts=1,
    index_topk=4, index_head_dim=16, index_n_heads=2, index_block_size=4, index_topk_blocks=2, router_hidden_size=16,
)  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]
_ALL_HEADS = dict(num_key_value_heads=4)  # of latent attention
_ROPE = dict(rope_type="default", rope_theta=10000.0)
_LEFT_OUT = object()  # for what a configuration calls otherwise and cannot be told
# What single models want to be told.
OWN: dict[str, dict[str, Any]] = {
    **HYBRID_OPTIONS,
    **dict.fromkeys(
        (
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite",
            "glm_moe_dsa", "hy_v4", "minicpm3", "youtu",
        ),
        _ALL_HEADS,
    ),
    "cohere_compass_text": dict(
        layer_types=_MIXED, rope_parameters={"full_attention": None, "sliding_attention": dict(_ROPE)}
    ),
    "codegen": dict(rotary_dim=4),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    "diffllama": _ALL_HEADS,
    "falcon": dict(head_dim=_LEFT_OUT),
    "gemma3n_text": dict(num_hidden_layers=4, layer_types=_MIXED * 2, num_kv_shared_layers=2, laurel_rank=8),
    "gemma4_text": dict(num_hidden_layers=4, layer_types=_MIXED * 2, num_kv_shared_layers=2),
    "gemma4_unified_text": dict(num_hidden_layers=4, layer_types=_MIXED * 2, num_kv_shared_layers=2),
    "gpt_neo": dict(num_layers=2, num_heads=4, window_size=5, attention_types=[[["global", "local"], 1]]),
    "gptj": dict(rotary_dim=4),
    "inkling2_text": dict(unpadded_vocab_size=97),
    "longcat_flash": dict(
        _ALL_HEADS, num_layers=2, expert_ffn_hidden_size=16, ffn_hidden_size=48, zero_expert_num=2
    ),
    "mamba2": dict(num_heads=8, head_dim=8, expand=2, n_groups=1, state_size=8),
    "minimax_m3_vl_text": dict(layer_types=["minimax_m3_sparse", "full_attention"]),
    "olmoe": dict(sliding_window=None),
    "roc_bert": dict(shape_vocab_size=97, pronunciation_vocab_size=97),
    "sarvam_mla": _ALL_HEADS,
    "xlstm": dict(head_dim=_LEFT_OUT, v_head_dim=_LEFT_OUT),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8),
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip
SAMPLES = Samples.random([(40, [12, 3]), (9, [5, 9, 0]), (2, [7])]).take([0, 2, 1, 5, 3, 4])
# In float64 what is left is rounding. Some models compute parts in float32 whatever their type, in
# 4.57 experts.
TOLERANCES = {torch.float64: Tolerance(1e-9, 1e-8), torch.float32: Tolerance(2e-5, 1e-3)}


def unknown_options(model_type: str) -> dict[str, Any]:
    """For `any_model`, to leave out what the configuration does not know: others look at it, and take it for what the
    model has.
    """
    config = transformers.CONFIG_MAPPING[model_type]
    known = {*dir(config), *inspect.signature(config.__init__).parameters, *config.attribute_map}
    known.update(getattr(config, "__dataclass_fields__", ()))
    return dict.fromkeys(OPTIONS.keys() - known, _LEFT_OUT)


def any_model(model_type: str, **options: Any) -> Any:
    """A model, or a skip: some configurations want to be told more.

    Raises:
        SharedPromptError: the model has no attention that can be chosen.
    """
    together = {**OPTIONS, **OWN.get(model_type, {}), **options}
    together = {name: value for name, value in together.items() if value is not _LEFT_OUT}

    def make() -> Any:
        config = transformers.AutoConfig.for_model(model_type, **together)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv")

    try:
        with torch.device("meta"):
            elements = sum(one.numel() for one in make().parameters())
        if elements < 5_000_000:
            with torch.random.fork_rng():
                torch.manual_seed(1)
                model = make().eval()
    except SharedPromptError:
        raise
    except Exception as error:
        pytest.skip(f"cannot be made: {type(error).__name__}")
    if elements >= 5_000_000:
        pytest.skip(f"is not tiny: {elements} parameters")
    with contextlib.suppress(Exception):  # an older version, or a model that has no such choice
        model.set_experts_implementation("eager")
    return model


def largest_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error of gradients, relative to their parameter's, or to a part of the model's where these are 0."""
    largest = max(one.abs().max().item() for one in expected.values())
    errors = []
    for name in got.keys() | expected.keys():
        # Stock code leaves out experts that no token has chosen, or gives them zeros.
        ours, theirs = (side.get(name, torch.zeros(1)).double() for side in (got, expected))
        scale = max(theirs.abs().max().item(), 1e-3 * largest)
        errors.append((ours - theirs).abs().max() / scale)
    return torch.stack(errors).max().item()  # a NaN, if there is one


@dataclass(frozen=True)
class Verdict:
    """What is said of a model; "stock" where the stock model has no answer to compare with."""

    kind: Literal["exact", "refused", "inexact", "stock"]
    reason: str = ""


Stock = Callable[[Any], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def copied(model: Any) -> Iterator[Any]:
    """A copy of a model on stock attention."""
    yield stock_twin(model, "eager")


@contextlib.contextmanager
def switched(model: Any) -> Iterator[Any]:
    """The model itself on stock attention: a copy of a parameter has lost its hooks."""
    model.set_attn_implementation("eager")
    try:
        yield model
    finally:
        model.set_attn_implementation("dualkv")


def verdict_of(model: Any, samples: Samples = SAMPLES, stock: Stock = copied) -> Verdict:
    """Log-probabilities and the gradients of all trained parameters, in the model's mode, against stock sequences.

    Numbers that a forward draws from torch's generator are the same in every forward here: what is left of noise is
    that of single tokens.

    Args:
        model: of `any_model` or its like, with or without adapters.
        stock: makes what it is compared with.

    Raises:
        Exception: another error than the library's own, where the stock model has none.
    """
    for dtype, tolerance in TOLERANCES.items():
        model = model.to(dtype)
        failure: Exception | None = None
        with in_float64() if dtype == torch.float64 else contextlib.nullcontext(), torch.random.fork_rng():
            try:
                got, own = _packed(model, samples)
            except SharedPromptError as error:
                return Verdict("refused", str(error))
            except Exception as error:
                failure = error
            try:
                with stock(model) as one:
                    expected, theirs = _each_alone(one, samples)
            except Exception as error:
                stock_failure = error
                continue
        if failure is not None:
            raise failure
        assert got.shape == expected.shape and got.dtype == expected.dtype
        error = (got - expected).abs().max().item()
        gradient = largest_error(own, theirs)
        if error <= tolerance.value and gradient <= tolerance.gradient:
            return Verdict("exact")
        return Verdict("inexact", f"log-probabilities are {error:.1e} off, gradients {gradient:.1e}")
    return Verdict("stock", f"{type(stock_failure).__name__}: {stock_failure}")


def model_verdict(make: Callable[[str], Any], model_type: str) -> Verdict:
    """Of a new model in training mode."""
    try:
        model = make(model_type).train()
    except SharedPromptError as error:
        return Verdict("refused", str(error))
    return verdict_of(model)


def check_page(title: str, package: str, name: str, verdict: Verdict) -> None:
    """A name is on docs/models.md as its verdict says, if the page was made with the installed package."""
    if models_page.is_of_installed(package):
        assert models_page.listed(title).get(name) == verdict.kind, "run tools/models_page.py again"


def _packed(model: Any, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    logps, _ = dualkv.shared_prompt_forward(model, samples.pack())
    logps.square().sum().backward()
    return logps.detach(), gradients(model)


def _each_alone(model: Any, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
    found = []
    for index, response in enumerate(samples.responses):
        if response:
            torch.manual_seed(0)
            logps, _ = replicated_logps(model, samples.take([index]))
            found.append(logps)
    together = torch.cat(found)
    together.square().sum().backward()
    return together.detach(), gradients(model)
