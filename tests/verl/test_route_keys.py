# SPDX-License-Identifier: BSD-3-Clause
"""Which tokens may share a row, where routes of experts are replayed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
from torch import Tensor

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.data.batch import PackedBatch, pack
from flash_attn_dualkv.data.plan import plan
from flash_attn_dualkv.data.samples import read_jagged
from flash_attn_dualkv.integrations.verl import route_keys as module
from flash_attn_dualkv.integrations.verl.route_keys import divided_prompts, route_keys

PROMPT, LENGTHS = 5, (8, 9, 7)


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def inputs() -> tuple[Tensor, Tensor]:
    """Three samples of one prompt: ids, and the same routes in the prompt; (layers, k) = (3, 2)."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(90, (sum(LENGTHS),), generator=source)
    routes = torch.randint(128, (sum(LENGTHS), 3, 2), generator=source, dtype=torch.int16)
    rows, of_rows = list(ids.split(LENGTHS)), list(routes.split(LENGTHS))
    for index in (1, 2):
        rows[index] = torch.cat((rows[0][:PROMPT], rows[index][PROMPT:]))
        of_rows[index] = torch.cat((of_rows[0][:PROMPT], of_rows[index][PROMPT:]))
    return jagged(rows), jagged(of_rows)


def test_equal_tokens_with_equal_routes_have_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, routes = inputs()
    columns = torch.cat((ids.values()[:, None], routes.values().flatten(1).long()), 1)
    _, expected = columns.unique(dim=0, return_inverse=True)

    def check() -> None:
        keys = route_keys(ids, routes)
        assert torch.equal(keys[:, None] == keys, expected[:, None] == expected)

    check()
    monkeypatch.setattr(module, "_CHUNK", 4)
    check()
    # Sums that say nothing, at first.
    stock, calls = torch.randint, []

    def randint(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return stock(*args, **kwargs) * (len(calls) > 2)

    monkeypatch.setattr(torch, "randint", randint)
    check()
    assert len(calls) == 3


@pytest.mark.parametrize("min_shared", [None, 1])
@pytest.mark.parametrize("place", [0, PROMPT])
def test_samples_of_other_routes_are_packed_apart(place: int, min_shared: int | None) -> None:
    ids, routes = inputs()
    routes.values()[place, 2, 1] += 1  # of the first sample
    keys = route_keys(ids, routes)
    samples = read_jagged(ids, [PROMPT] * 3, keys=keys)
    batch: PackedBatch = pack(samples, plan(samples, min_shared=min_shared), 8)
    divided = divided_prompts(keys, ids, [PROMPT] * 3)
    assert (batch.layout.num_groups, divided) == ((2, 1) if place < PROMPT else (1, 0))
    assert torch.equal(batch.input_ids[batch.row_index], ids.values())
    assert torch.equal(batch.targets, ids.values()[batch.jagged_index + 1])
    assert torch.equal(batch.labels[batch.token_index], batch.targets)
    assert (batch.labels >= 0).sum() == len(batch.targets)
    assert batch.max_token == int(ids.values().max())


def test_routes_that_are_not_replayed_do_not_count() -> None:
    ids, routes = inputs()
    replayed = torch.ones(sum(LENGTHS), dtype=torch.bool)
    routes.values()[3] += 1
    replayed[[3, LENGTHS[0] + 3]] = False  # of two samples
    found = route_keys(ids, routes, jagged([*replayed.split(LENGTHS)])).split(LENGTHS)
    assert found[0][3] == found[1][3] != found[2][3]
    assert torch.equal(found[0][:3], found[2][:3])


def test_other_lengths_are_refused() -> None:
    ids, routes = inputs()
    rows = list(routes.unbind())
    with pytest.raises(SharedPromptError, match="routed_experts"):
        route_keys(ids, jagged([rows[0][1:], *rows[1:]]))
