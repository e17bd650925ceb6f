"""The layer benchmarks: that all implementations compute the same layer, what is counted, the law of memory."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_layer  # noqa: E402
import bench_memory  # noqa: E402
import law  # noqa: E402
import layer  # noqa: E402
import layer_report  # noqa: E402
import measure  # noqa: E402
import measure_layer  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import schema  # noqa: E402
import shapes  # noqa: E402
from shapes import Group, Shape, in_layer  # noqa: E402

from flash_attn_dualkv.predict import DIRECTIONS  # noqa: E402

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


def test_the_packed_row_of_the_library() -> None:
    """Its positions are those that the benchmark gives its rows, for several groups too."""
    from flash_attn_dualkv import pack_shared_prompts

    for shape in SMALL:
        batch = pack_shared_prompts(*layer.samples(shape, CPU), boundary="gather")
        rows = layer.contexts_first_rows(shape)
        assert torch.equal(batch.position_ids, layer.packed_positions(shape)[rows])
        assert batch.layout.num_tokens == shape.packed_tokens
        assert batch.num_replicated_tokens == shape.replicated_tokens


def test_hidden_prompts_would_be_noticed() -> None:
    """The check between implementations fails an attention that forgets the prompt, with a wide margin."""
    shape = shapes.LAYER_TINY[0]
    source = layer.make_layer_source(shape, torch.float32, CPU)
    right = layer.build_shared(source)
    cu_seqlens = layer.cumulative([70, 33, 1, 90], CPU)
    rows = torch.arange(shape.packed_tokens)
    wrong = layer.build_layer(
        source, rows, source.dout, lambda q, k, v: peers.math_varlen(q, k, v, cu_seqlens, cu_seqlens, 90, 90)
    )
    expected, got = (one.take(one.run(), rows) for one in (right, wrong))
    assert (got - expected).norm() / expected.norm() > 5 * measure.LARGEST_DIFFERENCE


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
    shape = shapes.LAYER_TINY[0]
    prepared = layer.build_shared(layer.make_layer_source(shape, torch.float32, CPU))
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


def test_models_without_norms_of_heads_are_refused() -> None:
    model = shapes.ModelShape(1, 8, 8, 1, 1, 8, qk_norm=False)
    with pytest.raises(ValueError, match="expected qk_norm"):
        layer.make_weights(model, torch.float32, CPU)


# --- the work that is counted ---------------------------------------------------------------------------------------


def test_the_papers_grid() -> None:
    grid = shapes.LAYER_PRESETS["table11"]
    k = 1024
    expected = {(n, p) for p in (5059, 8 * k, 16 * k, 32 * k, 64 * k, 128 * k) for n in (4, 8, 16, 32)}
    assert {(shape.num_responses, shape.mean_prompt) for shape in grid} == expected
    assert len(grid) == len(expected)
    for shape in grid:
        assert shape.model == shapes.MODELS["qwen3-8b"]
        assert (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)
        assert all(131 <= length <= 2048 for length in shape.responses)
    assert [shape.name for shape in shapes.LAYER_PRESETS["quick"]] == ["16x8KxU(131,2048)", "8x16KxU(131,2048)"]
    # the same micro-batches as in the kernel benchmark
    assert all(shape.groups == shapes.SHAPES[shape.name].groups for shape in shapes.LAYER_PRESETS["quick"])


def test_executed_work() -> None:
    shape = shapes.LAYER_PRESETS["quick"][0]
    model = shape.model
    by_impl = {one.name: one for one in layer.cuda_layers({"sm90": ("forward", "backward")})}
    ours, dense = by_impl["dualkv_sm90"], by_impl["fa2_replicated"]
    weights = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
    for impl, tokens, pairs in (
        (ours, shape.packed_tokens, shape.visible_pairs()),
        (dense, shape.replicated_tokens, shape.replicated_pairs()),
    ):
        assert impl.executed_flops(shape, "forward") == 2 * weights * tokens + 4 * 32 * 128 * pairs
        assert impl.executed_flops(shape, "backward") == 4 * weights * tokens + 10 * 32 * 128 * pairs
        assert impl.executed_flops(shape, "forward") == model.layer_flops(tokens, pairs, "forward")


def test_replicated_rows_beyond_32_bits_go_to_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashAttention-2, which would end the process and with it all other measurements; the result is the same."""
    grid = shapes.by_name(shapes.LAYER_PRESETS)
    for name, calls in (("16x16KxU(131,2048)", 1), ("32x16KxU(131,2048)", 3)):
        pieces = layer.in_pieces(grid[name])
        assert len(pieces) == calls and [one for piece in pieces for one in piece] == grid[name].replicated_lengths()
        assert all(sum(piece) * 4096 < (1 << 31) // (1 if calls == 1 else 2) for piece in pieces)
    shape = in_layer(Shape("four responses", (Group(20, (5, 6, 7, 8)),)), shapes.TINY_MODEL)
    source = layer.make_layer_source(shape, torch.float64, CPU)
    results = []
    for tokens, calls in ((1000, 1), (shape.replicated_tokens, 3), (1, 4)):
        monkeypatch.setattr(shapes, "MOST_ELEMENTS", tokens * shape.heads * shape.head_dim)
        assert len(layer.in_pieces(shape)) == calls
        prepared = layer.build_replicated(source, peers.math_varlen)
        out = prepared.run()
        results.append((out, *torch.autograd.grad(out, prepared.leaves, prepared.dout)))
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_families_that_cannot_train_are_left_out() -> None:
    found = layer.cuda_layers({"sm80": ("forward", "backward"), "sm90": ("forward",)})
    assert [one.name for one in found if one.is_ours] == ["dualkv_sm80"]
    for implementation in found:
        assert schema.OURS.fullmatch(implementation.name) or schema.PEERS.fullmatch(implementation.name)
        assert implementation.name in layer_report.LABELS


# --- measuring ------------------------------------------------------------------------------------------------------


def run_layer(run_type: type[measure.ShapeRun], **changes: Any) -> measure.ShapeRun:
    settings = measure.Config(
        **{"dtype": "fp32", "device": CPU, "rounds": 2, "max_calls": 2, "assumed_tflops": 0.01, **changes}
    )
    found = [one for one in layer.cpu_layers() if one.name in ("dualkv_reference", "math_replicated")]
    run = run_type(shapes.LAYER_TINY[0], found, settings, measure.Matmul(settings))
    steps = list(run.run())
    assert len(steps) <= len(run)
    return run


def test_rows_of_a_measured_layer() -> None:
    shape = shapes.LAYER_TINY[0]
    rows = run_layer(measure_layer.LayerRun).rows
    assert [(row["impl"], row["direction"]) for row in rows] == [
        (impl, direction) for impl in ("dualkv_reference", "math_replicated") for direction in ("forward", "backward")
    ]
    for row in rows:
        assert "error" not in row, row
        tokens = shape.packed_tokens if row["impl"].startswith("dualkv") else shape.replicated_tokens
        pairs = shape.visible_pairs() if row["impl"].startswith("dualkv") else shape.replicated_pairs()
        assert (row["executed_tokens"], row["executed_pairs"]) == (tokens, pairs)
        assert row["replicated_tokens"] == shape.replicated_tokens
        assert row["tflops"] == pytest.approx(row["executed_flops"] / row["ms"] / 1e9, rel=1e-3)
        assert row["samples"] >= 2
        row.update(
            dtype="bf16", peak_gib=1.0, impl="dualkv_sm90" if row["impl"].startswith("dualkv") else "fa2_gathered"
        )
        assert [one for one in schema.problems_of_row(row, "row", "layer") if "tflops" not in one] == []
    ours = rows[0]
    host = [f"host_{what}{direction}_us" for what in layer_report.HOST for direction in DIRECTIONS]
    for what in ("pack_ms", "unpack_ms", *host):
        assert ours[what] > 0
        assert what not in rows[2]


def test_nothing_is_started_when_the_time_is_over() -> None:
    for run_type, measured in ((measure_layer.LayerRun, "ms"), (measure_layer.MemoryRun, "peak_gib")):
        rows = run_layer(run_type, deadline=0.0).rows
        assert all(row["skipped"] == "the time given was used up" and row[measured] is None for row in rows)


@pytest.mark.gpu
def test_layers_on_the_gpu() -> None:
    """A small layer of Qwen3-8B's heads: all but FlexAttention, whose compilation takes longer than all of these."""
    import flash_attn_dualkv

    build = dict(flash_attn_dualkv.build_info())
    families = peers.own_families(build, torch.cuda.get_device_capability())
    found = [one for one in layer.cuda_layers(families) if one.name != "flex_packed"]
    model = shapes.ModelShape(36, 512, 1024, 32, 8, 128)
    shape = in_layer(Shape("gpu", (Group(1000, (131, 700, 64)),)), model)
    settings = measure.Config(rounds=1, target_ms=1.0)
    run = measure_layer.LayerRun(shape, found, settings, measure.Matmul(settings))
    list(run.run())
    assert any(row["impl"].startswith("dualkv") for row in run.rows)
    for row in run.rows:
        assert row["ms"], row
        assert schema.problems_of_row(row, row["impl"], "layer") == []
    peaks = measure_layer.MemoryRun(shape, found, settings, measure.Matmul(settings))
    list(peaks.run())
    for row in peaks.rows:
        assert schema.problems_of_row(row, row["impl"], "memory") == []
    by_impl = {row["impl"]: row["peak_gib"] for row in peaks.rows}
    assert all(by_impl[name] < by_impl["fa2_replicated"] for name in by_impl if name.startswith("dualkv"))


# --- results --------------------------------------------------------------------------------------------------------

HEADER = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "cuda": "13.0",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-11-21T08:00:00+00:00",
    "matmul_tflops": 750.0,
    "dirty": False,
}
# Nothing is run: the longest rows need no refusal.
LAYERS = {
    one.name: dataclasses.replace(one, refuses=lambda shape: None)
    for one in layer.cuda_layers({"sm90": ("forward", "backward")})
}
MILLISECONDS = {"dualkv_sm90": 72.0, "flex_packed": 90.0, "fa2_replicated": 432.0}


