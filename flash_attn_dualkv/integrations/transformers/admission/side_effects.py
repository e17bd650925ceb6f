# SPDX-License-Identifier: BSD-3-Clause
"""Forwards without consequences: what they draw, count or write is as it was before.

A forward that only tries something out must not move the random numbers of a training run, the bias that a router keeps
in a buffer, or the counter of somebody's hook.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...common.buffers import Kept, buffers_of

_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
# Attributes that every module has and PyTorch manages.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
# Packages whose hooks are left alone: those that shard or move modules need their state, and this
# package's have none.
BOOKKEEPERS = ("torch.", "deepspeed.", "accelerate.", "flash_attn_dualkv.")


class Generators:
    """What a forward draws from: the default generators of PyTorch, Python and NumPy, and those of the model's own.

    Args:
        model: whose modules and hooks may hold generators of their own.
        devices: that it computes on.
    """

    def __init__(self, model: nn.Module, devices: Iterable[torch.device]) -> None:
        indices = {one.index or 0 for one in devices if one.type == "cuda"}
        torchs = [torch.default_generator, *(torch.cuda.default_generators[one] for one in sorted(indices))]
        self._sources = [_Source(random.getstate, random.setstate, random.seed)]
        if (numpy := sys.modules.get("numpy")) is not None:
            self._sources.append(_Source(numpy.random.get_state, numpy.random.set_state, numpy.random.seed))
        others = {id(value): _source_of(value) for value in (*torchs, *(value for value, _ in _variables(model)))}
        self._sources += [one for one in others.values() if one is not None]

    def read(self) -> list[Any]:
        """States of all generators."""
        return [one.read() for one in self._sources]

    def write(self, states: list[Any]) -> None:
        for source, state in zip(self._sources, states):
            source.write(state)

    def seed(self, number: int) -> list[Any]:
        """Seed all generators; returns their states."""
        for source in self._sources:
            source.seed(number)
        return self.read()

    def have_moved(self, since: list[Any]) -> bool:
        return any(not _is_same(one, other) for one, other in zip(self.read(), since))


class _Source(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]


def _source_of(value: Any) -> _Source | None:
    """An object as a source of random numbers, if it is one."""
    if isinstance(value, torch.Generator):
        return _Source(value.get_state, value.set_state, value.manual_seed)
    if isinstance(value, random.Random):
        return _Source(value.getstate, value.setstate, value.seed)
    inner = getattr(value, "bit_generator", None)  # NumPy's Generator
    if inner is None or type(inner).__module__.partition(".")[0] != "numpy":
        return None
    write = functools.partial(setattr, inner, "state")
    return _Source(lambda: inner.state, write, lambda number: write(type(inner)(number).state))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, dict)):  # NumPy: names, numbers and arrays
        parts = (one, other) if isinstance(one, tuple) else (one.values(), other.values())
        return all(map(_is_same, *parts))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@contextmanager
def without_consequences(
    model: nn.Module, devices: Iterable[torch.device]
) -> Iterator[tuple[Generators, dict[str, Kept]]]:
    """Put back generators, small buffers and frozen parameters, and what modules and hooks count, on leaving.

    Yields the generators, and the buffers as they were.
    """
    generators = Generators(model, devices)
    states = generators.read()
    buffers = buffers_of(model.named_modules())
    frozen = [Kept.of(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    restore = [*(one.put_back for one in (*buffers.values(), *frozen)), *_kept_counters(model)]
    try:
        yield generators, buffers
    finally:
        generators.write(states)
        for one in restore:
            one()


# Value of a variable, and its setter.
_Variable = tuple[Any, Callable[[Any], None]]


def _kept_counters(model: nn.Module) -> Iterator[Callable[[], None]]:
    for value, assign in _variables(model):
        if type(value) in (bool, int, float):
            yield functools.partial(assign, value)
        elif type(value) in _CONTAINERS:
            yield functools.partial(_refill, value, value.copy())
        # The longest sequence of a dynamic RoPE, for one. Others may be FSDP 1's views of freed
        # memory, to copy which is a segmentation fault.
        elif type(value) is Tensor and value.dim() == 0 and value.untyped_storage().size():
            yield functools.partial(assign, value)
            yield Kept.of("", value).put_back


def _variables(model: nn.Module) -> Iterator[_Variable]:
    """What modules and their hooks may count in, or draw from."""
    for module in model.modules():
        if not _is_of(type(module), BOOKKEEPERS):
            yield from _named(vars(module), _OF_EVERY_MODULE)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            yield from _variables_of(hook)


def comes_from(hook: Any, packages: tuple[str, ...]) -> bool:
    """Whether a hook is of one of some packages, whose names end with a point."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    is_function = isinstance(hook, (types.FunctionType, types.MethodType))
    return _is_of(hook if is_function else type(hook), packages)


def _is_of(kind: Any, packages: tuple[str, ...]) -> bool:
    return f"{getattr(kind, '__module__', '')}.".startswith(packages)


def _variables_of(hook: Any) -> Iterator[_Variable]:
    """What a hook may count in: its closure, the object that it is a method of, attributes of its own."""
    if isinstance(hook, functools.partial):
        yield from _variables_of(hook.func)
        return
    if comes_from(hook, BOOKKEEPERS):
        return
    owner = hook.__self__ if isinstance(hook, types.MethodType) else hook
    if not isinstance(owner, nn.Module):
        yield from _named(getattr(owner, "__dict__", {}))
    for cell in getattr(hook, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")


def _named(namespace: dict[str, Any], others: frozenset[str] = frozenset()) -> Iterator[_Variable]:
    for name, value in namespace.items():
        if name not in others:
            yield value, functools.partial(namespace.__setitem__, name)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
