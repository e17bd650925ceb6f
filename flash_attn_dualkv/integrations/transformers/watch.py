# SPDX-License-Identifier: BSD-3-Clause
"""Modules of a model, watched or disturbed while a forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .consequences import Generators

# Callbacks before a module's forward and its hooks, and after both.
Watcher = Callable[[str, nn.Module, Any], None]


@contextmanager
def watched(model: nn.Module, enter: Watcher | None, leave: Watcher) -> Iterator[None]:
    """Call `enter` with a module's name, itself and its arguments, and `leave` with its output in their stead."""
    handles = []
    for name, module in model.named_modules():
        if enter is not None:
            before = lambda module, args, name=name: enter(name, module, args)  # noqa: E731
            handles.append(module.register_forward_pre_hook(before, prepend=True))
        after = lambda module, args, output, name=name: leave(name, module, output)  # noqa: E731
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def jittered(model: nn.Module, size: float, seed: int) -> Iterator[None]:
    """Multiply what embeddings and decoder layers give with 1 + u, |u| <= size: errors as those of rounding."""
    generators: dict[torch.device, torch.Generator] = {}

    def jitter(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        device = first.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        factors = torch.rand(first.shape, generator=generators[device], device=device).mul_(2 * size).add_(1 - size)
        changed = (first * factors).to(first.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    disturbed = [one for one in model.modules() if isinstance(one, (GradientCheckpointingLayer, nn.Embedding))]
    handles = [one.register_forward_hook(jitter) for one in disturbed]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_to_draw(model: nn.Module, generators: Generators, forward: Callable[[], Any]) -> str | None:
    """The innermost of the modules that move a generator first, hooks included, with its class."""
    found: list[str] = []
    states: list[list[Any]] = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        states.append(generators.read())

    def leave(name: str, module: nn.Module, output: Any) -> None:
        if generators.have_moved(states.pop()):
            found.append(described(name, module))

    with watched(model, enter, leave):
        forward()
    return found[0] if found else None


def outputs_of(
    model: nn.Module, forward: Callable[[], Any], rows: Callable[[Tensor], Tensor | None]
) -> dict[str, tuple[nn.Module, Tensor]]:
    """What is compared of the modules' outputs in a forward, by name, from the innermost that runs first.

    Args:
        rows: of an output what is compared; None for an output of another shape.
    """
    found: dict[str, tuple[nn.Module, Tensor]] = {}

    def leave(name: str, module: nn.Module, output: Any) -> None:
        first = next(tensors_of(output), None)
        compared = None if first is None or not first.is_floating_point() else rows(first)
        if compared is not None:
            before = [found[name][1]] if name in found else []  # sequences that run one after the other
            found[name] = module, torch.cat([*before, compared.detach()])

    with watched(model, None, leave):
        forward()
    return found


def described(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def tensors_of(output: Any) -> Iterator[Tensor]:
    """An output's tensors, at any depth of tuples and of transformers' outputs."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from tensors_of(one)
    elif isinstance(output, dict):
        for one in output.values():
            yield from tensors_of(one)