def layer_result() -> dict[str, Any]:
    """As a GPU would give it; FlexAttention was left out at the second shape."""
    rows = []
    for shape in shapes.LAYER_PRESETS["quick"]:
        for impl, both in MILLISECONDS.items():
            settings = measure.Config(device=CPU, dtype="bf16")
            run = measure_layer.LayerRun(shape, [LAYERS[impl]], settings, measure.Matmul(settings))
            run.facts[impl]["peak_gib"] = 36.0 if impl == "fa2_replicated" else 6.0
            if impl == "dualkv_sm90":
                run.facts[impl].update(pack_ms=4.0, unpack_ms=1.184, host_forward_us=61.0, host_backward_us=72.0)
            if impl == "flex_packed" and shape.num_responses == 8:
                run.facts[impl] = {"oom": True}
            run.times = {(impl, "forward"): [both / 3], (impl, "backward"): [2 * both / 3]}  # type: ignore[assignment]
            run.matmul.readings.append(750.0)
            rows += run.rows
    return {"header": {**HEADER, "benchmark": "layer", "not_importable": ["prefix_grouper"]}, "rows": rows}


def memory_result() -> dict[str, Any]:
    """Peaks on a law, one out of memory."""
    rows: list[dict[str, Any]] = []
    for shape in shapes.MEMORY_PRESETS["grid"]:
        for impl in ("dualkv_sm90", "fa2_replicated"):
            settings = measure.Config(device=CPU, dtype="bf16")
            run = measure_layer.MemoryRun(shape, [LAYERS[impl]], settings, measure.Matmul(settings))
            row = run.peak_row(LAYERS[impl])
            peak = 1.5 + (200 * 1024 * row["prompt_tokens"] + 250 * 1024 * row["response_tokens"]) / law.GIB
            is_largest = impl == "fa2_replicated" and peak > 100
            row.update(peak_gib=None if is_largest else peak, oom=is_largest, skipped=None)
            rows.append(row)
    return {"header": {**HEADER, "benchmark": "memory"}, "rows": rows}


