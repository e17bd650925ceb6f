"""The benchmarks: the work that is counted, that all peers do the same work, how it is measured, and the commands."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_kernel
import bench_layer
import bench_stream
import command
import fake_fa4
import flex
import measure
import packing
import peers
import pytest
import results
import shapes
import stream
import torch
import varlen
from bench_cases import CPU, RAGGED, SMALL, dense_attention, dense_mask, outcome
from peers import Implementation
from shapes import Group, Shape

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


# --- the work that is counted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_pairs_against_brute_force(shape: Shape) -> None:
    assert shape.visible_pairs == dense_mask(shape).sum()
    assert shape.packed_tokens == len(dense_mask(shape))
    assert shape.replicated_pairs == sum(sum(range(1, length + 1)) for length in shape.replicated_lengths)
    assert shape.flops("forward", 0, 3) == 4 * shape.heads * shape.head_dim * 3
    assert shape.flops("backward", 0, 3) == 2.5 * shape.flops("forward", 0, 3)


@pytest.mark.parametrize(
    ("name", "title", "groups", "heads"),
    [
        ("28x16Kx2K", "28 x 16K x 2K", [(16384, [2048] * 28)], (32, 8, 128)),
        ("3x5059x7-H8-Hk2-d64", "3 x 5059 x 7, H = 8, H_k = 2, d = 64", [(5059, [7] * 3)], (8, 2, 64)),
        ("2-groups-of-1x2Kx2K", "2 groups of 1 x 2K x 2K", [(2048, [2048])] * 2, (32, 8, 128)),
        ("causal-2x4K", "causal, 2 x 4K", [(0, [4096] * 2)], (32, 8, 128)),
    ],
)
def test_names_of_shapes(name: str, title: str, groups: Any, heads: tuple[int, ...]) -> None:
    shape = shapes.parse(name)
    assert [(group.prompt, list(group.responses)) for group in shape.groups] == groups
    assert (shape.heads, shape.kv_heads, shape.head_dim) == heads
    assert shapes.title(name) == title


def test_shapes_with_options() -> None:
    """Pairs of a window by brute force, and the products that each head dim is in."""
    name = "2-groups-of-3x7x9-H4-Hk2-d192v128-w5-c30-sinks"
    shape = shapes.parse(name)
    assert (shape.head_dim_v, shape.window, shape.softcap, shape.sinks, shape.is_plain) == (128, 5, 30, True, False)
    assert shapes.title(name) == (
        "2 groups of 3 x 7 x 9, H = 4, H_k = 2, d = 192, d_v = 128, window 5, softcap 30, sinks"
    )
    position = torch.tensor(
        [at for group in shape.groups for at in (*range(7), *[*range(7, 16)] * len(group.responses))]
    )
    near = position[:, None] - position < 5
    assert shape.visible_pairs == (dense_mask(shape) & near).sum()
    assert shape.flops("forward", 0, 10) == 2 * 4 * 10 * (192 + 128)
    assert shape.flops("backward", 0, 10) == pytest.approx(2 * 4 * 10 * (3 * 192 + 2 * 128))
    assert shapes.parse("28x16Kx2K").is_plain and not shapes.parse("causal-2x8-w1K").is_plain


def test_drawn_lengths_are_those_of_the_results() -> None:
    ragged = shapes.parse("16x8Kx131-2048")
    assert ragged.responses[:4] == [820, 357, 1481, 1722] and ragged.packed_tokens == 27088
    assert shapes.title(ragged.name) == "16 x 8K x 131..2048"
    layer = shapes.parse("qwen3-0.6b-16x8Kx131-2048", shapes.LayerShape)
    assert layer.groups == ragged.groups and (layer.heads, layer.kv_heads) == (16, 8)
    assert shapes.title(layer.name) == "Qwen3-0.6B: 16 x 8K x 131..2048"
    many = shapes.parse("4-groups-of-8x200x4K-16K")
    assert len(many.groups) == 4 and all(4096 <= length <= 16384 for length in many.responses)


def test_presets_parse_and_nonsense_does_not() -> None:
    for presets, kind in ((shapes.KERNEL_PRESETS, Shape), (shapes.MODEL_PRESETS, shapes.StepShape)):
        assert all(shapes.parse(name, kind).name == name for names in presets.values() for name in names)
    assert len(shapes.LAYER_PRESETS["table11"]) == 24
    for name in ("4x5", "causal-4x5x6", "4x5x6-d", "8-groups-of-4x5", "U(1,2)"):
        with pytest.raises(ValueError, match=f"expected a name like .* got {re.escape(repr(name))}"):
            shapes.parse(name)


# --- the peers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fa4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package flash-attn-4 with a function of its signature that computes on the CPU."""
    package = tmp_path / "flash_attn" / "cute"  # as in the wheel, nothing makes flash_attn itself a package
    package.mkdir(parents=True)
    shutil.copy(Path(fake_fa4.__file__), package / "__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_all_implementations_do_the_same_work(shape: Shape, fa4: None) -> None:
    """Output and gradients, folded into the packed layout, against a dense softmax."""
    *qkv, dout = packing.make_source(shape, torch.float64, CPU)
    leaves = [packing.leaf(one) for one in qkv]
    out = dense_attention(*leaves, dense_mask(shape))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    found = [*peers.kernel_implementations(None), peers.replicated("fa4")]
    compared = set()
    for impl in found:
        assert impl.missing() is None
        if impl.refuses(shape) is None:
            prepared = packing.prepare_attention(shape, torch.float64, CPU, 0, impl.arrange(shape, CPU))
            for value, reference in zip(outcome(impl, prepared, shape), expected):
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=impl.name)
            compared.add(impl.name)
    assert {"dualkv_reference", "flex_packed", "math_replicated", "fa4_replicated"} <= compared


