"""The layer benchmarks: that all implementations compute the same layer, what is counted, the law of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import layer  # noqa: E402
import peers  # noqa: E402
import shapes  # noqa: E402
from shapes import Group, Shape, in_layer  # noqa: E402

CPU = torch.device("cpu")
SMALL = (
    *shapes.LAYER_TINY,
    in_layer(Shape("two groups", (Group(50, (20, 31)), Group(64, (64,)))), shapes.TINY_MODEL),
    in_layer(Shape("one response", (Group(37, (5,)),)), shapes.TINY_MODEL),
)


def by_name(shape: Shape) -> str:
    return shape.name


# --- the layer ------------------------------------------------------------------------------------------------------


def sequence_by_sequence(source: layer.LayerSource) -> list[torch.Tensor]:
    """Output (packed) and gradients of x and of every weight: each sequence alone, with attention written out."""
    shape, model = source.shape, source.shape.model
    x = source.x.detach().requires_grad_()
    weights = layer.Weights(*(one.detach().requires_grad_() for one in source.weights))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (one.repeat_interleave(model.heads // model.kv_heads, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / model.head_dim**0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def alone(rows: torch.Tensor) -> torch.Tensor:
        cos, sin = layer.rope_tables(torch.arange(len(rows)), model.head_dim, x.dtype)
        return layer.decoder_layer(x[rows], weights, cos, sin, attention, model)

    parts = []
    begin = 0
    for group in shape.groups:
        prompt = torch.arange(begin, begin + group.prompt)
        parts.append(alone(prompt))
        begin += group.prompt
        for length in group.responses:
            parts.append(alone(torch.cat([prompt, torch.arange(begin, begin + length)]))[group.prompt :])
            begin += length
    out = torch.cat(parts)
    return [out.detach() - source.x, *torch.autograd.grad(out, (x, *weights), source.dout)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", SMALL, ids=by_name)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_all_implementations_compute_the_same_layer(
    shape: shapes.LayerShape, dtype: torch.dtype, tolerance: float
) -> None:
    """Output, gradients of the hidden states and of every parameter, against each sequence by itself."""
    source = layer.make_layer_source(shape, dtype, CPU)
    expected = sequence_by_sequence(source)
    rows = torch.arange(shape.packed_tokens)
    compared = []
    for implementation in layer.cpu_layers():
        if implementation.refuses(shape) is None:
            prepared = implementation.build(source)
            out = prepared.run()
            got = [prepared.take(out, rows)]
            assert prepared.dout.shape == out.shape
            assert out.shape[0] == implementation.tokens(shape)
            if "backward" in implementation.directions:
                got += prepared.fold(torch.autograd.grad(out, prepared.leaves, prepared.dout))
                assert len(got) == len(expected)
            for value, reference in zip(got, expected, strict=False):
                difference = (value - reference).abs().max() / reference.abs().max()
                assert difference < tolerance, implementation.name
            compared.append(implementation.name)
    assert {"dualkv_reference", "flex_packed", "math_replicated"} <= set(compared)
    assert ("prefix_grouper" in compared) == (peers.is_importable("prefix_grouper") and len(shape.groups) == 1)
