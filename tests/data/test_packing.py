# SPDX-License-Identifier: BSD-3-Clause
"""Packing prompts with their responses: every row, label and index against the samples themselves, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BOUNDARIES, Lists, assert_same_batch, check, check_layout, nested, padded, rows_of, samples, tensors
from torch import Tensor

import flash_attn_dualkv
from flash_attn_dualkv import (
    PackedBatch,
    SharedPromptError,
    SharedPromptLayoutError,
    group_by_prompt,
    pack_jagged,
    pack_padded,
    pack_prefix_tree,
    pack_shared_prompts,
    shared_prompt_attention,
    unpack_logprobs,
)

# One prompt at a distance, a strict prefix of another, a single token, an empty response; 0 is a
# token like others.
PROMPTS = [[5, 0, 7], [5, 0], [5, 0, 7], [3], [5, 0, 7, 0], [3]]
RESPONSES = [[1, 2], [3], [], [4, 5, 6], [0, 0], [9]]


# --- the packed row against the samples ----------------------------------------------------------------------------


def check_samples(batch: PackedBatch, prompts: Lists, responses: Lists, boundary: str) -> None:
    """Every field of the batch, from the samples alone."""
    whole = [prompt + response for prompt, response in zip(prompts, responses)]
    masks = [[0] * len(prompt) + [1] * len(response) for prompt, response in zip(prompts, responses)]
    check(batch, whole, masks, None, least_rows=0)
    layout, shift = batch.layout, 1 if boundary == "replicate" else 0
    assert batch.prompt_lens == tuple(map(len, prompts)) and len({*batch.tree.leaves}) == len(prompts)
    contexts = set(layout.context_index().tolist())
    assert sorted([*contexts, *layout.decoded_index().tolist()]) == [*range(layout.num_tokens - layout.pad)]
    for rows, prompt in zip(rows_of(batch), prompts):
        assert sum(row in contexts for row in rows) == len(prompt) - shift
    if boundary == "replicate":  # as fused heads make labels: right in every row that has one
        is_scored = batch.labels >= 0
        assert batch.input_ids.roll(-1)[is_scored].equal(batch.labels[is_scored])


@settings(deadline=None, max_examples=150)
@given(samples(), st.sampled_from(BOUNDARIES), st.sampled_from([None, 8]))
def test_round_trip(lists: tuple[Lists, Lists], boundary: Any, multiple: int | None) -> None:
    prompts, responses = lists
    options: Any = dict(boundary=boundary, pad_to_multiple_of=multiple)
    batch = pack_shared_prompts(prompts, responses, **options)
    check_samples(batch, prompts, responses, boundary)
    assert batch.layout.num_groups == len({*map(tuple, prompts)})
    assert multiple is None or (batch.layout.num_tokens % multiple == 0 and batch.layout.pad < multiple)


# --- padded and jagged batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_all_forms_on_a_device(device: str, boundary: str, dtype: torch.dtype) -> None:
    """The same batch wherever the tokens are and wherever it is wanted, of any integers, in deterministic mode too.

    A prompt length for each row comes as a tensor, a list, a tuple or an array.
    """
    options: Any = dict(boundary=boundary, pad_to_multiple_of=8)
    expected = pack_shared_prompts(PROMPTS, RESPONSES, **options)
    prompts, responses = ([one.to(device, dtype) for one in tensors(lists)] for lists in (PROMPTS, RESPONSES))
    whole = [torch.cat(pair) for pair in zip(prompts, responses)]
    lengths = [len(one) for one in PROMPTS]
    forms: list[Any] = [torch.tensor(lengths, device=device), lengths, tuple(lengths), np.array(lengths)]
    ids, mask, columns = padded(PROMPTS, RESPONSES, ("right", "left"), pad=0)
    ids, mask = ids.to(device, dtype), mask.to(device, torch.bool)
    rows, own, _ = padded([[*one] for one in map(Tensor.tolist, whole)], [[]] * len(whole), ("left", "left"), pad=1)
    torch.use_deterministic_algorithms(True)
    try:
        for wanted in {device, "cpu"}:
            batches = [
                pack_shared_prompts(prompts, responses, device=wanted, **options),
                pack_padded(ids, mask, columns, device=wanted, **options),
                *(pack_padded(rows.to(device, dtype), own.to(device), one, device=wanted, **options) for one in forms),
                *(pack_jagged(nested(whole), one, device=wanted, **options) for one in forms),
            ]
            for batch in batches:
                assert batch.input_ids.device.type == batch.layout.device.type == wanted
                assert_same_batch(batch.to("cpu"), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# --- grouping ------------------------------------------------------------------------------------------------------


def test_group_by_prompt() -> None:
    assert group_by_prompt(PROMPTS) == [[0, 2], [1], [3, 5], [4]]
    assert group_by_prompt(tensors(PROMPTS)) == [[0, 2], [1], [3, 5], [4]]
    assert group_by_prompt([]) == []


def test_strided_tokens() -> None:
    """Rows and columns of larger tensors."""
    table = torch.tensor([[1, 9, 2, 9], [3, 9, 2, 9], [1, 9, 2, 8]])
    assert group_by_prompt(list(table[:, ::2])) == [[0, 2], [1]]
    assert group_by_prompt([table[0, ::2]]) == [[0]]
    batch = pack_padded(table.t().contiguous().t(), torch.ones(3, 8)[:, ::2] > 0, 3)
    assert_same_batch(batch, pack_shared_prompts(table[:, :3].tolist(), table[:, 3:].tolist()))
    assert batch.layout.num_groups == 2


@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_group_ids_divide_equal_prompts(form: Any) -> None:
    """Equal tokens are not enough where, for instance, images differ."""
    ids = form([7, 1, 8, 2, 3, 2])
    groups = [[0], [1], [2], [3, 5], [4]]
    assert group_by_prompt(PROMPTS, group_ids=ids) == groups
    batch = pack_shared_prompts(PROMPTS, RESPONSES, group_ids=ids)
    assert batch.layout.node_parents == (-1, 0, -1, 2, -1, 4, -1, 6, 6, -1, 9)
    check_samples(batch, PROMPTS, RESPONSES, "replicate")


def test_strict_prefixes_of_equal_bytes_do_not_merge() -> None:
    """Neither do prompts whose tokens agree as far as the shorter goes, nor those that differ in the last one."""
    prompts = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert group_by_prompt(prompts) == [[0], [1], [2], [3], [4]]
    large = [[2**40], [2**40 + 1], [0]]  # and those that differ in the high or the low half of a token
    assert group_by_prompt(large) == [[0], [1], [2]]


# --- errors --------------------------------------------------------------------------------------------------------


def test_errors_are_value_errors() -> None:
    assert issubclass(SharedPromptError, ValueError) and issubclass(SharedPromptLayoutError, SharedPromptError)


def test_unpacking_integers() -> None:
    batch = pack_shared_prompts([[1], [2]], [[3, 4], [5]])
    assert unpack_logprobs(torch.tensor([1, 2, 3]), batch, fill=-1.0).tolist() == [[1, 2], [3, -1]]
    with pytest.raises(SharedPromptError, match=r"^fill: expected a number of torch.int64 \(as values\), got 0.5"):
        unpack_logprobs(torch.tensor([1, 2, 3]), batch, fill=0.5)


def test_unpacking_asks_where_lengths_cannot_tell() -> None:
    """As many rows as scored tokens, but other ones."""
    batch = pack_prefix_tree([[1, 5], [1, 6], [1, 5]], min_shared=1, boundary="gather")
    assert batch.layout.num_tokens == 3 and batch.token_index.tolist() == [0, 0, 0]
    values = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(SharedPromptError, match="^per_row: expected a bool"):
        unpack_logprobs(values, batch)
    assert unpack_logprobs(values, batch, per_row=False)[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert unpack_logprobs(values, batch, per_row=True)[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert unpack_logprobs(values[None], batch, per_row=True)[:, 0].tolist() == [1.0, 1.0, 1.0]


# --- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pickle", "save", "deepcopy"])
def test_copies(how: str) -> None:
    """Of the size of their tensors, which share a buffer: once for each would be 13 times as much."""
    batch = pack_shared_prompts([[5] * 500] * 4, [[1] * 300] * 4)
    stream = io.BytesIO()
    if how == "deepcopy":
        other = copy.deepcopy(batch)
    elif how == "pickle":
        pickle.dump(batch, stream)
        other = pickle.loads(stream.getvalue())
    else:
        torch.save(batch, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    assert_same_batch(other, batch)
    size = sum(one.nbytes for one in (*vars(batch).values(), batch.layout.nodes) if isinstance(one, Tensor))
    assert stream.tell() < 1.5 * size + 20_000


def test_writing_to_a_tensor_of_a_batch_does_not_spoil_the_others() -> None:
    """They lie in one buffer, but what autograd has saved of the layout is not what was written to."""
    batch = pack_shared_prompts([[5, 6, 7]] * 2, [[1, 2], [3]])
    q, k, v = (torch.randn(batch.layout.num_tokens, 1, 8, requires_grad=True) for _ in range(3))
    out = shared_prompt_attention(q, k, v, batch.layout)
    batch.labels.clamp_(min=0)
    out.sum().backward()
    assert q.grad is not None


# --- the layout ----------------------------------------------------------------------------------------------------


def test_layout_on_another_device(device: str) -> None:
    layout = pack_shared_prompts(PROMPTS, RESPONSES).layout
    assert layout.to("cpu") is layout
    moved = layout.to(device)
    back = moved.to("cpu")
    check_layout(moved)
    assert moved.nodes.device.type == device and back.nodes.equal(layout.nodes)
    batch = pack_shared_prompts(PROMPTS, RESPONSES)
    assert batch.to("cpu") is batch
    returned = batch.to(device).to("cpu")
    assert_same_batch(returned, batch)
    assert returned.padded_index.equal(batch.padded_index) and returned.jagged_index.equal(batch.jagged_index)
    assert all(one.device.type == device for one in vars(batch.to(device)).values() if isinstance(one, Tensor))
    meta = layout.to("meta")
    assert meta.nodes.shape == layout.nodes.shape and meta.device.type == "meta"


def test_default_device_and_inference_mode() -> None:
    """Neither finds its way into a batch, or one that is moved: it can be saved for a backward later."""
    expected = pack_shared_prompts(PROMPTS, RESPONSES)
    with torch.device("meta"):
        assert_same_batch(pack_shared_prompts(PROMPTS, RESPONSES), expected)
    with torch.inference_mode():
        prompts, responses = tensors(PROMPTS), tensors(RESPONSES)
        batch = pack_shared_prompts(prompts, responses)
        moved, layout = expected.to("meta"), expected.layout.to("meta")
    for one in (*vars(batch).values(), *vars(moved).values(), batch.layout.nodes, layout.nodes):
        assert not (isinstance(one, Tensor) and one.is_inference())
    assert_same_batch(batch, expected)


def test_what_inference_mode_asks_for_can_be_saved_for_a_backward() -> None:
    values = torch.ones(2, 3)
    batch = pack_shared_prompts([[1, 2], [3]], [[4], [5, 6]], images={"pixel_values": [values, values]})
    with torch.inference_mode():
        found = [batch.row_index, batch.last_rows, batch.multiplicity, batch.cu_seqlens, batch.parents]
        found += batch.images.values()
    assert len(found) == 6 and not any(one.is_inference() for one in found)


def test_names_that_batches_have_had() -> None:
    assert flash_attn_dualkv.SharedPromptBatch is flash_attn_dualkv.PrefixTreeBatch is flash_attn_dualkv.PackedBatch