OPTIONS = (
    "causal-2x100-H4-Hk2-d16-sinks", "causal-3x70-90-H4-Hk2-d8-w30-sinks", "causal-2x64-H4-Hk4-d16-w1",
    "causal-2x100-H4-Hk2-d16-c5", "causal-2x100-H4-Hk2-d16-w40-c5", "causal-2x64-H4-Hk4-d24v16",
    "3x70x50-H4-Hk2-d16v8-w40-c5-sinks",
)  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_the_same_to_fa4(name: str, fa4: None) -> None:
    """Windows, softcaps, sinks and widths of V as this library and FlashAttention-4 are told of them."""
    shape = shapes.parse(name)
    outcomes = []
    for impl in (peers.kernel_implementations(None)[0], peers.replicated("fa4")):
        assert impl.refuses(shape) is None and impl.missing() is None
        prepared = packing.prepare_attention(shape, torch.float64, CPU, 0, impl.arrange(shape, CPU))
        outcomes.append(outcome(impl, prepared, shape))
    for value, reference in zip(*outcomes):
        torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)
    others = [one for one in peers.kernel_implementations(None)[1:] if one.refuses(shape) is None]
    assert others == []  # no other peer has these


def test_names_of_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word is a part of a name, with = in front it is all of it."""
    families: list[list[str] | None] = []
    every = [Implementation(name, peers.arrange_ours) for name in ("flex_fa4", "flex_fa4_static", "flex_packed")]
    benchmark = replace(bench_stream.BENCHMARK, implementations=lambda found: families.append(found) or every)
    for words, names in (
        (["fa4"], ["flex_fa4", "flex_fa4_static"]),
        (["=flex_fa4"], ["flex_fa4"]),
        (["=flex_fa4", "packed"], ["flex_fa4", "flex_packed"]),
    ):
        options = command.parse_arguments(benchmark, ["--device", "cpu", "--impls", *words])
        assert [one.name for one in options.implementations] == names
    assert families == [None] * 3


def test_packages_that_are_not_there(fa4: None) -> None:
    """flash-attn-4 alone must not be taken for the flash_attn package."""
    by_name = {one.name: one for one in peers.peers()}
    assert by_name["fa4_replicated"].missing() is by_name["flex_fa4"].missing() is None
    assert by_name["flash_attn_replicated"].missing() == "flash-attn is not installed"
    assert by_name["fa2_replicated"].missing() is None


def test_flex_on_fa4_asks_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    asked = []

    def compiled(*qkv: torch.Tensor, kernel_options: Any = None, **options: Any) -> Any:
        asked.append((kernel_options, options["block_mask"].BLOCK_SIZE))
        return flex_attention(*qkv, **options)

    monkeypatch.setattr(flex, "flex_function", lambda *_: compiled)
    q, k, v, _ = packing.make_source(RAGGED, torch.float64, CPU)
    for impl in peers.peers()[:2]:
        out = impl.arrange(RAGGED, CPU).attention(q, k, v)
        torch.testing.assert_close(out, dense_attention(q, k, v, dense_mask(RAGGED)))
    assert asked == [({"BACKEND": "FLASH"}, (128, 128)), (None, (128, 128))]


def test_replicated_rows_beyond_32_bits_go_to_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashAttention-2, which would end the process and with it all other measurements; the result is the same."""
    shape = Shape("four responses", (Group(20, (5, 6, 7, 8)),), 4, 2, 16)
    outs = []
    for tokens, calls in ((1000, 1), (shape.replicated_tokens, 3), (1, 4)):
        monkeypatch.setattr(shapes, "MOST_ELEMENTS", tokens * shape.heads * shape.head_dim)
        assert len(peers.in_pieces(shape)) == calls
        assert [one for piece in peers.in_pieces(shape) for one in piece] == shape.replicated_lengths
        how = peers.arrange_replicated(shape, CPU, lambda: varlen.math_varlen)
        outs.append(packing.prepare_attention(shape, torch.float64, CPU, 0, how).run())
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    ("built", "capability", "expected"),
    [
        (("sm80",), (9, 0), ["sm80"]),
        (("sm80", "sm90"), (9, 0), ["sm80", "sm90"]),
        (("sm80", "sm90"), (8, 9), ["sm80"]),
        (("sm80", "sm90"), (12, 0), ["sm80"]),
        (("sm90",), (8, 0), r"\['sm90'\], the GPU is sm_"),
        ((), (9, 0), "not installed: broken library"),
    ],
)
def test_own_families(built: tuple[str, ...], capability: tuple[int, int], expected: Any) -> None:
    head_dims = {family: [128] for family in built}
    build = {"compiled": bool(built), "compiled_error": "broken library", "head_dims": head_dims}
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            peers.own_families(build, capability)
    else:
        assert peers.own_families(build, capability) == expected


