# SPDX-License-Identifier: BSD-3-Clause
"""Requests of a decoding step that share pages, in caches whose other bytes are NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tree_cases import dense

from flash_attn_dualkv import SharedPrefixPlan

LATENTS: dict[str, Any] = {"heads": (5, 1), "layout": "latents", "head_dim": 72}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages_of(pages: int, page_size: int, heads: int, head_dim: int, layout: str, dtype: torch.dtype) -> list[Tensor]:
    """K and V, (pages, page_size, heads, head_dim) views of NaN in one of the layouts of engines."""
    if layout == "NHD":
        return [torch.full((pages, page_size, heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    if layout == "HND":
        return [
            torch.full((pages, heads, page_size, head_dim), torch.nan, dtype=dtype).transpose(1, 2) for _ in range(2)
        ]
    if layout == "latents":
        latents = torch.full((pages, page_size, heads, head_dim), torch.nan, dtype=dtype)
        return [latents, latents[..., : head_dim * 8 // 9]]
    if layout == "halves":
        return list(torch.full((pages, 2, page_size, heads, head_dim), torch.nan, dtype=dtype).unbind(1))
    together = torch.full((pages, heads, page_size, 2 * head_dim), torch.nan, dtype=dtype).transpose(1, 2)
    return [together[..., :head_dim], together[..., head_dim:]]


@dataclass
class Forest:
    """A step: caches, the block table, keys and queries of each request."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seqlens: list[int]
    queries: list[int]

    def to(self, device: str) -> Forest:
        """On that device, with the strides that it has."""
        moved = {}
        for name in ("q", "k_cache", "v_cache", "block_table"):
            tensor = getattr(self, name)
            moved[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            moved[name].copy_(tensor)
        return replace(self, **moved).with_caches(moved["k_cache"], moved["v_cache"])

    @property
    def has_latents(self) -> bool:
        """The values are columns of the keys."""
        return self.k_cache.shape[3] != self.v_cache.shape[3]

    def with_caches(self, k_cache: Tensor, v_cache: Tensor) -> Forest:
        """The step with its pages there."""
        values = k_cache[..., : v_cache.shape[3]] if self.has_latents else v_cache
        return replace(self, k_cache=k_cache, v_cache=values)

    def taken(self, order: list[int]) -> Forest:
        """Some of the requests, in that order."""
        offsets = self.offsets
        rows = [row for index in order for row in range(offsets[index], offsets[index + 1])]
        picked = {name: [getattr(self, name)[index] for index in order] for name in ("seqlens", "queries")}
        return replace(self, q=self.q[rows], block_table=self.block_table[order], **picked)

    @property
    def offsets(self) -> list[int]:
        return [sum(self.queries[:index]) for index in range(len(self.queries) + 1)]

    def plan(self, exact: str | None = None, **options: Any) -> SharedPrefixPlan:
        """A plan of the step, as ragged queries if some request has not one."""
        (requests, columns), (pages, page_size, kv_heads, head_dim) = self.block_table.shape, self.k_cache.shape
        device, exact = self.q.device, exact or ("split" if self.has_latents else "trainer")
        made = SharedPrefixPlan(
            requests, columns, num_pages=pages, max_queries=max(len(self.q), 1), page_size=page_size,
            num_heads=self.q.shape[1], num_kv_heads=kv_heads, head_dim=head_dim, head_dim_v=self.v_cache.shape[3],
            device=device, exact=exact,
        )  # fmt: skip
        if set(self.queries) != {1}:
            options = {"cu_seqlens_q": ints(*self.offsets), "num_queries": len(self.q)} | options
        options = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in options.items()}
        return made.update(self.block_table, ints(*self.seqlens).to(device), **options)

    def keys(self, request: int) -> tuple[Tensor, Tensor]:
        """K and V of a request, position by position."""
        places = [(position // self.k_cache.shape[1], position % self.k_cache.shape[1]) for position in
                  range(self.seqlens[request])]  # fmt: skip
        table = self.block_table[request].tolist()
        k, v = ([cache[table[page], row] for page, row in places] for cache in (self.k_cache, self.v_cache))
        if not k:
            return self.k_cache[0, :0], self.v_cache[0, :0]
        return torch.stack(k), torch.stack(v)

    def expected(
        self, *, scale: float | None = None, window: int = -1, softcap: float = 0.0, sinks: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Dense attention in float64 or the dtype, with a softmax over all keys at once."""
        outs, lses = [], []
        for request, (begin, end) in enumerate(pairwise(self.offsets)):
            q, k, v = (one.to(dtype) for one in (self.q[begin:end], *self.keys(request)))
            distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
            sees = (distance >= 0) & (distance <= (window if window >= 0 else len(k)))
            out, lse = dense(q, k, v, sees, scale or q.shape[2] ** -0.5, softcap, sinks)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses, 1)


def forest(
    seed: int, *, page_size: int = 16, layout: str = "NHD", heads: tuple[int, int] = (4, 2), head_dim: int = 16,
    dtype: torch.dtype = torch.float64, requests: int = 7, most_pages: int = 5, most_queries: int = 1,
    is_legal: bool = True,
) -> Forest:  # fmt: skip
    """Each request takes over pages of an earlier one up to some column, and has pages of its own behind them.

    It may have more queries than keys if it is not legal.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tables: list[list[int]] = []
    seqlens, queries, used = [], [], 0
    for _ in range(requests):
        keys = rng.choice([0, 1, page_size, rng.randint(1, most_pages * page_size)])
        count = -(-keys // page_size)
        shared = rng.choice(tables)[: rng.randint(0, count)] if tables else []
        tables.append([*shared, *range(used, used + count - len(shared))])
        used += count - len(shared)
        seqlens.append(keys)
        queries.append(rng.randint(0, most_queries) if most_queries > 1 else 1)
    queries[0] = most_queries  # some request has rows
    if is_legal:
        queries = [min(one, keys) if keys else one for one, keys in zip(queries, seqlens)]
    places = rng.sample(range(used + 3), used + 3)
    k, v = pages_of(used + 3, page_size, heads[1], head_dim, layout, dtype)
    for table, keys in zip(tables, seqlens):
        for column, page in enumerate(table):
            rows = min(page_size, keys - column * page_size)
            for cache in (k, v):
                valid = cache[places[page], :rows]
                valid.copy_(torch.where(valid.isnan(), torch.randn(valid.shape, generator=generator), valid))
    columns = max(map(len, tables)) + 1
    junk = [-1, 2**31 - 1, -(2**31), *range(used)]
    rows = [[places[page] for page in table] for table in tables]
    rows = [[*row, *(rng.choice(junk) for _ in range(columns - len(row)))] for row in rows]
    q = torch.randn(sum(queries), heads[0], head_dim, generator=generator).to(dtype)
    return Forest(q, k, v, torch.tensor(rows, dtype=torch.int32), seqlens, queries)
