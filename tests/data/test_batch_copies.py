# SPDX-License-Identifier: BSD-3-Clause
"""Copies of a packed micro-batch: pickled, saved, from a data loader, moved; and that its tensors are independent."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from samples import assert_same_batch
from torch import Tensor

from flash_attn_dualkv import PackedBatch, pack_shared_prompts, shared_prompt_attention


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


def test_batches_of_a_data_loader() -> None:
    class Batches(torch.utils.data.Dataset[PackedBatch]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> PackedBatch:
            return pack_shared_prompts([[5, 6]] * 2, [[1] * index, [2]])

    loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1)
    for index, batch in enumerate(loader):
        assert_same_batch(batch, Batches()[index])


def test_writing_to_a_tensor_of_a_batch_does_not_spoil_the_others() -> None:
    """They lie in one buffer, but what autograd has saved of the layout is not what was written to."""
    batch = pack_shared_prompts([[5, 6, 7]] * 2, [[1, 2], [3]])
    q, k, v = (torch.randn(batch.layout.num_tokens, 1, 8, requires_grad=True) for _ in range(3))
    out = shared_prompt_attention(q, k, v, batch.layout)
    batch.labels.clamp_(min=0)
    out.sum().backward()
    assert q.grad is not None
