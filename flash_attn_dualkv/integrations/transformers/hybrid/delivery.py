"""How a layout reaches the layers of a hybrid model that mix tokens, and the proof that each has used it.

Model files hand keyword arguments on to their decoder layers, but not all do so to the convolutions and recurrences
inside. A hook on each decoder layer keeps the layout while the layer runs. Layers run once more when activations are
recomputed, in the backward, when nothing around the forward is there any longer: what a hook finds among the arguments
of the layer itself is there both times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ....checks import explain
from ....errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from ....layout import SharedPromptLayout
from ...ulysses import UlyssesLayout
from .. import guard
from . import mixers
from .families import (
    ATTRIBUTES,
    CHANNEL_DELTA_RULE,
    CONVOLUTION,
    DELTA_RULE,
    FUSED_SCAN,
    SCAN,
    Family,
    family_of,
    mixers_of,
)

_WITH_LAYOUT: dict[str, Callable[..., Any]] = {
    CONVOLUTION: mixers.convolution,
    DELTA_RULE: mixers.gated_delta_rule,
    CHANNEL_DELTA_RULE: mixers.gated_delta_rule,
    SCAN: mixers.mamba2_scan,
    FUSED_SCAN: mixers.no_fused_scan,
}
_CACHES = ("cache_params", "past_key_values", "past_key_value")


@dataclass
class _Running:
    """A decoder layer or a mixer inside that runs in this thread."""

    module: nn.Module
    layout: SharedPromptLayout | None
    outer: _Running | None
    functions: tuple[str, ...] = ()  # of a mixer, which it must call
    called: set[str] = field(default_factory=set)


_running: ContextVar[_Running | None] = ContextVar("dualkv_running_layer", default=None)


def install(model: nn.Module, family: Family) -> None:
    """Let the layers of a model take layouts, once. Without a layout they compute what they did before."""
    file = family.file
    if family.is_global:
        for name in (*family.functions, FUSED_SCAN):
            stock = getattr(file, name, None)
            if stock is not None and not isinstance(stock, MixerFunction):
                setattr(file, name, MixerFunction(name, stock))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            _hook(module, _enter_layer, _leave)
    for _, module in mixers_of(model, family):
        if not family.is_global:
            for name in family.functions:
                stock = getattr(module, ATTRIBUTES[name])
                if not isinstance(stock, MixerFunction):
                    setattr(module, ATTRIBUTES[name], MixerFunction(name, stock or _causal_conv1d))
        _hook(module, functools.partial(_enter_mixer, family.functions), _leave)


def _hook(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    if after not in module._forward_hooks.values():
        module.register_forward_pre_hook(before, with_kwargs=True)
        # At the end of all that wrappers do, and after an error too.
        module.register_forward_hook(after, always_call=True)


def check_running(attention: nn.Module) -> None:
    """SharedPromptLayoutError if an attention layer of a hybrid model got a layout that the other layers will not."""
    config = getattr(attention, "config", None)
    if family_of(config) is not None and _running.get() is None:
        expected = "a hybrid model's layout through shared_prompt_forward, or a model that has install_layout_hook"
        raise SharedPromptLayoutError(explain("shared_prompt_layout", expected, "a plain forward of the model"))


class MixerFunction:
    """A function of a model file that mixes tokens, and what stands for it while a layer with a layout runs."""

    def __init__(self, name: str, stock: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stock, updated=())
        self.name = name
        self.dualkv_stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        if running is None or running.layout is None or not running.functions:
            return self.dualkv_stock(*args, **kwargs)
        running.called.add(self.name)
        return _compute(self.name, self.dualkv_stock, running.layout, args, kwargs)


@torch.compiler.disable
def _compute(
    name: str, stock: Callable[..., Any], layout: SharedPromptLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return _WITH_LAYOUT[name](stock, layout, *args, **kwargs)


def _enter_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _running.set(_Running(module, kwargs.get("shared_prompt_layout"), _running.get()))


def _enter_mixer(functions: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    outer = _running.get()
    layout = outer.layout if outer is not None else None
    if layout is not None:
        _check_call(layout, kwargs)
    _running.set(_Running(module, layout, outer, functions))


def _check_call(layout: SharedPromptLayout, kwargs: dict[str, Any]) -> None:
    if isinstance(layout, UlyssesLayout):
        expected = "a row that lies on one GPU, for a layer that carries a state along the sequence"
        raise SharedPromptUnsupportedError(explain("shared_prompt_layout", expected, "one that ranks divide"))
    if any(kwargs.get(name) is not None for name in _CACHES):
        raise SharedPromptError(explain("use_cache", "False with a shared prompt in a hybrid model", True))


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    running = _running.get()
    if running is None or running.module is not module:  # another hook has ended the forward before it began
        return
    _running.set(running.outer)
    # Without an output the forward has raised, or a recomputation has all that it wanted.
    if running.layout is None or not running.functions or output is None:
        return
    missing = [name for name in running.functions if name not in running.called]
    if missing:
        expected = f"a forward that calls {' and '.join(missing)} of its model file"
        got = "one that does not: its tokens were mixed without the layout"
        raise SharedPromptLayoutError(explain(type(module).__name__, expected, got))
    guard.consume(module, running.layout)


def _causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: None = None
) -> Tensor:
    """What older model files compute without the package causal_conv1d: (1, C, T), weight (C, K) -> (1, C, T)."""
    out = functional.conv1d(x, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])
    out = out[:, :, : x.shape[-1]]
    return out if activation is None else ACT2FN[activation](out)
