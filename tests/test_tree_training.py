"""A model on a packed tree computes what it computes on each sequence alone: log-probabilities, loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import Lists
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from flash_attn_dualkv import pack_prefix_tree, shared_prompt_attention, unpack_logprobs

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 31, 16, 4, 2, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
FLOAT64 = dict(rtol=1e-9, atol=1e-11)


class Model(nn.Module):
    """A decoder of two layers with embedded positions, in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.4 * torch.randn(shape, dtype=torch.float64, generator=generator))

        self.tokens, self.positions = matrix(VOCABULARY, WIDTH), matrix(64, WIDTH)
        self.qkv = nn.ParameterList(matrix(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM) for _ in range(2))
        self.out = nn.ParameterList(matrix(HEADS * HEAD_DIM, WIDTH) for _ in range(2))
        self.mlp = nn.ParameterList(matrix(WIDTH, WIDTH) for _ in range(2))
        self.head = matrix(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attention) -> Tensor:
        """(T, vocabulary) log-probabilities."""
        x = self.tokens[input_ids] + self.positions[position_ids]
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp):
            heads = (rms_norm(x, (WIDTH,)) @ qkv).unflatten(1, (-1, HEAD_DIM))
            x = x + attend(*heads.split([HEADS, KV_HEADS, KV_HEADS], 1)).flatten(1) @ out
            x = x + silu(rms_norm(x, (WIDTH,)) @ mlp)
        return (x @ self.head).log_softmax(-1)


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


def transcripts(seed: int) -> tuple[Lists, Lists]:
    """Dialogues of several turns that branch between turns and within them, and masks of several spans."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    sequences = [[draw(VOCABULARY) for _ in range(12 + draw(8))]]
    for _ in range(7):
        stem = sequences[draw(len(sequences))]
        own = [draw(VOCABULARY) for _ in range(draw(9))]
        sequences.append([*stem[: draw(len(stem) + 1)], *own])
    sequences += [[], [3], sequences[1][:4], sequences[2]]
    masks = [[0 if at == 0 else int(draw(3) > 0) for at in range(len(one))] for one in sequences]
    return sequences, masks


@pytest.mark.parametrize(
    "options",
    [
        dict(min_shared=1),
        dict(min_shared=1, boundary="replicate"),
        dict(min_shared=6),
        dict(min_shared=1, max_depth=2, pad_to_multiple_of=16),
        dict(min_shared=1, group_ids=[0, 1] * 6),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items() if name != "group_ids") or "ids",
)
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_equals_its_sequences(seed: int, options: dict[str, Any]) -> None:
    sequences, masks = transcripts(seed)
    batch = pack_prefix_tree(sequences, loss_mask=masks, **options)
    assert batch.dedup_ratio > 1.1 and batch.depth > 1
    model = Model()
    width = max(batch.scored_lens) + 1
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
