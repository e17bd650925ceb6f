"""The model benchmark: that all ways of packing give the same training step, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import varlen

pytest.importorskip("transformers", "4.57")

import bench_model
import measure
import model
import packing
import peers
import results
import shapes
from shapes import Group, Shape, StepShape, of_model, parse

from flash_attn_dualkv import pack_shared_prompts

CPU = torch.device("cpu")
TWO_GROUPS = of_model(
    Shape("two groups", (Group(50, (20, 31)), Group(64, (64,)))), shapes.ALL_MODELS["tiny"], StepShape
)
SMALL = (parse("tiny-3x70x1-90", StepShape), parse("tiny-4x64x24", StepShape), TWO_GROUPS)
OURS, REPLICATED = model.implementations(None)[:2]


def prepare(shape: Shape, impl: peers.Implementation, dtype: str) -> packing.Prepared:
    config = measure.Config(dtype=dtype, device=CPU)
    return next(model.StepRun(shape, [impl], config, measure.Matmul(config)).prepared(impl))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_all_compute_the_same_step(shape: StepShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities in the order of the responses, and the gradients of every parameter."""
    monkeypatch.setitem(measure.DTYPES, "fp32", torch.float64)
    outcomes = []
    for impl in (OURS, REPLICATED, peers.on_cpu(flex=True)[1]):
        prepared = prepare(shape, impl, "fp32")
        out = prepared.run()
        assert out.shape == (sum(shape.responses),)
        gradients: tuple[torch.Tensor, ...] = ()
        if "backward" in impl.directions:
            gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout.double())
        outcomes.append((out, *gradients))
    for others in outcomes[1:]:
        for got, expected in zip(others, outcomes[0]):
            assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_hidden_prompts_would_be_noticed() -> None:
    """The check between implementations fails an attention that forgets the prompt, with a margin."""
    shape = SMALL[0]

    def forgetful(shape: Shape, device: torch.device) -> packing.Arrangement:
        pieces = [len(one) for pair in packing.response_rows(shape) for one in pair]
        calls = [varlen.VarlenCall.of(pieces, device)]
        return packing.Arrangement(packing.replicated_rows(shape), varlen.varlen_attention(varlen.math_varlen, calls))

    wrong = peers.Implementation("forgetful", forgetful, is_replicated=True)
    prepared = [prepare(shape, impl, "fp32") for impl in (OURS, wrong)]
    outs = [one.take(one.run().detach(), torch.arange(shape.packed_tokens)) for one in prepared]
    right, got = (out - out.mean() for out in outs)
    assert measure.relative_difference(got, right) > 2 * model.StepRun.largest_difference


def test_executed_work() -> None:
    """Tokens are those of the library's layout; the backward repeats the forward, of the head too."""
    shape = parse("16x8Kx131-2048", StepShape)
    by_name = {one.name: one for one in model.implementations(["sm90"])}
    weights = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
    head = 2 * 4096 * 151936 * sum(shape.responses)
    moved = shape.packed_tokens + 15
    pairs = shape.visible_pairs + 15 * 8192  # a copy of the last token sees the whole prompt
    dense = (shape.replicated_tokens, shape.replicated_pairs)
    for name, (tokens, seen) in (("dualkv_sm90", (moved, pairs)), ("fa2_replicated", dense)):
        assert by_name[name].executed(shape) == (tokens, seen)
        forward = 36 * (2 * weights * tokens + 4 * 32 * 128 * seen) + head
        backward = 36 * (4 * weights * tokens + 10 * 32 * 128 * seen) + 2 * head
        assert shape.flops("forward", tokens, seen) == forward
        assert shape.flops("backward", tokens, seen) == forward + backward
    for small in SMALL:
        layout = pack_shared_prompts(*model.samples(small, model.make_ids(small, CPU)[0])).layout
        assert layout.num_tokens == OURS.executed(small)[0]


def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--rounds", "1", "--shape", "tiny-3x70x1-90", "--out", str(tmp_path)]
    assert bench_model.main([*arguments, "--name", "model"]) == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 2 + ["math_replicated"] * 2
    for row in rows:
        assert "error" not in row and row["rel_diff"] < 1e-4
        assert results.problems_of({**row, "dtype": "bf16", "impl": "dualkv_sm90", "peak_gib": 1.0}, "model") == []
