# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention's function against a loop over sequences, and tokens appended to pages."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from forests import LATENTS, Forest, forest, ints
from torch import Tensor

from flash_attn_dualkv import SharedPrefixPlan, append_kv, flash_attn_with_kvcache
from flash_attn_dualkv.decode import kvcache

# Of FlashAttention 2.8, before what is our own.
PUBLISHED = (
    "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
    "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_signature_is_that_of_flash_attention() -> None:
    given = inspect.signature(flash_attn_with_kvcache).parameters.values()
    own = [one for one in given if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    defaults = [f"={one.default}" if one.default is not inspect.Parameter.empty else "" for one in own]
    assert ", ".join(f"{one.name}{default}" for one, default in zip(own, defaults)) == PUBLISHED
    assert [one.name for one in given if one not in own] == ["s_aux", "plan"]


class Caches:
    """Two sequences in a cache of 32 rows each, or in pages of 16, and three new tokens of each."""

    lengths = (20, 7)

    def __init__(self, paged: bool) -> None:
        self.k_new, self.v_new = normal(2, 3, 2, 16, seed=1), normal(2, 3, 2, 16, seed=2)
        self.q = normal(2, 3, 4, 16, seed=3)
        k, v = normal(2, 32, 2, 16, seed=4), normal(2, 32, 2, 16, seed=5)
        self.block_table = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32) if paged else None
        self.k_cache, self.v_cache = k.clone(), v.clone()
        if paged:
            self.k_cache, self.v_cache = (torch.full((4, 16, 2, 16), torch.nan, dtype=k.dtype) for _ in range(2))
            for cache, rows in ((self.k_cache, k), (self.v_cache, v)):
                cache[2], cache[0, :4], cache[3, :7] = rows[0, :16], rows[0, 16:20], rows[1, :7]
        self.k = [torch.cat([rows[:length], new]) for rows, length, new in zip(k, self.lengths, self.k_new)]
        self.v = [torch.cat([rows[:length], new]) for rows, length, new in zip(v, self.lengths, self.v_new)]

    def call(self, queries: int = 3, **options: Any) -> Any:
        given: dict[str, Any] = {
            "k": self.k_new, "v": self.v_new, "cache_seqlens": ints(*self.lengths), "block_table": self.block_table,
            "causal": True,
        }  # fmt: skip
        return flash_attn_with_kvcache(self.q[:, -queries:], self.k_cache, self.v_cache, **given | options)

    def expected(self, queries: int = 3, **rules: Any) -> tuple[Tensor, Tensor]:
        """By the dense attention of `Forest`, one sequence at a time."""
        outs, lses = [], []
        for q, k, v in zip(self.q, self.k, self.v):
            table = torch.arange(len(k), dtype=torch.int32)[None]
            step = Forest(q[-queries:], k[:, None], v[:, None], table, [len(k)], [queries])
            out, lse = step.expected(**rules)
            outs.append(out)
            lses.append(lse)
        return torch.stack(outs), torch.stack(lses)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
def test_appends_and_attends(paged: bool, queries: int) -> None:
    caches = Caches(paged)
    out, lse = caches.call(queries, return_softmax_lse=True)
    expected, expected_lse = caches.expected(queries)
    assert out.shape == (2, queries, 4, 16) and lse.shape == (2, 4, queries) and lse.is_contiguous()
    close(out, expected)
    close(lse, expected_lse)
    # What it has written stays: a second call finds it in the cache.
    lengths = ints(*(one + 3 for one in caches.lengths))
    close(caches.call(queries, k=None, v=None, cache_seqlens=lengths), expected)


def test_options() -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    out = Caches(True).call(softmax_scale=0.3, softcap=2.0, window_size=(6, 0), s_aux=sinks, num_splits=1)
    close(out, Caches(True).expected(scale=0.3, softcap=2.0, window=6, sinks=sinks)[0])


def test_windows_end_where_causality_does() -> None:
    """transformers gives a window both ways; with one query the last position is the last key."""
    expected = Caches(False).expected(window=5)[0]
    close(Caches(False).call(window_size=(5, 5)), expected)
    close(Caches(False).call(window_size=(5, 0), causal=False), expected)
    close(Caches(False).call(1, window_size=(5, 9), causal=False), expected[:, -1:])


def test_cache_that_is_not_paged() -> None:
    caches = Caches(False)
    out = caches.call()
    swapped = Caches(False)
    swapped.k_cache, swapped.v_cache = swapped.k_cache.flip(0), swapped.v_cache.flip(0)
    for dtype in (torch.int32, torch.int64):
        close(swapped.call(cache_batch_idx=torch.tensor([1, 0], dtype=dtype)), out)
    full = flash_attn_with_kvcache(caches.q[:, :1], caches.k_cache, caches.v_cache)
    same = flash_attn_with_kvcache(caches.q[:, :1], caches.k_cache, caches.v_cache, cache_seqlens=32)
    assert torch.equal(full, same)


def test_bits_without_a_plan_do_not_depend_on_the_table() -> None:
    """A plan of its own divides no walk: places would be by the table's width, which is the batch's."""
    caches = Caches(True)
    plan = kvcache._plan(caches.q, caches.k_cache, caches.block_table)
    assert plan.limits.num_kv_heads == 2 and plan.exact == "trainer"


def test_with_a_plan() -> None:
    """`flash_attn_with_kvcache` writes what is new, and the plan knows the rest."""
    caches, fresh = Caches(True), Caches(True)
    plan = SharedPrefixPlan(
        2, 2, num_pages=4, max_queries=6, page_size=16, num_heads=4, num_kv_heads=2, head_dim=16, device="cpu"
    )
    plan.update(caches.block_table, ints(23, 10), cu_seqlens_q=ints(0, 3, 6))
    assert torch.equal(caches.call(plan=plan), fresh.call())
    # Nothing is written: neither table nor lengths are needed.
    assert torch.equal(caches.call(plan=plan, k=None, v=None, cache_seqlens=None, block_table=None), fresh.call())
    for queries in (1, 2):
        with pytest.raises(ValueError, match="^plan: expected a step of 2 requests and . queries, got one of 2 and 6"):
            caches.call(queries, plan=plan)


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rotary_cos", {"rotary_cos": torch.ones(8, 8)}, NotImplementedError, "a tensor"),
    ("rotary_sin", {"rotary_sin": torch.ones(8, 8)}, NotImplementedError, "a tensor"),
    ("cache_leftpad", {"cache_leftpad": ints(0, 0)}, NotImplementedError, "a tensor"),
    ("alibi_slopes", {"alibi_slopes": torch.ones(4)}, NotImplementedError, "a tensor"),
    ("num_splits", {"num_splits": 2}, NotImplementedError, "2"),
    ("causal", {"causal": False}, NotImplementedError, "False"),
    ("window_size", {"causal": False, "window_size": (4, 1)}, NotImplementedError, "(4, 1)"),
    ("causal", {"causal": 1}, TypeError, "1"),
    ("rotary_interleaved", {"rotary_interleaved": 0}, TypeError, "0"),
    ("return_softmax_lse", {"return_softmax_lse": None}, TypeError, "None"),
    ("cache_batch_idx", {"cache_batch_idx": ints(0, 1)}, ValueError, "a tensor"),
    ("cache_batch_idx", {"block_table": None, "cache_batch_idx": ints(0)}, ValueError, "shape (1,)"),
    ("cache_seqlens", {"cache_seqlens": None}, ValueError, "None"),
    ("cache_seqlens", {"cache_seqlens": 30}, ValueError, "30"),
    ("cache_seqlens", {"cache_seqlens": ints(1)}, ValueError, "shape (1,)"),
    ("cache_seqlens", {"cache_seqlens": torch.tensor([1, 2])}, TypeError, "torch.int64"),
    ("v", {"v": None}, ValueError, "None"),
    ("k", {"k": None}, ValueError, "None"),
    ("k", {"k": normal(1, 3, 2, 16)}, ValueError, "shape (1, 3, 2, 16)"),
    ("v", {"v": normal(2, 2, 2, 16)}, ValueError, "shape (2, 2, 2, 16)"),
    ("k", {"k": normal(2, 3, 4, 16)}, ValueError, "shape (6, 4, 16)"),
    ("k", {"k": normal(2, 3, 2, 16).float()}, TypeError, "torch.float32"),
    ("block_table", {"block_table": ints(1, 2)}, ValueError, "shape (2,)"),
    ("block_table", {"block_table": ints(1, 2)[None]}, ValueError, "1"),
    ("plan", {"plan": 1}, TypeError, "1"),
]


