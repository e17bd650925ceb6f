# SPDX-License-Identifier: BSD-3-Clause
"""Pixels and grids that belong to prompts: which samples have the same ones, and those of a batch's groups.

Equal tokens do not mean equal images: placeholders look alike. Samples share a prompt where all values are equal, which
is compared value by value: no hash is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, SharedPromptTypeError
from .given import groups_of, named

ImageValues = Mapping[str, Sequence[Tensor | None]]

# Values of each tensor that are looked at before all of it is compared.
GLIMPSE = 64


def images_of(images: Any, count: int) -> tuple[dict[str, list[Tensor | None]], list[int]]:
    """Images of `count` samples as a caller gives them, checked; and of each the first sample with the same images."""
    values = {name: _checked(name, tensors, count) for name, tensors in named("images", images).items()}
    if not values:
        return {}, [0] * count
    of_samples = [*zip(*values.values())]
    firsts = [*range(count)]
    for alike in groups_of(zip(*map(_glimpses, values.values()))):
        for index in alike:
            # The last candidate is the sample itself.
            unique = (sample for sample in alike if firsts[sample] == sample)
            firsts[index] = next(twin for twin in unique if all(map(_are_equal, of_samples[twin], of_samples[index])))
    return values, firsts


def _are_equal(tensor: Tensor | None, other: Tensor | None) -> bool:
    return tensor is other or (tensor is not None and other is not None and torch.equal(tensor, other))


def _glimpses(values: Sequence[Tensor | None]) -> list[Any]:
    """Shape and up to `GLIMPSE` values of each tensor, as float32, of which zeros are equal; one copy from a GPU."""
    flat = [tensor.detach().reshape(-1) for tensor in values if tensor is not None]
    some = [tensor[:: max(1, len(tensor) // GLIMPSE)][:GLIMPSE].float() + 0.0 for tensor in flat]
    seen = iter(torch.cat(some).cpu().split([*map(len, some)]) if some else ())
    return [None if tensor is None else (tensor.shape, next(seen).numpy().tobytes()) for tensor in values]


def _checked(name: str, values: Any, count: int) -> list[Tensor | None]:
    name = f"images[{name!r}]"
    given = [*checks.items(name, values, "tensors (of a sample each)")]
    checks.check_count(name, given, count, "samples")
    first: Tensor | None = None
    for index, tensor in enumerate(given):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.is_nested:
            raise SharedPromptTypeError(
                f"{name}[{index}]", "a tensor of at least one dimension, or None", checks.describe(tensor)
            )
        first = tensor if first is None else first
        if (tensor.shape[1:], tensor.dtype, tensor.device) != (first.shape[1:], first.dtype, first.device):
            expected = (
                f"(any, {', '.join(map(str, first.shape[1:]))}) values of {first.dtype} on {first.device}, as before"
            )
            raise SharedPromptError(f"{name}[{index}]", expected, checks.describe(tensor))
    return given
