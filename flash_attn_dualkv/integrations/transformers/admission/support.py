# SPDX-License-Identifier: BSD-3-Clause
"""Which models are exact on shared prompts: what makes a model unsupported is decided here, and only here.

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
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification

from .... import kernels
from ....checks import describe, explain
from ....errors import SharedPromptError, SharedPromptLayoutError, SharedPromptTypeError
from ..hybrid.families import ATTENTION_TYPES, LAYER_TYPES, family_of, is_a, layer_types_of, mixers_of
from .adapters import lora_dropouts
from .unwrap import decoder_of

# Substrings of the names of inputs other than text.
MEDIA = ("pixel", "image", "token_type_ids", "spatial_shapes", "video", "audio")
# Attribute that marks attention functions that take a layout.
TAKES_LAYOUT = "dualkv_takes_layout"

# Fields of models that also mix tokens without attention, unless their layer_types say otherwise.
_MIXER_FIELDS = re.compile(r"^(mamba|ssm|rwkv|conv_L_cache|linear_conv|lru|hybrid_override_pattern|use_rg_lru)")
_MIXER_CLASSES = re.compile(
    r"mamba|deltanet|linearattention|lightningattention|shortconv|rwkv|rglru|retention|mlstm|slstm|indexer", re.I
)
# Configuration fields of random numbers that stock training draws for every copy of the prompt.
_NOISE_FIELDS = re.compile(r"(dropout|_pdrop|layerdrop|drop_path|jitter)")
_NOISE_OF_OTHER_HEADS = re.compile(r"^(classifier|summary)_")
LORA_REMEDIES = (
    "lora_dropout=0.0, or share_lora_dropout=True for one mask of the one copy, which is another regulariser than that "
    "of stock training, and not exact"
)


# Embeddings of positions, and buffers of sines, with a row for each position.
_POSITION_TABLES = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions|pos_encoding)$")


class FirstUseError(SharedPromptError):
    """A model is not exact on shared prompts in its present mode and with its present adapters."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason  # "dropout", "noise" or "self_check"

    def __str__(self) -> str:
        return str(self.args[0])


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the decoder of text tokens."""
    return config.get_text_config(decoder=True)


def rope_of_ranks(config: Any, longest: int) -> str | None:
    """Why a row cannot be divided among ranks: RoPE whose angles follow the longest sequence.

    Each rank would see that of its own part.
    """
    for kind, most in _varying_ropes(config):
        if longest > most:
            expected = f"sequences of at most {most} tokens on several ranks, as angles of RoPE follow the longest one"
            return explain("shared_prompt_layout", expected, f"{longest} ({kind})")
    return None


def rope_class(config: Any, length: int) -> tuple[int, ...]:
    """Equal for lengths at which a sequence has the same angles of RoPE alone; the longer, the larger.

    Returns:
        For each RoPE whose angles follow the longest sequence: 0 within the original length; beyond it 1 where there is
        one other set of angles, or the length itself where each has its own.
    """
    ropes = _varying_ropes(config)
    return tuple(0 if length <= most else 1 if kind == "longrope" else length for kind, most in ropes)


def _varying_ropes(config: Any) -> list[tuple[str, int]]:
    """The kinds of RoPE whose angles follow the longest sequence, and up to which length they do not."""
    text = text_config(config)
    original = "original_max_position_embeddings"
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    found = []
    for one in (given, *given.values()):  # of the model, or of each kind of layer
        kind = str(one.get("rope_type", one.get("type"))) if isinstance(one, dict) else ""
        if "dynamic" not in kind and kind != "longrope":
            continue
        most = one.get(original) or getattr(text, original, None) or text.max_position_embeddings
        # Dynamic angles are reset below the original length alone.
        found.append((kind, most if kind == "longrope" else most - 1))
    return found


def media_among(inputs: Mapping[str, Any]) -> list[str]:
    """The names of a model's inputs that are images and the like, or say where these are."""
    given = {name for name, value in inputs.items() if value is not None and any(word in name for word in MEDIA)}
    return sorted(name for name in given if not is_mark_of_text(name, inputs[name]))


def is_mark_of_text(name: str, value: Any) -> bool:
    """Whether an input says which tokens are text, and that all of them are: 0."""
    return name.endswith("token_type_ids") and isinstance(value, Tensor) and not value.any()


def tower_configs(config: Any) -> list[Any]:
    """The parts of a configuration, at any depth, that do not describe the decoder of text tokens: vision, audio."""
    parts = _parts(config)
    if not parts:
        return []
    try:
        text = text_config(config)
    except ValueError:  # several text decoders: no layout reaches one of them
        return []
    return [one for one in parts if one is not text and all(part is not text for part in _parts(one))]


def _parts(config: Any) -> list[Any]:
    found = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    own = [one for one in found if hasattr(one, "get_text_config")]
    return own + [part for one in own for part in _parts(one)]


