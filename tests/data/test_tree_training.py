# SPDX-License-Identifier: BSD-3-Clause
"""A model on a packed tree computes what it computes on each sequence alone: log-probabilities, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_trees import FLOAT64, Model, transcripts
from samples import Lists
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_dualkv import pack_prefix_tree, shared_prompt_attention, unpack_logprobs


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own attention of one sequence."""
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def expected_logprobs(model: Model, sequences: Lists, masks: Lists, width: int) -> Tensor:
    """(B, width) log-probabilities of the trained tokens, 0 behind the last."""
    lines = []
    for sequence, mask in zip(sequences, masks):
        line = torch.zeros(width, dtype=torch.float64)
        trained = [place for place, value in enumerate(mask) if value]
        if trained:
            values = model(torch.tensor(sequence), torch.arange(len(sequence)), alone)
            scores = values[[place - 1 for place in trained], [sequence[place] for place in trained]]
            line = torch.cat([scores, line[len(trained) :]])
        lines.append(line)
    return torch.stack(lines)


@pytest.mark.parametrize(
    "options",
    [
        dict(min_shared=1),
        dict(min_shared=1, boundary="replicate"),
        dict(min_shared=6),
        dict(min_shared=4, pad_to_multiple_of=16),
        dict(min_shared=1, group_ids=[0, 1] * 6),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items() if name != "group_ids") or "ids",
)
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_equals_its_sequences(seed: int, options: dict[str, Any]) -> None:
    sequences, masks = transcripts(seed)
    batch = pack_prefix_tree(sequences, loss_mask=masks, **options)
    assert batch.dedup_ratio > 1.1 and batch.layout.depth > 1
    model = Model()
    width = max(batch.response_lens) + 1
    # Every token of every sequence has a weight of its own, as advantages do it.
    weights = torch.randn(len(sequences), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    wanted = expected_logprobs(model, sequences, masks, width)
    values = model(
        batch.input_ids,
        batch.position_ids,
        lambda q, k, v: shared_prompt_attention(q, k, v, batch.layout),
    )
    got = unpack_logprobs(values[batch.token_index, batch.targets], batch, width=width, per_row=False)
    torch.testing.assert_close(got, wanted, **FLOAT64)
    gradients = [torch.autograd.grad((one * weights).sum(), [*model.parameters()]) for one in (got, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **FLOAT64)


def test_labels_of_the_replicated_boundary_are_enough() -> None:
    """Every row scores one token: a fused head that knows labels only gives what token_index gives."""
    sequences, masks = transcripts(0)
    batch = pack_prefix_tree(sequences, loss_mask=masks, min_shared=1, boundary="replicate")
    values = Model()(
        batch.input_ids,
        batch.position_ids,
        lambda q, k, v: shared_prompt_attention(q, k, v, batch.layout),
    )
    by_row = values.gather(1, batch.row_labels.clamp(min=0)[:, None])[:, 0]
    by_token = values[batch.token_index, batch.targets]
    assert unpack_logprobs(by_row, batch, per_row=True).equal(unpack_logprobs(by_token, batch, per_row=False))
