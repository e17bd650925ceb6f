# SPDX-License-Identifier: BSD-3-Clause
"""Which tree samples are packed with, however they are held."""

from __future__ import annotations

import itertools

import pytest
import torch
from samples import assert_same_batch, nested, padded, tensors

from flash_attn_dualkv import SharedPromptError, pack_prefix_tree, pack_shared_prompts
from flash_attn_dualkv.data.batch import pack
from flash_attn_dualkv.data.plan import checked_tree, plan
from flash_attn_dualkv.data.prefix_tree import Boundary
from flash_attn_dualkv.data.samples import Beside, Samples, read_jagged, read_padded, read_prompts

PROMPT = [5, 6, 7, 8]
# Two responses begin with the same three tokens.
RESPONSES = [[1, 2, 3, 4], [1, 2, 3, 9, 9], [4, 4]]
PROMPTS = [PROMPT] * 3


def readings() -> list[Samples]:
    """The same samples, read from lists, from padded and from jagged tensors."""
    whole = [torch.tensor(prompt + response) for prompt, response in zip(PROMPTS, RESPONSES)]
    lengths = [len(PROMPT)] * 3
    found = [read_prompts(PROMPTS, RESPONSES), read_jagged(nested(whole), lengths)]
    for sides in itertools.product(("left", "right"), repeat=2):
        ids, mask, columns = padded(PROMPTS, RESPONSES, sides, pad=1)
        found.append(read_padded(ids, mask, columns))
    rows, mask, _ = padded([one.tolist() for one in whole], [[]] * 3, ("left", "left"), pad=1)
    return [*found, read_padded(rows, mask, torch.tensor(lengths))]


def test_what_follows_prompts_is_shared_where_that_saves_enough() -> None:
    masks = [[0] * len(PROMPT) + [1] * len(response) for response in RESPONSES]
    sequences = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES)]
    deep = pack_prefix_tree(sequences, loss_mask=masks, boundary="replicate", min_shared=1)
    flat = pack_shared_prompts(PROMPTS, RESPONSES)
    assert flat.layout.num_tokens - deep.layout.num_tokens == 3
    for samples in readings():
        assert_same_batch(pack(samples, plan(samples, min_shared=3)), deep)
        for least in (None, 4, 64):
            tree = plan(samples, min_shared=least)
            assert (sum(tree.node_lens), tree.leaves) == (flat.layout.num_tokens, flat.tree.leaves)
            assert_same_batch(pack(samples, tree), flat)


def test_images_are_shared_with_prompts_alone() -> None:
    samples = read_prompts(PROMPTS, RESPONSES, Beside(images={"pixels": [torch.ones(2)] * 3}))
    assert plan(samples, min_shared=1) == plan(samples)


def test_labels_are_known_to_be_own_where_they_are() -> None:
    """Packing says so without a look at the labels, of any tree."""
    for responses in (RESPONSES, [[1, 2], [1, 2]], [[], []]):
        samples = read_prompts([PROMPT] * len(responses), responses)
        assert pack(samples, plan(samples)).own_labels
        boundaries: tuple[Boundary, ...] = ("replicate", "gather")
        for boundary, least in itertools.product(boundaries, (None, 1)):
            batch = pack(samples, plan(samples, boundary=boundary, min_shared=least))
            assert batch.own_labels <= (int((batch.row_labels >= 0).sum()) == len(batch.targets))


def test_a_tree_of_other_samples_is_refused() -> None:
    samples = read_prompts(*map(tensors, (PROMPTS, RESPONSES)))
    tree = plan(samples, min_shared=1)
    assert checked_tree(tree.take([0, 1, 2]), samples) == tree
    other = read_prompts(PROMPTS, [[9, 2, 3, 4], *RESPONSES[1:]])
    with pytest.raises(SharedPromptError, match="^tree: .*other tokens share rows"):
        checked_tree(tree, other)
    with pytest.raises(SharedPromptError, match="^tree: .*sequence 0 has 8$"):
        checked_tree(tree, read_prompts(PROMPTS, [[1], *RESPONSES[1:]]))
    with pytest.raises(SharedPromptError, match="^tree: expected 3 .*sequences.*got 2$"):
        checked_tree(tree.take([0, 1]), samples)


def test_keys_say_which_tokens_are_equal() -> None:
    ids = nested([torch.tensor(PROMPT + response) for response in RESPONSES])
    keys = torch.arange(len(ids.values()))
    samples = read_jagged(ids, [len(PROMPT)] * 3, keys=keys)
    batch = pack(samples, plan(samples, min_shared=1))
    assert batch.layout.num_groups == 3 and torch.equal(batch.input_ids[batch.row_index], ids.values())
