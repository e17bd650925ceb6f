"""What `register` and `wrap` add to transformers' base class: two mistakes become errors that say what to do.

Both concern calls that never reach the attention functions: a model without transformers' attention interface, which
raises a bare KeyError, and labels that a stock loss would shift by one row, which is wrong for a packed row.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ...checks import explain
from ...errors import SharedPromptError

own_names: set[str] = set()  # of attention implementations that `register` has made


def install() -> None:
    """Add the checks, once."""
    stock_loss = PreTrainedModel.loss_function
    if not hasattr(stock_loss.fget, "dualkv_stock"):
        PreTrainedModel.loss_function = property(_checked_loss(stock_loss.fget), stock_loss.fset)
    stock_choice = PreTrainedModel.get_correct_attn_implementation
    if not hasattr(stock_choice, "dualkv_stock"):
        PreTrainedModel.get_correct_attn_implementation = _checked_choice(stock_choice)


def check_labels(labels: Any, shift_labels: Any) -> None:
    """SharedPromptError for labels that a model would shift itself: a packed row's next token is not the next row's."""
    if labels is not None and shift_labels is None:
        expected = "shift_labels=batch.labels[None] beside labels=batch.labels[None] with a shared prompt"
        raise SharedPromptError(explain("labels", expected, "labels alone, which the model would shift by a row"))


def _checked_loss(stock: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def loss_function(model: Any) -> Callable[..., Any]:
        loss = stock(model)

        @functools.wraps(loss)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("shared_prompt_layout") is not None:
                check_labels(True, kwargs.get("shift_labels"))
            return loss(*args, **kwargs)

        return checked

    loss_function.dualkv_stock = stock  # type: ignore[attr-defined]
    return loss_function


def _checked_choice(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def get_correct_attn_implementation(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in own_names and not model._supports_attention_backend:
            # Models of before the interface choose a class by the implementation's name.
            names = vars(sys.modules[type(model).__module__])
            if any(name.endswith("ATTENTION_CLASSES") for name in names):
                expected = "a model whose attention goes through transformers' interface (a newer version may have it)"
                raise SharedPromptError(explain("attn_implementation", expected, type(model).__name__))
        return stock(model, requested_attention, *args, **kwargs)

    get_correct_attn_implementation.dualkv_stock = stock  # type: ignore[attr-defined]
    return get_correct_attn_implementation
