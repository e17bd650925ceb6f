# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a model and of its configuration, inside of wrappers and adapters; its forward, replaced for a call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

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
            raise SharedPromptError("model", "a transformers model, wrapped or not", type(model).__name__)
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
    return [part for part in model.modules() if isinstance(part, PreTrainedModel) and holds(part, embeddings)][-1]


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the decoder of text tokens."""
    return config.get_text_config(decoder=True)


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer of the text decoder; where these differ, some fields are only there."""
    text = text_config(config)
    own = getattr(text, "per_layer_config", None)
    return [text if own is None else own[index] for index in range(text.num_hidden_layers)]


def tower_configs(config: Any) -> list[Any]:
    """The parts of a configuration, at any depth, that do not describe the decoder of text tokens: vision, audio."""
    parts = _parts(config)
    if not parts:
        return []
    try:
        text = text_config(config)
    except ValueError:  # several text decoders: no layout reaches one of them
        return []
    return [part for part in parts if part is not text and all(inner is not text for inner in _parts(part))]


def _parts(config: Any) -> list[Any]:
    found = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    own = [part for part in found if hasattr(part, "get_text_config")]
    return own + [inner for part in own for inner in _parts(part)]


def tower_names(model: Any) -> tuple[str, ...]:
    """The parts of a model that do not see text, as prefixes of the names of modules."""
    configs = tower_configs(model.config) if hasattr(model, "config") else []
    return tuple(
        f"{name}."
        for name, module in (model.named_modules() if configs else ())
        if isinstance(module, PreTrainedModel) and any(module.config is config for config in configs)
    )


def holds(module: nn.Module, other: nn.Module) -> bool:
    """True if a module is another one, or contains it."""
    return any(part is other for part in module.modules())


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def lock_of(causal_lm: nn.Module) -> threading.RLock:
    """What a thread must hold while it replaces parts of the model, which another one would put back too early.

    Plain forwards of other threads need no lock: to them the replacements are what they replace.
    """
    with _locks_lock:
        return _locks.setdefault(causal_lm, threading.RLock())


def is_elsewhere(thread: int) -> bool:
    """True if this runs in another thread. Compilers cannot trace the question, and trace in one thread."""
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
    """True if a forward is the method of the model's class, with nothing around it."""
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
    """True if a causal LM answers with something else than its own output."""
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
            raise SharedPromptError("model", "a wrapper that calls the transformers model itself", got)
        return output

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if is_elsewhere(self._thread):
            return self._stock(*args, **inputs)
        # Adapters such as X-LoRA weigh experts by the hidden states of a forward that goes before.
        for name in ("output_hidden_states", "output_attentions"):
            if inputs.get(name):
                expected = "a model whose wrappers and adapters call it once, for its log-probabilities"
                got = f"a call with {name}=True (an adapter looks into the model, and cannot be shared)"
                raise SharedPromptError("model", expected, got)
        self._has_answered = True
        return self._forward(self._stock, *args, **inputs)


# Adapters. PEFT itself is not imported: its models are known by what they carry.


def is_adapter_layer(kind: Any) -> bool:
    """True if modules of a class are PEFT's layers: there it is a property, of transformers' models a method."""
    return isinstance(getattr(kind, "disable_adapters", None), property)


def wrappers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The wrappers of a model of transformers, and that model: where PEFT keeps configurations."""
    yield model
    if not isinstance(model, PreTrainedModel):
        for child in model.children():
            yield from wrappers_of(child)


def active_adapters(model: nn.Module) -> set[str]:
    """The names of all adapters that take part in a forward."""
    layers: list[Any] = [module for module in model.modules() if is_adapter_layer(type(module))]
    enabled = [layer for layer in layers if not layer.disable_adapters]
    if layers and not enabled:
        return set()
    names = {name for layer in enabled for name in layer.active_adapters}
    # Adapters without layers, such as virtual tokens: the wrapper says which one is active.
    for wrapper in wrappers_of(model):
        active = vars(wrapper).get("active_adapter")
        if isinstance(active, (str, list)) and not vars(wrapper).get("_adapters_disabled", False):
            names.update([active] if isinstance(active, str) else active)
    return names


def lora_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The dropout in front of the matrices A of LoRA's layers."""
    held = (getattr(module, "lora_dropout", None) for module in model.modules() if is_adapter_layer(type(module)))
    dropouts = (dropout for each in held if isinstance(each, nn.ModuleDict) for dropout in each.values())
    return [dropout for dropout in dropouts if isinstance(dropout, nn.Dropout)]


@contextmanager
def without_lora_dropout(model: nn.Module) -> Iterator[None]:
    """Let LoRA's layers drop nothing for a while, whatever the mode of the model."""
    switched = [dropout for dropout in lora_dropouts(model) if dropout.training]
    for dropout in switched:
        dropout.training = False
    try:
        yield
    finally:
        for dropout in switched:
            dropout.training = True
