# SPDX-License-Identifier: BSD-3-Clause
"""Batches for the tests of the kernels, and their results in both modes against the oracle."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from groups import Batch, Group, Results, build_groups, run
from launches import CONFIGURATIONS, kernels_ran, poison_free_memory

# Lengths on both sides of tile borders, a prompt, queries without keys, an empty sequence, a
# context without owners.
MIXED = (
    Group(150, ((150, 0), (70, 70), (1, 1), (0, 0), (129, 129), (33, 65))),
    Group(0, ((40, 40), (9, 4))),
    Group(37, ()),
    Group(65, ((85, 20), (0, 30), (10, 0), (64, 64))),
)
both_masks = pytest.mark.parametrize("causal", [True, False])
SMALL = CONFIGURATIONS[0]
Options = dict[str, Any]


def check_both_modes(batch: Batch) -> tuple[Results, Results]:
    poison_free_memory()
    with kernels_ran(*(("forward", "backward") if batch.pairs else ())):
        default = run(batch)
    results = default, run(batch, deterministic=True)
    oracle.check(batch, *results)
    return results


def split_owner_batch(options: Options, causal: bool = True) -> Batch:
    """A short context and one KV head, so that the queries of a context tile are split among blocks."""
    return build_groups([Group(200, ((200, 0), *(((64, 64),) * 48)))], causal=causal, **options | {"heads": (8, 1)})
