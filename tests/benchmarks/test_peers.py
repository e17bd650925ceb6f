# SPDX-License-Identifier: BSD-3-Clause
"""All attention that is measured is that of a dense softmax; what peers refuse; memory that is predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bench_layer
import packing
import peers
import pytest
import shapes
import torch
from bench_cases import CPU, SMALL, TREES, dense_attention, dense_mask, outcome
from bench_cases import packages as packages
from bench_cases import several_micro_batches as several_micro_batches
from shapes import Shape


@pytest.mark.parametrize(("shape", "calls"), [*((one, 1) for one in (*SMALL, *TREES)), *((one, 2) for one in TREES)])
def test_attention(shape: Shape, calls: int, packages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, folded into the packed rows, against a dense softmax; keys gathered in several calls."""
    if calls == 2:
        elements = sum(shape.ends) * shape.heads * shape.head_dim
        monkeypatch.setattr(shapes, "MOST_ELEMENTS", 1 + elements // 2)
        assert len(shape.gathered_calls()) > 1
    *qkv, dout = packing.make_source(shape, torch.float64, CPU)
    leaves = [packing.leaf(one) for one in qkv]
    out = dense_attention(*leaves, dense_mask(shape))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    compared = set()
    for impl in peers.kernel_implementations(None):
        assert not impl.missing()
        if not impl.refuses(shape):
            compared.add(impl.name)
            for value, reference in zip(outcome(impl, shape), expected):
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=impl.name)
    ways = ("gathered", "flattened") if shape.is_tree else ("replicated",)
    both = {f"{name}{mode}" for name in ("dualkv_reference", "cudnn_flex") for mode in ("", "_deterministic")}
    assert compared == both | {f"fa4_{way}" for way in ways}


def test_what_peers_refuse() -> None:
    """Head dims of cuDNN; rows beyond 32 bits, with which FlashAttention-2 would end the process; a layer."""
    fits = {"Hk4-d128": 1, "Hk4-d256": 0, "Hk16-d256": 1, "Hk16-d512": 0, "Hk4-d192v128": 1, "Hk4-d128v64": 0}
    assert {one: not peers.cudnn_flex().refuses(shapes.parse(f"4x1Kx256-H16-{one}")) for one in fits} == fits
    fa2 = peers.of_varlen("fa2")[0]
    assert not fa2.refuses(shapes.parse("28x16Kx2K")) and "fewer elements" in fa2.refuses(shapes.parse("32x16Kx2K"))
    with pytest.raises(ValueError, match="expected qk_norm"):
        bench_layer.make_layer_source(shapes.parse("llama3-8b-1x5x7"), torch.float32, CPU)


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
    shape = replace(SMALL[0], model=shapes.ALL_MODELS["tiny"])
    prepared = bench_layer.prepare_layer(shape, torch.float32, CPU, *peers.arrange_ours(shape, CPU))
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
