# SPDX-License-Identifier: BSD-3-Clause
"""The forwards that verl puts in the place of transformers', and which of the two a layer runs.

verl replaces forwards of classes, for as long as the process lives. Those inside a decoder
(attention of Qwen2.5-VL, layers of Qwen3.5) drop arguments that they do not know, the layout among
them, and divide a packed row into sequences in ways of their own. With a layout such a layer runs
what transformers has there, without one what verl has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from verl.utils import ulysses
from verl.utils.activation_offload import ActivationHandler
from verl.workers.engine.fsdp import transformer_impl

from ...errors import SharedPromptError
from ..common.patching import replace_once
from ..transformers.admission import unwrap

Forward = Callable[..., Any]

# What transformers had and what verl has as the forward of each class that verl has changed.
_transformers: dict[type[nn.Module], Forward] = {}
_verl: dict[type[nn.Module], Forward] = {}
_is_stock: ContextVar[bool] = ContextVar("dualkv_verl_stock_layers", default=False)


def install() -> None:
    """Let verl's patches keep what they replace, and offloading wait for gradients; once."""
    replace_once(transformer_impl, "apply_monkey_patch", _remembering)
    replace_once(ActivationHandler, "wrap_module_forward_method", _with_gradients)


def _remembering(stock: Forward) -> Forward:
    def apply_monkey_patch(model: nn.Module, *args: Any, **options: Any) -> None:
        # Patches are those of a family: they come to classes of other models that are here, too.
        kinds: set[type[nn.Module]] = {*map(type, model.modules()), *_transformers}
        before = {kind: kind.forward for kind in kinds}
        stock(model, *args, **options)
        for kind, forward in before.items():
            if kind.forward is not forward:
                _keep(kind, forward)
        for module in model.modules():
            if is_replaced(module) and isinstance(tower := getattr(module, "visual", None), nn.Module):
                tower.register_forward_hook(_with_mean)

    return apply_monkey_patch


def _with_gradients(stock: Callable[..., None]) -> Callable[..., None]:
    """Layers offload activations where there are gradients: verl counts layers, and only backwards count back."""

    def wrap_module_forward_method(self: Any, module: nn.Module) -> None:
        own = module.forward
        stock(self, module)
        offloading = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (offloading if torch.is_grad_enabled() else own)(*args, **kwargs)

        module.forward = functools.wraps(own)(forward)

    return wrap_module_forward_method


def is_replaced(module: nn.Module) -> bool:
    """True if a forward of verl's stands for that of the module's class."""
    return str(getattr(type(module).forward, "__module__", "")).startswith("verl.")


def decoder_of(model: nn.Module) -> Any:
    """The decoder of text tokens: the innermost transformers model with the embeddings.

    Raises:
        SharedPromptError: no transformers model is inside; what its layers run is only verl's.
    """
    decoder = unwrap.decoder_of(unwrap.causal_lm_of(model))
    for name, module in decoder.named_modules():
        if is_replaced(module) and not (module is decoder and type(decoder) in _transformers):
            expected = "transformers' forward (load this package before the process builds its first model with verl)"
            raise SharedPromptError(name or "model", expected, f"that of {type(module).forward.__module__}")
    if is_replaced(decoder):
        # verl's takes anything, and hands it on: which arguments there are, transformers' says.
        type(decoder).forward.__wrapped__ = _transformers[type(decoder)]
    return decoder


@contextmanager
def stock_layers() -> Iterator[None]:
    """Let layers run what transformers has there, and every rank of Ulysses whole rows."""
    group = ulysses.get_ulysses_sequence_parallel_group()
    ulysses.set_ulysses_sequence_parallel_group(None)
    token = _is_stock.set(True)
    try:
        yield
    finally:
        _is_stock.reset(token)
        ulysses.set_ulysses_sequence_parallel_group(group)


def _keep(kind: type[nn.Module], before: Forward) -> None:
    """Remember both forwards of a class; a layer's class then chooses between them."""
    is_known = kind in _transformers
    own = _transformers.setdefault(kind, before)
    _verl[kind] = kind.forward

    @functools.wraps(own)
    def choose(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_stock = kwargs.get("shared_prompt_layout") is not None or _is_stock.get()
        chosen = own if is_stock else _verl[kind]
        return chosen(self, *args, **kwargs)

    if not issubclass(kind, PreTrainedModel):  # models hand on what they are given
        # Patched again, for another engine: what chooses already stands in `before`.
        kind.forward = before if is_known else choose


def _with_mean(tower: nn.Module, args: Any, output: Any) -> None:
    """A mean of a tower's output: verl 0.9 takes it of texts, and Qwen2.5-VL's is no tensor."""
    if not hasattr(output, "mean") and isinstance(features := getattr(output, "pooler_output", None), Tensor):
        output.mean = features.mean