def test_every_implementation_has_a_label() -> None:
    families = ["sm80", "sm90"]
    attention = (*peers.kernel_implementations(families), *peers.tree_implementations(families))
    found = (*attention, *peers.layer_implementations(families))
    assert {one.name for one in (*found, *stream.implementations(families))} <= set(results.LABELS)
    assert all(one.name.startswith("dualkv") == one.is_ours for one in found)


# --- measuring ------------------------------------------------------------------------------------------------------


def measured(implementations: list[Implementation], shape: Shape = RAGGED, **changes: Any) -> list[dict[str, Any]]:
    # The assumed rate is a CPU's, so that the plan for these shapes is what it would be for real ones on a GPU.
    settings = {"dtype": "fp32", "device": CPU, "rounds": 2, "max_calls": 2, "assumed_tflops": 0.01, **changes}
    config = measure.Config(**settings)
    run = measure.ShapeRun(shape, implementations, config, measure.Matmul(config))
    assert len(list(run.run())) <= len(run)
    return run.rows


OURS = peers.on_cpu(flex=False)[0]


def test_rows_of_a_measured_shape() -> None:
    rows = measured([OURS])
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert (row["n"], row["p"], row["r"]) == (3, 70, round((33 + 1 + 90) / 3))
        flops = RAGGED.flops(row["direction"], 0, RAGGED.visible_pairs)
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9, rel=1e-3)
        assert row["fraction"] == pytest.approx(row["tflops"] / row["matmul_tflops"], rel=1e-3)
        assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["samples"] >= 2


@pytest.mark.parametrize(
    ("error", "fact"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB"), {"oom": True}),
        (RuntimeError("cudnn: out of memory"), {"oom": True}),
        (RuntimeError("No available kernel.\nAborting."), {"error": "RuntimeError: No available kernel."}),
        (ImportError("no such symbol"), {"error": "ImportError: no such symbol"}),
    ],
)
def test_a_failure_is_a_row(error: Exception, fact: dict[str, Any]) -> None:
    def arrange(shape: Shape, device: torch.device) -> packing.Arrangement:
        raise error

    rows = measured([OURS, Implementation("broken", arrange)])
    assert all(row["ms"] > 0 for row in rows[:2])
    assert all(row["ms"] is row["tflops"] is None and fact.items() <= row.items() for row in rows[2:])


@pytest.mark.parametrize("what", ["output", "gradient"])
def test_an_implementation_that_computes_something_else_is_refused(what: str) -> None:
    def wrong(shape: Shape, device: torch.device) -> packing.Arrangement:
        how = OURS.arrange(shape, device)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if what == "output":
                return 1.2 * how.attention(q, k, v)
            return how.attention(q, k.detach() + 0.8 * (k - k.detach()), v)  # four fifths of the gradient of k

        return packing.Arrangement(how.rows, attention)

    rows = measured([OURS, Implementation("wrong", wrong)])
    assert rows[0]["rel_diff"] == rows[0]["gradient_rel_diff"] == 0
    assert f"{what} differs by 0.2" in rows[2]["error"] and rows[2]["ms"] is None


