# SPDX-License-Identifier: BSD-3-Clause
"""How a layout reaches the layers of a hybrid model that mix tokens, and the proof that each has used it.

Model files hand keyword arguments on to their decoder layers, but not all do so to the convolutions and recurrences
inside: a hook on each decoder layer keeps the layout while the layer runs. Layers run once more when activations are
recomputed, in the backward, when nothing around the forward is there any longer; what is among the arguments of the
layer itself is there both times. Older versions of transformers run the hooks of a layer again as well; newer ones do
not, and there the layout must be among the arguments of the convolution or recurrence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .... import guard
from ....errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from ....layout import SharedPromptLayout, is_in_backward
from ....parallel.sharded import DividedLayout
from ....pieces import PieceLayout
from ...common.patching import replace_once
from ...recurrences import mixers
from ..admission.unwrap import holds
from . import families

_WITH_LAYOUT: dict[str, Callable[..., Any]] = {
    families.CONVOLUTION: mixers.convolution,
    families.DELTA_RULE: mixers.gated_delta_rule,
    families.CHANNEL_DELTA_RULE: mixers.gated_delta_rule,
    families.SCAN: mixers.mamba2_scan,
    families.FUSED_SCAN: mixers.no_fused_scan,
}
# Whether activation checkpointing runs a layer with its hooks again.
_RECOMPUTES_HOOKS = "__call__" in vars(GradientCheckpointingLayer)
_CACHES = ("cache", "cache_params", "past_key_values", "past_key_value")


@dataclass(frozen=True)
class _Running:
    """A decoder layer or a layer inside that mixes tokens, while it runs in this thread."""

    module: nn.Module
    layout: SharedPromptLayout | None
    outer: _Running | None
    called: list[str] | None = None  # functions that the layer has called


_running: ContextVar[_Running | None] = ContextVar("dualkv_running_layer", default=None)


def prepare(model: Any) -> None:
    """Let the layers of a supported model take layouts where these do not reach them by attention alone.

    Args:
        model: a transformers model. It is changed if it is a hybrid one: for calls with a layout only, once.
    """
    family = families.family_of(model.config.get_text_config(decoder=True))
    if family is None:
        return
    file = family.file
    kind = getattr(file, family.mixer)
    replace_once(kind, "forward", functools.partial(_forward_with_layout, family.functions))
    if family.is_global:
        for name in (*family.functions, families.FUSED_SCAN):
            stock = getattr(file, name, None)
            if stock is not None and not isinstance(stock, MixerFunction):
                setattr(file, name, MixerFunction(name, stock))
    else:
        for _, module in families.mixers_of(model, family):
            for name in family.functions:
                stock = getattr(module, families.ATTRIBUTES[name])
                if not isinstance(stock, MixerFunction):
                    setattr(module, families.ATTRIBUTES[name], MixerFunction(name, stock or _causal_conv1d))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and _leave_layer not in module._forward_hooks.values():
            module.register_forward_pre_hook(_enter_layer, with_kwargs=True)
            module.register_forward_hook(_leave_layer, always_call=True)


def check_running(attention: nn.Module) -> None:
    """SharedPromptLayoutError if an attention layer of a hybrid model got a layout that the other layers will not."""
    config = getattr(attention, "config", None)
    if families.family_of(config) is None or is_in_backward():
        return
    running = _running.get()
    if running is None or not holds(running.module, attention):
        expected = "a hybrid model's layout through shared_prompt_forward, or a model that has install_layout_hook"
        raise SharedPromptLayoutError("shared_prompt_layout", expected, "a plain forward of the model")


class MixerFunction:
    """A function of a model file that mixes tokens, and what stands for it while a layer with a layout runs."""

    def __init__(self, name: str, stock: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock, updated=())
        self.name = name
        self.dualkv_stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None or running.layout is None or running.called is None:
            return self.dualkv_stock(*args, **kwargs)
        running.called.append(self.name)
        layout = running.layout
        if isinstance(layout, PieceLayout):
            layer = getattr(running.module, "layer_idx", None)
            layer = id(running.module) if layer is None else layer
            layout = layout.called_by(f"{layer}, call {len(running.called)}: {self.name}")
        return _compute(self.name, self.dualkv_stock, layout, args, kwargs)


@torch.compiler.disable
def _compute(
    name: str, stock: Callable[..., Any], layout: SharedPromptLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return _WITH_LAYOUT[name](stock, layout, *args, **kwargs)


def _enter_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _running.set(_Running(module, kwargs.get("shared_prompt_layout"), _running.get()))


def _leave_layer(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    running = _running.get()
    if running is not None and running.module is module:  # else another hook ended the forward before it started
        _running.set(running.outer)


def _forward_with_layout(functions: tuple[str, ...], stock: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class whose layers mix tokens, for all models of its file: with a layout, if there is one."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = _running.get()
        layout = _layout_of(self, kwargs, outer)
        called: list[str] = []
        _running.set(_Running(self, layout, outer, called))
        try:
            output = stock(self, *args, **kwargs)
        finally:
            _running.set(outer)
        if layout is not None:
            missing = [name for name in functions if name not in called]
            if missing:
                expected = f"a forward that calls {' and '.join(missing)} of its model file"
                got = "one that does not: its tokens were mixed without the layout"
                raise SharedPromptLayoutError(type(self).__name__, expected, got)
            guard.consume(self, layout)
        return output

    return forward


def _layout_of(mixer: nn.Module, kwargs: dict[str, Any], outer: _Running | None) -> SharedPromptLayout | None:
    """The layout with which a layer runs, among its arguments or of the decoder layer that it lies in."""
    layout: SharedPromptLayout | None = kwargs.get("shared_prompt_layout")
    # May be stale: PyTorch runs no hooks after Ctrl-C, so that another model may be running.
    if layout is None and outer is not None and outer.layout is not None and holds(outer.module, mixer):
        layout = outer.layout
        if not _RECOMPUTES_HOOKS and getattr(outer.module, "gradient_checkpointing", False):
            expected = "a decoder layer that hands it on, for activation checkpointing"
            raise SharedPromptLayoutError("shared_prompt_layout", expected, type(outer.module).__name__)
    if isinstance(layout, DividedLayout):
        expected = "a row that lies on one GPU, for a layer that carries a state along the sequence"
        raise SharedPromptUnsupportedError("shared_prompt_layout", expected, "one that ranks divide")
    if layout is not None and any(kwargs.get(name) is not None for name in _CACHES):
        raise SharedPromptError("use_cache", "False with a shared prompt in a hybrid model", True)
    return layout


def _causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: Tensor | None = None
) -> Tensor:
    """What older model files compute without the package causal_conv1d, where that would be called.

    x (1, C, T), weight (C, K), seq_idx (1, T) -> (1, C, T). A token sees those of its seq_idx only.
    """
    width, rows = weight.shape[-1], x.shape[-1]
    if seq_idx is None:
        out = functional.conv1d(x, weight[:, None], bias, padding=width - 1, groups=weight.shape[0])[:, :, :rows]
    else:
        out = x * weight[:, -1:]
        for back in range(1, min(width, rows)):
            is_own = seq_idx[:, None, back:] == seq_idx[:, None, :-back]
            # Selected, not multiplied: invisible inputs may be NaN.
            seen = (x[:, :, :-back] * weight[:, -1 - back, None]).where(is_own, 0)
            out = out + functional.pad(seen, (back, 0))
        out = out if bias is None else out + bias[:, None]
    return out if activation is None else ACT2FN[activation](out)