@pytest.mark.parametrize(
    ("name", "options", "error", "got"),
    [pytest.param(*row, id=f"{row[0]}, {index}") for index, row in enumerate(REFUSED)],
)
def test_what_is_refused(name: str, options: dict[str, Any], error: type[Exception], got: str) -> None:
    caches = Caches(True)
    before = caches.k_cache.clone()
    with pytest.raises(error, match=f"^{name}: expected ") as caught:
        caches.call(**options)
    assert got in str(caught.value).partition(", got ")[2]
    assert torch.equal(caches.k_cache.nan_to_num(), before.nan_to_num())


def test_caches_that_are_no_pages() -> None:
    caches = Caches(False)
    caches.k_cache, caches.v_cache = caches.k_cache[:, :20], caches.v_cache[:, :20]
    with pytest.raises(ValueError, match="^k_cache: expected a multiple of 16 rows .*, got 20"):
        caches.call()
    caches = Caches(False)
    caches.k_cache, caches.v_cache = caches.k_cache[:1], caches.v_cache[:1]
    with pytest.raises(ValueError, match="^k_cache: expected at least 2 sequences"):
        caches.call()


# append_kv


def append_by_loop(new: Tensor, cache: Tensor, table: Tensor, lengths: list[int], offsets: list[int]) -> Tensor:
    expected, (pages, page_size) = cache.clone(), cache.shape[:2]
    for request, length in enumerate(lengths):
        for index in range(offsets[request], offsets[request + 1]):
            position = length + index - offsets[request]
            if (
                0 <= position < table.shape[1] * page_size
                and 0 <= (page := table[request, position // page_size]) < pages
            ):
                expected[page, position % page_size] = new[index]
    return expected


@pytest.mark.parametrize("layout", ["NHD", "HND", "halves", "side by side"])
@pytest.mark.parametrize("case", ["ragged", "each two", "some dropped", "all dropped"])
def test_append(layout: str, case: str) -> None:
    step = forest(6, layout=layout, page_size=48, most_pages=2)
    table = torch.tensor([[5, 1, -1], [5, 0, 3], [4, 1000, 2]], dtype=torch.int32)
    lengths, offsets = [40 + 48, 30 + 96, 5], [0, 2, 4, 6]
    if case == "ragged":
        offsets = [0, 5, 5, 6]
    if case == "some dropped":  # behind the columns, before position 0, a page that is none, rows of no request
        lengths, offsets = [95, 143, -1], [1, 3, 6, 8]
    if case == "all dropped":
        lengths = [200, -7, 50]
    total = offsets[-1] + (case == "some dropped")
    k, v = normal(total, 2, 16, seed=1), normal(total, 2, 16, seed=2)
    assert len(step.k_cache) > 5
    expected = [
        append_by_loop(new, cache, table, lengths, offsets) for new, cache in ((k, step.k_cache), (v, step.v_cache))
    ]
    changed = sum(bool((one.nan_to_num() != cache.nan_to_num()).any()) for one, cache in
                  zip(expected, (step.k_cache, step.v_cache)))  # fmt: skip
    assert changed == (0 if case == "all dropped" else 2)
    cu_seqlens_q = ints(*offsets) if case in ("ragged", "some dropped") else None
    append_kv(k, v, step.k_cache, step.v_cache, table, ints(*lengths), cu_seqlens_q)
    for cache, one in zip((step.k_cache, step.v_cache), expected):
        torch.testing.assert_close(cache, one, rtol=0, atol=0, equal_nan=True)


def test_append_of_nothing() -> None:
    step = forest(6)
    before = step.k_cache.clone()
    none = step.q.new_zeros(0, 2, 16)
    append_kv(none, none, step.k_cache, step.v_cache, step.block_table, ints(*step.seqlens))
    append_kv(none, none, step.k_cache, step.v_cache, step.block_table[:0], ints())
    torch.testing.assert_close(step.k_cache, before, rtol=0, atol=0, equal_nan=True)


def test_latents_need_a_plan() -> None:
    """With one O has the values' columns; without, and to append, caches of two widths are refused."""
    step = forest(3, requests=4, **LATENTS)
    given = (step.q[:, None], step.k_cache, step.v_cache)
    out = flash_attn_with_kvcache(*given, softmax_scale=0.3, plan=step.plan())
    expected, _ = step.expected(scale=0.3)
    torch.testing.assert_close(out[:, 0], expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="^v_cache: expected shape"):
        flash_attn_with_kvcache(*given, softmax_scale=0.3, cache_seqlens=4, block_table=step.block_table)
