# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a model before prompts are shared in it, once per mode and set of active adapters."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdRef

from ....checks import explain
from ....errors import SharedPromptError, SharedPromptLayoutError
from .. import hybrid, query_pruning
from .adapters import check_adapters, is_adapter_layer, without_lora_dropout
from .probe import Trial, is_trying
from .support import FirstUseError, check_checkpoints, check_modules, check_noise, check_positions
from .unwrap import decoder_of, lock_of

__all__ = ["FirstUseError", "check_first_use"]

# States that are remembered of a model, and kinds of hooks of all models: whoever registers another
# hook in each step has a trial in each.
MOST_STATES = 256
MOST_KINDS = 4096
# Elements of a container that are compared by value.
MOST_ELEMENTS = 64

# Factory of the error: a kept exception would hold the tensors of all frames that it has passed.
_Error = Callable[[], SharedPromptError]
_errors: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Error | None]] = weakref.WeakKeyDictionary()


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
        self_check: whether the pair is tried. If not, only parts and configuration are looked at.
        share_lora_dropout: let LoRA's dropout in the decoder draw one mask for the one copy of a prompt. It is switched
            off while all else is looked at and tried.
        stateless: modules whose forwards the caller runs in other numbers than stock does, so that none may change
            their buffers.

    Raises:
        SharedPromptError: names what is not exact; inputs on the meta device, where nothing can be tried.
    """
    if is_trying():
        return
    if device.type == "meta":
        expected = "inputs that have values (batch.to(device) of a batch that was packed from such)"
        raise SharedPromptError(explain("batch", expected, "one on meta"))
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
        stateless = [one for one in stateless if next(one.buffers(), None) is not None]
        state = (*_state_of(stock), self_check, share_lora_dropout, outer, frozenset(map(id, stateless)))
        if state not in known:
            if len(known) >= MOST_STATES:
                known.clear()
            trial = Trial(stock, device, model, stateless) if self_check else None
            with without_lora_dropout(decoder_of(stock)) if share_lora_dropout else nullcontext():
                known[state] = _error_of(stock, trial)
        error = known[state]
    if error is not None:
        raise error()


def _error_of(stock: Any, trial: Trial | None) -> _Error | None:
    try:
        check_modules(stock)
        check_positions(decoder_of(stock))
        check_noise(stock)
        if trial is not None:
            trial.run()
    except SharedPromptLayoutError:  # something on the layout's way, which may be mended
        raise
    except SharedPromptError as error:
        return functools.partial(type(error), *error.args)
    return None


def _state_of(stock: nn.Module) -> tuple[Any, ...]:
    """Equal as long as the model has the same parts, mode, dropout and active adapters; in one process, the same hooks.

    Parts are the same if they are as many, of the same classes, and hooks if they run the same code on the same values:
    who registers one anew in each step does not try the model in each. Several processes must try a model together, and
    hooks may come on one of them alone (those of loggers, say). Every forward asks for the state, so it takes a third
    of the time of `named_modules`.
    """
    is_alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    modules = kinds = training = 0
    hooks: list[int] = []
    rates = 0.0
    adapters = set()
    pending: list[Any] = [stock]
    while pending:
        module = pending.pop()
        modules += 1
        kinds += id(type(module))
        if is_alone:
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                hooks.append(_kind_of(hook))
        training += module.training
        role = _role(type(module))  # type: ignore[arg-type]
        if role == "dropout" and module.training:
            rates += module.p
        elif role == "adapter":
            adapters.add((module.disable_adapters, tuple(getattr(module, "active_adapters", ()))))
        pending += [one for one in module._modules.values() if one is not None]
    return modules, kinds, tuple(hooks), training, rates, frozenset(adapters)


# By identity, as hooks may have no hash; each is there as long as its hook is.
_kinds_of_hooks: dict[int, tuple[weakref.ref[Any], int]] = {}
_kinds: dict[Hashable, int] = {}
_numbers = itertools.count()


def _kind_of(hook: Any) -> int:
    """A number that hooks have in common if they run the same code on the same values.

    The values are those that the hook had when it was first seen: a counter in its closure makes no other hook of it.
    """
    place = id(hook)
    if place in _kinds_of_hooks:
        return _kinds_of_hooks[place][1]
    try:
        alive = weakref.ref(hook, lambda _: _kinds_of_hooks.pop(place, None))
    except TypeError:  # nothing would tell that it is another one's place
        return _number_of((type(hook),))
    number = _number_of(_print_of(hook, ()))
    _kinds_of_hooks[place] = alive, number
    return number


def _number_of(kind: Hashable) -> int:
    if kind not in _kinds:
        if len(_kinds) >= MOST_KINDS:
            _kinds.clear()
        _kinds[kind] = next(_numbers)
    return _kinds[kind]


def _print_of(value: Any, outer: tuple[Any, ...]) -> Hashable:
    """Equal for equal plain values, and for functions of the same code that are bound to such; else by identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return type(value), value
    if any(value is one for one in outer):  # a function that calls itself
        return "outer"
    parts: Iterable[Any]
    if isinstance(value, FunctionType):
        parts = value.__code__, value.__closure__, value.__defaults__, value.__kwdefaults__
    elif isinstance(value, MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, CellType):
        try:
            parts = (value.cell_contents,)
        except ValueError:  # empty yet
            parts = ()
    elif type(value) in (tuple, list) and len(value) <= MOST_ELEMENTS:
        parts = value
    elif type(value) is dict and len(value) <= MOST_ELEMENTS:
        parts = itertools.chain.from_iterable(value.items())
    else:
        try:
            return WeakIdRef(value)
        except TypeError:  # nothing tells whether it is still there: equal to nothing
            return object()
    return type(value), *(_print_of(one, (*outer, value)) for one in parts)


@functools.cache
def _role(kind: Any) -> str | None:
    """State of a model that modules of a class hold: "dropout", "adapter" or None."""
    if issubclass(kind, nn.modules.dropout._DropoutNd):
        return "dropout"
    return "adapter" if is_adapter_layer(kind) else None
