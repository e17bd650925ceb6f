# SPDX-License-Identifier: BSD-3-Clause
"""Wrong arguments of the packing functions: each is named, with what was expected and what was got."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from samples import nested

from flash_attn_dualkv import (
    SharedPromptError,
    balance,
    group_by_prefix,
    group_by_prompt,
    pack_jagged,
    pack_padded,
    pack_prefix_tree,
    pack_shared_prompts,
    split_by_token_budget,
    unpack_logprobs,
    unpack_to_jagged,
)

ONES = torch.ones(2, 4, dtype=torch.int64)
BATCH_OF_3 = pack_shared_prompts([[1]], [[1, 2, 3]])
TREE = group_by_prefix([[1, 2, 3], [1, 2]])


def with_borders(borders: Any) -> Any:
    return lambda: pack_prefix_tree([[1, 2, 3]], borders=borders)


def with_hole(place: int, prompt_length: Any = 4) -> Any:
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, place] = 0
    return lambda: pack_padded(torch.arange(16).view(2, 8), mask, prompt_length)


def with_ids(*ids: str) -> Any:
    return lambda: group_by_prompt([[1], [1, 2], [3]], group_ids=ids)


def rows_of(tokens: Any) -> Any:
    return lambda: BATCH_OF_3.rows_of(tokens)


ERRORS: list[tuple[Any, str]] = [
    (with_hole(1), "^attention_mask.*got a hole in row 1"),
    (with_hole(6), "^attention_mask.*got a hole in row 1"),
    (with_hole(6, [2, 2]), "^attention_mask.*got a hole in row 1"),
    (with_ids("a", "b", "b"), "^group_ids: expected equal prompts .*'b'.*samples 1 and 2 differ"),
    (with_ids("a", "b"), "^group_ids: expected 3 of them"),
    (rows_of(torch.tensor([4])), "^tokens: expected .*places among 4 tokens"),
    (rows_of(torch.tensor([-1])), "^tokens: expected .*places among 4 tokens"),
    (rows_of(torch.tensor([0]).int()), "^tokens: expected .*int64"),
    (rows_of(torch.tensor([[0]])), "^tokens: expected .*1 dimension"),
    (rows_of([0]), "^tokens: expected .*an integer tensor"),
    *(
        (partial(function, torch.zeros(count), BATCH_OF_3, **options), message)
        for function in (unpack_logprobs, unpack_to_jagged)
        for count, options, message in (
            (10, {}, r"^values: expected 3 \(scored tokens\) or"),
            (9, {"per_row": True}, "^values: expected .* one for each row"),
        )
    ),
    (lambda: TREE.take([2]), "^chosen: expected an int >= 0 and <= 1"),
    (lambda: TREE.take([-1]), "^chosen: expected an int >= 0 and <= 1"),
    (lambda: pack_shared_prompts([], []), "^prompts: expected at least one, got 0"),
    (lambda: pack_shared_prompts([[1], []], [[2], [3]]), r"^prompts\[1\]: expected at least one token"),
    (lambda: pack_shared_prompts([[1], [2]], [[3]]), "^responses: expected 2 of them .* got 1"),
    (lambda: pack_shared_prompts([torch.ones(2)], [[1]]), r"^prompts\[0\]: expected integers"),
    (lambda: pack_shared_prompts([[1]], [torch.ones(2) > 0]), r"^responses\[0\]: expected integers"),
    (lambda: pack_shared_prompts([[1.5]], [[1]]), r"^prompts\[0\]: expected integers"),
    (lambda: pack_shared_prompts([ONES], [[1]]), r"^prompts\[0\]: expected 1 dimension"),
    (lambda: pack_shared_prompts(["text"], [[1]]), r"^prompts\[0\]: expected a 1-D integer tensor"),
    (lambda: pack_shared_prompts([ONES[0], ONES[0].to("meta")], [*ONES]), "^device: expected cpu"),
    (lambda: pack_shared_prompts([ONES[0].to("meta")], [ONES[0].to("meta")]), "^prompts and .* on meta"),
    (lambda: group_by_prompt([ONES[0].to("meta")]), "^prompts: expected a tensor that has values, got one on meta"),
    (lambda: pack_shared_prompts([[1]], [[1]], boundary="both"), "^boundary: expected 'replicate' or"),
    (
        lambda: pack_shared_prompts([[1]], [[1]], max_responses_per_group=2),
        "^max_responses_per_group: expected None: split_by",
    ),
    (lambda: pack_shared_prompts([[1]], [[1]], pad_to_multiple_of=0), "^pad_to_multiple_of"),
    (lambda: pack_padded(ONES, ONES[:, :3], 2), "^attention_mask: expected shape"),
    (lambda: pack_padded(ONES, 2 * ONES, 2), "^attention_mask: expected 0 and 1"),
    (lambda: pack_padded(ONES, ONES - 2 * (ONES.cumsum(1) == 4), 2), "^attention_mask: .* 0 and 1"),
    (lambda: pack_padded(ONES[:0], ONES[:0], 2), "^prompts: expected at least one, got 0"),
    (lambda: pack_padded(ONES[:, :0], ONES[:, :0], 0), r"^prompts\[0\]: expected at least one token"),
    (lambda: pack_padded(ONES[:0], ONES[:0], []), "^prompts: expected at least one, got 0"),
    (lambda: pack_padded(ONES, ONES / 2, 2), "^attention_mask: expected 0 and 1"),
    (lambda: pack_padded(ONES, ONES * float("nan"), 2), "^attention_mask: expected 0 and 1"),
    (lambda: pack_padded(ONES[0], ONES[0], 2), "^input_ids: expected 2 dimension"),
    (lambda: pack_padded(ONES, ONES, 5), "^prompt_length: expected an int >= 0 and <= 4, got 5"),
    (lambda: pack_padded(ONES, ONES, 0), r"^prompts\[0\]: expected at least one token"),
    (lambda: pack_padded(ONES, ONES, [2, 5]), r"^prompt_length\[1\]: expected 0 .. 4"),
    (lambda: pack_padded(ONES, ONES, [2, 2.5]), r"^prompt_length\[1\]: expected an int >= 0"),
    (lambda: pack_padded(ONES, ONES, [2]), "^prompt_length: expected 2 of them"),
    (lambda: pack_padded(ONES, ONES, torch.tensor(2)), "^prompt_length: expected 1 dimension"),
    (lambda: pack_padded(ONES, ONES, np.array([2])), "^prompt_length: expected 2 of them"),
    (lambda: pack_padded(ONES, ONES, np.array([2.0, 2.0])), r"^prompt_length\[0\]: expected an int >= 0"),
    (lambda: pack_padded(ONES, ONES, np.array([[2], [2]])), r"^prompt_length\[0\]: expected an int >= 0"),
    (lambda: pack_jagged(nested(ONES), [2, 5]), r"^prompt_lens\[1\]: expected 0 .. 4"),
    (lambda: pack_jagged(nested(ONES), torch.ones(2)), "^prompt_lens: expected integers"),
    (lambda: group_by_prompt([[1]], group_ids=list(torch.ones(1))), r"^group_ids\[0\]: .* no tensor"),
    (lambda: group_by_prompt([[1]], group_ids=[[1]]), r"^group_ids\[0\]: expected a hashable value"),
    (lambda: pack_shared_prompts(iter([[1]]), [[1]]), "^prompts: expected a list of token sequences"),
    (lambda: pack_shared_prompts([[1]], [[-1]]), "^prompts and responses: expected token ids >= 0, got -1"),
    (lambda: pack_padded(-ONES, ONES, 2), "^input_ids: expected token ids >= 0, got -1"),
    (lambda: pack_jagged(nested(-ONES), [2, 2]), "^input_ids: expected token ids >= 0, got -1"),
    (lambda: pack_padded(ONES, ONES, True), "^prompt_length: expected an int"),
    (lambda: pack_shared_prompts([[1]], [[1]], device="gpu"), "^device: expected a device such as"),
    (lambda: pack_shared_prompts([[1]], [[1]], pad_to_multiple_of=2.5), "^pad_to_multiple_of: expected an int >= 1"),
    (lambda: unpack_logprobs(torch.zeros(3), BATCH_OF_3, width=2), "^width: expected an int >= 3"),
    (lambda: unpack_logprobs(torch.zeros(3), {}), "^batch: expected a PackedBatch, got"),
    (lambda: split_by_token_budget([[0, 1], [1]], [5] * 2, [2] * 2, 99), r"^groups\[1\]: .* sample 1 again"),
    (lambda: split_by_token_budget([[0, 2]], [5] * 2, [2] * 2, 99), r"^groups\[0\]\[1\]: .* <= 1, got 2"),
    (lambda: split_by_token_budget([[-1]], [5], [2], 99), r"^groups\[0\]\[0\]: expected an int >= 0"),
    (lambda: split_by_token_budget([[0]], [5], [-2], 99), r"^response_lens\[0\]: expected an int >= 0"),
    (lambda: split_by_token_budget([[0, 1]], [5, 6], [2] * 2, 99), r"^groups\[0\]: .* with one prompt"),
    (lambda: split_by_token_budget([[]], [5], [2], 99), r"^groups\[0\]: expected at least one sample"),
    (lambda: balance([[0, 1]], [5, 6], [1, 1], 1), r"^groups\[0\]: .* with one prompt"),
    (lambda: balance([[0, 1]], [5, 5], [1, 1], 2.0), "^num_ranks: expected an int >= 1 and <= 2, got 2.0"),
    (lambda: pack_jagged(ONES, [1, 1]), "^input_ids: expected a nested tensor"),
    (lambda: balance([[0, 1]], [5, 5], [1, 1]), "^num_ranks: expected an int >= 1 and <= 2, got None"),
    (lambda: balance([[0]], [5], [1], 1, equal_counts=1), "^equal_counts: expected a bool"),
    (lambda: balance([[0, 1, 2]], [1] * 3, [1] * 2, 1), "^response_lens: expected 3"),
    (lambda: split_by_token_budget([[0, 1]], [5, 5], [2, 4], 8), "^max_tokens: expected at least 9.* got 8"),
    (lambda: pack_prefix_tree([]), "^sequences: expected at least one, got 0"),
    (lambda: pack_prefix_tree([torch.ones(2, device="meta").long()]), "^sequences: .* got one on meta"),
    (lambda: pack_prefix_tree([[1], [2]], loss_mask=[[0]]), "^loss_mask: expected 2 of them .* got 1"),
    (lambda: pack_prefix_tree([[1], [2, 3]], loss_mask=[[0], [0]]), r"^loss_mask\[1\]: expected 2 values"),
    (lambda: pack_prefix_tree([[1, 2]], loss_mask=[[0, 2]]), r"^loss_mask\[0\]: expected 0 and 1"),
    (lambda: pack_prefix_tree([[], [1, 2]], loss_mask=[[], [0, -1]]), r"^loss_mask\[1\]: expected 0 and 1"),
    (lambda: pack_prefix_tree([[1, 2], [3]], loss_mask=[[0.0, 0.5], [0.0]]), r"^loss_mask\[0\]: expected 0 and 1"),
    (lambda: pack_prefix_tree([[1, 2]], loss_mask=[[0.0, float("nan")]]), r"^loss_mask\[0\]: expected 0 and 1"),
    (lambda: pack_prefix_tree([[1, 2]], loss_mask=torch.tensor(0)), "^loss_mask: expected a list of masks"),
    (
        lambda: pack_prefix_tree([[1, 2], [], [3, 4]], loss_mask=[[0, 1], [], [1, 0]]),
        r"^loss_mask\[2\]\[0\]: expected 0 for the first token, which no row scores, got 1",
    ),
    (
        lambda: pack_prefix_tree([[1, 2]], loss_mask=[torch.zeros(2, device="meta").long()]),
        "^loss_mask: .* got one on meta",
    ),
    (lambda: pack_prefix_tree([[1]], boundary="both"), "^boundary: expected 'replicate' or 'gather'"),
    (lambda: pack_prefix_tree([[1]], min_shared=0), "^min_shared: expected an int >= 1, got 0"),
    (lambda: pack_prefix_tree([[1], [2]], group_ids=[0]), r"^group_ids: expected 2 of them \(as sequences\)"),
    (
        lambda: pack_prefix_tree([[1, 2, 3]], borders=[[1]], min_shared=3),
        "^min_shared: expected None with borders, .* got 3",
    ),
    (with_borders([[1], [2]]), r"^borders: expected 1 of them \(as sequences\), got 2"),
    (with_borders(1), "^borders: expected a list of lists of positions, got 1"),
    (with_borders([[0]]), r"^borders\[0\]: expected rising positions from 1 to 3, got \[0\]"),
    (with_borders(["12"]), r"^borders\[0\]: expected a list of ints"),
    (with_borders([[1, 1]]), r"^borders\[0\]: expected rising positions from 1 to 3, got \[1, 1\]"),
    (with_borders([[2, 1]]), r"^borders\[0\]: expected rising positions from 1 to 3, got \[2, 1\]"),
    (with_borders([[1, 4]]), r"^borders\[0\]: expected rising positions from 1 to 3, got \[1, 4\]"),
    (with_borders([[1.5]]), r"^borders\[0\]\[0\]: expected an int >= 0, got 1.5"),
    (lambda: split_by_token_budget(TREE, max_tokens=0), "^max_tokens: expected an int >= 1, got 0"),
    (
        lambda: split_by_token_budget(TREE, max_tokens=2),
        "^max_tokens: expected at least 3, the tokens of sample 0, got 2",
    ),
    (lambda: split_by_token_budget(TREE, [3, 2], max_tokens=8), "^prompt_lens: expected None with a tree"),
    (lambda: split_by_token_budget(TREE, max_tokens=8, dp_group=1), "^dp_group: expected a process group"),
    (lambda: balance(TREE, num_ranks=0), "^num_ranks: expected an int >= 1 and <= 2, got 0"),
    (lambda: balance(TREE, num_ranks=2, token_cost=-1), "^token_cost: expected a finite number >= 0"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(SharedPromptError, match=message):
        call()


# Tensors, or what holds tensors: all rows are equally long, of which padding is not told.
MATRICES: dict[str, Any] = {
    "tensor": ONES,
    "bytes": ONES.to(torch.uint8),
    "array": ONES.numpy(),
    "one row": ONES[:1],
    "no rows": ONES[:0],
    "three dimensions": ONES[None],
}
TAKERS: dict[str, tuple[Any, str]] = {
    "responses": (lambda given: pack_shared_prompts([[1], [2]], given), "^responses"),
    "prompts": (lambda given: pack_shared_prompts(given, [[1], [2]]), "^prompts"),
    "with ids": (lambda given: pack_shared_prompts([[1], [2]], given, group_ids=[0, 1]), "^responses"),
    "groups": (group_by_prompt, "^prompts"),
    "trees": (pack_prefix_tree, "^sequences"),
    "prefixes": (group_by_prefix, "^sequences"),
    "masks": (lambda given: pack_prefix_tree([[1] * 4] * 2, loss_mask=given), "^loss_mask"),
}


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_matrix_is_no_list_of_sequences(taker: str, matrix: str) -> None:
    take, name = TAKERS[taker]
    expected = f"{name}: expected a list of .*got a matrix, whose padding would be tokens .pack_padded takes a padded"
    with pytest.raises(SharedPromptError, match=expected):
        take(MATRICES[matrix])
    with pytest.raises(SharedPromptError, match=f"{name}: .*a nested tensor .pack_jagged takes whole sequences"):
        take(nested([ONES[0], ONES[1, :3]]))


def test_lists_of_equal_lengths_are_lists() -> None:
    for given in ([*ONES], tuple(ONES), ONES.tolist(), ONES.unbind(), [*ONES.numpy()]):
        assert pack_shared_prompts(given, given).response_lens == (4, 4)
        assert pack_prefix_tree(given, min_shared=1).sequence_lens == (4, 4)
