# SPDX-License-Identifier: BSD-3-Clause
"""Micro-batches in which the samples of a prompt meet."""

from __future__ import annotations

from typing import Any


def fill(groups: Any, rows: int) -> list[list[int]]:
    """Divide groups among slices of `rows` each, with as few groups cut as first fit finds.

    Groups are looked at in their order, so are the slices; larger ones are cut into slices first.
    """
    pieces = [group[at : at + rows] for group in groups for at in range(0, len(group), rows)]
    slices: list[list[int]] = [[] for _ in range(sum(map(len, pieces)) // rows)]
    left: list[int] = []
    # The largest first: where groups are equally large, as a rule, that is their own order.
    for piece in sorted(pieces, key=len, reverse=True):
        room = next((own for own in slices if rows - len(own) >= len(piece)), None)
        if room is None:
            left += piece
        else:
            room += piece
    for own in slices:
        missing = rows - len(own)
        own += left[:missing]
        left = left[missing:]
    # Where a slice stands depends on the shuffle, not on how large its groups are.
    return sorted(slices, key=min)
