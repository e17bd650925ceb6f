# SPDX-License-Identifier: BSD-3-Clause
"""The layer benchmark: that all implementations compute the same layer, and what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_layer
import packing
import peers
import pytest
import report
import shapes
import torch
from bench_cases import SMALL as SHAPES
from bench_cases import dense_attention, dense_mask, outcome
from bench_cases import packages as packages
from shapes import Shape

CPU = torch.device("cpu")
TINY = dict(heads=4, kv_heads=2, head_dim=16, model=shapes.ALL_MODELS["tiny"])
SMALL = [replace(shape, **TINY) for shape in SHAPES]


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_all_implementations_compute_the_same_layer(shape: Shape, packages: Any) -> None:
    """Output, gradients of the hidden states and of every parameter, beside attention under the mask of all tokens."""
    source, dout, all_weights = bench_layer.make_layer_source(shape, torch.float64, CPU)
    x, weights = packing.leaf(source), {name: packing.leaf(one) for name, one in all_weights.items()}
    tables = bench_layer.rope_tables(packing.packed_positions(shape), shape.model.head_dim, torch.float64)
    attention = partial(dense_attention, mask=dense_mask(shape))
    out = bench_layer.decoder_layer(x, weights, *tables, attention, shape.model)
    expected = [out.detach() - source, *torch.autograd.grad(out, (x, *weights.values()), dout)]
    found = [one for one in peers.layer_implementations(None) if not one.refuses(shape)]
    assert [one.name for one in found] == ["dualkv_reference", "math_replicated", "cudnn_flex"]
    for impl in found:
        got = outcome(impl, shape, bench_layer.prepare_layer)
        for value, reference in zip(got, expected, strict=True):
            assert (value - reference).abs().max() < 1e-9 * reference.abs().max(), impl.name


class FusedNorm(torch.autograd.Function):
    """RMSNorm that keeps what the fused kernel keeps: its input, its weight, one statistic per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("only what is saved matters here")


def test_predicted_activations_are_what_autograd_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all distinct storages saved by a forward, without weights, RoPE tables and the layout."""
    monkeypatch.setattr(bench_layer, "rms_norm", lambda x, size, weight, eps: FusedNorm.apply(x, weight, eps))
    shape = SMALL[0]
    prepared = bench_layer.prepare_layer(shape, torch.float32, CPU, peers.arrange_ours(shape, CPU))
    weights = {one.untyped_storage().data_ptr() for one in prepared.leaves[1:]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = prepared.run()
    tables = 2 * 4 * shape.model.head_dim
    assert out.shape == (shape.packed_tokens, shape.model.hidden)
    assert sum(saved.values()) == shape.packed_tokens * (shape.model.saved_bytes_per_token(4) + tables)


def test_the_layer_command(tmp_path: Path) -> None:
    assert bench_layer.main(["--device", "cpu", "--rounds", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "layer-tiny.json").read_text())["rows"]
    trees = ["math_gathered", "math_flattened"]
    for name, peer in (("tiny-3x70x1-90", ["math_replicated"]), ("tiny-tree-tiny", trees)):
        found = [row["impl"] for row in rows if row["shape"] == name and row["direction"] == "backward"]
        assert found == ["dualkv_reference", *peer]
    for row in rows:
        shape, is_replicated = shapes.parse(row["shape"]), row["impl"] in ("math_replicated", "math_flattened")
        work = (shape.replicated_tokens, shape.replicated_pairs) if is_replicated else None
        assert (row["executed_tokens"], row["executed_pairs"]) == (work or (shape.packed_tokens, shape.visible_pairs))
        assert row["ms"] > 0 and row["rel_diff"] < 1e-4 and row["tflops"] is None
        assert report.problems_of({**row, "dtype": "bf16", "impl": "dualkv_sm90"}, "layer") == []
    llama = shapes.ModelShape(1, 8, 8, 1, 1, 8, qk_norm=False)
    with pytest.raises(ValueError, match="expected qk_norm"):
        bench_layer.make_layer_source(replace(SMALL[0], model=llama), torch.float32, CPU)
