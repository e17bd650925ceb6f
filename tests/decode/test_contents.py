# SPDX-License-Identifier: BSD-3-Clause
"""Plans that another step uses, and pages that two requests append to: seen on the CPU, or with DUALKV_DEBUG=1."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from forests import ints
from torch import Tensor

from flash_attn_dualkv import SharedPrefixPlan, append_kv, flash_attn_with_kvcache, shared_prefix_decode

TABLE = [[0, 1, 2], [0, 3, 4], [5, -1, 77]]
LENGTHS = (20, 31, 0)  # the last is padding
OLDER = (
    r"^plan: expected one that update\(\) has planned for this step, before its first layer, got an earlier step's: "
)


def table(rows: list[list[int]] = TABLE) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


class Engine:
    """Two layers and the plan of their requests."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.caches = [torch.randn(2, 9, 16, 2, 16, generator=generator) for _ in range(2)]
        for cache in self.caches:
            cache[:, 6:] = torch.nan
        self.plan = SharedPrefixPlan(
            3, 3, num_pages=9, page_size=16, num_heads=4, num_kv_heads=2, head_dim=16, device="cpu"
        )
        self.table, self.lengths, self.cuts = table(), ints(*LENGTHS), ints(17, 17, 17)

    def update(self) -> None:
        self.plan.update(self.table, self.lengths, boundaries=self.cuts)

    def decode(self) -> None:
        for k_cache, v_cache in [*self.caches, self.caches[0]]:  # a layer may read the keys of an earlier one
            shared_prefix_decode(torch.ones(3, 4, 16), k_cache, v_cache, self.plan)

    def append(self, lengths: Tensor) -> None:
        for k_cache, v_cache in self.caches:
            append_kv(torch.ones(3, 2, 16), torch.ones(3, 2, 16), k_cache, v_cache, self.table, lengths)


@pytest.mark.parametrize("name", ["table", "lengths", "cuts"])
def test_contents_that_have_changed(name: str) -> None:
    """On a GPU the plan is that of the older contents, and the rest of a layer is not."""
    engine = Engine()
    engine.update()
    engine.decode()
    getattr(engine, name).view(-1)[1] += 1
    argument = {"table": "block_table", "lengths": "seqlens", "cuts": "boundaries"}[name]
    with pytest.raises(RuntimeError, match=f"{OLDER}since its update {argument} has other contents"):
        engine.decode()
    engine.update()
    engine.decode()


@pytest.mark.parametrize("lengths", [LENGTHS, (32, 31, 0), (16, 16, 0)])
def test_new_keys_behind_those_of_the_plan(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the next step are new ones, so that those of the plan do not change."""
    monkeypatch.setenv("DUALKV_DEBUG", "1")
    engine = Engine()
    engine.lengths = ints(*lengths)
    engine.update()
    engine.decode()
    engine.append(engine.lengths)
    with pytest.raises(RuntimeError, match=f"{OLDER}since its update k_cache has new keys of request 0"):
        engine.decode()
    engine.lengths = ints(*(one + (one > 0) for one in lengths))
    engine.update()
    engine.decode()


def test_a_bound_that_a_request_exceeds() -> None:
    engine = Engine()
    engine.plan.update(engine.table, engine.lengths, max_seqlen=31)
    assert engine.plan.step.block_table.shape[1] == 3
    with pytest.raises(ValueError, match=r"^seqlens\[0\]: expected 0 to 16 keys \(1 pages of 16\), got 20"):
        engine.plan.update(engine.table, engine.lengths, max_seqlen=16)


def test_rows_that_may_be_another_request() -> None:
    """Entries behind a request's keys mean nothing: what others write there is no sign."""
    engine = Engine()
    engine.lengths, engine.table = ints(16, 31, 0), table([[5, 3, 7], [0, 3, 4], [5, -1, 77]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALKV_DEBUG", "1")
        engine.update()
        engine.decode()
        engine.caches[0][:, 3, 0] += 1.0  # the entry behind request 0 is a page of request 1
        engine.decode()


@pytest.mark.parametrize(
    ("rows", "lengths", "counts", "who"),
    [
        ([[0, 1, 2], [0, 1, 4]], (20, 20), (1, 1), (0, 1, 1)),  # a fork whose last page was not copied
        ([[0, 1, 2], [0, 1, 4]], (20, 24), (1, 0), (0, 1, 1)),  # over keys of another request
        ([[0, 1, 2], [0, 1, 2]], (24, 31), (0, 2), None),  # behind them
        ([[0, 1, 2], [0, 3, 2]], (31, 31), (2, 2), (0, 2, 1)),
        ([[0, 1, 2], [0, 3, 4]], (20, 31), (2, 2), None),
        ([[0, 1, -1], [0, 3, -1]], (31, 31), (2, 2), None),  # dropped
        ([[5, 1, 2], [5, 3, 4]], (0, 0), (1, 1), (0, 0, 1)),  # padding with a page
    ],
)
def test_appending_to_shared_pages(
    rows: list[list[int]], lengths: tuple[int, int], counts: tuple[int, int], who: tuple[int, int, int] | None
) -> None:
    k_cache, v_cache = torch.zeros(2, 9, 16, 2, 16)
    new = torch.ones(sum(counts), 2, 16)
    arguments = (new, new, k_cache, v_cache, table(rows), ints(*lengths), ints(0, counts[0], sum(counts)))
    if who is None:
        append_kv(*arguments)
        assert k_cache.any()
        return
    index, column, other = who
    message = (
        f"block_table[{index}, {column}]: expected a page of its own for the tokens that request {index} appends "
        f"(-1 for padding), got {rows[index][column]}, as request {other} has"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        append_kv(*arguments)
    assert not k_cache.any()


@pytest.mark.parametrize(
    ("planned", "rows", "message"),
    [
        ((21, 32, 0), TABLE, None),
        ((20, 31, 0), TABLE, "plan: expected 21 keys of request 0, with those of k, got 20"),
        ((21, 32, 0), [[0, 1, 2], [0, 8, 4], [5, -1, 77]], "plan: expected the pages of request 1 in block_table"),
    ],
)
def test_a_plan_of_other_requests(planned: tuple[int, ...], rows: Any, message: str | None) -> None:
    """`flash_attn_with_kvcache` appends by one table and attends by the plan's; padding has no keys in that."""
    engine = Engine()
    engine.plan.update(table(rows), ints(*planned))
    new, k_cache, v_cache = torch.ones(3, 1, 2, 16), *engine.caches[0]
    engine.table[2] = -1
    call = {"k": new, "v": new, "cache_seqlens": engine.lengths, "block_table": engine.table, "plan": engine.plan}
    if message is None:
        flash_attn_with_kvcache(torch.ones(3, 1, 4, 16), k_cache, v_cache, **call)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        flash_attn_with_kvcache(torch.ones(3, 1, 4, 16), k_cache, v_cache, **call)
