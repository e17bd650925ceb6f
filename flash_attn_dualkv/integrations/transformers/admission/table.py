# SPDX-License-Identifier: BSD-3-Clause
"""Refusals by configuration: what a probe does not see, each with the reason, and what is said before weights exist.

One copy of the prompt stands for all of them if a token's hidden state depends on the tokens that it attends to and on
nothing else. Layers that mix tokens in another way (recurrence, convolution) break that silently unless they hand on
what they carry, as `hybrid` lets them; so do those that see keys by another rule than causality and a sliding window.
Dropout draws one mask for the prompt instead of one per response.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GenericForTokenClassification

from .... import kernels
from ....checks import describe, explain
from ....errors import SharedPromptError, SharedPromptLayoutError, SharedPromptTypeError
from ..hybrid.families import ATTENTION_TYPES, LAYER_TYPES, family_of, is_a, layer_types_of
from .unwrap import active_adapters, decoder_of, layer_configs, lora_dropouts, text_config, tower_names, wrappers_of

# Substrings of the names of inputs other than text.
MEDIA = ("pixel", "image", "token_type_ids", "spatial_shapes", "video", "audio")
# Attribute that marks attention functions that take a layout.
TAKES_LAYOUT = "dualkv_takes_layout"

# Embeddings of positions, and buffers of sines, with a row for each position.
_POSITION_TABLES = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions|pos_encoding)$")
# Fields of models that mix tokens without attention, too, unless their layer_types say otherwise.
_MIXER_FIELDS = re.compile(r"^(mamba|ssm|rwkv|conv_L_cache|linear_conv|lru|hybrid_override_pattern|use_rg_lru)")
# Configuration fields of random numbers that stock training draws for every copy of the prompt.
_NOISE_FIELDS = re.compile(r"(dropout|_pdrop|layerdrop|drop_path|jitter)")
_NOISE_OF_OTHER_HEADS = re.compile(r"^(classifier|summary)_")
_LORA_REMEDIES = (
    "lora_dropout=0.0, or share_lora_dropout=True for one mask of the one copy, which is another regulariser than that "
    "of stock training, and not exact"
)


class FirstUseError(SharedPromptError):
    """A model is not exact on shared prompts in its present mode and with its present adapters."""

    def __init__(self, message: str, reason: str = "self_check") -> None:
        super().__init__(message)
        self.reason = reason  # "dropout", "noise" or "self_check"


def check_supported(config: Any) -> None:
    """Refuse a model, by its configuration, whose layers are not exact on shared prompts.

    Args:
        config: of a transformers model (`model.config`).

    Raises:
        SharedPromptError: names what is not supported.
    """
    if not hasattr(config, "get_text_config"):
        raise SharedPromptTypeError("config", "a transformers configuration (model.config)", describe(config))
    for refusal in _refusals(config):
        raise SharedPromptError(*refusal)


def _refusals(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Arguments of errors, what was expected and what a configuration has.

    A comment says why a probe does not see it.
    """
    # Without an encoder's output its stock forward may fail, too.
    if getattr(config, "is_encoder_decoder", False):
        yield "model", "a decoder-only model", "an encoder-decoder"
    text = text_config(config)
    # A probe does; this is said before weights exist.
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        yield "model", "causal attention", f"bidirectional attention ({text.model_type})"
    # A lost layout is seen, but not that a layer which gets it computes by functions of another package.
    family = family_of(text)
    if family is not None and (refusal := family.refusal()) is not None:
        yield f"layer_types of {text.model_type}", *refusal
    # Chunks and compressed keys begin beyond the 32 tokens of its sequences.
    inexact = sorted(layer_types_of(text) - ATTENTION_TYPES - (LAYER_TYPES if family else frozenset()))
    if inexact:
        kinds = "full or sliding-window attention, or those of a hybrid model in docs/hybrids.md"
        expected = f"layers that are exact on shared prompts ({kinds})"
        yield "layer_types", expected, f"{', '.join(inexact)} ({text.model_type})"
    # Its guard cannot tell an unknown mixer from a layout that gets lost, which is an error and no
    # reason for stock attention.
    mixers = sorted(name for name in text.to_dict() if _MIXER_FIELDS.match(name))
    if mixers and family is None and not layer_types_of(text):
        yield "model", "attention as the only mixer of tokens", f"{text.model_type}, which has {', '.join(mixers)}"
    # Llama 4 scales queries of layers without RoPE by the index of their row, in steps of 8192.
    if getattr(text, "attn_temperature_tuning", None) and 0 in (getattr(text, "no_rope_layers", None) or ()):
        expected = "False (it counts the rows before a token instead of its position)"
        yield "attn_temperature_tuning", expected, text.attn_temperature_tuning
    # By these numbers it is seen whether all layers have got the layout.
    if not getattr(text, "num_attention_heads", None) or not getattr(text, "num_hidden_layers", None):
        yield "model", "a transformer with attention heads and layers", text.model_type


