# SPDX-License-Identifier: BSD-3-Clause
"""What belongs to rows and to groups in a packed batch, and values of sequences for their scored tokens."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from samples import assert_same_batch, nested, padded, tensors

from flash_attn_dualkv import (
    PackedBatch,
    SharedPromptError,
    group_by_prefix,
    group_by_prompt,
    pack_jagged,
    pack_padded,
    pack_prefix_tree,
    pack_shared_prompts,
)

PROMPTS = [[5, 0, 7], [5, 0], [5, 0, 7], [3]]
RESPONSES = [[1, 2], [3], [], [4, 5, 6]]
WHOLE = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES)]
HEIGHTS = [torch.stack([torch.arange(len(one)) * scale for scale in (10, 100)]) for one in WHOLE]  # as mRoPE's rows
UIDS = ["a", "b", "a", "c"]
PIXELS = [torch.full((2, 2), float(one)) for one in (1, 2, 1, 3)]
GROUPS: dict[str, Any] = {"uid": UIDS, "pixels": PIXELS}


def batches(heights: Any, groups: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Calls of every way to pack these samples with what belongs to them."""
    ids, mask, columns = padded(PROMPTS, RESPONSES, ("left", "right"), pad=0)
    of_mask = torch.zeros(2, *ids.shape, dtype=torch.int64)
    of_mask[:, mask.bool()] = torch.cat(heights, -1)
    values: dict[str, Any] = {"group_values": groups, **options}
    lens = [len(one) for one in PROMPTS]
    return {
        "lists": lambda: pack_shared_prompts(PROMPTS, RESPONSES, row_values={"height": heights}, **values),
        "padded": lambda: pack_padded(ids, mask, columns, row_values={"height": of_mask}, **values),
        "jagged": lambda: pack_jagged(nested(tensors(WHOLE)), lens, row_values={"height": ragged(heights)}, **values),
    }


