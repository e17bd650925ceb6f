"""One decoder layer in plain PyTorch around an attention, over the rows that an implementation computes.

The layer is that of Qwen3: RMSNorm, projections, an RMSNorm of every query and key head, RoPE, attention, output
projection, RMSNorm, gated MLP. Implementations differ in the attention and in the tokens that the layer runs over:
shared ones compute every token once, replicated ones a copy of the prompt for every response.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from packing import Arrangement, Attention, Prepared, folded, leaf, packed_positions, shared
from shapes import LayerShape
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from flash_attn_dualkv.predict import ModelShape

ROPE_BASE = 1e6
EPS = 1e-6
WEIGHT_STD = 0.02
# Of the norms of query and key heads. At 1 the scores of random tokens are nearly equal and attention is close to an
# average of all values, in which an error would be lost.
HEAD_NORM = 1.6


class Weights(NamedTuple):
    """Of one layer, as torch.nn.functional.linear takes them: (outputs, inputs)."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def make_weights(
    model: ModelShape, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
) -> Weights:
    """Random weights; norms are near 1.

    Raises:
        ValueError: the model's layers have no norm of queries and keys.
    """
    if not model.qk_norm:
        raise ValueError("model: expected qk_norm, this layer has norms of queries and keys")
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator) * WEIGHT_STD

    return Weights(
        input_norm=1 + normal(hidden),
        q=normal(queries, hidden),
        k=normal(keys, hidden),
        v=normal(keys, hidden),
        q_norm=HEAD_NORM + normal(model.head_dim),
        k_norm=HEAD_NORM + normal(model.head_dim),
        o=normal(hidden, queries),
        mlp_norm=1 + normal(hidden),
        gate=normal(model.intermediate, hidden),
        up=normal(model.intermediate, hidden),
        down=normal(hidden, model.intermediate),
    )


def rope_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, 1, head_dim), of positions (T,); angles in fp64, as 128K times the fastest frequency needs."""
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = positions.double()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of (T, H, d), whose pairs are the two halves of a head."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def decoder_layer(
    x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, attention: Attention, model: ModelShape
) -> Tensor:
    """The layer's output for hidden states x (T, hidden)."""
    h = rms_norm(x, (model.hidden,), weights.input_norm, EPS)
    q = linear(h, weights.q).unflatten(-1, (model.heads, model.head_dim))
    k = linear(h, weights.k).unflatten(-1, (model.kv_heads, model.head_dim))
    v = linear(h, weights.v).unflatten(-1, (model.kv_heads, model.head_dim))
    q = rotate(rms_norm(q, (model.head_dim,), weights.q_norm, EPS), cos, sin)
    k = rotate(rms_norm(k, (model.head_dim,), weights.k_norm, EPS), cos, sin)
    x = x + linear(attention(q, k, v).flatten(1), weights.o)
    h = rms_norm(x, (model.hidden,), weights.mlp_norm, EPS)
    return x + linear(silu(linear(h, weights.gate)) * linear(h, weights.up), weights.down)


def make_layer_source(
    shape: LayerShape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Weights]:
    """Random normal hidden states of the packed rows, the gradient of the output, and weights."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.packed_tokens, shape.model.hidden)
    x, dout = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    return x, dout, make_weights(shape.model, dtype, device, generator)


def prepare_layer(shape: LayerShape, dtype: torch.dtype, device: torch.device, seed: int, how: Arrangement) -> Prepared:
    """The layer over the implementation's rows. Leaves are its input and its weights.

    Nothing of the source stays alive: it would count as this implementation's memory.
    """
    model, total = shape.model, shape.packed_tokens
    all_x, all_dout, all_weights = make_layer_source(shape, dtype, device, seed)
    rows, copies = how.rows.to(device), how.counted(total).to(device)
    x, weights = leaf(all_x[rows]), Weights(*map(leaf, all_weights))
    tables = rope_tables(packed_positions(shape).to(device), model.head_dim, x.dtype)
    cos, sin = (table[rows] for table in tables)
    del tables

    def take(out: Tensor, which: Tensor) -> Tensor:
        # What the layer adds to its input: the input itself is the same for all.
        added = folded(out, rows, which, total) - folded(x.detach(), rows, which, total)
        return shared(added, copies[which])

    return Prepared(
        (x, *weights),
        shared(all_dout, copies)[rows],
        lambda: decoder_layer(x, weights, cos, sin, how.attention, model),
        take,
        lambda gradients, which: (folded(gradients[0], rows, which, total),),
    )