def check_attention(config: Any) -> None:
    """SharedPromptError unless the model runs on an attention implementation that takes a layout."""
    implementation = text_config(config)._attn_implementation
    if not hasattr(AttentionInterface._global_mapping.get(implementation), TAKES_LAYOUT):
        expected = 'a registered or wrapped attention (attn_implementation="dualkv" after register())'
        raise SharedPromptError("model", expected, repr(implementation))


def kernels_lack(config: Any) -> str | None:
    """Requirement that the CUDA kernels do not meet for a supported model; None if they run it.

    To be asked before a forward: on several GPUs, one whose layer raises leaves the others waiting.

    Args:
        config: of a transformers model.
    """
    text = text_config(config)
    # global_head_dim: of layers without a window, where these have another, before transformers 5.24.
    names = "head_dim", "global_head_dim"
    head_dims = (getattr(layer, name, None) or 0 for layer in layer_configs(config) for name in names)
    return kernels.kernels_lack(head_dims, getattr(text, "attn_logit_softcapping", None) or 0.0, torch.device("cuda"))


def is_hybrid(config: Any) -> bool:
    """True if a supported model has layers that carry something along the sequence, beside attention."""
    return family_of(text_config(config)) is not None


def num_mixing_layers(model: Any) -> int:
    """How many layers of a supported model must get the layout: all that mix tokens.

    Args:
        model: a transformers model.
    """
    text = text_config(model.config)
    family = family_of(text)
    if family is None:
        # Cross-attention to images does nothing without images.
        of_images = getattr(text, "cross_attention_layers", None) or ()
        return len(set(range(text.num_hidden_layers)).difference(of_images))
    return sum(is_a(module, family.mixer) or is_a(module, family.attention) for module in model.modules())


def check_checkpoints(model: nn.Module) -> None:
    """Refuse reentrant checkpoints around layers that attend to the keys of earlier ones, as in Gemma 3n and 4.

    A probe computes no gradients. Such a checkpoint knows none but of what a layer is given and returns: those of the
    keys are lost, without a word, in stock training as well. In transformers 4 it is the default.

    Raises:
        SharedPromptError: names the option.
    """
    for layer in model.modules() if torch.is_grad_enabled() else ():
        attention = getattr(layer, "self_attn", None)
        # Before transformers 5 they have a projection, and use it unless there is a cache.
        if not getattr(attention, "is_kv_shared_layer", False) or hasattr(attention, "k_proj"):
            continue
        if is_reentrant(layer):
            expected = "False for layers that attend to the keys of earlier ones, whose gradients would be lost"
            advice = "; model.gradient_checkpointing_enable(dict(use_reentrant=False))"
            raise SharedPromptError(explain("use_reentrant", expected, True) + advice)


def is_reentrant(layer: Any) -> bool:
    """True if a checkpoint loses the gradients of what a layer neither is given nor returns."""
    is_checkpointed = layer.training and getattr(layer, "gradient_checkpointing", False)
    options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
    return is_checkpointed and options.get("use_reentrant") is not False


