# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a model, found inside wrappers and adapters, and one of them replaced for the time of a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ....checks import explain
from ....errors import SharedPromptError

# Attributes in which wrappers (DDP, FSDP1, torch.compile, accelerate, DeepSpeed) keep the model.
_WRAPPED_AS = ("_orig_mod", "_fsdp_wrapped_module", "module")


def causal_lm_of(model: nn.Module) -> Any:
    """The transformers model inside wrappers and adapters.

    Raises:
        SharedPromptError: there is none.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        get_base_model = getattr(inner, "get_base_model", None)
        wrapped = [getattr(inner, name) for name in _WRAPPED_AS if isinstance(getattr(inner, name, None), nn.Module)]
        if callable(get_base_model):
            inner = get_base_model()
        elif wrapped:
            inner = wrapped[0]
        else:
            raise SharedPromptError(explain("model", "a transformers model, wrapped or not", type(model).__name__))
    return inner


def backbone_name(causal_lm: Any) -> str | None:
    """The attribute of a causal LM that holds its backbone, the child with the input embeddings; None for a backbone.

    Not `base_model_prefix`, which names an attribute that some classes do not have.
    """
    embeddings = causal_lm.get_input_embeddings()
    for name, child in causal_lm.named_children():
        if child is not embeddings and holds(child, embeddings):
            return str(name)
    return None


def decoder_of(model: Any) -> Any:
    """The decoder of text tokens: of the transformers models that hold the input embeddings the innermost."""
    embeddings = model.get_input_embeddings()
    return [one for one in model.modules() if isinstance(one, PreTrainedModel) and holds(one, embeddings)][-1]


def holds(module: nn.Module, other: nn.Module) -> bool:
    """Whether a module is another one, or contains it."""
    return any(one is other for one in module.modules())


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def lock_of(causal_lm: nn.Module) -> threading.RLock:
    """What a thread must hold while it replaces parts of the model, which another one would put back too early.

    Plain forwards of other threads need no lock: to them the replacements are what they replace.
    """
    with _locks_lock:
        return _locks.setdefault(causal_lm, threading.RLock())


def is_elsewhere(thread: int) -> bool:
    """Whether this runs in another thread. Compilers cannot trace the question, and trace in one thread."""
    return not torch.compiler.is_compiling() and threading.get_ident() != thread


@contextmanager
def replaced_forward(causal_lm: Any, forward: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Let the causal LM answer calls of this thread with `forward(stock, ...)`: below its hooks and wrappers.

    Yields what calls the module around it, and sees that the answer came from `forward`.
    """
    attributes = causal_lm.__dict__
    had_one, before = "forward" in attributes, attributes.get("forward")
    # The bound method, with whatever a library has put around it (autocast, for example).
    causal_lm.forward = replacement = _Replacement(causal_lm.forward, forward)
    try:
        yield replacement.call_outermost
    finally:
        if had_one:
            causal_lm.forward = before
        else:
            del causal_lm.forward


def is_plain(forward: Any, model: nn.Module) -> bool:
    """Whether a forward is the method of the model's class, with nothing around it."""
    return getattr(forward, "__func__", None) is type(model).forward


@contextmanager
def kept_outputs(module: nn.Module) -> Iterator[list[Any]]:
    """A list that gets what a module returns in this thread."""
    outputs: list[Any] = []
    thread = threading.get_ident()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if not is_elsewhere(thread):
            outputs.append(output)

    handle = module.register_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


def is_replaced(module: nn.Module) -> bool:
    """Whether a causal LM answers with something else than its own output."""
    return isinstance(module.__dict__.get("forward"), _Replacement)


class _Replacement:
    def __init__(self, stock: Callable[..., Any], forward: Callable[..., Any]) -> None:
        self._stock = stock
        self._forward = forward
        self._thread = threading.get_ident()
        self._has_answered = False

    def call_outermost(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        output = model(**inputs)
        if not self._has_answered:
            got = f"a {type(model).__name__} that calls a forward which it has kept (a disabled adapter may do so)"
            raise SharedPromptError(explain("model", "a wrapper that calls the transformers model itself", got))
        return output

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if is_elsewhere(self._thread):
            return self._stock(*args, **inputs)
        # Adapters such as X-LoRA weigh experts by the hidden states of a forward that goes before.
        for name in ("output_hidden_states", "output_attentions"):
            if inputs.get(name):
                expected = "a model whose wrappers and adapters call it once, for its log-probabilities"
                got = f"a call with {name}=True (an adapter looks into the model, and cannot be shared)"
                raise SharedPromptError(explain("model", expected, got))
        self._has_answered = True
        return self._forward(self._stock, *args, **inputs)
