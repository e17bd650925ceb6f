# SPDX-License-Identifier: BSD-3-Clause
"""A generation batch's slices, with the completions of a prompt in the same slice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ...data.divided import linked
from ...data.given import groups_of
from ...data.images import images_of
from ..common.siblings import fill


def keep_siblings_together(slices: list[dict[str, Any]], window: int | None = None) -> list[dict[str, Any]]:
    """Move rows between equally large slices so that rows with equal prompts meet.

    TRL shuffles the completions before it divides them. The order of the prompts after the shuffle,
    which is random, is kept, and no random number is drawn: the trainer's next one stays the same.

    Args:
        slices: of one generation batch: tensors whose first dimension is the rows, lists of rows,
            values that all rows have in common, or images as TRL keeps them. Others leave the
            slices as they are.
        window: slices of an optimizer step. Those that share a prompt are neighbours then, and in one window where it
            holds them.
    """
    stock, slices = slices, [split_pixel_values_by_grid(inputs) for inputs in slices]
    rows = _rows(slices)
    if len(slices) < 2 or rows is None:
        return stock
    merged = {name: _join([inputs[name] for inputs in slices]) for name in slices[0]}
    padding = merged["prompt_mask"] == 0
    prompts = merged["prompt_ids"].masked_fill(padding, -1).tolist()
    images = {name: value for name, value in merged.items() if isinstance(value, list) and isinstance(value[0], Tensor)}
    _, firsts = images_of(images, len(prompts))
    groups = groups_of(zip(map(tuple, prompts), firsts))
    parts = fill(groups, rows)
    if window is not None:
        group_of = {row: number for number, group in enumerate(groups) for row in group}
        clusters = linked([{group_of[row] for row in part} for part in parts])
        places = fill(clusters, window if len(parts) % window == 0 else len(parts))
        parts = [parts[place] for place in chain.from_iterable(places)]
    moved = [{name: _select(value, part) for name, value in merged.items()} for part in parts]
    return [unsplit_pixel_values_by_grid(inputs) for inputs in moved]


def _rows(slices: Sequence[dict[str, Any]]) -> int | None:
    """Rows of each slice; None if they differ, or something is not divided by rows."""
    counts = {len(inputs["prompt_ids"]) for inputs in slices}
    for inputs in slices:
        if inputs.keys() != slices[0].keys():
            return None
        counts |= {len(value) for value in inputs.values() if _is_divided(value)}
    return counts.pop() if len(counts) == 1 else None


def _is_divided(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _join(values: list[Any]) -> Any:
    if not _is_divided(values[0]):
        return values[0]
    return torch.cat(values) if isinstance(values[0], Tensor) else [row for value in values for row in value]


def _select(value: Any, rows: list[int]) -> Any:
    if not _is_divided(value):
        return value
    return value[rows] if isinstance(value, Tensor) else [value[row] for row in rows]
