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
from ..checks import check_count, describe, explain
from ..errors import SharedPromptError, SharedPromptTypeError
from .given import groups_of, named

ImageValues = Mapping[str, Sequence[Tensor | None]]

# Values of each tensor that are looked at before all of it is compared.
GLIMPSE = 64


def images_of(images: Any, count: int) -> tuple[dict[str, list[Tensor | None]], list[int]]:
    """What a caller has given for `count` samples, checked; and of each sample the first one with the same images."""
    values = {name: _checked(name, one, count) for name, one in named("images", images).items()}
    if not values:
        return {}, [0] * count
    of_samples = [*zip(*values.values())]
    firsts = [*range(count)]
    for alike in groups_of(zip(*map(_glimpses, values.values()))):
        for index in alike:
            # The last candidate is the sample itself.
            different = (one for one in alike if firsts[one] == one)
            firsts[index] = next(one for one in different if all(map(_are_equal, of_samples[one], of_samples[index])))
    return values, firsts


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _glimpses(values: Sequence[Tensor | None]) -> list[Any]:
    """Shape and up to `GLIMPSE` values of each tensor, as float32, of which zeros are equal; one copy from a GPU."""
    flat = [one.detach().reshape(-1) for one in values if one is not None]
    some = [one[:: max(1, len(one) // GLIMPSE)][:GLIMPSE].float() + 0.0 for one in flat]
    seen = iter(torch.cat(some).cpu().split([*map(len, some)]) if some else ())
    return [None if one is None else (one.shape, next(seen).numpy().tobytes()) for one in values]


def _checked(name: str, values: Any, count: int) -> list[Tensor | None]:
    name = f"images[{name!r}]"
    given = [*checks.items(name, values, "tensors (of a sample each)")]
    check_count(name, given, count, "samples")
    first: Tensor | None = None
    for index, one in enumerate(given):
        if one is None:
            continue
        if not isinstance(one, Tensor) or one.dim() == 0 or one.is_nested:
            raise SharedPromptTypeError(
                explain(f"{name}[{index}]", "a tensor of at least one dimension, or None", describe(one))
            )
        first = one if first is None else first
        if (one.shape[1:], one.dtype, one.device) != (first.shape[1:], first.dtype, first.device):
            expected = (
                f"(any, {', '.join(map(str, first.shape[1:]))}) values of {first.dtype} on {first.device}, as before"
            )
            raise SharedPromptError(explain(f"{name}[{index}]", expected, describe(one)))
    return given