def test_slow_peers_get_fewer_rounds_or_none() -> None:
    shape, slow = shapes.parse("16x64Kx2K"), Implementation("slow", OURS.arrange, is_replicated=True)
    seconds = 3.5 * 4 * 32 * 128 * shape.replicated_pairs / 300e12
    for limit_s, rounds in ((2.1 * seconds, 1), (1.9 * seconds, None), (1e9, 5)):
        config = measure.Config(device=CPU, assumed_tflops=300.0, limit_s=limit_s)
        run = measure.ShapeRun(shape, [slow], config, measure.Matmul(config))
        assert run.seconds["slow"] == pytest.approx(seconds) and run.rounds["slow"] == rounds
    assert "s a pass at the assumed rate" in measured([slow], limit_s=1e-9)[0]["skipped"]


def test_nothing_is_started_that_the_budget_does_not_hold() -> None:
    slow = Implementation("slow", OURS.arrange, compile_s=1e6)
    rows = measured([OURS, slow], deadline=time.monotonic() + 60)
    assert all(row["ms"] for row in rows[:2]) and {row.get("skipped") for row in rows[2:]} == {"left out: budget"}
    assert {row["skipped"] for row in measured([OURS], deadline=0.0)} == {"left out: budget"}


def test_the_budget_holds_within_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that turns out slower than was assumed is not repeated."""

    def slow(shape: Shape, device: torch.device) -> packing.Arrangement:
        how = OURS.arrange(shape, device)
        return packing.Arrangement(how.rows, lambda q, k, v: (time.sleep(0.3), how.attention(q, k, v))[1])

    begin = time.monotonic()
    rows = measured([Implementation("slow", slow)], deadline=begin + 1.5, rounds=100, limit_s=1e9)
    assert time.monotonic() - begin < 4
    assert {row["skipped"] for row in rows} == {"left out: budget"}


# --- the commands ---------------------------------------------------------------------------------------------------


def test_the_kernel_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--shape", "3x70x1-90-H4-Hk2-d16", "--impls", "dualkv", "replicated"]
    assert bench_kernel.main([*arguments, "--rounds", "1", "--out", str(tmp_path / "cpu"), "--name", "trial"]) == 0
    path = tmp_path / "cpu" / "trial.json"
    result = json.loads(path.read_text())
    assert {row["impl"] for row in result["rows"]} == {"dualkv_reference", "math_replicated"}
    assert result["header"]["matmul_tflops"] > 0 and str(path) in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown impl dualkv_reference|dirty tree"):
        results.check(path)


def test_the_stream_command(tmp_path: Path) -> None:
    assert bench_stream.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "stream-tiny.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 4 + ["flex_packed"] * 4
    assert len({row["packed_tokens"] for row in rows}) == 4
    for row in rows:
        assert "error" not in row and row["wall_ms"] > row["host_ms"] > 0
        assert row["ms"] == pytest.approx(row["wall_ms"] - row["attention_ms"], abs=1e-2)
        assert results.problems_of({**row, "dtype": "bf16", "impl": "flex_packed"}, "stream") == []


def test_a_stream_that_fails_or_has_no_time() -> None:
    tiny, (ours, peer) = stream.parse("tiny"), stream.implementations(None)

    def doubled(shape: Shape, device: torch.device) -> stream.Steps:
        steps = peer.arrange(shape, device)

        def pack() -> tuple[packing.Attention, stream.Unpack]:
            attention, unpack = steps.pack()
            return lambda q, k, v: 2 * attention(q, k, v), unpack

        return stream.Steps(steps.rows, pack)

    config = measure.Config(dtype="fp32", device=CPU)
    run = partial(stream.StreamRun, tiny, matmul=measure.Matmul(config))
    wrong = run([ours, replace(peer, arrange=doubled)], config)
    list(wrong.run())
    assert all(row["ms"] for row in wrong.rows[:4])
    assert all("output differs by" in row["error"] and row["ms"] is None for row in wrong.rows[4:])
    late = run([ours], measure.Config(dtype="fp32", device=CPU, deadline=time.monotonic() + 0.5))
    list(late.run())
    assert {row["skipped"] for row in late.rows} == {"left out: budget"}


def test_a_gpu_that_fails_does_not_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def synchronize(config: measure.Config, after_failure: bool) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measure, "clear", synchronize)
    assert bench_kernel.main(["--device", "cpu", "--impls", "dualkv", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernel-tiny.json").read_text())["rows"]
    assert {row["shape"] for row in rows} == set(shapes.KERNEL_PRESETS["tiny"])
    assert {row["skipped"] for row in rows} == {"a failure before: RuntimeError"}


def test_a_budget_ends_a_command_before_large_shapes(tmp_path: Path) -> None:
    begin = time.monotonic()
    arguments = ["--device", "cpu", "--preset", "paper", "--budget-s", "2", "--limit-s", "1e9", "--out", str(tmp_path)]
    assert bench_kernel.main(arguments) == 0
    assert time.monotonic() - begin < 10
    rows = json.loads((tmp_path / "kernel-paper.json").read_text())["rows"]
    assert {row["skipped"] for row in rows} == {"left out: budget"}
    assert {row["shape"] for row in rows} == set(shapes.PAPER)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "nothing"], "expected a name like"),
        (["--rounds", "-1"], "at least 0"),
        (["--budget-s", "0"], "above 0"),
        (["--preset", "nothing"], "invalid choice"),
        (["--impls", "=dualkv"], "dualkv_reference, .*flex_packed.*, got =dualkv"),
        (["--impls", "nothing"], "dualkv_reference, .*flex_packed.*, got nothing"),
    ],
)
@pytest.mark.parametrize("main", [bench_kernel.main, bench_layer.main, bench_stream.main])
def test_bad_arguments(main: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *arguments])
    expected = "expected one of" if main is bench_stream.main and arguments[0] == "--shape" else message
    assert re.search(expected, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layer.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert bench_layer.main(["--list"]) == 0
    assert re.search(r"16x8Kx131-2048 +16 x 8K x 131..2048", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("head", "status", "commit", "is_clean", "expected"),
    [
        ("a" * 40, "", None, False, ("a" * 40, False)),
        ("a" * 40, " M setup.py", "b" * 40, True, ("b" * 40, False)),
        ("a" * 40, None, None, True, ("a" * 40, True)),
        (None, None, "b" * 40, True, ("b" * 40, False)),
        (None, None, "b" * 40, False, ("b" * 40, True)),
        (None, None, None, True, ("unknown", True)),
    ],
)
def test_commit_and_dirtiness(
    monkeypatch: pytest.MonkeyPatch, head: Any, status: Any, commit: Any, is_clean: bool, expected: Any
) -> None:
    answers = {"rev-parse HEAD": head, "rev-parse --show-toplevel": str(command.ROOT)}
    monkeypatch.setattr(command, "git", lambda *words: answers.get(" ".join(words), status))
    assert command.tree_state(commit, is_clean) == expected
    # A copy inside another repository has no commit.
    answers["rev-parse --show-toplevel"] = str(command.ROOT.parent)
    assert command.tree_state(None, False) == ("unknown", True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kernel", "layer", "model"])
def test_on_the_gpu(kind: str) -> None:
    """All but FlexAttention, whose compilation takes longer than all of these; cuDNN may be missing."""
    import flash_attn_dualkv

    families = peers.own_families(dict(flash_attn_dualkv.build_info()), torch.cuda.get_device_capability())
    group = (Group(1000, (131, 700, 64)),)
    shape, run_type, found = Shape("3x1000x64-700", group), measure.ShapeRun, peers.kernel_implementations(families)
    if kind != "kernel":
        sizes = shapes.ModelShape(2, 512, 1024, 32, 8, 128, vocab=1024)
        model = pytest.importorskip("model") if kind == "model" else None
        shape = shapes.of_model(shape, sizes, shapes.StepShape if model else shapes.LayerShape)
        run_type = model.StepRun if model else measure.LayerRun
        found = model.implementations(families) if model else peers.layer_implementations(families)
    found = [one for one in found if one.missing() is None and not one.name.startswith("flex")]
    config = measure.Config(rounds=1, target_ms=1.0)
    run = run_type(shape, found, config, measure.Matmul(config))
    list(run.run())
    peaks = {}
    for row in run.rows:
        assert (row["ms"] and row["peak_gib"] > 0 and row["rel_diff"] < 0.1) or row["impl"] == "cudnn_replicated", row
        peaks[row["impl"]] = row["peak_gib"]
    assert all(peaks[one.name] < peaks["fa2_replicated"] for one in run.chosen if one.is_ours)
