# SPDX-License-Identifier: BSD-3-Clause
"""Micro-batches within a token budget, and prompts balanced over ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core_time import least_time
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_ranks
from samples import SEQUENCES, Lists, samples

from flash_attn_dualkv import (
    SharedPromptError,
    balance,
    group_by_prefix,
    group_by_prompt,
    pack_shared_prompts,
    split_by_token_budget,
)
from flash_attn_dualkv.data.given import groups_of
from flash_attn_dualkv.data.split import on_equal_terms


def packed_tokens(chosen: Sequence[int], prompts: Lists, responses: Lists) -> int:
    return pack_shared_prompts([prompts[i] for i in chosen], [responses[i] for i in chosen]).layout.num_tokens


@settings(deadline=None, max_examples=100)
@given(samples(), st.integers(0, 30))
def test_split_by_token_budget(lists: tuple[Lists, Lists], slack: int) -> None:
    prompts, responses = lists
    lens = [len(one) for one in prompts], [len(one) for one in responses]
    budget = max(map(int.__add__, *lens)) + slack
    groups = group_by_prompt(prompts)
    micro_batches = split_by_token_budget(groups, *lens, budget)
    assert sorted(itertools.chain(*micro_batches)) == list(range(len(prompts)))
    assert all(one and packed_tokens(one, prompts, responses) <= budget for one in micro_batches)
    for members in groups:
        if packed_tokens(members, prompts, responses) <= budget:
            assert any(set(members) <= set(one) for one in micro_batches), "a group that fits was split"


def test_a_group_over_the_budget_is_split_in_full_parts() -> None:
    assert split_by_token_budget([list(range(6))], [10] * 6, [4] * 6, 20) == [[0, 1], [2, 3], [4, 5]]
    assert split_by_token_budget([[0, 2], [1]], [10] * 3, [4] * 3, 40) == [[0, 2, 1]]
    assert split_by_token_budget([], [5], [2], 8) == []


def test_parts_of_a_group_are_filled_well() -> None:
    """One after the other, the long responses would fill eight parts and the short ones four."""
    parts = split_by_token_budget([list(range(16))], [41] * 16, [34] * 8 + [24] * 8, 100)
    assert len(parts) == 8
    draw = random.Random(0)
    responses = [draw.randint(100, 4000) for _ in range(5000)]
    groups = [list(range(at, at + 50)) for at in range(0, 5000, 50)]
    parts = split_by_token_budget(groups, [1000] * 5000, responses, 8192)
    assert least_time(2.0, split_by_token_budget, groups, [1000] * 5000, responses, 8192) < 2.0
    least = sum(sum(responses[i] + 1 for i in members) / (8192 - 999) for members in groups)
    assert len(parts) <= 1.08 * least


def _budget_on_rank(rank: int, results: Any) -> None:
    group = torch.distributed.group.WORLD

    def split(name: str, budgets: tuple[int, int], *given: Any) -> None:
        try:
            results[rank, name] = split_by_token_budget(*given, max_tokens=budgets[rank], dp_group=group)
        except SharedPromptError as error:
            results[rank, name] = str(error)

    def prompts(samples: int) -> Any:
        return [list(range(samples))], [10] * samples, [4] * samples

    split("split", (30, 20), *prompts(4))
    split("mixed", (200, 50), [[0, 1, 2, 3, 4], [5], [6, 7]], [10] * 8, [4] * 8)
    split("budget", (30, 13), *prompts(4))
    split("samples", (14, 40), *prompts((4, 2)[rank]))
    split("tree", (100, 7), group_by_prefix(SEQUENCES, min_shared=1))
    split("budget of a tree", (100, 2), group_by_prefix(SEQUENCES))
    split("sequences of a tree", (1, 1), group_by_prefix([[1], [2], [3]][: 3 - 2 * rank]))
    for multiple in (4, 8):
        own = [[0, 1, 2], [3, 4], [5]] if rank else [[0, 1, 2, 3, 4]]
        try:
            results[rank, multiple] = on_equal_terms(lambda: (own, [[0, 1, 2], [3], [4], [5]]), group, multiple)  # noqa: B023
        except SharedPromptError as error:
            results[rank, multiple] = str(error)


def test_equally_many_micro_batches_on_every_rank() -> None:
    """Ranks with fewer split theirs; what fails on one fails on all, so that none waits for another."""
    results = run_ranks(_budget_on_rank, 2)
    for name, count, least in (("split", 4, 2), ("mixed", 8, 2), ("tree", 9, 2)):
        of_ranks = [results[rank, name] for rank in (0, 1)]
        assert len(of_ranks[0]) == len(of_ranks[1]) >= least
        assert all(sorted(itertools.chain(*one)) == [*range(count)] for one in of_ranks)
    assert len(results[0, "split"]) == len(results[0, "mixed"]) == 2
    assert sorted(map(sorted, results[0, "mixed"])) == [[0, 1, 2, 3, 4], [5, 6, 7]]  # no group in both
    for name, least in (("budget", 14), ("budget of a tree", 5)):
        assert "one that cannot" in results[0, name] and f"at least {least}" in results[1, name]
    for name, least in (("samples", 4), ("sequences of a tree", 3)):
        assert all(f"at least {least} samples on each rank" in results[rank, name] for rank in (0, 1))
    assert all(len(results[rank, 4]) == 4 for rank in (0, 1))
    assert sorted(results[1, 4]) == [[0, 1, 2], [3], [4], [5]]
    for rank in (0, 1):
        assert "at least 8 samples on each rank" in results[rank, 8] and "in multiples of 8, got 5" in results[rank, 8]


def test_multiples_of_micro_batches() -> None:
    """Without other ranks, too; between groups first."""

    def fill() -> tuple[Lists, Lists]:
        return [[0, 1, 2], [3, 4]], [[0, 1], [2], [3, 4]]

    assert on_equal_terms(fill, None) == on_equal_terms(fill, None, 2) == [[0, 1, 2], [3, 4]]
    assert on_equal_terms(fill, None, 3) == [[0, 1], [2], [3, 4]]
    assert sorted(on_equal_terms(fill, None, 5)) == [[0], [1], [2], [3], [4]]
    with pytest.raises(SharedPromptError, match="groups: expected at least 6 samples .* multiples of 6, got 5"):
        on_equal_terms(fill, None, 6)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_balance_gives_equal_counts(sizes: list[int], num_ranks: int, rng: random.Random) -> None:
    ids = [g for g, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(ids)
    lens = [10 * (one + 1) for one in ids], [rng.randint(0, 50) for _ in ids]
    num_ranks = min(num_ranks, len(ids))
    ranks = balance(groups_of(ids), *lens, num_ranks)
    assert sorted(itertools.chain(*ranks)) == list(range(len(ids)))
    least, over = divmod(len(ids), num_ranks)
    assert sorted(map(len, ranks)) == [least] * (num_ranks - over) + [least + 1] * over
    # Without equal counts no group is divided.
    ranks = balance(groups_of(ids), *lens, num_ranks, equal_counts=False)
    assert sorted(itertools.chain(*ranks)) == list(range(len(ids)))
    assert sum(len({ids[i] for i in rank}) for rank in ranks) == len({*ids})


def test_lengths_may_be_tensors() -> None:
    lens = torch.tensor([5, 5, 7, 7]), torch.tensor([1, 2, 3, 4])
    assert balance([[0, 1], [2, 3]], *lens, 2) == [[2, 3], [0, 1]]
    assert split_by_token_budget([[0, 1], [2, 3]], *lens, 20) == split_by_token_budget(
        [[0, 1], [2, 3]], *(one.tolist() for one in lens), 20
    )


def test_micro_batches_are_filled_evenly() -> None:
    """A group of 64K rows within a budget of 40K: two micro-batches of 35K, not of 40K and 30K."""
    micro_batches = split_by_token_budget([list(range(30))], [6000] * 30, [1949] * 30, 40960)
    assert [len(one) for one in micro_batches] == [15, 15]
    # Not at the price of a split, nor of one more micro-batch.
    assert split_by_token_budget([[0, 1], [2]], [100] * 3, [50] * 3, 250) == [[0, 1], [2]]
