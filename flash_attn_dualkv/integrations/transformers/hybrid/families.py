# SPDX-License-Identifier: BSD-3-Clause
"""Which hybrid models are known: the class of their layers that mix tokens, and the functions by which it does so.

A family is exact where its model file leaves the mixing to functions that can be called with a state. They are global
names of the file in newer versions of transformers; in older ones, of some families, attributes of each layer.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from ...common.patching import stock_of

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
CHANNEL_DELTA_RULE = "chunk_kimi_delta_attention"
SCAN = "mamba2_chunk_scan"
FUSED_SCAN = "mamba2_split_conv1d_scan_combined"
# Layer attributes that hold the same functions in older model files.
ATTRIBUTES = {CONVOLUTION: "causal_conv1d_fn", DELTA_RULE: "chunk_gated_delta_rule"}

# Fields in which older configurations name the kinds of their layers. A layer with both attention
# and a recurrence may be called "attention" there.
_OLDER_LAYER_TYPES = ("layers_block_type", "block_types")

_DELTA_NET = (CONVOLUTION, DELTA_RULE)
_CHANNEL_DELTA_NET = (CONVOLUTION, CHANNEL_DELTA_RULE)
_MAMBA2 = (CONVOLUTION, SCAN)

# Kinds of layers in configurations: attention; known token mixers, and layers that mix no tokens.
ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "mamba", "mlp", "moe"})


@dataclass(frozen=True)
class Family:
    """A hybrid model.

    Attributes:
        package: of transformers.models.
        mixer: the class of its layers that mix tokens by something else than attention.
        attention: the class of its attention layers.
        functions: of its file, each of which a forward of such a layer calls.
        has_attributes: whether older versions have them as attributes of the layer.
    """

    package: str
    mixer: str
    attention: str
    functions: tuple[str, ...]
    has_attributes: bool = False

    @property
    def file(self) -> types.ModuleType:
        return importlib.import_module(f"transformers.models.{self.package}.modeling_{self.package}")

    @property
    def is_global(self) -> bool:
        """True if the functions are global names of the file: its own, whatever package may stand behind them."""
        return all(_is_own(self.file, name) for name in self.functions)

    def refusal(self) -> tuple[str, str] | None:
        """What is expected and what there is, if this version of transformers cannot hand states on."""
        # A library that replaces the layer mixes tokens in its own way.
        kind = getattr(self.file, self.mixer, None)
        owner = self.file.__name__ if kind is None else kind.forward.__module__
        if owner != self.file.__name__:
            return f"the {self.mixer} of transformers", f"one whose forward is that of {owner}"
        if self.is_global or (self.has_attributes and hasattr(self.file, DELTA_RULE)):
            return None
        expected = f"transformers 5.17 or newer, whose {self.mixer} can be given the state of a prompt"
        return expected, f"transformers {transformers.__version__}"


# Keyed by the model type of the text configuration.
FAMILIES = {
    "qwen3_next": Family("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextAttention", _DELTA_NET, has_attributes=True),
    "qwen3_5_text": Family("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5Attention", _DELTA_NET, has_attributes=True),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeAttention", _DELTA_NET, has_attributes=True
    ),
    "olmo_hybrid": Family("olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridAttention", _DELTA_NET),
    "kimi_linear": Family("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearAttention", _CHANNEL_DELTA_NET),
    "granitemoehybrid": Family("granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridAttention", _MAMBA2),
    "bamba": Family("bamba", "BambaMixer", "BambaAttention", _MAMBA2),
    "falcon_h1": Family("falcon_h1", "FalconH1Mixer", "FalconH1Attention", _MAMBA2),
    "nemotron_h": Family("nemotron_h", "NemotronHMamba2Mixer", "NemotronHAttention", _MAMBA2),
    "zamba2": Family("zamba2", "Zamba2MambaMixer", "Zamba2Attention", _MAMBA2),
    "lfm2": Family("lfm2", "Lfm2ShortConv", "Lfm2Attention", (CONVOLUTION,)),
    "lfm2_moe": Family("lfm2_moe", "Lfm2MoeShortConv", "Lfm2MoeAttention", (CONVOLUTION,)),
    "lfm3": Family("lfm3", "Lfm3ShortConv", "Lfm3Attention", (CONVOLUTION,)),
    "bailing_hybrid": Family(
        "bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridAttention", _CHANNEL_DELTA_NET
    ),
}


def family_of(text_config: Any) -> Family | None:
    """The family of a text configuration, or None for models without such layers."""
    family = FAMILIES.get(getattr(text_config, "model_type", ""))
    if family is None:
        return None
    types = {str(one) for one in getattr(text_config, "layer_types", None) or ()}
    return None if types and types <= ATTENTION_TYPES else family


def layer_types_of(text_config: Any) -> set[str]:
    """The kinds of layers that a text configuration names; empty if it names none."""
    fields = (getattr(text_config, name, None) or () for name in ("layer_types", *_OLDER_LAYER_TYPES))
    return {str(one) for field in fields for one in field}


def mixers_of(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Names and layers of a model that mix tokens by something else than attention."""
    for name, module in model.named_modules():
        if is_a(module, family.mixer):
            yield name, module


def state_columns(mixer: Any) -> int:
    """Numbers of the state of a layer with a recurrence: of each head a matrix."""
    heads = getattr(mixer, "num_v_heads", None) or mixer.num_heads
    rows = getattr(mixer, "head_k_dim", None) or getattr(mixer, "ssm_state_size", None) or mixer.head_dim
    return int(heads * rows * (getattr(mixer, "head_v_dim", None) or mixer.head_dim))


def is_a(module: nn.Module, name: str) -> bool:
    """True if a module is of a class of that name. Its own class may be FSDP2's, derived from the model's."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _is_own(file: types.ModuleType, name: str) -> bool:
    """True if a file has a function of its own under a name; others are imported, and None where a package lacks."""
    function = stock_of(getattr(file, name, None))
    # With the package kernels, such functions are modules, which it may let run something else.
    is_replaceable = isinstance(function, nn.Module) and hasattr(function, "kernel_layer_name")
    return is_replaceable or (callable(function) and getattr(function, "__module__", None) == file.__name__)
