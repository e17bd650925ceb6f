# SPDX-License-Identifier: BSD-3-Clause
"""Forwards without side effects: what they draw, count or write is afterwards as it was before.

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
from typing import Any

import torch
from torch import Tensor, nn

from ...common.buffers import Kept, buffers_of

_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
# Attributes that every module has and PyTorch manages.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
# Packages whose hooks are left alone: those that shard or move modules need their state, and this
# package's have none.
BOOKKEEPERS = ("torch.", "deepspeed.", "accelerate.", "flash_attn_dualkv.")

# Functions of a generator: to read its state, to write it, and to seed it.
_Source = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]


class Generators:
    """What a forward draws from: the default generators of PyTorch, Python and NumPy, and those of the model's own.

    Args:
        model: whose modules and hooks may hold generators of their own.
        devices: that it computes on.
    """

    def __init__(self, model: nn.Module, devices: Iterable[torch.device]) -> None:
        indices = {device.index or 0 for device in devices if device.type == "cuda"}
        torchs = [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(indices))]
        self._sources: list[_Source] = [(random.getstate, random.setstate, random.seed)]
        if (numpy := sys.modules.get("numpy")) is not None:
            self._sources.append((numpy.random.get_state, numpy.random.set_state, numpy.random.seed))
        others = {id(value): _source_of(value) for value in (*torchs, *(value for value, _ in _variables(model)))}
        self._sources += [source for source in others.values() if source is not None]

    def read(self) -> list[Any]:
        """States of all generators."""
        return [read() for read, _, _ in self._sources]

    def write(self, states: list[Any]) -> None:
        for (_, write, _), state in zip(self._sources, states):
            write(state)

    def seed(self, number: int) -> list[Any]:
        """Seed all generators; returns their states."""
        for _, _, seed in self._sources:
            seed(number)
        return self.read()

    def have_moved(self, since: list[Any]) -> bool:
        return not all(map(_is_same, self.read(), since))


def _source_of(value: Any) -> _Source | None:
    """An object as a source of random numbers, if it is one."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state, value.manual_seed
    if isinstance(value, random.Random):
        return value.getstate, value.setstate, value.seed
    inner = getattr(value, "bit_generator", None)  # NumPy's Generator
    if inner is None or type(inner).__module__.partition(".")[0] != "numpy":
        return None
    write = functools.partial(setattr, inner, "state")
    return lambda: inner.state, write, lambda number: write(type(inner)(number).state)


def _is_same(state: Any, other: Any) -> bool:
    if isinstance(state, (tuple, dict)):  # NumPy: names, numbers and arrays
        parts = (state, other) if isinstance(state, tuple) else (state.values(), other.values())
        return all(map(_is_same, *parts))
    same = state == other
    return bool(same.all() if hasattr(same, "all") else same)


@contextmanager
def without_side_effects(
    model: nn.Module, devices: Iterable[torch.device]
) -> Iterator[tuple[Generators, dict[str, Kept]]]:
    """Put back generators, small buffers and frozen parameters, and what modules and hooks count, on leaving.

    Yields the generators, and the buffers as they were.
    """
    generators = Generators(model, devices)
    states = generators.read()
    buffers = buffers_of(model.named_modules())
    frozen = [Kept.of(name, tensor) for name, tensor in model.named_parameters() if not tensor.requires_grad]
    restore = [*(kept.put_back for kept in (*buffers.values(), *frozen)), *_kept_counters(model)]
    try:
        yield generators, buffers
    finally:
        generators.write(states)
        for put_back in restore:
            put_back()


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


def _variables(model: nn.Module) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """What modules and their hooks may count in, or draw from: values, and setters of their variables.

    A hook has its closure, the object that it is a method of, and attributes of its own.
    """
    for module in model.modules():
        spaces = [] if _is_of(type(module), BOOKKEEPERS) else [vars(module)]
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            function = function_of(hook)
            if comes_from(function, BOOKKEEPERS):
                continue
            owner = getattr(function, "__self__", function)
            spaces += [] if isinstance(owner, nn.Module) else [getattr(owner, "__dict__", {})]
            for cell in getattr(function, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # it has no value yet
                    yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
        for space in spaces:
            for name, value in space.items():
                if name not in _OF_EVERY_MODULE:
                    yield value, functools.partial(space.__setitem__, name)


def comes_from(hook: Any, packages: tuple[str, ...]) -> bool:
    """True if a hook is of one of some packages, whose names end with a point."""
    function = function_of(hook)
    is_function = isinstance(function, (types.FunctionType, types.MethodType))
    return _is_of(function if is_function else type(function), packages)


def function_of(hook: Any) -> Any:
    """A hook without arguments that are bound to it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _is_of(kind: Any, packages: tuple[str, ...]) -> bool:
    return f"{getattr(kind, '__module__', '')}.".startswith(packages)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    container.extend(before) if isinstance(container, (list, deque)) else container.update(before)
