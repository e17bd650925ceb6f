# SPDX-License-Identifier: BSD-3-Clause
"""Prompts and responses for the tests of packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_dualkv import PackedBatch, SharedPromptLayout

Lists = list[list[int]]


def tensors(lists: Lists, **options: Any) -> list[Tensor]:
    return [torch.tensor(one, dtype=torch.int64, **options) for one in lists]


def nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def padded(prompts: Lists, responses: Lists, sides: tuple[str, str], pad: int) -> tuple[Tensor, Tensor, int]:
    """ids, mask and prompt columns, the prompts and the responses each padded on their side."""
    columns, ids, mask = max(map(len, prompts)), [], []
    longest = max(map(len, responses))
    for prompt, response in zip(prompts, responses):
        line, own = [], []
        for tokens, width, side in ((prompt, columns, sides[0]), (response, longest, sides[1])):
            fill = [pad] * (width - len(tokens))
            line += fill + tokens if side == "left" else tokens + fill
            own += [0] * len(fill) + [1] * len(tokens) if side == "left" else [1] * len(tokens) + [0] * len(fill)
        ids.append(line)
        mask.append(own)
    return torch.tensor(ids), torch.tensor(mask), columns


@st.composite
def samples(draw: st.DrawFn) -> tuple[Lists, Lists]:
    """A few prompts, some of them prefixes of each other, each in any number of samples in any order."""
    stem = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    prefixes = [stem[: draw(st.integers(1, len(stem)))] for _ in range(draw(st.integers(1, 4)))]
    others = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=2))
    prompts = draw(st.lists(st.sampled_from([*prefixes, *others]), min_size=1, max_size=9))
    response = st.lists(st.integers(0, 9), max_size=4)
    return prompts, draw(st.lists(response, min_size=len(prompts), max_size=len(prompts)))


def assert_same_batch(batch: PackedBatch, expected: PackedBatch) -> None:
    """Every field, those of the layout too, which has the batch's own positions."""
    assert batch.layout.position_ids is batch.position_ids
    for one, other in ((batch, expected), (batch.layout, expected.layout)):
        for field in dataclasses.fields(one):
            got, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(wanted, Tensor):
                assert got.dtype == wanted.dtype and got.equal(wanted), field.name
            elif field.name != "layout":
                assert got == wanted, field.name


def check_layout(layout: SharedPromptLayout) -> None:
    """Its table and its numbers are those of its nodes."""
    rebuilt = SharedPromptLayout.from_tree(layout.node_lens, layout.node_parents, pad=layout.pad)
    assert layout.nodes.cpu().equal(rebuilt.nodes) and layout.is_like(rebuilt)
    assert (layout.max_sequence, layout.mean_keys) == (rebuilt.max_sequence, rebuilt.mean_keys)
