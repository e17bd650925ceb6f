# SPDX-License-Identifier: BSD-3-Clause
"""Samples and sequences that share prefixes, for the tests of packing, and what must hold of their packed batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import paths_of

from flash_attn_dualkv import PackedBatch, SharedPromptLayout, unpack_logprobs, unpack_to_jagged
from flash_attn_dualkv.nodes import Node, tree_nodes

Lists = list[list[int]]
BOUNDARIES = ("gather", "replicate")
# A turn that ends in three ways; a repetition, beginnings of others, other trees; 256 has a first
# byte of 0.
SEQUENCES = [
    [5, 0, 7, 1, 2],
    [5, 0, 7, 1, 3, 3],
    [5, 0, 8],
    [5, 0, 7, 1, 2],
    [5, 0],
    [],
    [256, 2],
    [9],
    [5, 0, 7, 1, 3, 4],
]


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


# --- what must hold of a batch ----------------------------------------------------------------------------------------


def trains(sequences: Lists, masks: Lists | None) -> Lists:
    """The places of the trained tokens of each sequence."""
    if masks is None:
        return [[*range(1, len(one))] for one in sequences]
    return [[place for place, value in enumerate(mask) if value] for mask in masks]


def paths(batch: PackedBatch) -> list[list[int]]:
    """The rows of the path of each node, from the root to the node's last row."""
    return paths_of((batch.cu_seqlens.diff().tolist(), batch.parents.tolist()))


def rows_of(batch: PackedBatch) -> list[list[int]]:
    """The rows of each sequence."""
    bounds = [*accumulate(batch.sequence_lens, initial=0)]
    return [batch.row_index[begin:end].tolist() for begin, end in pairwise(bounds)]


def check(
    batch: PackedBatch, sequences: Lists, masks: Lists | None, groups: list[int] | None, least_rows: int = 1
) -> None:
    """Every field of the batch, from the sequences alone, and the way back; `least_rows`: of a node."""
    layout, total = batch.layout, batch.layout.num_tokens
    table = tree_nodes(batch.cu_seqlens, batch.parents, total)  # refuses an order that is not depth-first
    check_layout(layout)
    assert layout.nodes.equal(table) and layout.position_ids is batch.position_ids
    nodes = [Node(*row) for row in table.tolist()]
    assert layout.node_lens == tuple(node.q_len for node in nodes) and min(layout.node_lens, default=1) >= least_rows
    assert layout.node_parents == tuple(node.parent for node in nodes)
    assert batch.cu_seqlens.dtype == batch.parents.dtype == torch.int32
    end = batch.cu_seqlens.tolist()[-1]
    assert total == end + layout.pad == len(batch.input_ids) == len(batch.position_ids)
    assert batch.sequence_lens == tuple(map(len, sequences))
    ids, positions, labels = batch.input_ids.tolist(), batch.position_ids.tolist(), batch.row_labels.tolist()
    node_of = [index for index, node in enumerate(nodes) for _ in range(node.q_len)]
    all_paths, rows, trained = paths(batch), rows_of(batch), trains(sequences, masks)
    for own, sequence in zip(rows, sequences):
        assert [ids[row] for row in own] == sequence and [positions[row] for row in own] == [*range(len(sequence))]
        if own:  # what its last row sees, causally, is the sequence
            assert all_paths[node_of[own[-1]]][: len(own)] == own
    assert batch.multiplicity.tolist() == [sum(row in own for own in rows) for row in range(total)]
    assert 0 not in batch.multiplicity.tolist()[:end]
    assert batch.token_index.tolist() == [own[at - 1] for own, places in zip(rows, trained) for at in places]
    assert batch.targets.tolist() == [one[at] for one, places in zip(sequences, trained) for at in places]
    assert batch.response_lens == tuple(map(len, trained))
    first: dict[int, int] = {}
    for row, target in zip(batch.token_index.tolist(), batch.targets.tolist()):
        first.setdefault(row, target)
    assert labels == [first.get(row, -100) for row in range(total)]
    assert ids[end:] == positions[end:] == [0] * layout.pad
    assert batch.max_token == max((token for one in sequences for token in one), default=0)
    assert batch.tree.leaves == tuple(leaf if one else -1 for leaf, one in zip(batch.tree.leaves, sequences))
    assert all(all_paths[leaf][: len(own)] == own for leaf, own in zip(batch.tree.leaves, rows) if own)
    if groups is not None:  # nothing is shared between them
        assert not any(
            set(one) & set(other)
            for i, one in enumerate(rows)
            for j, other in enumerate(rows)
            if groups[i] != groups[j]
        )
    check_ratios(batch, sequences)
    check_way_back(batch, trained)


