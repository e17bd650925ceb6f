# SPDX-License-Identifier: BSD-3-Clause
"""Decisions over ranks: what one of them finds decides for all, which would else wait for each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..host import device_of_group


def all_ranks() -> Any:
    """The group of all processes; None for a process that is alone."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def largest_of_ranks(values: Iterable[float], *groups: Any) -> list[float]:
    """The maximum of each value over the ranks of these groups, all of which must call; NaN counts as infinite.

    Args:
        values: as many on every rank; integers up to 2^53.
        groups: of torch.distributed, one after the other. None, and no group: this process alone.
    """
    found = torch.tensor([*values], dtype=torch.float64)
    found = found.masked_fill(found.isnan(), math.inf)
    for group in groups:
        if group is not None:
            found = found.to(device_of_group(group))
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()
