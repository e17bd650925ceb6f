# SPDX-License-Identifier: BSD-3-Clause
"""Decoding by the reference against dense attention of every request's keys, in caches that are NaN elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forests import LATENTS, Forest, forest, ints

from flash_attn_dualkv import reference as training
from flash_attn_dualkv import shared_prefix_decode
from flash_attn_dualkv.decode import reference
from flash_attn_dualkv.decode.calls import DecodeCall

VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"page_size": 48, "layout": "HND", "most_queries": 4}, {}),
    ({"page_size": 256, "layout": "side by side", "most_pages": 2}, {}),
    ({"most_queries": 20}, {"window": 19}),
    ({"layout": "side by side", "most_queries": 3}, {"softcap": 1.5, "scale": 0.7}),
    ({"heads": (6, 1), "most_queries": 2}, {"window": 0, "sinks": True}),
    ({"heads": (3, 3), "layout": "HND"}, {"window": 40, "softcap": 3.0, "sinks": True}),
    (LATENTS | {"most_queries": 3}, {"scale": 0.2}),
    ({"heads": (4, 1), "layout": "latents", "head_dim": 576, "page_size": 48}, {"scale": 192**-0.5, "sinks": True}),
]


def check(step: Forest, rules: dict[str, Any], **options: Any) -> None:
    if rules.get("sinks"):
        rules = rules | {"sinks": torch.linspace(-1.0, 2.0, step.q.shape[1], dtype=torch.float64)}
    out, lse = shared_prefix_decode(
        step.q, step.k_cache, step.v_cache, step.plan(**options), softmax_scale=rules.get("scale"), return_lse=True,
        window_size=(rules.get("window", -1), 0), softcap=rules.get("softcap", 0.0), sinks=rules.get("sinks"),
    )  # fmt: skip
    expected, expected_lse = step.expected(**rules)
    assert out.dtype == step.q.dtype and lse.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(out.dtype, 2e-2)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    tolerance = min(tolerance, 1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("seed", range(4))
def test_against_dense_attention(variant: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rules = VARIANTS[variant]
    if seed % 2:  # several blocks of keys, and of queries
        monkeypatch.setattr(training, "KEY_BLOCK", 24)
        monkeypatch.setattr(training, "SCORE_ELEMENTS", 24 * 4 * 3)
    check(forest(seed, **shape), rules)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    check(forest(1, dtype=dtype, most_queries=3), {"window": 30})


def test_a_cut_changes_nothing_but_bits() -> None:
    step = forest(3, most_queries=2)
    check(step, {}, boundaries=ints(*(one // 2 for one in step.seqlens)))


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)])
def test_rows_that_no_request_owns_are_zero(sinks: torch.Tensor | None) -> None:
    step = forest(2, most_queries=3)
    step.q = torch.cat([torch.ones_like(step.q[:2]), step.q, torch.ones_like(step.q[:1])])
    rows = len(step.q)
    offsets = ints(*(one + 2 for one in step.offsets))
    plan = step.plan(cu_seqlens_q=offsets, num_queries=rows)
    out, lse = shared_prefix_decode(step.q, step.k_cache, step.v_cache, plan, sinks=sinks, return_lse=True)
    step.q = step.q[2:-1]
    expected, expected_lse = step.expected(sinks=sinks)
    torch.testing.assert_close(out[2:-1], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[:, 2:-1], expected_lse, rtol=1e-12, atol=1e-12)
    for index in (0, 1, -1):
        assert not out[index].any() and (lse[:, index] == (-math.inf if sinks is None else sinks)).all()


def test_out_is_written_and_returned() -> None:
    step = forest(4)
    wide = torch.full((len(step.q), 4, 40), torch.nan, dtype=torch.float64)
    out = wide[..., 8:24]
    plan = step.plan()
    assert shared_prefix_decode(step.q, step.k_cache, step.v_cache, plan, out=out) is out
    assert torch.equal(out, shared_prefix_decode(step.q, step.k_cache, step.v_cache, plan))
    assert wide[..., :8].isnan().all() and wide[..., 24:].isnan().all()


@pytest.mark.parametrize("shape", [{}, LATENTS], ids=["heads", "latents"])
def test_bits_do_not_depend_on_the_batch(shape: dict[str, Any]) -> None:
    """Nor on the order of requests, or on the pages where the keys lie."""
    step = forest(5, dtype=torch.float32, **shape)
    whole = shared_prefix_decode(step.q, step.k_cache, step.v_cache, step.plan(), softmax_scale=0.3)
    for request in range(len(step.seqlens)):
        table = step.block_table[request : request + 1]
        moved = table.flip(0).clone()
        k, v = step.k_cache.clone(), step.v_cache.clone()
        for column in range(-(-step.seqlens[request] // 16)):
            page = (int(table[0, column]) + 1) % len(k)
            k[page], v[page] = step.k_cache[table[0, column]], step.v_cache[table[0, column]]
            moved[0, column] = page
        alone = step.taken([request]).with_caches(k, v)
        alone.block_table = moved
        out = shared_prefix_decode(alone.q, alone.k_cache, alone.v_cache, alone.plan(), softmax_scale=0.3)
        assert torch.equal(out, whole[request : request + 1])


@pytest.mark.parametrize("seed", range(3))
def test_hostile_contents_are_clamped(seed: int) -> None:
    """Any numbers give some numbers, from rows inside of the cache, as on a GPU, where they are not checked."""
    step = forest(seed, most_queries=3)
    generator = torch.Generator().manual_seed(seed)

    def any_ints(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()

    requests, columns = step.block_table.shape
    hostile = step.plan().step._replace(
        block_table=any_ints(requests, columns), seqlens=any_ints(requests), cu_seqlens_q=any_ints(requests + 1),
        boundaries=any_ints(requests), queries=len(step.q),
    )  # fmt: skip
    step.k_cache.nan_to_num_(), step.v_cache.nan_to_num_()
    out = torch.full_like(step.q, torch.nan)
    lse = reference.decode(DecodeCall(step.q, step.k_cache, step.v_cache, None, out, 0.25, -1, 0.0, hostile))
    assert out.isfinite().all() and not lse.isnan().any()
