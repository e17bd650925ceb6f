"""The model benchmark: that both ways of packing give the same training step, what is counted, and its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "4.57")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_model  # noqa: E402
import measure  # noqa: E402
import model  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import schema  # noqa: E402
import shapes  # noqa: E402
from shapes import Group, Shape, in_layer, in_model  # noqa: E402

from flash_attn_dualkv import pack_shared_prompts  # noqa: E402

CPU = torch.device("cpu")
TWO_GROUPS = in_model(in_layer(Shape("two groups", (Group(50, (20, 31)), Group(64, (64,)))), shapes.STEP_TINY_MODEL))
SMALL = (*shapes.STEP_PRESETS["tiny"], TWO_GROUPS)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_both_compute_the_same_step(shape: shapes.StepShape) -> None:
    """Log-probabilities in the order of the responses, and the gradients of every parameter."""
    source = model.make_step_source(shape, torch.float64, CPU)
    results = []
    for implementation in model.cpu_steps():
        prepared = implementation.build(source)
        out = prepared.run()
        assert out.shape == (sum(shape.responses),)
        results.append((out, *prepared.fold(torch.autograd.grad(out, prepared.leaves, prepared.dout))))
    for got, expected in zip(*results, strict=True):
        assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_hidden_prompts_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check between implementations fails an attention that forgets the prompt, with a margin."""
    shape = shapes.STEP_PRESETS["tiny"][0]
    source = model.make_step_source(shape, torch.float32, CPU)
    which = torch.arange(shape.packed_tokens)

    def without_prompts(*_: Any) -> Any:
        pieces = [
            length for group in shape.groups for response in group.responses for length in (group.prompt, response)
        ]
        offsets = model_offsets(pieces)
        return lambda q, k, v: peers.math_varlen(q, k, v, offsets, offsets, max(pieces), max(pieces))

    right = model.build_shared(source)
    monkeypatch.setattr(model, "replicated_attention", without_prompts)
    wrong = model.build_replicated(source, peers.math_varlen)
    expected, got = (one.take(one.run().detach(), which) for one in (right, wrong))
    assert (got - expected).norm() / expected.norm() > 2 * bench_model.StepRun.largest_difference


def model_offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


# --- the work that is counted ---------------------------------------------------------------------------------------


def test_executed_work() -> None:
    """Tokens are those of the library's layout; the backward repeats the forward, of the head too."""
    shape = shapes.STEP_PRESETS["qwen3-8b"][0]
    assert [one.name for one in shapes.STEP_PRESETS["qwen3-8b"]] == [
        "16x8KxU(131,2048)", "8x16KxU(131,2048)", "8x1KxU(131,2048)",
    ]  # fmt: skip
    small = shapes.STEP_PRESETS["qwen3-0.6b"]
    assert [one.name for one in small][1:3] == ["qwen3-0.6b-16x1KxU(131,2048)", "qwen3-0.6b-4x8KxU(131,2048)"]
    assert {(one.model.layers, one.model.hidden, one.heads, one.kv_heads, one.head_dim) for one in small} == {
        (28, 1024, 16, 8, 128)
    }
    by_impl = {one.name: one for one in model.cuda_steps({"sm80": ("forward",), "sm90": ("forward", "backward")})}
    assert "dualkv_sm80" not in by_impl
    weights = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
    head = 2 * 4096 * 151936 * sum(shape.responses)
    moved = shape.packed_tokens + shape.num_responses - 1
    pairs = shape.visible_pairs() + (shape.num_responses - 1) * 8192  # a copy of the last token sees the whole prompt
    dense = (shape.replicated_tokens, shape.replicated_pairs())
    for name, (tokens, seen) in (("dualkv_sm90", (moved, pairs)), ("fa2_replicated", dense)):
        impl = by_impl[name]
        assert (impl.tokens(shape), impl.pairs(shape)) == (tokens, seen)
        forward = 36 * (2 * weights * tokens + 4 * 32 * 128 * seen) + head
        backward = 36 * (4 * weights * tokens + 10 * 32 * 128 * seen) + 2 * head
        assert impl.executed_flops(shape, "forward") == forward
        assert impl.executed_flops(shape, "backward") == forward + backward
        assert schema.PEERS.fullmatch(name) or schema.OURS.fullmatch(name)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_tokens_are_those_of_the_layout(shape: shapes.StepShape) -> None:
    layout = pack_shared_prompts(*model.samples(model.make_step_source(shape, torch.float32, CPU))).layout
    assert layout.num_tokens == model.cpu_steps()[0].tokens(shape)