def test_table_of_a_layer() -> None:
    result = layer_result()
    schema.validate(result, "NVIDIA-H200")
    table = report.table(result)
    shape = shapes.LAYER_PRESETS["quick"][0]
    start = f"| {shape.name} | this library, sm_90 kernels |"
    ours = next(line for line in table.splitlines() if line.startswith(start))
    cells = [cell.strip() for cell in ours.split("|")]
    flops = sum(LAYERS["dualkv_sm90"].executed_flops(shape, direction) for direction in ("forward", "backward"))
    rate = flops / 72.0 / 1e9
    assert cells[3:6] == ["24.0", "48.0", "72.0"]
    assert cells[6:8] == [f"{shape.packed_tokens / 72.0:.0f}", f"{shape.replicated_tokens / 72.0:.0f}"]
    assert cells[8:11] == [f"{rate:.0f}", f"{100 * rate / 750:.0f}%", "6.00"]
    assert cells[11:15] == ["6.00x", "1.25x", "0.17x", ""]
    assert "out of memory |" in table
    assert "| 4.00 | 1.18 | 0.20% | 61 | 72 |" in table  # 5.184 ms of 36 layers of 72 ms
    assert "Not importable where this was measured: `prefix_grouper`." in table


def test_several_calls_are_noted() -> None:
    """Of replicated rows that are too many for one call, not of ours on the same shape."""
    result = layer_result()
    assert "in several calls" not in report.table(result)
    for row in result["rows"]:
        if row["executed_tokens"] == row["replicated_tokens"]:
            row["d"] = 1 << 13
    note = "| in several calls, their outputs joined |"
    noted = [line for line in report.table(result).splitlines() if line.endswith(note)]
    assert len(noted) == 2 and all("FlashAttention-2" in line for line in noted)


