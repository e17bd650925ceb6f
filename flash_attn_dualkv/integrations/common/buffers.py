# SPDX-License-Identifier: BSD-3-Clause
"""Buffers of modules: what forwards make of them, and how they were before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import SharedPromptError

# Size limit of saved tensors: larger ones are weights of quantized models, which no forward writes.
_MOST_ELEMENTS = 2**18


class Kept(NamedTuple):
    """A tensor of a module as it was: its version (one of inference mode has none), and a copy if it is small."""

    name: str
    tensor: Tensor
    version: int | None
    copy: Tensor | None
    home: dict[str, Tensor | None] | None = None  # the buffers of its module, where another may take its place

    @staticmethod
    def of(name: str, tensor: Tensor, home: dict[str, Tensor | None] | None = None) -> Kept:
        is_small = tensor.numel() <= _MOST_ELEMENTS and not tensor.is_meta
        version = None if tensor.is_inference() else tensor._version
        return Kept(name, tensor, version, tensor.detach().clone() if is_small else None, home)

    @property
    def now(self) -> Tensor | None:
        """The tensor that stands in its place."""
        return self.tensor if self.home is None else self.home.get(self.name)

    def has_changed(self) -> bool:
        """True if the values of a small buffer are others."""
        now = self.now
        # A cache that grows is no statistic.
        return self.copy is not None and now is not None and now.shape == self.copy.shape and _differs(now, self.copy)

    def put_back(self) -> None:
        # What was not written is not: a graph that has saved it would not take that. Versions do not
        # tell it of buffers, which batch norm writes without counting; parameters may be sharded.
        is_written = self.version is None or self.tensor._version != self.version
        if self.home is not None:
            is_written = self.copy is not None and _differs(self.tensor, self.copy)
        if is_written and self.copy is not None:
            with torch.inference_mode(self.version is None), torch.no_grad():
                self.tensor.copy_(self.copy)
        if self.home is not None and self.home.get(self.name) is not self.tensor:
            self.home[self.name] = self.tensor


def buffers_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Kept]:
    """The buffers of some modules as they are, by words that name each."""
    return {
        f"buffer {name!r} of {described(of, module)}": Kept.of(name, tensor, module._buffers)
        for of, module in modules
        for name, tensor in module._buffers.items()
        if tensor is not None
    }


@contextmanager
def unchanged_buffers(modules: Iterable[nn.Module], why: str) -> Iterator[None]:
    """Raise SharedPromptError if a buffer of some modules has changed on leaving; it is put back.

    Args:
        why: what is done with the modules that one with state does not stand.
    """
    kept = buffers_of((module._get_name(), module) for module in modules)
    yield
    changed = [name for name, buffer in kept.items() if buffer.has_changed()]
    for name in changed:
        kept[name].put_back()
    if changed:
        expected = f"modules without state where {why}"
        raise SharedPromptError("model", expected, f"one whose forward changes {changed[0]}")


def _differs(tensor: Tensor, other: Tensor) -> bool:
    return not bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())  # NaN is NaN


def described(name: str, module: nn.Module) -> str:
    """A module in an error: its name and its class."""
    return f"{name or 'the model'} ({type(module).__name__})"
