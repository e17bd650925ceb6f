"""The layer benchmark: that all implementations compute the same layer, and what is counted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import bench_layer
import layer
import measure
import packing
import peers
import pytest
import results
import shapes
import torch
import varlen
from bench_cases import SMALL as SHAPES
from bench_cases import dense_attention, dense_mask, outcome
from shapes import of_model

CPU = torch.device("cpu")
TINY = shapes.ALL_MODELS["tiny"]
SMALL = [of_model(shape, TINY) for shape in SHAPES if not shape.is_context_free]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def dense_layer(shape: shapes.LayerShape, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of x and of every weight, with attention written out under the mask of all tokens."""
    source, dout, all_weights = layer.make_layer_source(shape, dtype, CPU)
    x, weights = packing.leaf(source), layer.Weights(*map(packing.leaf, all_weights))
    tables = layer.rope_tables(packing.packed_positions(shape), shape.model.head_dim, dtype)
    attention = partial(dense_attention, mask=dense_mask(shape))
    out = layer.decoder_layer(x, weights, *tables, attention, shape.model)
    return [out.detach() - source, *torch.autograd.grad(out, (x, *weights), dout)]


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_all_implementations_compute_the_same_layer(
    shape: shapes.LayerShape, dtype: torch.dtype, tolerance: float
) -> None:
    """Output, gradients of the hidden states and of every parameter."""
    expected = dense_layer(shape, dtype)
    compared = set()
    for impl in peers.layer_implementations(None):
        if impl.refuses(shape) is None and impl.missing() is None:
            got = outcome(impl, layer.prepare_layer(shape, dtype, CPU, 0, impl.arrange(shape, CPU)), shape)
            assert len(got) == (len(expected) if "backward" in impl.directions else 1)
            for value, reference in zip(got, expected):
                assert (value - reference).abs().max() < tolerance * reference.abs().max(), impl.name
            compared.add(impl.name)
    assert {"dualkv_reference", "flex_packed", "math_replicated"} <= compared
    assert ("prefix_grouper" in compared) == (varlen.is_importable("prefix_grouper") and len(shape.groups) == 1)


def test_the_packed_row_of_the_library() -> None:
    """Its positions are those that the benchmark gives its rows, for several groups too."""
    from flash_attn_dualkv import pack_shared_prompts

    for shape in SMALL:
        batch = pack_shared_prompts(*peers.samples(shape, CPU), boundary="gather")
        rows = packing.contexts_first_rows(shape)
        assert torch.equal(batch.position_ids, packing.packed_positions(shape)[rows])
        assert batch.layout.num_tokens == shape.packed_tokens
        assert batch.num_replicated_tokens == shape.replicated_tokens


def test_hidden_prompts_would_be_noticed() -> None:
    """The check between implementations fails an attention that forgets the prompt, with a wide margin."""
    shape = SMALL[0]  # three responses of one group
    alone = varlen.varlen_attention(varlen.math_varlen, [varlen.VarlenCall.of([70, 33, 1, 90], CPU)])
    hows = peers.arrange_ours(shape, CPU), packing.Arrangement(packing.packed_rows(shape), alone)
    prepared = [layer.prepare_layer(shape, torch.float32, CPU, 0, how) for how in hows]
    right, wrong = (one.take(one.run().detach(), torch.arange(shape.packed_tokens)) for one in prepared)
    assert measure.relative_difference(wrong, right) > 5 * measure.ShapeRun.largest_difference


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
    monkeypatch.setattr(layer, "rms_norm", lambda x, size, weight, eps: FusedNorm.apply(x, weight, eps))
    shape = SMALL[0]
    prepared = layer.prepare_layer(shape, torch.float32, CPU, 0, peers.arrange_ours(shape, CPU))
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


def test_executed_work() -> None:
    shape = shapes.parse("16x8Kx131-2048", shapes.LayerShape)
    by_name = {one.name: one for one in peers.layer_implementations(["sm90"])}
    weights = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
    for name, tokens, pairs in (
        ("dualkv_sm90", shape.packed_tokens, shape.visible_pairs),
        ("flex_fa4", shape.packed_tokens, shape.visible_pairs),
        ("fa2_replicated", shape.replicated_tokens, shape.replicated_pairs),
    ):
        assert by_name[name].executed(shape) == (tokens, pairs)
        assert shape.flops("forward", tokens, pairs) == 2 * weights * tokens + 4 * 32 * 128 * pairs
        assert shape.flops("backward", tokens, pairs) == 4 * weights * tokens + 10 * 32 * 128 * pairs
    with pytest.raises(ValueError, match="expected qk_norm"):
        layer.make_weights(shapes.ModelShape(1, 8, 8, 1, 1, 8, qk_norm=False), torch.float32, CPU)


def test_the_layer_command(tmp_path: Path) -> None:
    """With times, and with --rounds 0 for the memory alone, of which a CPU has no count."""
    arguments = ["--device", "cpu", "--impls", "dualkv", "math", "--shape", "tiny-3x70x1-90", "--out", str(tmp_path)]
    for rounds in ("1", "0"):
        assert bench_layer.main([*arguments, "--rounds", rounds, "--name", rounds]) == 0
    rows, memory = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in "10")
    shape = shapes.parse("tiny-3x70x1-90", shapes.LayerShape)
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 2 + ["math_replicated"] * 2
    for row in rows:
        work = row["executed_tokens"], row["executed_pairs"]
        expected = shape.packed_tokens, shape.visible_pairs
        assert work == (
            expected if row["impl"] == "dualkv_reference" else (shape.replicated_tokens, shape.replicated_pairs)
        )
        assert row["tflops"] == pytest.approx(shape.flops(row["direction"], *work) / row["ms"] / 1e9, rel=1e-3)
        assert results.problems_of({**row, "dtype": "bf16", "impl": "dualkv_sm90", "peak_gib": 1.0}, "layer") == []
    assert {row["skipped"] for row in memory} == {"peak memory alone was measured"}
    assert all("rel_diff" in row and row["ms"] is None for row in memory)