def ragged(heights: list[torch.Tensor]) -> torch.Tensor:
    """(B, 2, L_i), whose last dimension is jagged."""
    offsets = torch.tensor([0, *(one.shape[-1] for one in heights)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(heights, -1), offsets, jagged_dim=2)


def check(batch: PackedBatch) -> None:
    end = batch.layout.num_tokens - batch.layout.pad
    heights = batch.row_values["height"]
    assert heights[0].tolist() == (10 * batch.position_ids).tolist()
    assert heights[1].tolist() == (100 * batch.position_ids).tolist()
    flat = torch.tensor([token for one in WHOLE for token in one])
    assert flat[batch.source_index[:end]].equal(batch.input_ids[:end])
    assert batch.source_index[end:].tolist() == [-1] * batch.layout.pad
    assert batch.group_values["uid"] == ("a", "b", "c")
    assert [one[0, 0].item() for one in batch.group_values["pixels"]] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("boundary", ["replicate", "gather"])
@pytest.mark.parametrize("form", ["lists", "padded", "jagged"])
def test_values_of_rows_and_groups(form: str, boundary: str) -> None:
    batch = batches(HEIGHTS, GROUPS, boundary=boundary, pad_to_multiple_of=8)[form]()
    check(batch)
    check(pickle.loads(pickle.dumps(batch)))
    moved = batch.to("meta")
    assert moved.row_values["height"].is_meta and moved.group_values["pixels"][0].is_meta
    assert moved.row_index.is_meta and moved.row_index.shape == batch.row_index.shape
    assert moved.last_rows.is_meta and moved.multiplicity.shape == batch.multiplicity.shape


def test_values_of_trees() -> None:
    tree = group_by_prefix(WHOLE, min_shared=1)
    batch = pack_prefix_tree(WHOLE, tree=tree, row_values={"height": HEIGHTS})
    assert batch.row_values["height"][1].tolist() == (100 * batch.position_ids).tolist()
    # Those of some sequences; what is given for all of them is picked.
    masks = [[0] * len(prompt) + [1] * len(response) for prompt, response in zip(PROMPTS, RESPONSES)]
    chosen = [3, 0]
    part = pack_prefix_tree(
        WHOLE, loss_mask=masks, tree=tree, chosen=chosen, row_values={"height": HEIGHTS}, group_values={"uid": UIDS}
    )
    assert part.sequence_lens == (4, 5) and part.response_lens == (3, 2)
    assert part.group_values["uid"] == ("c", "a")
    assert part.tree.borders == tuple(tree.borders[index] for index in chosen)
    missing = pack_prefix_tree(WHOLE, tree=tree, row_values={"height": [one * torch.nan for one in HEIGHTS]})
    assert missing.row_values["height"].isnan().all()


@pytest.mark.parametrize("form", ["lists", "padded", "jagged"])
def test_values_that_differ_where_tokens_share_a_row(form: str) -> None:
    odd = [one.clone() for one in HEIGHTS]
    odd[2][1, 0] += 1  # in the prompt of sample 2, whose rows are those of sample 0
    with pytest.raises(SharedPromptError, match=r"^row_values\['height'\]: expected equal values of tokens"):
        batches(odd, {})[form]()
    batches(odd, {}, group_ids=[0, 1, 2, 3])[form]()
    message = r"^group_values\['uid'\]: expected one value .* got different ones of samples 0 and 2"
    with pytest.raises(SharedPromptError, match=message):
        batches(HEIGHTS, {"uid": ["a", "b", "d", "c"]})[form]()
    with pytest.raises(SharedPromptError, match=r"^group_values\['pixels'\]"):
        batches(HEIGHTS, {"pixels": [*PIXELS[:2], PIXELS[0] + 1, PIXELS[3]]})[form]()


EQUAL: list[Any] = [
    lambda: np.arange(3), lambda: np.float32(2.0), lambda: np.array(["a"]), lambda: (np.arange(3), "a"),
    lambda: [torch.arange(3)], lambda: {"a": [np.arange(3), torch.arange(2)]},
    lambda: float("nan"), lambda: np.array([1.0, np.nan]), lambda: [torch.tensor([1.0, np.nan])],
]  # fmt: skip
UNEQUAL: list[tuple[Any, Any]] = [
    (np.arange(3), np.array([0, 1, 3])), (np.arange(3), np.arange(4)), (np.ones(1), np.ones((1, 1))), (np.ones(1), 1.0),
    (np.ones(2), torch.ones(2)), ((np.ones(2), 1), (np.ones(2), 2)), ([torch.ones(1)], [torch.ones(1, 1)]),
    ([1], (1,)), ({"a": torch.ones(2)}, {"b": torch.ones(2)}), ({"a": torch.ones(2)}, {"a": torch.zeros(2)}),
    (float("nan"), 1.0), (torch.tensor(1.0), torch.tensor(np.nan)),
    (torch.ones(2), torch.ones(2, device="meta")), (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
]  # fmt: skip


@pytest.mark.parametrize("make", EQUAL, ids=range(len(EQUAL)))
def test_equal_values_of_groups(make: Any) -> None:
    """Arrays are compared as a whole, also where other values hold them."""
    value = make()
    batch = pack_shared_prompts([[1, 2]] * 2, [[3], [4]], group_values={"x": [value, make()]})
    assert batch.group_values["x"][0] is value


@pytest.mark.parametrize(("one", "other"), UNEQUAL, ids=range(len(UNEQUAL)))
def test_unequal_values_of_groups(one: Any, other: Any) -> None:
    with pytest.raises(SharedPromptError, match=r"^group_values\['x'\]: .* different ones of samples 0 and 1"):
        pack_shared_prompts([[1, 2]] * 2, [[3], [4]], group_values={"x": [one, other]})


def lists(**options: Any) -> PackedBatch:
    return pack_shared_prompts(PROMPTS, RESPONSES, **options)


def jagged(values: torch.Tensor) -> PackedBatch:
    return pack_jagged(nested(tensors([[1, 2]])), [1], row_values={"x": values})


def with_gap() -> torch.Tensor:
    """One value and two, which begin where two sequences of two tokens do."""
    values, ones = torch.tensor([[1, 2], [4, 5]]), torch.tensor([1, 2])
    return torch.nested.narrow(values, 1, torch.zeros_like(ones), ones, layout=torch.jagged)


ERRORS: list[tuple[Any, str]] = [
    (lambda: batches(HEIGHTS, {"uid": UIDS[:3]})["lists"](), r"^group_values\['uid'\]: expected 4 of them"),
    (lambda: lists(row_values={"x": [*HEIGHTS[:3], HEIGHTS[0]]}), r"^row_values\['x'\]\[3\]: expected shape"),
    (lambda: pack_shared_prompts([[1]], [[2]], row_values=[1]), "^row_values: expected a dict of names"),
    (lambda: pack_shared_prompts([[1]], [[2]], row_values={"x": []}), r"^row_values\['x'\]: expected 1 of them"),
    (lambda: pack_padded(torch.ones(1, 2).long(), torch.ones(1, 2).long(), 1, row_values={"x": torch.ones(2, 1)}),
     r"^row_values\['x'\]: expected a tensor of shape \(..., 1, 2\)"),
    (lambda: jagged(torch.ones(2)), r"^row_values\['x'\]: expected a nested"),
    (lambda: jagged(nested(tensors([[1]]))), r"^row_values\['x'\]: expected 2"),
    (lambda: jagged(nested(tensors([[1], [2]]))), r"^row_values\['x'\]: expected the offsets of input_ids"),
    (lambda: pack_jagged(nested(tensors([[1, 2], [4]])), [1, 1], row_values={"x": nested(tensors([[1], [3, 4]]))}),
     r"^row_values\['x'\]: expected the offsets of input_ids"),
    (lambda: pack_jagged(nested(tensors([[1, 2], [4, 5]])), [1, 1], row_values={"x": with_gap()}),
     r"^row_values\['x'\]: expected no gaps between the sequences"),
    (lambda: pack_jagged(with_gap(), [1, 1]), "^input_ids: expected no gaps between the sequences"),
    (lambda: pack_prefix_tree([[1] * 9, [2] * 9], tree=group_by_prefix([[1] * 9] * 2, min_shared=1)),
     "^tree: expected that of these sequences, got one in which other tokens share rows"),
    (lambda: pack_prefix_tree([[1] * 9] * 2, tree=group_by_prefix([[1] * 9] * 2), group_ids=[0, 1]),
     "^group_ids: expected equal ones for sequences that share rows in the tree, got 0 and 1"),
    (lambda: pack_prefix_tree(WHOLE, chosen=[4]), r"^chosen\[0\]: expected an int >= 0 and <= 3, got 4"),
    (lambda: pack_prefix_tree(WHOLE, chosen=[0], loss_mask=[[0]]), "^loss_mask: expected 4 of them"),
    (lambda: pack_prefix_tree(WHOLE[:2], tree=group_by_prefix(WHOLE)), "^tree: expected that of these 2 sequences"),
    (lambda: pack_prefix_tree(WHOLE, tree=group_by_prefix(WHOLE), boundary="gather"), "^boundary: .* of the tree"),
    (lambda: pack_prefix_tree(WHOLE, tree=group_by_prefix(WHOLE), borders=[[]] * 4), "^borders: .* beside a tree"),
    (lambda: pack_prefix_tree(WHOLE, tree=WHOLE), "^tree: expected a PrefixTree"),
    (lambda: pack_shared_prompts([[1]], [[2]]).expand([1.0, 2.0]), "^per_sequence: expected 1 values"),
    (lambda: pack_shared_prompts([[1]], [[2]]).expand(torch.tensor(1.0)), "^per_sequence: expected 1 values"),
    (lambda: pack_shared_prompts([[1]], [[2]]).expand(torch.ones(1, 1)),
     r"^per_sequence: expected shape \(1,\).* got shape \(1, 1\)"),
    (lambda: pack_shared_prompts([[1]], [[2]]).expand(["a"]), "^per_sequence: expected a tensor or a list"),
    (lambda: pack_prefix_tree(WHOLE, device="meta").distinct, "^batch: .* tensors have values, got one on meta"),
    (lambda: pack_prefix_tree(WHOLE, device="meta").labels, "^batch: .* tensors have values, got one on meta"),
    (lambda: lists(row_values={"x": ["a"] * 4}), r"^row_values\['x'\]: expected a list of tensors"),
    (lambda: pack_prefix_tree([WHOLE[0], WHOLE[0], *WHOLE[2:]], tree=group_by_prefix(WHOLE)),
     "^tree: .* 5 tokens in sequence 1, got one whose sequence 1 has 3"),
    (lambda: pack_prefix_tree([1, 2, 3, 4], tree=group_by_prefix(WHOLE), chosen=[0]), r"^sequences\[0\]: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(SharedPromptError, match=message):
        call()


def test_expand() -> None:
    """Advantages, in the order in which the tokens are scored."""
    batch = pack_shared_prompts(PROMPTS, RESPONSES)
    assert batch.expand([0.5, -1.0, 9.0, 2.0]).tolist() == [0.5, 0.5, -1.0, 2.0, 2.0, 2.0]
    advantages = torch.arange(8.0).view(4, 2).requires_grad_()
    batch.expand(advantages).sum().backward()
    assert advantages.grad is not None and advantages.grad[:, 0].tolist() == [2.0, 1.0, 0.0, 3.0]
    assert pack_shared_prompts([[1]] * 2, [[]] * 2).expand([1.0, 2.0]).shape == (0,)


@pytest.mark.parametrize("has_mask", [False, True])
def test_tokens_that_are_elsewhere_travel_with_the_numbers(has_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch for another device takes along, in one copy: here between tensors of one device."""
    masks = [[0] + [1] * (len(one) - 1) for one in WHOLE] if has_mask else None
    kinds: dict[str, Any] = dict(loss_mask=masks, min_shared=1, pad_to_multiple_of=8)
    expected = pack_prefix_tree(tensors(WHOLE), **kinds), lists()
    monkeypatch.setattr("flash_attn_dualkv.data.batch.same_device", lambda *_: False)
    for one, other in zip((pack_prefix_tree(tensors(WHOLE), **kinds), lists()), expected):
        assert_same_batch(one, other)


@pytest.mark.parametrize("form", ["lists", "padded", "jagged"])
def test_equal_tokens_and_other_images(form: str) -> None:
    """One value differs, wherever it stands; an image that only lies elsewhere in memory is the same. Grids count."""
    first = torch.randn(64, 384, generator=torch.Generator().manual_seed(0))
    second, grid = first.clone(), torch.tensor([[1, 8, 8]])
    images: dict[str, Any] = {"pixels": [first, None, second, None], "grids": [grid, None, grid.clone(), None]}

    def pack(**options: Any) -> PackedBatch:
        return batches(HEIGHTS, {}, images=images, **options)[form]()

    assert pack().layout.num_groups == 3 and len(pack().images["pixels"]) == 64
    for row, column in ((0, 0), (17, 101), (63, 383)):
        second[row, column] += 1e-3
        batch = pack()
        assert batch.layout.num_groups == 4 == len(group_by_prompt(PROMPTS, images=images))
        assert torch.equal(batch.images["pixels"], torch.cat([first, second]))
        with pytest.raises(SharedPromptError, match="^group_ids: expected equal images .*'a', got samples 0 and 2"):
            pack(group_ids=UIDS)
        assert pack(group_ids=[*range(4)]).layout.num_groups == 4
        second.copy_(first)
    images["grids"][2] = torch.tensor([[1, 4, 16]])
    assert pack().layout.num_groups == 4
    assert all(one.is_meta for one in pack().to("meta").images.values())