# --- measuring ------------------------------------------------------------------------------------------------------


def measured_rows() -> list[dict[str, Any]]:
    settings = measure.Config(dtype="fp32", device=CPU, rounds=1, max_calls=1, warm_ms=0.0, assumed_tflops=0.01)
    run = bench_model.StepRun(shapes.STEP_PRESETS["tiny"][0], model.cpu_steps(), settings, measure.Matmul(settings))
    list(run.run())
    return run.rows


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As a GPU would give it: 100 and 500 ms."""
    for row in rows:
        is_ours = row["impl"].startswith("dualkv")
        ms = (100.0 if is_ours else 500.0) * (0.25 if row["direction"] == "forward" else 0.75)
        row.update(impl="dualkv_sm90" if is_ours else "fa2_replicated", dtype="bf16", ms=ms, matmul_tflops=750.0)
        row.update(tflops=row["executed_flops"] / ms / 1e9, peak_gib=10.0 if is_ours else 40.0)
    header = {
        "benchmark": "model",
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "cuda": "13.0",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "date": "2026-11-22T08:00:00+00:00",
        "matmul_tflops": 750.0,
        "dirty": False,
    }
    return {"header": header, "rows": rows}


def test_a_measured_step_and_its_report(tmp_path: Path) -> None:
    rows = measured_rows()
    assert [(row["impl"], row["direction"]) for row in rows] == [
        (impl, direction) for impl in ("dualkv_reference", "math_replicated") for direction in ("forward", "backward")
    ]
    assert all("error" not in row and row["ms"] > 0 and row["rel_diff"] < 1e-4 for row in rows)
    result = result_of(rows)
    schema.validate(result, "NVIDIA-H200")
    shape = shapes.STEP_PRESETS["tiny"][0]
    assert f"| {shape.name} | this library, sm_90 kernels | 25.0 | 75.0 | 100.0 |" in report.table(result)
    folder = tmp_path / "benchmarks" / "results"
    (folder / "NVIDIA-H200").mkdir(parents=True)
    (folder / "NVIDIA-H200" / "model.json").write_text(json.dumps(result))
    section = report.readme_section(folder)
    assert f"| {shape.name} | this library, sm_90 kernels | 5.00x | 0.25x |" in section
    assert f"| {shape.name} | FlashAttention-2" not in section

    rows[0]["executed_pairs"] += 1000
    with pytest.raises(ValueError, match="executed_flops .* do not follow"):
        schema.validate(result, "NVIDIA-H200")


def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    out = tmp_path / "model.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--shape", "ragged-layer-tiny", "--out", str(out)]
    assert bench_model.main(arguments) == 0
    result = json.loads(out.read_text())
    assert result["header"]["benchmark"] == "model"
    assert {row["impl"] for row in result["rows"]} == {"dualkv_reference", "math_replicated"}
    assert out.with_suffix(".md").read_text() == report.table(result)


@pytest.mark.gpu
def test_steps_on_the_gpu() -> None:
    """A small model of Qwen3-8B's heads: both ways of packing agree, and shared prompts take less memory."""
    import flash_attn_dualkv

    families = peers.own_families(dict(flash_attn_dualkv.build_info()), torch.cuda.get_device_capability())
    small = shapes.ModelShape(2, 512, 1024, 32, 8, 128, vocab=1024)
    shape = in_model(in_layer(Shape("gpu", (Group(1000, (131, 700, 64)),)), small))
    settings = measure.Config(rounds=1, target_ms=1.0, warm_ms=0.0)
    run = bench_model.StepRun(shape, model.cuda_steps(families), settings, measure.Matmul(settings))
    list(run.run())
    peaks = {}
    for row in run.rows:
        assert row["ms"], row
        assert schema.problems_of_row(row, row["impl"], "model") == []
        peaks[row["impl"]] = row["peak_gib"]
    assert all(peaks[name] < peaks["fa2_replicated"] for name in peaks if name.startswith("dualkv"))