# Positions


def check_positions(backbone: nn.Module) -> None:
    """Refuse a backbone that counts positions itself, from 0 to the end of the packed row, or from another number on.

    A probe gives positions to a sequence alone too, as wrappers want them: which ones stock would count is not seen.

    Raises:
        SharedPromptError: its forward does not take position_ids, or a module reserves positions.
    """
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        expected = "a backbone whose forward takes position_ids"
        raise SharedPromptError("model", expected, f"that of {type(backbone).__name__}")
    for name, table in _position_tables(backbone):
        # RoBERTa and its like reserve a position for padding: the first token gets the next one.
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            raise SharedPromptError(name, "positions that begin at 0", f"{table.padding_idx + 1}")


def check_length(model: Any, longest: int) -> None:
    """SharedPromptError for sequences that a model's table of positions has no row for.

    On a GPU the look-up would only say "device-side assert", on the CPU "index out of range".

    Args:
        model: a transformers model.
        longest: tokens of the longest sequence.
    """
    if longest <= (getattr(text_config(model.config), "max_position_embeddings", None) or 0):
        return
    for name, table in _position_tables(decoder_of(model)):
        rows = len(table) if isinstance(table, Tensor) else getattr(table, "num_embeddings", longest)
        most = rows - getattr(table, "offset", 0)
        if longest > most:
            expected = f"sequences of at most {most} tokens, as {name} of {type(model).__name__} has no more positions"
            raise SharedPromptError("batch", expected, longest)


def _position_tables(backbone: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names, and modules or buffers."""
    for name, table in (*backbone.named_modules(), *backbone.named_buffers()):
        if _POSITION_TABLES.search(name):
            yield name, table


def check_one_row(position_ids: Any) -> None:
    """SharedPromptLayoutError for positions without the dimension of rows, of which a packed batch has one.

    Models broadcast them: over heads, for example, where there are as many of these.
    """
    if isinstance(position_ids, Tensor) and (position_ids.dim() < 2 or position_ids.shape[-2] != 1):
        expected = "batch.position_ids[None] with a shared prompt, (1, T), or (n, 1, T) where images have several"
        raise SharedPromptLayoutError("position_ids", expected, f"shape {tuple(position_ids.shape)}")


# Images


def media_among(inputs: Mapping[str, Any]) -> list[str]:
    """The names of a model's inputs that are images and the like, or say where these are."""
    given = {name for name, value in inputs.items() if value is not None and any(word in name for word in MEDIA)}
    return sorted(name for name in given if not is_mark_of_text(name, inputs[name]))


def is_mark_of_text(name: str, value: Any) -> bool:
    """True if an input says which tokens are text, and that all of them are: 0."""
    return name.endswith("token_type_ids") and isinstance(value, Tensor) and not value.any()


# Noise


def check_noise(model: Any) -> None:
    """Refuse a model that draws random numbers per token in its present mode; in eval mode dropout does nothing.

    A probe sees noise that shows in one of its few forwards: a small rate does not. Trainers tell dropout, for which
    there is a remedy, from other noise.

    Args:
        model: a transformers model, adapters included.

    Raises:
        FirstUseError: names the module or the field of the configuration.
    """
    reason = ". One copy of the prompt cannot have a draw for each response; set "
    towers = tower_names(model)
    for name, module in model.named_modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and not f"{name}.".startswith(towers)
        if is_dropout and module.training and module.p > 0:
            message = explain(f"dropout of {name}", "0 in training mode", module.p)
            raise FirstUseError(f"{message}{reason}{_remedy(model, module)}", "dropout")
    for field, value in fields_of(text_config(model.config).to_dict()) if model.training else ():
        is_noise = _NOISE_FIELDS.search(field) and not _NOISE_OF_OTHER_HEADS.match(field)
        if is_noise and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            message = explain(f"config.{field}", "0 in training mode", value)
            raise FirstUseError(f"{message}{reason}{_remedy(model, model)}", "dropout")


def _remedy(model: Any, source: nn.Module) -> str:
    """The setting that switches noise off: of a module of dropout, or of the model by its configuration."""
    if any(source is dropout for dropout in lora_dropouts(decoder_of(model))):
        return _LORA_REMEDIES
    if any(source is dropout for dropout in lora_dropouts(model)):
        return "lora_dropout=0.0, or leave this module out of LoRA's target_modules"
    if isinstance(model, GenericForTokenClassification) and source is getattr(model, "dropout", None):
        return "classifier_dropout=0.0 in its configuration (from_pretrained takes it)"
    return "it to 0 before the model is made, or use model.eval()"


def fields_of(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of its parts, with their names."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", part) for inner, part in fields_of(value))
        else:
            yield str(name), value