def test_table_of_peaks() -> None:
    result = memory_result()
    schema.validate(result, "NVIDIA-H200")
    table = report.table(result)
    assert "| this library, sm_90 kernels | M0 + cP P + cR mb R | 1.50 | 200.0 | 250.0 | 1.00000 | 12 |" in table
    fitted = sum(row["peak_gib"] is not None for row in result["rows"] if row["impl"] == "fa2_replicated")
    assert 4 <= fitted < 12
    assert f"| M0 + cP mb P + cR mb R | 1.50 | 200.0 | 250.0 | 1.00000 | {fitted} |" in table
    assert "| out of memory |" in table


@pytest.mark.parametrize("make", [layer_result, memory_result])
def test_plots(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "result.json"
    path.write_text(json.dumps(make()))
    assert report.render(path) == [path.with_suffix(".md"), path.with_suffix(".png")]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_readme_sections(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    (folder / "NVIDIA-H200").mkdir(parents=True)
    for name, make in (("layer-quick", layer_result), ("memory-grid", memory_result)):
        (folder / "NVIDIA-H200" / f"{name}.json").write_text(json.dumps(make()))
    section = report.readme_section(folder)
    shape = shapes.LAYER_PRESETS["quick"][0]
    rates = f"{shape.packed_tokens / 72:.0f} / {shape.replicated_tokens / 72:.0f}"
    assert f"| {shape.name} | 72.0 ({rates}; 6.0) | 90.0 (" in section
    assert f"| {shape.name} | this library, sm_90 kernels | 6.00x | 1.25x | 0.17x |" in section
    assert "| 1.50 | 200.0 | 250.0 | 1.00000 | 12 |" in section
    assert section.index("layer-quick.md") < section.index("memory-grid.md")


Damage = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("make", "message", "damage"),
    [
        (layer_result, "benchmark must be one of", lambda result: result["header"].update(benchmark="nothing")),
        (layer_result, "executed_tokens is missing", lambda result: result["rows"][0].pop("executed_tokens")),
        (layer_result, "executed_flops .* do not follow", lambda result: result["rows"][0].update(executed_pairs=1)),
        (layer_result, "tflops .* does not follow", lambda result: result["rows"][0].update(ms=1.0)),
        (layer_result, "ms, and neither oom", lambda result: result["rows"][0].update(ms=None)),
        (layer_result, "unknown impl", lambda result: result["rows"][0].update(impl="dualkv_reference")),
        (memory_result, "prompt_tokens .* do not follow", lambda result: result["rows"][0].update(prompt_tokens=1)),
        (memory_result, "peak_gib must be positive", lambda result: result["rows"][0].update(peak_gib=-1.0)),
        (memory_result, "peak_gib, and neither oom", lambda result: result["rows"][0].update(peak_gib=None)),
        (memory_result, "failed: RuntimeError", lambda result: result["rows"][0].update(error="RuntimeError: x")),
    ],
)
def test_a_damaged_result_is_refused(make: Callable[[], dict[str, Any]], message: str, damage: Damage) -> None:
    result = copy.deepcopy(make())
    schema.validate(result, "NVIDIA-H200")
    damage(result)
    with pytest.raises(ValueError, match=message):
        schema.validate(result, "NVIDIA-H200")


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_layer_command_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    out = tmp_path / "layer.json"
    arguments = ["--device", "cpu", "--impls", "dualkv", "math", "--rounds", "1", "--shape", "ragged-layer-tiny"]
    assert bench_layer.main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["header"]["benchmark"] == "layer"
    assert {row["impl"] for row in result["rows"]} == {"dualkv_reference", "math_replicated"}
    assert all(row["ms"] > 0 for row in result["rows"])
    importable = peers.is_importable("prefix_grouper")
    assert ("prefix_grouper" in result["header"]["not_importable"]) == (not importable)
    assert out.with_suffix(".md").read_text() == report.table(result)
    assert str(out) in capsys.readouterr().out


def test_shapes_that_time_does_not_reach_are_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    out = tmp_path / "layer.json"
    assert bench_layer.main(["--device", "cpu", "--budget-s", "1e-9", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["shape"] for row in rows} == {shape.name for shape in shapes.LAYER_TINY}
    assert {row["skipped"] for row in rows} == {"the time given was used up"}
    assert "| not timed |" in out.with_suffix(".md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", [bench_layer, bench_memory])
def test_no_gpu_is_said(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert script.main(["--list"]) == 0
    assert "16x8KxU(131,2048)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main(["--preset", "nothing"])
