# SPDX-License-Identifier: BSD-3-Clause
"""Pixels and grids that belong to prompts: which samples have the same ones, and those of a batch's groups.

Equal tokens do not mean equal images: placeholders look alike. Samples share a prompt where all values are equal, which
is compared value by value: no hash is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..checks import check_count, describe, explain
from ..errors import SharedPromptError, SharedPromptTypeError
from .samples import groups_of, named

ImageValues = Mapping[str, Sequence[Tensor | None]]

# Values of each tensor that are looked at before all of it is compared.
GLIMPSE = 64


class Images(NamedTuple):
    """By the names of a model's inputs the tensors of each sample; None for a sample without."""

    values: Mapping[str, list[Tensor | None]]

    @staticmethod
    def of(images: Any, count: int) -> Images:
        """What a caller has given for `count` samples, checked."""
        values = {name: _checked(name, one, count) for name, one in named("images", images).items()}
        return Images(values)

    def divide(self, groups: Sequence[list[int]], group_ids: Sequence[Any] | None = None) -> list[list[int]]:
        """Groups of samples with equal prompts, divided where images differ; with ids that is an error."""
        if not self.values:
            return [*groups]
        glimpses = self._glimpses([index for one in groups for index in one])
        parts: list[list[int]] = []
        for members in groups:
            found = [
                part for alike in groups_of(map(glimpses.__getitem__, members)) for part in self._alike(members, alike)
            ]
            if group_ids is not None and len(found) > 1:
                expected = f"equal images of the samples with the id {group_ids[members[0]]!r}"
                raise SharedPromptError(
                    explain("group_ids", expected, f"samples {found[0][0]} and {found[1][0]} differ")
                )
            parts += found
        return sorted(parts)

    def _alike(self, members: list[int], places: list[int]) -> list[list[int]]:
        """Members at these places by equal images; all of a part then have the tensors of its first."""
        parts: list[list[int]] = []
        for index in (members[place] for place in places):
            part = next((one for one in parts if self._are_equal(one[0], index)), None)
            if part is None:
                parts.append([index])
                continue
            part.append(index)
            for one in self.values.values():
                one[index] = one[part[0]]
        return parts

    def _are_equal(self, one: int, other: int) -> bool:
        pairs = ((values[one], values[other]) for values in self.values.values())
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    def _glimpses(self, samples: Sequence[int]) -> dict[int, Any]:
        """Shapes, types and some values of each sample; one copy from a GPU for each name."""
        found: dict[int, list[Any]] = {index: [] for index in samples}
        for values in self.values.values():
            given = [(index, one) for index in samples if (one := values[index]) is not None]
            some = [_some_of(one) for _, one in given]
            counts = [len(one) for one in some]
            seen = torch.cat(some).cpu().split(counts) if some else ()
            shown = {index: (one.shape, one.dtype, few.numpy().tobytes()) for (index, one), few in zip(given, seen)}
            for index in samples:
                found[index].append(shown.get(index))
        return {index: tuple(one) for index, one in found.items()}


def _some_of(tensor: Tensor) -> Tensor:
    """Up to `GLIMPSE` values, as float32; zeros of either sign are equal."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // GLIMPSE)][:GLIMPSE].float() + 0.0


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
