# SPDX-License-Identifier: BSD-3-Clause
"""Forwards in which trained parameters that are all zero hide nothing, and to which nothing is written.

Zeros hide what they multiply, as LoRA's B does before its first step. For the time of a module's forward another tensor
stands in such a parameter's place. The parameter, the shard that a rank holds and the copy that FSDP or ZeRO-3 has
gathered are left alone: wrappers may keep what is written to any of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Magnitude of the values.
NUDGE = 0.05


@contextmanager
def nudged(model: nn.Module) -> Iterator[None]:
    """Let modules compute with small values where trained parameters are all zero, the same in all forwards inside."""
    is_flat = any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules())
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if is_flat or any(home for _, home in _homes(name, module)):
                stand_in = _StandIn(name, is_flat)
                hooks.callback(stand_in.leave)
                # Inside the hooks that gather parameters, and let them go.
                hooks.callback(module.register_forward_pre_hook(stand_in.enter).remove)
                hooks.callback(module.register_forward_hook(stand_in.leave, prepend=True).remove)
        yield


class _StandIn:
    """Puts other tensors in the place of a module's own zero parameters, from before its forward until after it."""

    def __init__(self, name: str, is_flat: bool) -> None:
        self._name = name
        self._is_flat = is_flat
        # By name, as gathered parameters are other tensors in each forward; None: not all zero.
        self._values: dict[str, Tensor | None] = {}
        self._replaced: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []

    def enter(self, module: nn.Module, _: Any) -> None:
        homes = [*_homes(self._name, module)]
        if self._is_flat:  # views of FSDP 1's flat parameters are plain attributes
            homes.append((self._name, vars(module)))
        for prefix, home in homes:
            for name, value in [*home.items()]:
                if not _is_trained(value) or (home is vars(module) and not value._is_view()):
                    continue
                key = f"{prefix}.{name}"
                if key not in self._values:
                    self._values[key] = None if _local(value).any() else _nudge(value, key)
                nudge = self._values[key]
                if nudge is not None and value is not nudge:
                    home[name] = nudge
                    self._replaced.append((home, name, value, nudge))

    def leave(self, *_: Any) -> None:
        for home, name, value, nudge in self._replaced:
            if home.get(name) is nudge:  # else a wrapper has put its own there
                home[name] = value
        self._replaced.clear()


def _homes(name: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parameters of a module, and of what only holds some for it: a ParameterDict has no forward."""
    yield name, module._parameters
    for part, child in module.named_children():
        if type(child).forward is nn.Module.forward:
            yield from _homes(f"{name}.{part}", child)


def _is_trained(value: Any) -> bool:
    """True if it is a parameter of numbers that is here and trained; FSDP 1's views of parameters do not say."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel() or value.is_meta:
        return False
    is_own = not isinstance(value, nn.Parameter) or value.requires_grad
    return is_own and not getattr(value, "_is_flat_param", False)


def _nudge(parameter: Tensor, key: str) -> Tensor:
    """A tensor like a parameter, of small values that are equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    nudge = parameter.detach().clone()
    own = _local(nudge)
    own.copy_(torch.rand(own.shape, generator=generator).mul_(2 * NUDGE).sub_(NUDGE))
    return nn.Parameter(nudge) if isinstance(parameter, nn.Parameter) else nudge


def _local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