def check_ratios(batch: PackedBatch, sequences: Lists) -> None:
    layout, total, tokens = batch.layout, batch.layout.num_tokens, sum(map(len, sequences))
    pairs = sum(len(one) * (len(one) + 1) // 2 for one in sequences)
    seen = sum(position + 1 for position in batch.position_ids[: total - layout.pad].tolist())
    assert batch.dedup_ratio == (tokens / total if total else math.inf)
    assert batch.pair_ratio == (pairs / seen if seen else math.inf)
    depths = [0] * layout.num_nodes
    for index, parent in enumerate(layout.node_parents):
        depths[index] = 1 + (depths[parent] if parent >= 0 else 0)
    assert layout.depth == max(depths, default=0)
    assert batch.metrics() == {
        "shared_prompt/dedup_ratio": batch.dedup_ratio,
        "shared_prompt/pair_ratio": batch.pair_ratio,
        "shared_prompt/tokens": total,
        "shared_prompt/tokens_saved": tokens - total,
        "shared_prompt/num_prompts": layout.node_parents.count(-1),
        "shared_prompt/responses_per_prompt": len(sequences) / max(1, layout.node_parents.count(-1)),
        "shared_prompt/num_nodes": layout.num_nodes,
        "shared_prompt/depth": layout.depth,
    }


def check_way_back(batch: PackedBatch, trained: Lists) -> None:
    """Every value returns to its sequence and token, with its gradient."""
    total, longest = sum(batch.response_lens), max(batch.response_lens)
    values = torch.arange(1.0, total + 1, requires_grad=True)
    padded = unpack_logprobs(values, batch, fill=-7.0, per_row=False, width=longest + 1)
    jagged: Any = unpack_to_jagged(values, batch, per_row=False)
    numbers = iter(range(1, total + 1))
    parts = jagged.unbind()
    for line, part, length, places in zip(padded.tolist(), parts, batch.sequence_lens, trained, strict=True):
        own = [next(numbers) for _ in places]
        assert line == own + [-7.0] * (longest + 1 - len(own))
        by_place = dict(zip(places, own))
        assert part.tolist() == [by_place.get(place + 1, 0) for place in range(length)]
    weights = torch.rand(total)
    for unpack in (unpack_logprobs, unpack_to_jagged):
        unpacked: Any = unpack(values * weights, batch, per_row=False)
        flat = unpacked.values() if unpacked.is_nested else unpacked
        (gradient,) = torch.autograd.grad(flat.sum(), values)
        assert gradient.equal(weights)
    of_rows = torch.rand(batch.layout.num_tokens)
    by_token = unpack_logprobs(of_rows[batch.token_index], batch, per_row=False)
    assert unpack_logprobs(of_rows, batch, per_row=True).equal(by_token)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Lists, Lists, list[int]]:
    """Sequences that leave others anywhere, repeat them or end within them; masks with several spans; group ids."""
    token, sequences = st.integers(0, 2), [draw(st.lists(st.integers(0, 2), max_size=12))]
    for _ in range(draw(st.integers(0, 9))):
        stem = draw(st.sampled_from(sequences))
        kept = draw(st.integers(0, len(stem)))
        sequences.append([*stem[:kept], *draw(st.lists(token, max_size=5))])
    sequences = draw(st.permutations(sequences))
    flags = [draw(st.lists(st.integers(0, 1), min_size=len(one), max_size=len(one))) for one in sequences]
    masks = [[0, *one[1:]] if one else [] for one in flags]
    groups = draw(st.lists(st.integers(0, 1), min_size=len(sequences), max_size=len(sequences)))
    return sequences, masks, groups
