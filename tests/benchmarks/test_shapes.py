# SPDX-License-Identifier: BSD-3-Clause
"""Shapes of the benchmarks: their names, and the work that is counted."""

from __future__ import annotations

import re
from dataclasses import replace

import bench_kernel
import bench_layer
import bench_model
import packing
import pytest
import report
import shapes
import torch
from bench_cases import SMALL, TREES, dense_mask
from bench_cases import several_micro_batches as several_micro_batches
from shapes import Shape


@pytest.mark.parametrize("shape", [*SMALL, *TREES], ids=lambda shape: shape.name)
def test_work_against_brute_force(shape: Shape) -> None:
    mask = dense_mask(shape)
    seen = mask.sum(1)  # of the last token of a leaf: its whole sequence
    ends = [shape.begins[leaf] + shape.nodes[leaf][0] - 1 for leaf in shape.leaves]
    assert (shape.packed_tokens, shape.visible_pairs) == (len(mask), mask.sum())
    assert shape.replicated_lengths == seen[ends].tolist()
    assert shape.replicated_pairs == sum(sum(range(1, length + 1)) for length in shape.replicated_lengths)
    assert shape.flops("forward") == 4 * shape.heads * shape.head_dim * shape.visible_pairs
    assert shape.flops("backward") == 2.5 * shape.flops("forward")
    assert torch.equal(packing.packed_positions(shape), seen - 1)
    rows = packing.path_rows(shape, shape.leaves)
    assert all(torch.equal(one, mask[end].nonzero().view(-1)) for one, end in zip(rows, ends))
    pieces, most = shape.micro_batches(), max(shape.packed_tokens, *shape.replicated_lengths)
    assert [leaf for piece in pieces for leaf in piece] == shape.leaves
    assert all(sum(shape.ends[leaf] for leaf in piece) <= most for piece in pieces)


def test_options_and_drawn_lengths() -> None:
    """Pairs of a window by brute force, the products that each head dim is in, and lengths as in the results."""
    shape = shapes.parse("2-groups-of-3x7x9-H4-Hk2-d192v128-w5-c30-sinks")
    assert (shape.head_dim_v, shape.window, shape.softcap, shape.sinks, shape.is_plain) == (128, 5, 30, True, False)
    pairs = dense_mask(shape).sum().item()
    assert shape.visible_pairs == pairs < replace(shape, window=0).visible_pairs
    assert shape.flops("forward") == 2 * 4 * pairs * (192 + 128)
    assert shape.flops("backward") == pytest.approx(2 * 4 * pairs * (3 * 192 + 2 * 128))
    ragged = shapes.parse("16x8Kx131-2048")
    assert ragged.responses[:4] == [820, 357, 1481, 1722] and ragged.packed_tokens == 27088
    assert (ragged.mean_prompt, ragged.depth) == (8192, 2)


def test_presets_parse_and_nonsense_does_not() -> None:
    for module in (bench_kernel, bench_layer, bench_model):
        assert all(shapes.parse(name).name == name for names in module.BENCHMARK.presets.values() for name in names)
    assert shapes.title("gemma3-4b-L6-2-groups-of-1x1Kx7-9-d64v128-w5-c30-sinks") == (
        "Gemma 3 4B: 6 layers, 2 groups of 1 x 1K x 7..9, d = 64, d_v = 128, window 5, softcap 30, sinks"
    )
    assert all(shapes.parse(name) for names in report.HEADLINE.values() for name in names)
    for name in ("4x5", "causal-4x5x6", "4x5x6-d", "8-groups-of-4x5", "U(1,2)", "L6-16x8Kx131-2048"):
        with pytest.raises(ValueError, match=f"expected a name like .* got {re.escape(repr(name))}"):
            shapes.parse(name)
    with pytest.raises(ValueError, match="layers: expected 1 to 36, got 37"):
        shapes.parse("qwen3-8b-L37-16x8Kx131-2048")