def check_supported(config: Any) -> None:
    """Refuse a model, by its configuration, whose layers are not exact on shared prompts.

    Args:
        config: of a transformers model (`model.config`).

    Raises:
        SharedPromptError: names what is not supported.
    """
    if not hasattr(config, "get_text_config"):
        raise SharedPromptTypeError(explain("config", "a transformers configuration (model.config)", describe(config)))
    if getattr(config, "is_encoder_decoder", False):
        raise SharedPromptError(explain("model", "a decoder-only model", "an encoder-decoder"))
    text = text_config(config)
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise SharedPromptError(explain("model", "causal attention", f"bidirectional attention ({text.model_type})"))
    layer_types = getattr(text, "layer_types", None)
    family = family_of(text)
    if family is not None and (refusal := family.refusal()) is not None:
        raise SharedPromptError(explain(f"layer_types of {text.model_type}", *refusal))
    exact = ATTENTION_TYPES if family is None else ATTENTION_TYPES | LAYER_TYPES
    inexact = sorted(layer_types_of(text) - exact)
    if inexact:
        kinds = "full or sliding-window attention, or those of a hybrid model in docs/hybrids.md"
        expected = f"layers that are exact on shared prompts ({kinds})"
        raise SharedPromptError(explain("layer_types", expected, f"{', '.join(inexact)} ({text.model_type})"))
    if not layer_types and family is None:
        mixers = sorted(name for name in text.to_dict() if _MIXER_FIELDS.match(name))
        if mixers:
            got = f"{text.model_type}, which has {', '.join(mixers)}"
            raise SharedPromptError(explain("model", "attention as the only mixer of tokens", got))
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and not layer_types:
        raise SharedPromptError(explain("attention_chunk_size", "None (chunked attention is not exact)", chunk))
    # Llama 4 scales queries of layers without RoPE by the index of their row, not by position.
    if getattr(text, "attn_temperature_tuning", None) and 0 in (getattr(text, "no_rope_layers", None) or ()):
        expected = "False (it counts the rows before a token instead of its position)"
        raise SharedPromptError(explain("attn_temperature_tuning", expected, text.attn_temperature_tuning))
    if not getattr(text, "num_attention_heads", None) or not getattr(text, "num_hidden_layers", None):
        raise SharedPromptError(explain("model", "a transformer with attention heads and layers", text.model_type))


def check_attention(config: Any) -> None:
    """SharedPromptError unless the model runs on an attention implementation that takes a layout."""
    implementation = text_config(config)._attn_implementation
    if not hasattr(AttentionInterface._global_mapping.get(implementation), TAKES_LAYOUT):
        expected = 'a registered or wrapped attention (attn_implementation="dualkv" after register())'
        raise SharedPromptError(explain("model", expected, repr(implementation)))


def kernels_lack(config: Any) -> str | None:
    """Requirement that the CUDA kernels do not meet for a supported model; None if they run it.

    To be asked before a forward: on several GPUs, one whose layer raises leaves the others waiting.

    Args:
        config: of a transformers model.
    """
    text = text_config(config)
    # global_head_dim: of layers without a window, where these have another.
    head_dims = (getattr(text, name, None) or 0 for name in ("head_dim", "global_head_dim"))
    return kernels.kernels_lack(head_dims, getattr(text, "attn_logit_softcapping", None) or 0.0, torch.device("cuda"))


def is_hybrid(config: Any) -> bool:
    """Whether a supported model has layers that carry something along the sequence, beside attention."""
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


def check_modules(model: nn.Module) -> None:
    """Refuse a model with modules that mix tokens in an unknown way, whatever its configuration says.

    And one whose positions do not begin at 0, as those of packed batches do.

    Raises:
        SharedPromptError: names the module.
    """
    family = family_of(text_config(model.config)) if hasattr(model, "config") else None
    mixers = [f"{name}." for name, _ in mixers_of(model, family)] if family is not None else []
    towers = tower_names(model)
    for name, module in model.named_modules():
        if f"{name}.".startswith(towers):
            continue
        if family is not None and (
            is_a(module, family.attention)
            or any(f"{name}.".startswith(one) or one.startswith(f"{name}.") for one in mixers)
        ):
            continue
        # RoBERTa and its like reserve a position for padding: the first token gets the next one.
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and "position" in name:
            raise SharedPromptError(explain(name, "positions that begin at 0", f"{module.padding_idx + 1}"))
        is_convolution = isinstance(module, nn.modules.conv._ConvNd) and module.kernel_size[-1] > 1
        # The patch embeddings of vision towers are convolutions too.
        is_of_text = "layers." in name and not any(tower in name for tower in ("vision", "visual", "audio"))
        if (is_convolution and is_of_text) or _MIXER_CLASSES.search(type(module).__name__):
            raise SharedPromptError(explain(name, "a module that does not mix tokens", type(module).__name__))


