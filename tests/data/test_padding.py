# SPDX-License-Identifier: BSD-3-Clause
"""Padding: advice for a padded matrix, masks of any type, and what is said once because it may be a mistake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import BOUNDARIES, assert_same_batch, nested

from flash_attn_dualkv import (
    PackedBatch,
    SharedPromptError,
    errors,
    pack_jagged,
    pack_padded,
    pack_prefix_tree,
    pack_shared_prompts,
)

PAD = 9
# Prompts as a tokenizer pads them, and their responses.
PROMPTS = torch.tensor([[PAD, PAD, 1, 2], [3, 1, 2, 4]])
RESPONSES = torch.tensor([[5, 6, PAD], [7, PAD, PAD]])
IDS = torch.cat([PROMPTS, RESPONSES], 1)
MASK = (IDS != PAD).long()
LISTS = [[1, 2], [3, 1, 2, 4]], [[5, 6], [7]]
# Sequences with a beginning of 3 tokens in common.
BRANCHES = [[1, 2, 3, 4], [1, 2, 3, 5, 6]]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors, "_said", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def said(call: Any) -> str | None:
    """What a call warns of; None if nothing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert len(found) <= 1
    return str(found[0].message) if found else None


def test_what_is_advised_for_a_padded_matrix() -> None:
    """First what is right for padding; rows as they are only where there is none, which pad_token_id checks."""
    with pytest.raises(SharedPromptError) as error:
        pack_shared_prompts(PROMPTS, [*RESPONSES])
    advice = str(error.value)
    assert 0 < advice.index("pack_padded") < advice.index("only where no row is padded") < advice.index("list(prompts)")
    batch = pack_padded(IDS, MASK, PROMPTS.shape[1])
    assert_same_batch(batch, pack_shared_prompts(*LISTS, pad_token_id=PAD))
    with pytest.raises(
        SharedPromptError, match=r"^prompts\[0\]: .*pad_token_id=9; pack_padded.*padding at place 0 of 4"
    ):
        pack_shared_prompts([*PROMPTS], LISTS[1], pad_token_id=PAD)


def packers(pad_token_id: Any) -> dict[str, tuple[Any, str]]:
    """Calls with rows that are padded behind their tokens, and the name of the first row with padding."""
    rows, option = [[1, 2], [3, PAD]], dict(pad_token_id=pad_token_id)
    return {
        "prompts": (lambda: pack_shared_prompts(rows, [[], [4]], **option), r"prompts\[1\]: .* place 1 of 2"),
        "responses": (lambda: pack_shared_prompts([[1], [2]], rows, **option), r"responses\[1\]: .* place 1 of 2"),
        "jagged": (lambda: pack_jagged(nested([*map(torch.tensor, rows)]), [1, 1], **option), r"input_ids\[1\]"),
        "tree": (lambda: pack_prefix_tree([[], *rows], **option), r"sequences\[2\]: .* place 1 of 2"),
        "chosen": (lambda: pack_prefix_tree([[PAD], *rows], chosen=[2], **option), r"sequences\[0\]: .* place 1"),
    }


@pytest.mark.parametrize("name", packers(None))
def test_padding_inside_rows_is_refused(name: str) -> None:
    call, message = packers(PAD)[name]
    with pytest.raises(SharedPromptError, match=message):
        call()
    for other in (None, 8):  # tokens are tokens, whatever they are
        packers(other)[name][0]()
    with pytest.raises(SharedPromptError, match="^pad_token_id: expected an int >= 0 .*, got .9."):
        packers(str(PAD))[name][0]()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_masks_of_exact_zeros_and_ones(boundary: Any, dtype: torch.dtype) -> None:
    for prompt_length in (PROMPTS.shape[1], [2, 4]):
        expected = pack_padded(IDS, MASK, prompt_length, boundary=boundary)
        assert_same_batch(pack_padded(IDS, MASK.to(dtype), prompt_length, boundary=boundary), expected)
    masks = [torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1, 1])]
    options: Any = dict(boundary=boundary, min_shared=1)
    expected = pack_prefix_tree(BRANCHES, loss_mask=masks, **options)
    assert_same_batch(pack_prefix_tree(BRANCHES, loss_mask=[one.to(dtype) for one in masks], **options), expected)
    assert_same_batch(
        pack_prefix_tree(BRANCHES, loss_mask=[one.to(dtype).tolist() for one in masks], **options), expected
    )


# --- what may be a mistake -------------------------------------------------------------------------------------------


def test_whole_sequences_with_one_number_for_all_prompts() -> None:
    """The columns of prompts have a prompt, its response and padding; a row with an empty response looks alike."""
    ids = torch.tensor([[1, 2, 5, 6, PAD, PAD], [1, 2, 3, 4, 7, 8]])
    mask = ids != PAD
    wrong: list[PackedBatch] = []
    message = said(lambda: wrong.append(pack_padded(ids, mask, 5)))
    assert wrong[0].response_lens == (0, 1)
    assert message is not None and "row 0 has 4 prompt tokens, padding behind them and no response" in message
    assert "the number of prompt tokens of each row, (B,)" in message
    assert said(lambda: pack_padded(ids, mask, 5)) is None  # once
    assert pack_padded(ids, mask, [2, 4]).response_lens == (2, 2)


def test_empty_responses_are_no_mistake() -> None:
    """Behind prompts that end where their columns do, and in whole sequences."""
    mask = MASK.clone()
    mask[:, PROMPTS.shape[1] :] = 0
    assert pack_padded(IDS, mask, PROMPTS.shape[1]).response_lens == (0, 0)
    assert pack_padded(PROMPTS, mask[:, :4], 4).response_lens == (0, 0)
    assert pack_padded(IDS, mask, [2, 4]).response_lens == (0, 0)
    right = torch.tensor([[1, 2, PAD, 5], [1, 2, 3, 6]])  # padded behind each part
    assert pack_padded(right, right != PAD, 3).response_lens == (1, 1)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_tree_that_shares_nothing(boundary: Any) -> None:
    masks = [[0] * len(one) for one in BRANCHES]
    options: Any = dict(loss_mask=masks, boundary=boundary)
    message = said(lambda: pack_prefix_tree(BRANCHES, **options))
    assert message is not None and "2 sequences begin alike, but no beginning saves 64 tokens" in message
    assert said(lambda: pack_prefix_tree(BRANCHES, **options)) is None  # once


def test_trees_of_which_nothing_is_to_be_said() -> None:
    for boundary in BOUNDARIES:
        pack_prefix_tree(BRANCHES, loss_mask=[[0] * 4, [0] * 5], min_shared=1, boundary=boundary)
        pack_prefix_tree([[1, 2], [2, 1], []], boundary=boundary)  # they begin with different tokens
        pack_prefix_tree(BRANCHES, group_ids=[0, 1], boundary=boundary)
        pack_prefix_tree(BRANCHES, borders=[[], []], boundary=boundary)
    # A token before each branch is left to it.
    pack_prefix_tree([[1, 2], [1, 3]], boundary="replicate")


def test_prompts_that_are_scored() -> None:
    message = said(lambda: pack_prefix_tree(BRANCHES, min_shared=1))
    assert message is not None and message.startswith("flash_attn_dualkv: loss_mask: without one all tokens")
    assert said(lambda: pack_prefix_tree(BRANCHES, min_shared=1)) is None  # once
