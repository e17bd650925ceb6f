# SPDX-License-Identifier: BSD-3-Clause
"""Which rows of a generation batch go into which micro-batch."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import tiny_trl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

regroup = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.trl.regroup")
siblings = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.common.siblings")


def slices(prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """As TRL's `_prepare_inputs` buffers them; `row` and `name` tell rows apart."""
    width = max(map(len, prompts))
    merged = dict(
        prompt_ids=torch.tensor([[0] * (width - len(one)) + one for one in prompts]),
        prompt_mask=torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts]),
        row=torch.arange(len(prompts)),
        advantages=torch.arange(len(prompts)) * 0.5,
        name=[f"row {row}" for row in range(len(prompts))],
        num_items_in_batch=torch.tensor(17),
        ref_per_token_logps=None,
    )
    rows = len(prompts) // count
    return [
        {
            name: value[at : at + rows] if isinstance(value, list) or (value is not None and value.ndim) else value
            for name, value in merged.items()
        }
        for at in range(0, rows * count, rows)
    ]


@settings(deadline=None, max_examples=150)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8), count=st.integers(1, 5), seed=st.integers(0, 99))
def test_rows_are_permuted_and_whole(sizes: list[int], count: int, seed: int) -> None:
    """All rows are there once, everything of a row moves with it, slices stay equally large."""
    rows = [[9 + group] * (group % 3 + 1) for group, size in enumerate(sizes) for _ in range(size)]
    rows += [[7]] * (-len(rows) % count)
    random.Random(seed).shuffle(rows)
    before = slices(rows, count)
    state = torch.get_rng_state()
    after = regroup.keep_siblings_together(before)
    assert torch.equal(torch.get_rng_state(), state)
    order = list(chain.from_iterable(one["row"].tolist() for one in after))
    assert sorted(order) == list(range(len(rows)))
    for one in after:
        assert one["row"].shape == before[0]["row"].shape
        assert one["name"] == [f"row {row}" for row in one["row"].tolist()]
        assert one["advantages"].tolist() == [row * 0.5 for row in one["row"].tolist()]
        ids, mask = one["prompt_ids"], one["prompt_mask"].bool()
        assert [row[real].tolist() for row, real in zip(ids, mask)] == [rows[row] for row in one["row"].tolist()]
        assert one["num_items_in_batch"] == 17 and one["ref_per_token_logps"] is None


@given(parts=st.integers(2, 4), rows=st.integers(1, 4), groups=st.integers(1, 4))
def test_groups_larger_than_a_slice_fill_whole_slices(parts: int, rows: int, groups: int) -> None:
    members = iter(range(parts * rows * groups))
    made = [[next(members) for _ in range(parts * rows)] for _ in range(groups)]
    owner = {row: index for index, group in enumerate(made) for row in group}
    for one in regroup.fill(made, rows):
        assert len({owner[row] for row in one}) == 1


def test_ends_of_groups_of_other_ranks_share_a_slice() -> None:
    """A rank begins and ends within a group: its two halves go together, and the whole group stays whole."""
    rows = [[1], [2], [1], [2], [2], [3], [2], [3]]
    after = regroup.keep_siblings_together(slices(rows, 2))
    assert sorted(sorted(one["prompt_ids"].flatten().tolist()) for one in after) == [[1, 1, 3, 3], [2, 2, 2, 2]]


def test_slices_are_in_the_order_of_their_first_rows() -> None:
    """Not in that of how large their groups are, by which they are filled."""
    assert regroup.fill([[0], [1, 2], [3]], 2) == [[0, 3], [1, 2]]


def test_a_prompt_that_is_the_end_of_another_is_another() -> None:
    """Pad tokens are no tokens of the prompt, and a prompt may hold the pad token."""
    rows = [[0, 5], [5], [0, 5], [5]]
    after = regroup.keep_siblings_together(slices(rows, 2))
    assert sorted(one["row"].tolist() for one in after) == [[0, 2], [1, 3]]


def test_what_is_not_divided_by_rows_is_left_alone() -> None:
    before = slices([[1], [2], [1], [2]], 2)
    for one in before:
        one["pixel_values"] = torch.zeros(7, 3)
    assert regroup.keep_siblings_together(before) is before
    one_slice = slices([[1], [2]], 1)
    assert regroup.keep_siblings_together(one_slice) is one_slice


@settings(deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_slices_of_a_prompt_are_neighbours_in_a_window(sizes: list[int], rows: int, seed: int) -> None:
    """Prompts of whole slices: no more windows than needed have a part of them, and their slices stand together."""
    window = 4
    sizes += [1] * (-sum(sizes) % window)
    prompts = [[9 + group] for group, size in enumerate(sizes) for _ in range(size * rows)]
    random.Random(seed).shuffle(prompts)
    after = regroup.keep_siblings_together(slices(prompts, sum(sizes)), window)
    order = [{*own["prompt_ids"].flatten().tolist()} for own in after]
    assert all(len(own) == 1 for own in order)
    assert sorted(chain.from_iterable(own["row"].tolist() for own in after)) == list(range(len(prompts)))
    windows = [[own for (own,) in order[at : at + window]] for at in range(0, len(order), window)]
    whole = {
        len({*own}) == len([1 for at, prompt in enumerate(own) if not at or own[at - 1] != prompt]) for own in windows
    }
    assert whole == {True}
    if sizes.count(1) >= sizes.count(3):  # windows can be filled without a cut
        for group, size in enumerate(sizes):
            assert sum(9 + group in own for own in windows) == 1, (group, size)