def check_positions(backbone: nn.Module) -> None:
    """Refuse a backbone that counts positions itself, from 0 to the end of the packed row.

    Raises:
        SharedPromptError: its forward does not take position_ids.
    """
    if "position_ids" not in inspect.signature(type(backbone).forward).parameters:
        expected = "a backbone whose forward takes position_ids"
        raise SharedPromptError(explain("model", expected, f"that of {type(backbone).__name__}"))


def check_length(model: Any, longest: int) -> None:
    """SharedPromptError for sequences that a model's table of positions has no row for.

    On a GPU the look-up would only say "device-side assert", on the CPU "index out of range".

    Args:
        model: a transformers model.
        longest: tokens of the longest sequence.
    """
    if longest <= (getattr(text_config(model.config), "max_position_embeddings", None) or 0):
        return
    decoder = decoder_of(model)
    for name, one in (*decoder.named_modules(), *decoder.named_buffers()):
        if not _POSITION_TABLES.search(name):
            continue
        rows = len(one) if isinstance(one, Tensor) else getattr(one, "num_embeddings", longest)
        most = rows - getattr(one, "offset", 0)
        if longest > most:
            expected = f"sequences of at most {most} tokens, as {name} of {type(model).__name__} has no more positions"
            raise SharedPromptError(explain("batch", expected, longest))


def check_one_row(position_ids: Any) -> None:
    """SharedPromptLayoutError for positions without the dimension of rows, of which a packed batch has one.

    Models broadcast them: over heads, for example, where there are as many of these.
    """
    if isinstance(position_ids, Tensor) and (position_ids.dim() < 2 or position_ids.shape[-2] != 1):
        expected = "batch.position_ids[None] with a shared prompt, (1, T), or (n, 1, T) where images have several"
        raise SharedPromptLayoutError(explain("position_ids", expected, f"shape {tuple(position_ids.shape)}"))


def tower_names(model: Any) -> tuple[str, ...]:
    """Where the parts of a model are that do not see text, as prefixes of the names of modules."""
    configs = tower_configs(model.config) if hasattr(model, "config") else []
    if not configs:
        return ()
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and any(module.config is one for one in configs)
    )


def check_noise(model: Any) -> None:
    """Refuse a model that draws random numbers per token in its present mode; in eval mode dropout does nothing.

    Args:
        model: a transformers model, adapters included.

    Raises:
        FirstUseError: names the module or the field of the configuration.
    """
    reason = ". One copy of the prompt cannot have a draw for each response; set "
    advice = f"{reason}it to 0 before the model is made, or use model.eval()"
    towers = tower_names(model)
    for name, module in model.named_modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and not f"{name}.".startswith(towers)
        if is_dropout and module.training and module.p > 0:
            message = explain(f"dropout of {name}", "0 in training mode", module.p)
            if any(module is one for one in lora_dropouts(decoder_of(model))):
                advice = f"{reason}{LORA_REMEDIES}"
            elif any(module is one for one in lora_dropouts(model)):
                advice = f"{reason}lora_dropout=0.0, or leave this module out of LoRA's target_modules"
            elif isinstance(model, GenericForTokenClassification) and module is getattr(model, "dropout", None):
                advice = f"{reason}classifier_dropout=0.0 in its configuration (from_pretrained takes it)"
            raise FirstUseError(message + advice, "dropout")
    if not model.training:
        return
    for field, value in fields_of(text_config(model.config).to_dict()):
        is_noise = _NOISE_FIELDS.search(field) and not _NOISE_OF_OTHER_HEADS.match(field)
        if is_noise and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            raise FirstUseError(explain(f"config.{field}", "0 in training mode", value) + advice, "dropout")


def check_checkpoints(model: nn.Module) -> None:
    """Refuse reentrant checkpoints around layers that attend to the keys of earlier ones, as in Gemma 3n and 4.

    Such a checkpoint knows no gradient but of what a layer is given and returns: those of the keys are lost, without a
    word, in stock training as well. In transformers 4 it is the default.

    Raises:
        SharedPromptError: names the option.
    """
    if not torch.is_grad_enabled():
        return
    for layer in model.modules():
        attention = getattr(layer, "self_attn", None)
        # Before transformers 5 they have a projection, and use it unless there is a cache.
        if not getattr(attention, "is_kv_shared_layer", False) or hasattr(attention, "k_proj"):
            continue
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            options = getattr(layer._gradient_checkpointing_func, "keywords", {})
            if options.get("use_reentrant") is not False:
                expected = "False for layers that attend to the keys of earlier ones, whose gradients would be lost"
                advice = "; model.gradient_checkpointing_enable(dict(use_reentrant=False))"
                raise SharedPromptError(explain("use_reentrant", expected, options.get("use_reentrant")) + advice)


def fields_of(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of its parts, with their names."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in fields_of(value))
        else:
            yield str(name), value
