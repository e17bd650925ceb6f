# SPDX-License-Identifier: BSD-3-Clause
"""Borders of nodes that are given: equal along every path, whatever other sequences a micro-batch has."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BOUNDARIES, Lists, check, forests, rows_of

from flash_attn_dualkv import (
    PackedBatch,
    flash_attn_tree_varlen_func,
    pack_prefix_tree,
    pack_shared_prompts,
)

Forest = tuple[Lists, Lists, list[int]]


def borders_in(batch: PackedBatch) -> list[list[int]]:
    """Of each sequence the positions at which its rows pass from one node to the next."""
    node_of = [index for index, size in enumerate(batch.layout.node_lens) for _ in range(size)]
    return [[at for at in range(1, len(own)) if node_of[own[at]] != node_of[own[at - 1]]] for own in rows_of(batch)]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_tree_of_prompts_of_one_token(boundary: Any) -> None:
    """With "replicate" its root has no rows, and a node below begins where the sequences do."""
    prompts, responses = [[5], [5]], [[1, 2], [3]]
    batch = pack_shared_prompts(prompts, responses, boundary=boundary)
    whole = [one + other for one, other in zip(prompts, responses)]
    for options in (dict(tree=batch.tree), dict(borders=batch.tree.borders, boundary=boundary)):
        again = pack_prefix_tree(whole, **options)
        assert borders_in(again) == borders_in(batch) and again.layout.num_tokens == batch.layout.num_tokens


def shared(one: list[int], other: list[int], borders: tuple[list[int], list[int]], shift: int) -> int:
    """Up to where two sequences, neither of which begins with the other, have the same nodes."""
    common = next(at for at, (a, b) in enumerate(zip(one, other)) if a != b)
    ends = [0]
    for a, b in zip(*borders):
        if a != b:
            break
        ends.append(a)
    return max(end for end in ends if end == 0 or end + shift <= common)


@settings(deadline=None, max_examples=100)
@given(forests(), st.sampled_from(BOUNDARIES), st.data())
def test_any_borders(forest: Forest, boundary: Any, data: st.DataObject) -> None:
    """They are kept, and nodes are shared that agree in tokens and borders up to their end."""
    sequences, masks, _ = forest
    places = max(map(len, sequences)) + 1
    flags = data.draw(st.lists(st.integers(0, 2), min_size=places, max_size=places))  # for most sequences the same
    own = [data.draw(st.booleans()) and data.draw(st.integers(1, 12)) for _ in sequences]
    borders = [
        [at for at in range(1, len(one) + 1) if flags[at] == 0 or at == extra] for one, extra in zip(sequences, own)
    ]
    batch = pack_prefix_tree(sequences, loss_mask=masks, boundary=boundary, borders=borders)
    check(batch, sequences, masks, None)
    assert borders_in(batch) == [[at for at in one if at < len(s)] for one, s in zip(borders, sequences)]
    rows = rows_of(batch)
    for i, one in enumerate(sequences):
        for j, other in enumerate(sequences):
            size = min(len(one), len(other))
            if one[:size] != other[:size]:
                count = shared(one, other, (borders[i], borders[j]), 1 if boundary == "replicate" else 0)
                assert len({*rows[i]} & {*rows[j]}) == count


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_row_has_the_same_bits_in_every_part(boundary: Any, device: str) -> None:
    """Attention with the borders of the whole: what a ratio of exactly 1 needs of it."""
    draw = random.Random(0)
    sequences = [[draw.randrange(9) for _ in range(700)]]
    for number in range(40):  # none of them is the beginning of another
        stem = draw.choice(sequences)
        own = [100 + number] + [draw.randrange(9) for _ in range(draw.randrange(500))]
        sequences.append(stem[: draw.randrange(len(stem))] + own)
    whole = pack_prefix_tree(sequences, boundary=boundary, min_shared=16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    total = whole.layout.num_tokens
    rows = [torch.randn(total, h, 128, device=device, generator=generator).bfloat16() for h in (8, 2, 2)]
    expected = flash_attn_tree_varlen_func(*rows, whole.cu_seqlens, whole.parents)
    of_whole = rows_of(whole)
    for size in (1, 3, 20):
        chosen = draw.sample(range(len(sequences)), size)
        taken, borders = ([one[i] for i in chosen] for one in (sequences, whole.tree.borders))
        part = pack_prefix_tree(taken, boundary=boundary, borders=borders, device=device)
        row_of = dict(zip(part.row_index.tolist(), (row for i in chosen for row in of_whole[i])))
        index = torch.tensor([row_of[row] for row in range(part.layout.num_tokens)], device=device)
        got = flash_attn_tree_varlen_func(*(one[index] for one in rows), part.cu_seqlens, part.parents)
        assert got.equal(expected[index])
