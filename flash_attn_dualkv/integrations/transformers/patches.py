# SPDX-License-Identifier: BSD-3-Clause
"""What `register` and `wrap` add to transformers' base class, for calls that never reach the attention functions.

Three mistakes become errors that say what to do: a model without transformers' attention interface, which raises a bare
KeyError, positions without the dimension of rows, over which rotary embeddings stumble, and labels that a stock loss
would shift by one row, which is wrong for a packed row. Registered names are for
decoders of text: other parts of a model (vision, audio) stay on the stock attention that they have or would choose. And
continuous batching, which knows stock names alone, runs on what a registered name stands for without a layout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ...errors import SharedPromptError
from ..common.patching import in_place_of, replace_once
from .admission import table, unwrap

# Attention implementations made by `register`, and the fallback of each.
own_names: dict[str, str] = {}
# Tower configurations of a model whose attention is being changed.
_unchanged: ContextVar[tuple[Any, ...]] = ContextVar("dualkv_unchanged", default=())


def install() -> None:
    """Add all of it, once."""
    stock_loss = PreTrainedModel.loss_function
    if not hasattr(stock_loss.fget, "dualkv_stock"):
        checked = in_place_of(stock_loss.fget, _checked_loss(stock_loss.fget))
        PreTrainedModel.loss_function = property(checked, stock_loss.fset)
    replace_once(PreTrainedModel, "get_correct_attn_implementation", _checked_choice)
    replace_once(PreTrainedModel, "set_attn_implementation", _change_of_text)
    replace_once(GenerationMixin, "generate_batch", _stock_batching)


def check_labels(labels: Any, shift_labels: Any) -> None:
    """SharedPromptError for labels that a model would shift itself: a packed row's next token is not the next row's."""
    if labels is not None and shift_labels is None:
        expected = "shift_labels=batch.labels[None] beside labels=batch.labels[None] with a shared prompt"
        raise SharedPromptError("labels", expected, "labels alone, which the model would shift by a row")


def _checked_loss(stock: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def loss_function(model: Any) -> Callable[..., Any]:
        loss = stock(model)

        @functools.wraps(loss)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("shared_prompt_layout") is not None:
                check_labels(True, kwargs.get("shift_labels"))
            return loss(*args, **kwargs)

        return checked

    return loss_function


def _check_positions(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook before a model on a registered name."""
    if kwargs.get("shared_prompt_layout") is not None:
        table.check_one_row(kwargs.get("position_ids"))


def _checked_choice(stock: Callable[..., str]) -> Callable[..., str]:
    def get_correct_attn_implementation(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        # Towers get no choice here, before they are made: they then choose as stock ones do.
        _keep(unwrap.tower_configs(model.config), None)
        if requested_attention in own_names and any(model.config is one for one in _unchanged.get()):
            return str(model.config._attn_implementation)
        if requested_attention in own_names and not model._supports_attention_backend:
            # Models older than the interface choose a class by the implementation's name.
            names = vars(sys.modules[type(model).__module__])
            if any(name.endswith("ATTENTION_CLASSES") for name in names):
                expected = "a model whose attention goes through transformers' interface (a newer version may have it)"
                raise SharedPromptError("attn_implementation", expected, type(model).__name__)
        if requested_attention in own_names and _check_positions not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_check_positions, with_kwargs=True)
        return stock(model, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


def _keep(configs: list[Any], implementation: str | None) -> None:
    """Take configurations off registered attention."""
    for config in configs:
        if config._attn_implementation in own_names:
            config._attn_implementation_internal = implementation


def _change_of_text(stock: Callable[..., None]) -> Callable[..., None]:
    def set_attn_implementation(model: Any, *args: Any, **kwargs: Any) -> None:
        towers = unwrap.tower_configs(model.config)
        before = [(config, config._attn_implementation) for config in towers]
        token = _unchanged.set(tuple(towers))
        try:
            stock(model, *args, **kwargs)
        finally:
            _unchanged.reset(token)
        for config, implementation in before:  # of parts that are not asked
            _keep([config], implementation)

    return set_attn_implementation


def _stock_batching(stock: Callable[..., Any]) -> Callable[..., Any]:
    def generate_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
        # On the stock attention that it runs on without a layout, under the name that this has.
        configs = {id(one.config): one.config for one in model.modules() if isinstance(one, PreTrainedModel)}.values()
        before = [(config, config._attn_implementation) for config in configs]
        has_softcap = getattr(unwrap.text_config(model.config), "attn_logit_softcapping", None) is not None
        auto = "sdpa" if model._supports_sdpa and not has_softcap else "eager"
        for config, name in before:
            if name in own_names:
                fallback = own_names[name]
                config._attn_implementation_internal = auto if fallback == "auto" else fallback
        try:
            return stock(model, *args, **kwargs)
        finally:
            for config, name in before:
                config._attn_implementation_internal = name

    return generate_batch
