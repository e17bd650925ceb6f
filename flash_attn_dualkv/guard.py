# SPDX-License-Identifier: BSD-3-Clause
"""The guard against a layout that gets lost on its way to the layers that mix tokens.

Models accept keyword arguments that they do not know and may drop them. Attention without its layout is still
attention, over the wrong tokens: no error, only wrong numbers. So whoever passes a layout says how many attention
layers must consume it, and every layer that does reports so here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn

from . import checks
from .errors import SharedPromptLayoutError
from .layout import SharedPromptLayout


@dataclass
class Expectation:
    """A layout that is on its way through a model, and which layers have consumed it so far."""

    layout: SharedPromptLayout
    num_layers: int
    outer: Expectation | None
    owner: object = None  # ends the expectation, if no with statement does
    # Identities of modules, because activation checkpointing may run a layer a second time.
    consumers: set[int] = field(default_factory=set)

    def check(self) -> None:
        """SharedPromptLayoutError unless every attention layer has consumed the layout."""
        got = f"{len(self.consumers)}"
        if len(self.consumers) < self.num_layers:
            got += (
                ": the others attended without it, so the results of this forward are wrong. Either the model does not "
                "run on a registered or wrapped attention, or something on the way drops unknown keyword arguments "
                "(install_layout_hook passes the layout to the backbone itself)"
            )
        if len(self.consumers) != self.num_layers:
            expected = f"consumed by {self.num_layers} layers that mix tokens"
            raise SharedPromptLayoutError("shared_prompt_layout", expected, got)


_expectation: ContextVar[Expectation | None] = ContextVar("dualkv_expectation", default=None)


def current() -> Expectation | None:
    """The innermost expectation of this thread or task."""
    return _expectation.get()


def begin(layout: SharedPromptLayout, num_layers: int, owner: object = None) -> Expectation:
    """Expect that the layout is consumed, until `end`."""
    checks.instance("layout", layout, SharedPromptLayout, " (batch.layout)")
    checks.integer("num_layers", num_layers, 1)
    expectation = Expectation(layout, num_layers, current(), owner)
    _expectation.set(expectation)
    return expectation


def end(expectation: Expectation) -> None:
    """Restore the previous expectation."""
    _expectation.set(expectation.outer)


@contextmanager
def suspended() -> Iterator[None]:
    """Hide the expected layout from forwards inside."""
    token = _expectation.set(None)
    try:
        yield
    finally:
        _expectation.reset(token)


def consume(module: nn.Module, layout: SharedPromptLayout) -> None:
    """Record that an attention layer has got `layout`; SharedPromptLayoutError if another one is expected."""
    expectation = _expectation.get()
    if expectation is None:
        return
    # Equality, not identity: wrappers such as FSDP rebuild dataclasses among the arguments.
    if not layout.is_like(expectation.layout):
        raise SharedPromptLayoutError(
            "shared_prompt_layout", "the layout of the enclosing expect_shared_prompt", "another one"
        )
    expectation.consumers.add(id(module))


@contextmanager
def expect_shared_prompt(layout: SharedPromptLayout, num_layers: int) -> Iterator[None]:
    """Raise unless the forward inside consumes `layout` in `num_layers` layers.

    Leave it before the backward. It counts layers and does not look at the model: `check_supported` and
    `install_layout_hook` say whether that is exact on shared prompts. A backbone that has `install_layout_hook` takes
    the layout from here when it is not among its arguments.

    Args:
        layout: what the model gets as `shared_prompt_layout`.
        num_layers: layers of the model that mix tokens: its attention layers, and of a hybrid model the convolutions
            and recurrences too; >= 1.

    Raises:
        SharedPromptError: an argument is not as described.
        SharedPromptLayoutError: on leaving, if any layer attended without the layout; inside, if a layer gets another.
    """
    expectation = begin(layout, num_layers)
    try:
        yield
    finally:
        end(expectation)
    expectation.check()
