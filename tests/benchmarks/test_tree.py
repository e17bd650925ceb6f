# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of prefix trees: the trees, and that all ways to their attention, and through layers, do the same."""

from __future__ import annotations

from typing import Any

import bench_layer
import packing
import peers
import pytest
import shapes
import torch
from bench_cases import dense_attention, dense_mask, outcome
from bench_cases import packages as packages
from shapes import Shape

CPU = torch.device("cpu")
CHAIN = ((5, -1), (30, 0), (9, 1), (4, 2))
FOREST = ((40, -1), (7, 0), (1, 1), (20, 1), (33, 0), (12, -1), (3, 5), (64, 5), (5, 7), (6, 7))
SMALL = (
    shapes.parse("tree-tiny-H4-Hk2-d16"),
    Shape("tree-chain", CHAIN, 4, 1, 16),
    Shape("tree-forest", FOREST, 4, 2, 16, model=shapes.ALL_MODELS["tiny"]),
)


@pytest.fixture(autouse=True)
def several_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tree is flattened."""
    monkeypatch.setattr(shapes, "MICRO_BATCH_TOKENS", 1)


@pytest.mark.parametrize(
    ("name", "nodes", "leaves", "depth", "tokens", "flattened", "saved"),
    [
        ("balanced_d4", 31, 16, 5, 16384, 49152, 1.99),
        ("branched", 15, 9, 7, 24512, 36608, 1.15),
        ("comb", 129, 65, 65, 25600, 349184, 8.83),
        ("agentic", 248, 149, 11, 275618, 1765807, 3.68),
        ("agentic_wide", 22, 13, 5, 19074, 53305, 1.98),
    ],
)
def test_trees(name: str, nodes: int, leaves: int, depth: int, tokens: int, flattened: int, saved: float) -> None:
    shape = shapes.parse(f"qwen3-1.7b-tree-{name}")
    assert (shape.heads, shape.kv_heads, shapes.title(shape.name)) == (16, 8, f"Qwen3-1.7B: tree {name}")
    assert (len(shape.nodes), len(shape.leaves), shape.depth) == (nodes, leaves, depth)
    assert (shape.packed_tokens, shape.replicated_tokens) == (tokens, flattened)
    assert round(shape.replicated_pairs / shape.visible_pairs, 2) == saved
    # In depth-first order a node's parent is on the path of the node before it.
    paths = [[-1], *shape.paths]
    assert all(parent in (-1, *before) for before, (_, parent) in zip(paths, shape.nodes))


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_work_against_brute_force(shape: Shape) -> None:
    mask = dense_mask(shape)
    assert (shape.packed_tokens, shape.visible_pairs) == (len(mask), mask.sum())
    seen = mask.sum(1)  # of the last token of a leaf: its whole sequence
    ends = [shape.begins[leaf] + shape.nodes[leaf][0] - 1 for leaf in shape.leaves]
    assert shape.replicated_lengths == seen[ends].tolist()
    assert torch.equal(packing.packed_positions(shape), seen - 1)
    rows = packing.path_rows(shape, shape.leaves)
    assert all(torch.equal(one, mask[end].nonzero().view(-1)) for one, end in zip(rows, ends))
    pieces = shape.micro_batches()
    assert [leaf for piece in pieces for leaf in piece] == shape.leaves
    assert all(sum(shape.ends[leaf] for leaf in piece) <= shape.packed_tokens for piece in pieces)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("most", [1.0, 0.5])
def test_all_implementations_do_the_same_work(
    shape: Shape, most: float, monkeypatch: pytest.MonkeyPatch, packages: Any
) -> None:
    """Where keys are gathered in several calls too."""
    elements = sum(shape.ends) * shape.heads * shape.head_dim
    monkeypatch.setattr(shapes, "MOST_ELEMENTS", 1 + int(most * elements))
    assert (len(shape.gathered_calls()) > 1) == (most < 1)
    *qkv, dout = packing.make_source(shape, torch.float64, CPU)
    leaves = [packing.leaf(one) for one in qkv]
    out = dense_attention(*leaves, dense_mask(shape))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    found = [one for one in peers.layer_implementations(None) if not one.refuses(shape)]
    assert [one.name for one in found] == ["dualkv_reference", "math_gathered", "math_flattened", "cudnn_flex"]
    for impl in found:
        for value, reference in zip(outcome(impl, shape), expected):
            torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=impl.name)


def test_all_compute_the_same_layer(packages: Any) -> None:
    found = [one for one in peers.layer_implementations(None) if not one.refuses(SMALL[2])]
    expected, *others = [outcome(impl, SMALL[2], bench_layer.prepare_layer) for impl in found]
    assert [len(one) for one in (expected, *others)] == [13] * 4
    for got in others:
        for value, reference in zip(got, expected):
            assert (value - reference).abs().max() < 1e-9 * reference.abs().max()


def test_all_compute_the_same_step() -> None:
    """Log-probabilities of the last node of every sequence, and gradients of all parameters, through a model."""
    pytest.importorskip("transformers", "4.57")
    from bench_steps import step_outcomes

    outcomes = step_outcomes(SMALL[2])
    assert len(outcomes) == 3
    for others in outcomes[1:]:
        for got, expected in zip(others, outcomes[0]):
            assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()
