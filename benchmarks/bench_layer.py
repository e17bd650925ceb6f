#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure one decoder layer of Qwen3-8B, forward and backward, with shared and with replicated prompts.

    python benchmarks/bench_layer.py                                   # 16 x 8K and 8 x 16K, all implementations
    python benchmarks/bench_layer.py --preset table11 --budget-s 500   # the DualKV paper's layer table
    python benchmarks/bench_layer.py --preset tree      # the agentic tree, against flattened sequences

Plain PyTorch around the attention, bf16, no checkpointing: RMSNorm, projections, an RMSNorm of every query and key
head, RoPE, attention, output projection, RMSNorm, gated MLP. Replicated implementations run the whole layer over
N (P + R) tokens, the others over P + N R. Times are those of a forward and of the backward that follows it, medians of
CUDA events; peak memory includes weights and all gradients.
"""

from __future__ import annotations

import sys

import command
import torch
from measure import ShapeRun, laps_under_load
from models import HEAD_NORM
from packing import Arrangement, Attention, Prepared, leaf, packed_positions, shared
from peers import Implementation, layer_implementations
from shapes import Shape
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from flash_attn_dualkv.model_shape import ModelShape

ROPE_BASE, EPS, WEIGHT_STD = 1e6, 1e-6, 0.02
Weights = dict[str, Tensor]  # of one layer, as torch.nn.functional.linear takes them: (outputs, inputs)


def make_weights(model: ModelShape, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Weights:
    """Random; norms are near 1."""
    if not model.qk_norm:
        raise ValueError("model: expected qk_norm, this layer has norms of queries and keys")
    hidden, inner, dim = model.hidden, model.intermediate, model.head_dim
    queries, keys = model.heads * dim, model.kv_heads * dim
    sizes: dict[str, tuple[int, ...]] = dict(
        q=(queries, hidden), k=(keys, hidden), v=(keys, hidden), o=(hidden, queries)
    )
    sizes |= dict(gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner))
    sizes |= dict(input_norm=(hidden,), mlp_norm=(hidden,), q_norm=(dim,), k_norm=(dim,))
    means = dict(input_norm=1.0, mlp_norm=1.0, q_norm=HEAD_NORM, k_norm=HEAD_NORM)
    found = {name: torch.randn(size, dtype=dtype, device=device, generator=generator) for name, size in sizes.items()}
    return {name: means.get(name, 0.0) + one * WEIGHT_STD for name, one in found.items()}


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
    h = rms_norm(x, (model.hidden,), weights["input_norm"], EPS)
    q, k, v = (linear(h, weights[name]).unflatten(-1, (-1, model.head_dim)) for name in "qkv")
    q = rotate(rms_norm(q, (model.head_dim,), weights["q_norm"], EPS), cos, sin)
    k = rotate(rms_norm(k, (model.head_dim,), weights["k_norm"], EPS), cos, sin)
    x = x + linear(attention(q, k, v).flatten(1), weights["o"])
    h = rms_norm(x, (model.hidden,), weights["mlp_norm"], EPS)
    return x + linear(silu(linear(h, weights["gate"])) * linear(h, weights["up"]), weights["down"])


def make_layer_source(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Weights]:
    """Random normal hidden states of the packed rows, the gradient of the output, and weights."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.packed_tokens, shape.model.hidden)
    x, dout = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    return x, dout, make_weights(shape.model, dtype, device, generator)


def prepare_layer(shape: Shape, dtype: torch.dtype, device: torch.device, how: Arrangement) -> Prepared:
    """The layer over the implementation's rows. Leaves are its input and its weights.

    Nothing of the source stays alive: it would count as this implementation's memory.
    """
    model, rows, copies = shape.model, how.rows.to(device), how.copies.to(device)
    all_x, all_dout, all_weights = make_layer_source(shape, dtype, device)
    x, weights = leaf(all_x[rows]), {name: leaf(one) for name, one in all_weights.items()}
    tables = rope_tables(packed_positions(shape).to(device), model.head_dim, x.dtype)
    cos, sin = (table[rows] for table in tables)
    del tables
    dout = shared(all_dout, copies)[rows]

    def run() -> Tensor:
        return decoder_layer(x, weights, cos, sin, how.attention, model)

    return Prepared((x, *weights.values()), dout, run, rows, copies, with_rows=1, base=x.detach())


class LayerRun(ShapeRun):
    """All measurements of one layer over one micro-batch."""

    counts_flops = False
    prepare = staticmethod(prepare_layer)

    def timed(self, impl: Implementation, prepared: Prepared) -> tuple[list[float], list[float]]:
        """A forward and its backward, which frees what the forward kept: there is memory for one of them only."""
        held: list[Tensor] = []

        def run() -> None:
            held.clear()
            held.append(prepared.run())

        steps = run, lambda: prepared.backward(held.pop(), retain_graph=False)
        forward, after = laps_under_load(self.config, steps)
        return forward, after


# A pass is long: a few in a round give the median enough samples.
SETTINGS = {"target_ms": 250.0, "max_calls": 5, "rounds": 3}
BENCHMARK = command.Benchmark("layer", __doc__ or "", layer_implementations, run_type=LayerRun, settings=SETTINGS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
