# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a model before prompts are shared in it, once per mode and set of active adapters."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .... import checks
from ....errors import SharedPromptError, SharedPromptLayoutError
from .. import hybrid, query_pruning
from .probe import Trial, is_trying
from .side_effects import function_of
from .table import check_adapters, check_checkpoints, check_noise, check_positions
from .unwrap import decoder_of, is_adapter_layer, lock_of, without_lora_dropout, wrappers_of

# States that are remembered of a model: whoever wraps it anew in each step has a trial in each.
MOST_STATES = 256

_errors: weakref.WeakKeyDictionary[nn.Module, dict[Any, SharedPromptError | None]] = weakref.WeakKeyDictionary()


@torch.compiler.disable
def check_first_use(
    stock: Any,
    device: torch.device,
    *,
    model: nn.Module | None = None,
    self_check: bool = True,
    share_lora_dropout: bool = False,
    stateless: Sequence[nn.Module] = (),
) -> None:
    """Refuse a model that is not exact on shared prompts in its present mode and with its present adapters.

    With `self_check` a pair of short sequences is tried: forwards of at most 64 tokens without gradients,
    which are collectives where parameters are sharded, so that every rank must ask at the same call. Generators, small
    buffers and counters of hooks are afterwards as they were before.

    Args:
        stock: the transformers model, inside of all wrappers, or its decoder; supported by its configuration.
        device: that of the inputs.
        model: the outermost module around it; None from inside of its forward.
        self_check: whether the pair is tried. If not, only configurations, positions and dropout are looked at.
        share_lora_dropout: let LoRA's dropout in the decoder draw one mask for the one copy of a prompt. It is switched
            off while all else is looked at and tried.
        stateless: modules whose forwards the caller runs in other numbers than stock does, so that none may change
            their buffers.

    Raises:
        SharedPromptError: names what is not exact; inputs on the meta device, where nothing can be tried.
    """
    for name, value in (("self_check", self_check), ("share_lora_dropout", share_lora_dropout)):
        checks.flag(name, value)
    if is_trying():
        return
    if device.type == "meta":
        expected = "inputs that have values (batch.to(device) of a batch that was packed from such)"
        raise SharedPromptError("batch", expected, "one on meta")
    with lock_of(stock):
        hybrid.prepare(stock)
        query_pruning.prepare(stock)
        # Checked every time: the active adapter without layers shows in no module, nor do checkpoints.
        check_adapters(stock if model is None else model)
        check_checkpoints(stock)
        known = _errors.setdefault(stock, {})
        # Keyed by the outermost module too, which takes part in the trial.
        outer = None if model is None else weakref.ref(model)
        # Those without buffers, as most heads are, ask for no trial of their own.
        stateless = [module for module in stateless if next(module.buffers(), None) is not None]
        # Adapters without layers show in no module.
        wrappers = map(vars, wrappers_of(stock if model is None else model))
        adapters = str([(has.get("active_adapter"), has.get("_adapters_disabled")) for has in wrappers])
        options = adapters, self_check, share_lora_dropout, outer, frozenset(map(id, stateless))
        state = (*_state_of(stock), *options)
        if state not in known:
            if len(known) >= MOST_STATES:
                known.clear()
            trial = Trial(stock, device, model, stateless) if self_check else None
            with without_lora_dropout(decoder_of(stock)) if share_lora_dropout else nullcontext():
                known[state] = _error_of(stock, trial)
        error = known[state]
    if error is not None:
        raise copy.copy(error)


def _error_of(stock: Any, trial: Trial | None) -> SharedPromptError | None:
    """A copy, as an error that was raised would hold the tensors of all frames that it has passed."""
    try:
        check_positions(decoder_of(stock))
        check_noise(stock)
        if trial is not None:
            trial.run()
    except SharedPromptLayoutError:  # something on the layout's way, which may be mended
        raise
    except SharedPromptError as error:
        return copy.copy(error)
    return None


def _state_of(stock: nn.Module) -> tuple[Any, ...]:
    """Equal as long as the model has the same parts, mode, dropout and active adapters; in one process, the same hooks.

    Parts are the same if they are as many, of the same classes, and hooks if they run the same code: who registers one
    anew in each step does not try the model in each. Several processes must try a model together, and hooks may come on
    one of them alone (those of loggers, say). Every forward asks for the state, so it takes a third of the time of
    `named_modules`.
    """
    is_alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    modules = kinds = training = 0
    hooks: list[Hashable] = []
    rates = 0.0
    adapters = set()
    pending: list[Any] = [stock]
    while pending:
        module = pending.pop()
        modules += 1
        kinds += id(type(module))
        if is_alone:
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                hooks.append(_code_of(hook))
        training += module.training
        role = _role(type(module))  # type: ignore[arg-type]
        if role == "dropout" and module.training:
            rates += module.p
        elif role == "adapter":
            adapters.add((module.disable_adapters, tuple(getattr(module, "active_adapters", ()))))
        pending += [child for child in module._modules.values() if child is not None]
    return modules, kinds, tuple(hooks), training, rates, frozenset(adapters)


def _code_of(hook: Any) -> Hashable:
    """Qualified name and code of a hook; of an object its class."""
    function = function_of(hook)
    code: Hashable = getattr(function, "__code__", None)  # methods have their function's
    return (type(function) if code is None else function.__qualname__), code


@functools.cache
def _role(kind: Any) -> str | None:
    """State of a model that modules of a class hold: "dropout", "adapter" or None."""
    if issubclass(kind, nn.modules.dropout._DropoutNd):
        return "dropout"
    return "adapter" if is_adapter_layer(kind) else None