# Adapters


def check_adapters(model: nn.Module) -> None:
    """Refuse a model with a PEFT adapter, active and enabled, that is not exact on shared prompts by its configuration.

    Args:
        model: with whatever is around it; adapters of PEFT and of transformers' own `add_adapter` are found in it.

    Raises:
        SharedPromptError: names the adapter, the setting, and what it does.
    """
    found = {
        name: reason
        for wrapper in wrappers_of(model)
        for name, config in _configurations(wrapper).items()
        if (reason := _adapter_lacks(config, model.training)) is not None
    }
    # Of LoRA, for example, nothing is found: its layers, which are many, need not be looked at.
    for name in sorted(found.keys() & active_adapters(model)) if found else ():
        expected = "one that changes a token by this token alone and draws no random numbers"
        advice = ". Run batches without a shared prompt, or the model without this adapter"
        raise SharedPromptError(explain(f"PEFT adapter {name!r}", expected, found[name]) + advice)


def _adapter_lacks(config: Any, training: bool) -> str | None:
    """The setting of an adapter that is not exact on shared prompts, and what it does; None if all are.

    A comment says why a probe does not see it.
    """
    peft_type = getattr(config, "peft_type", None)  # a string where it is not PEFT's own enumeration
    kind = str(getattr(peft_type, "value", peft_type))
    # Some need arguments that a probe has not; of the others its error says less.
    if getattr(config, "is_prompt_learning", False):
        return f"peft_type={kind} (it puts virtual tokens in front of each row)"
    if kind == "POLY":
        return f"peft_type={kind} (it needs task_ids, one a row)"
    # Of all rows of a batch: to a probe, which computes the pair as a batch too, that is rounding.
    if kind == "LILY":
        return f"peft_type={kind} (its router takes the mean over all tokens of the row)"
    # A probe's tokens are others.
    if (tokens := getattr(config, "alora_invocation_tokens", None)) is not None:
        return f"alora_invocation_tokens={tokens} (it acts from the last occurrence of these tokens in the row on)"
    # With a generator that each forward seeds, rows of a batch have other draws: rounding to a probe, too.
    samples_always = getattr(config, "sample_at_inference", None)  # a field of PVeRA alone
    if samples_always or (training and samples_always is not None):
        return f"peft_type={kind} with sample_at_inference={samples_always} (it draws a sample for every token)"
    # Drawn ahead of many forwards, so that in a probe's no generator moves.
    if training and getattr(config, "monteclora_config", None) is not None:
        return "monteclora_config in training mode (it draws noise on its weights in every forward)"
    # A probe computes no gradients.
    projection = getattr(getattr(config, "velora_config", None), "init_type", "random")
    if training and projection != "random":
        mean = "its gradient depends on the mean over all tokens of the batch"
        return f'velora_config.init_type={projection!r} in training mode ({mean}; "random" is exact)'
    return None


def _configurations(module: nn.Module) -> dict[str, Any]:
    """The adapters' configurations that a module itself carries, by their names."""
    found = vars(module).get("peft_config") or vars(module).get("_peft_config")
    return found if isinstance(found, dict) else {}
