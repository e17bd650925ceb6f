# SPDX-License-Identifier: BSD-3-Clause
"""Results of the kernels: every pair of values of the test space against fp64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import oracle
import pytest
import torch
from groups import (
    Batch,
    Case,
    Results,
    build,
    covering_array,
    one_large_advantage,
    random_case,
    run,
    shrink,
)
from launches import DEVICE, GPU_MARKS, kernel_families, kernels_ran, poison_free_memory, use_kernels
from torch import Tensor

pytestmark = GPU_MARKS

# The shapes of the main job, beside the covering array's: a long prompt, many responses and heads
# at once.
LARGE_CASES = (
    Case(4096, 1000, 64, 128, (32, 8), query="prompt", ragged=True),
    Case(4096, 1000, 16, 64, (40, 8), dtype="float16", query="prompt", ragged=True, groups="several", layout="packed"),
    Case(4096, 1000, 7, 256, (8, 1), query="longer"),
)


def sized(cases: tuple[Case, ...]) -> list[Case]:
    return list(cases) if DEVICE == "cuda" else list(dict.fromkeys(shrink(case) for case in cases))


def results_of_all_kernels(batch: Batch, dlse: Tensor | None = None) -> Iterator[Results]:
    """The batch by every family of kernels, in default and deterministic mode."""
    directions = ("forward", "backward") if batch.pairs else ()
    families = kernel_families(max(batch.q.shape[2], batch.dout.shape[2]))
    if not families:
        pytest.skip("no kernels of this head dim here")
    for family in families:
        with use_kernels(family):
            poison_free_memory()
            with kernels_ran(*directions):
                results = run(batch, dlse=dlse)
            yield results
            yield run(batch, dlse=dlse, deterministic=True)


def check_case(case: Case) -> None:
    """Forward and backward against fp64; a third of the cases with a gradient of the LSE."""
    batch = build(case, DEVICE)
    dlse = torch.randn(batch.q.shape[1], batch.q.shape[0], device=DEVICE) if case.seed % 3 == 0 else None
    oracle.check(batch, *results_of_all_kernels(batch, dlse), dlse=dlse)


@pytest.mark.parametrize("case", sized((*covering_array(), *LARGE_CASES)), ids=lambda case: case.id)
def test_every_pair_of_values(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_cases(seed: int) -> None:
    """Three and more values that go wrong together only."""
    rng = random.Random(seed)
    for _ in range(25):
        check_case(Case(**random_case(rng)))


SHARED_GRADIENT_SHAPES = [
    (64, (4, 4)),
    (64, (12, 2)),
    (80, (8, 1)),
    (96, (8, 2)),
    (128, (32, 8)),
    (192, (4, 4)),
    (256, (8, 2)),
    (512, (8, 1)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "heads"), SHARED_GRADIENT_SHAPES)
def test_shared_context_gradient(head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Data on which sums in 16 bits fail the rule: a mutant has such."""
    options = dict(head_dim=head_dim, heads=heads, dtype=dtype, device=DEVICE)
    batch = one_large_advantage(64, decoded=64, context=150, **options)
    oracle.check(batch, *results_of_all_kernels(batch))
