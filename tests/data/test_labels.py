# SPDX-License-Identifier: BSD-3-Clause
"""Labels for a loss over rows: one term for every trained token of every sequence, or an error."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flash_attn_dualkv import (
    PackedBatch,
    SharedPromptError,
    pack_prefix_tree,
    pack_shared_prompts,
    unpack_logprobs,
)

PROMPTS, RESPONSES = [[5, 6, 7], [5, 6, 7], [8], [5, 6, 7]], [[1, 2], [3], [4, 5, 6], []]
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(pad_to_multiple_of=8),
    dict(group_ids=range(4)),
    dict(group_ids=[0, 0, 1, 2]),
]
SHARED = r"^labels: expected a row for each of the \d+ scored tokens of all sequences, got \d+ rows"


def by_token(batch: PackedBatch, logits: Tensor) -> Tensor:
    """The loss of all trained tokens, whatever rows score them: what labels must agree with."""
    return cross_entropy(logits[batch.token_index], batch.targets)


def logits_of(batch: PackedBatch) -> Tensor:
    return torch.randn(batch.layout.num_tokens, 20, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_labels_say_everything_or_raise(options: dict[str, Any]) -> None:
    batch = pack_shared_prompts(PROMPTS, RESPONSES, **options)
    logits = logits_of(batch)
    torch.testing.assert_close(cross_entropy(logits, batch.labels), by_token(batch, logits))
    gathered = pack_shared_prompts(PROMPTS, RESPONSES, boundary="gather", **options)
    if options.get("group_ids") == range(4):  # no row stands before a branch
        torch.testing.assert_close(
            cross_entropy(logits_of(gathered), gathered.labels), by_token(gathered, logits_of(gathered))
        )
        return
    with pytest.raises(SharedPromptError, match=SHARED):
        _ = gathered.labels
    logits = logits_of(gathered)
    assert (cross_entropy(logits, gathered.row_labels) - by_token(gathered, logits)).abs() > 0.01


def test_a_batch_without_responses_leaves_nothing_out() -> None:
    for boundary in ("replicate", "gather"):
        batch = pack_shared_prompts([[5, 6], [7]], [[], []], boundary=boundary)  # type: ignore[arg-type]
        assert (batch.labels == -100).all()


# The trained tokens are the last ones of each.
TREES: dict[str, tuple[list[list[int]], list[int]]] = {
    "a turn that two sequences train": ([[5, 6, 7, 8, 9], [5, 6, 7, 8, 3]], [3, 3]),
    "a sequence that is the beginning of another": ([[5, 6, 7, 8], [5, 6, 7]], [2, 1]),
    "equal sequences": ([[5, 6, 7]] * 2, [1, 1]),
    "a turn of many": ([[5, 6, 7, one] for one in (1, 2, 3, 4)], [2] * 4),
}
APART = ([[5, 6, 7, 8, 9], [5, 6, 7, 3], [4, 4]], [2, 1, 1])


def tree_of(sequences: list[list[int]], trained: list[int], **options: Any) -> PackedBatch:
    masks = [[0] * (len(one) - count) + [1] * count for one, count in zip(sequences, trained)]
    return pack_prefix_tree(sequences, loss_mask=masks, min_shared=1, **options)


@pytest.mark.parametrize("boundary", ["replicate", "gather"])
@pytest.mark.parametrize("name", TREES)
def test_tokens_that_sequences_share(name: str, boundary: str) -> None:
    batch = tree_of(*TREES[name], boundary=boundary)
    for one in (batch, copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        with pytest.raises(SharedPromptError, match=SHARED):
            _ = one.labels
    # A head with one value a row is another matter: unpacking gives it to every sequence.
    if boundary == "replicate":
        values = logits_of(batch).log_softmax(-1)
        own = values.gather(1, batch.row_labels.clamp(min=0)[:, None])[:, 0]
        expected = unpack_logprobs(values[batch.token_index, batch.targets], batch, per_row=False)
        assert unpack_logprobs(own, batch, per_row=True).equal(expected)


def test_trees_whose_sequences_train_tokens_of_their_own() -> None:
    batch = tree_of(*APART, boundary="replicate", pad_to_multiple_of=8)
    logits = logits_of(batch)
    torch.testing.assert_close(cross_entropy(logits, batch.labels), by_token(batch, logits))
    with pytest.raises(SharedPromptError, match=SHARED):
        _ = tree_of(*APART, boundary="gather").labels
    # A branch of which one side is trained is no loss.
    one_side = tree_of([[5, 6, 7], [5, 6, 8]], [1, 0], boundary="gather")
    assert one_side.labels.tolist() == [-100, 7, -100, -100]


GATHERED = pack_shared_prompts(PROMPTS, RESPONSES, boundary="gather")


@pytest.mark.parametrize("batch", [GATHERED, tree_of(*TREES["equal sequences"])])
def test_batches_without_labels_are_batches(batch: Any) -> None:
    """Nothing but the labels raises: printed, copied, moved and changed they are as others."""
    assert "row_labels" in repr(batch)
    other = dataclasses.replace(batch, targets=batch.targets.clone())
    assert other.row_labels is batch.row_labels
    assert batch.to("cpu").row_labels is batch.row_labels
    assert pickle.loads(pickle.dumps(batch)).row_labels.equal(batch.row_labels)
    assert batch.to("meta").row_labels.is_meta
