# SPDX-License-Identifier: BSD-3-Clause
"""The tests' own tools: the covering array, the fp64 reference, and an accuracy rule that tells right from wrong."""

from __future__ import annotations

import oracle
import pytest
import torch
from groups import (
    Batch,
    Group,
    Results,
    all_pairs,
    build_groups,
    cost,
    covering_array,
    one_large_advantage,
    pack,
    pairs_of,
)


def test_covering_array_holds_every_pair() -> None:
    missing = set(all_pairs())
    for case in covering_array():
        missing.difference_update(pairs_of(vars(case)))
    assert not missing
    assert len({case.id for case in covering_array()}) == len(covering_array()) < 350
    assert sum(cost(vars(case)) for case in covering_array()) < 2e13


def _sum_of_copies(batch: Batch, right: Results, dtype: torch.dtype) -> Results:
    """The results with the context gradients summed copy by copy in the given type."""
    sums = [torch.zeros_like(batch.k_context, dtype=dtype) for _ in range(2)]
    for rows in batch.table:
        one = batch.replace(table=[rows])
        part = oracle.plain(one)
        sums[0] += part.dk_context
        sums[1] += part.dv_context
    return right._replace(dk_context=sums[0].to(batch.q.dtype), dv_context=sums[1].to(batch.q.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_16_bit_fail_the_rule(dtype: torch.dtype) -> None:
    batch = one_large_advantage(64, dtype=dtype)
    expected, plain = oracle.reference(batch), oracle.plain(batch)
    right = plain._replace(lse=expected.lse)
    assert not oracle.compare(_sum_of_copies(batch, right, torch.float32), plain, expected, dtype)
    problems = oracle.compare(_sum_of_copies(batch, right, dtype), plain, expected, dtype)
    assert any("dk_context: relative" in p for p in problems) and any("dv_context: relative" in p for p in problems)
    assert any("dk_context: max" in p for p in problems) and any("dv_context: max" in p for p in problems)


def _wrong_results(batch: Batch, right: Results) -> dict[str, Results]:
    open_mask = oracle.plain(batch.replace(causal=False))
    skipped = oracle.plain(batch.replace(table=batch.table[:-1]))
    swapped = right.dk_context.flip(1)
    nan = right.out.clone()
    nan[0, 0, 0] = float("nan")
    return {
        "no mask": right._replace(out=open_mask.out),
        "a skipped sequence": right._replace(dk_context=skipped.dk_context),
        "the wrong head": right._replace(dk_context=swapped),
        "a NaN": right._replace(out=nan),
        "an unscaled lse": right._replace(lse=right.lse * 1.001),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rule_rejects_wrong_results(dtype: torch.dtype) -> None:
    batch = pack(build_groups([Group(40, ((9, 9), (12, 12), (5, 5)))], dtype=dtype, heads=(4, 2)))
    expected, plain = oracle.reference(batch), oracle.plain(batch)
    right = plain._replace(lse=expected.lse)
    assert not oracle.compare(right, plain, expected, dtype)
    for name, wrong in _wrong_results(batch, right).items():
        assert oracle.compare(wrong, plain, expected, dtype), name
