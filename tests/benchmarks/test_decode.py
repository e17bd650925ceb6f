# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of decoding: forests of its shapes, and the page of its results."""

from __future__ import annotations

import bench_decode
import pytest


@pytest.mark.parametrize(
    "name",
    ["4x3x1K", "ragged-4x2", "half-2x4x2K", "levels-2x8x1K", "2x2x1K-q4", "2x2x1K-page256", "2x2x1K-page64-own9-mla16"],
)
def test_forests(name: str) -> None:
    """Requests share the pages of what they are below, and nothing else; every row counts once."""
    step = bench_decode.make_step(name)
    rows = {page: min(step.page_size, keys - column * step.page_size) for table, keys in zip(step.tables, step.keys)
            for column, page in enumerate(table)}  # fmt: skip
    assert step.bytes == sum(rows.values()) * (1152 if step.has_latents else step.kv_heads * 512)
    assert not step.has_latents or {keys - 1024 for keys in step.keys} == {9}
    owners: dict[int, set[int]] = {}
    for request, table in enumerate(step.tables):
        for page in table:
            owners.setdefault(page, set()).add(request)
    shared = {page: set(members) for pages, members in step.trunks for page in pages}
    assert all(
        found == shared.get(page, found) and (len(found) == 1 or page in shared) for page, found in owners.items()
    )
