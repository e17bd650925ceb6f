# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks: the work that is counted, that all peers do the same work, how it is measured, and the commands."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_kernel
import bench_layer
import bench_model
import bench_stream
import bench_tree
import command
import measure
import packing
import peers
import pytest
import report
import shapes
import torch
from bench_cases import CPU, RAGGED, SMALL, dense_attention, dense_mask, outcome
from bench_cases import packages as packages
from packing import Arrangement
from peers import Implementation
from shapes import Shape, nodes_of

# --- the work that is counted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_pairs_against_brute_force(shape: Shape) -> None:
    assert shape.visible_pairs == dense_mask(shape).sum()
    assert shape.packed_tokens == len(dense_mask(shape))
    assert shape.replicated_pairs == sum(sum(range(1, length + 1)) for length in shape.replicated_lengths)
    assert shape.flops("forward") == 4 * shape.heads * shape.head_dim * shape.visible_pairs
    assert shape.flops("backward") == 2.5 * shape.flops("forward")


@pytest.mark.parametrize(
    ("name", "title", "nodes", "heads"),
    [
        ("28x16Kx2K", "28 x 16K x 2K", [(16384, -1), *[(2048, 0)] * 28], (32, 8, 128)),
        ("3x5059x7-H8-Hk2-d64", "3 x 5059 x 7, H = 8, H_k = 2, d = 64", [(5059, -1), *[(7, 0)] * 3], (8, 2, 64)),
        (
            "2-groups-of-1x2Kx2K",
            "2 groups of 1 x 2K x 2K",
            [(2048, -1), (2048, 0), (2048, -1), (2048, 2)],
            (32, 8, 128),
        ),
        ("causal-2x4K", "causal, 2 x 4K", [(4096, -1)] * 2, (32, 8, 128)),
        ("qwen3-0.6b-1x1Kx2", "Qwen3-0.6B: 1 x 1K x 2", [(1024, -1), (2, 0)], (16, 8, 128)),
        ("gemma3-4b-L6-1x5x7", "Gemma 3 4B: 6 layers, 1 x 5 x 7", [(5, -1), (7, 0)], (8, 4, 256)),
    ],
)
def test_names_of_shapes(name: str, title: str, nodes: Any, heads: tuple[int, ...]) -> None:
    shape = shapes.parse(name)
    assert [*shape.nodes] == nodes and (shape.heads, shape.kv_heads, shape.head_dim) == heads
    assert shapes.title(name) == title and shape.model.layers == (6 if "L6" in name else shape.model.layers)


def test_shapes_with_options() -> None:
    """Pairs of a window by brute force, and the products that each head dim is in."""
    shape = shapes.parse("2-groups-of-3x7x9-H4-Hk2-d192v128-w5-c30-sinks")
    assert (shape.head_dim_v, shape.window, shape.softcap, shape.sinks, shape.is_plain) == (128, 5, 30, True, False)
    title = "2 groups of 3 x 7 x 9, H = 4, H_k = 2, d = 192, d_v = 128, window 5, softcap 30, sinks"
    assert shapes.title(shape.name) == title
    pairs = dense_mask(shape).sum().item()
    assert shape.visible_pairs == pairs < replace(shape, window=0).visible_pairs
    assert shape.flops("forward") == 2 * 4 * pairs * (192 + 128)
    assert shape.flops("backward") == pytest.approx(2 * 4 * pairs * (3 * 192 + 2 * 128))


def test_drawn_lengths_are_those_of_the_results() -> None:
    ragged = shapes.parse("16x8Kx131-2048")
    assert ragged.responses[:4] == [820, 357, 1481, 1722] and ragged.packed_tokens == 27088
    assert shapes.title(ragged.name) == "16 x 8K x 131..2048" and (ragged.mean_prompt, ragged.depth) == (8192, 2)
    many = shapes.parse("4-groups-of-8x200x4K-16K")
    assert len(many.roots) == 4 and all(4096 <= length <= 16384 for length in many.responses)


def test_presets_parse_and_nonsense_does_not() -> None:
    for module in (bench_kernel, bench_tree, bench_layer, bench_model):
        assert all(shapes.parse(name).name == name for names in module.PRESETS.values() for name in names)
    assert all(shapes.parse(name) for name in [one for names in report.HEADLINE.values() for one in names])
    for name in ("4x5", "causal-4x5x6", "4x5x6-d", "8-groups-of-4x5", "U(1,2)", "L6-16x8Kx131-2048"):
        with pytest.raises(ValueError, match=f"expected a name like .* got {re.escape(repr(name))}"):
            shapes.parse(name)
    with pytest.raises(ValueError, match="layers: expected 1 to 36, got 37"):
        shapes.parse("qwen3-8b-L37-16x8Kx131-2048")


# --- the peers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_all_implementations_do_the_same_work(shape: Shape, packages: None) -> None:
    """Output and gradients, folded into the packed layout, against a dense softmax."""
    *qkv, dout = packing.make_source(shape, torch.float64, CPU)
    leaves = [packing.leaf(one) for one in qkv]
    out = dense_attention(*leaves, dense_mask(shape))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    compared = set()
    for impl in [*peers.kernel_implementations(None), *peers.of_varlen("fa4")]:
        assert not impl.missing()
        if not impl.refuses(shape):
            compared.add(impl.name)
            for value, reference in zip(outcome(impl, shape), expected):
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=impl.name)
    deterministic = {"dualkv_reference_deterministic", "cudnn_flex_deterministic"}
    assert compared == {"dualkv_reference", "math_replicated", "fa4_replicated", "cudnn_flex", *deterministic}


@pytest.mark.parametrize(
    "name",
    [
        "causal-2x100-H4-Hk2-d16-sinks", "causal-3x70-90-H4-Hk2-d8-w30-sinks", "causal-2x64-H4-Hk4-d16-w1",
        "causal-2x100-H4-Hk2-d16-c5", "causal-2x100-H4-Hk2-d16-w40-c5", "causal-2x64-H4-Hk4-d192v128",
        "3x70x50-H4-Hk2-d16v8-w40-c5-sinks", "3x70x50-H4-Hk2-d16-w60", "2-groups-of-2x40x30-H4-Hk2-d16-w35",
        "tree-tiny-H4-Hk2-d16-w20",
    ],
)  # fmt: skip
def test_options_mean_the_same_to_peers(name: str, packages: None) -> None:
    """Windows, softcaps, sinks and widths of V as this library, FlashAttention-4 and cuDNN are told of them."""
    shape = shapes.parse(name)
    expected = outcome(peers.kernel_implementations(None)[0], shape)
    has_both = bool(shape.softcap or shape.sinks)
    others = [one for one in (*peers.of_varlen("fa4")[:1], peers.cudnn_flex()) if not one.refuses(shape)]
    assert [one.name for one in others] == ["fa4_replicated"] * (not shape.is_tree) + ["cudnn_flex"] * (not has_both)
    for impl in others:
        for value, reference in zip(outcome(impl, shape), expected):
            torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=impl.name)
    assert all(one.refuses(shape) for one in peers.peers() if one.name not in ("fa4_replicated", "cudnn_flex"))


@pytest.mark.parametrize(
    ("heads", "fits"),
    [("Hk4-d128", 1), ("Hk4-d256", 0), ("Hk16-d256", 1), ("Hk16-d512", 0), ("Hk4-d192v128", 1), ("Hk4-d128v64", 0)],
)
def test_head_dims_of_cudnn(heads: str, fits: bool) -> None:
    assert bool(peers.cudnn_flex().refuses(shapes.parse(f"4x1Kx256-H16-{heads}"))) != fits


def test_endpoints_of_cudnn() -> None:
    """One interval for a prompt's rows, two for responses: as many as its documentation has."""
    endpoints = peers.cudnn_endpoints(shapes.parse("2x3x2"), CPU)
    assert endpoints[0].T.tolist() == [[1] * 3, [2] * 3, [3] * 3, [4] * 3, [5] * 3, [3, 5, 6], [3, 5, 7]]
    comb = peers.cudnn_endpoints(shapes.parse("tree-comb"), CPU)
    assert comb.shape == (1, 2 * 65 - 1, 25600)  # a leaf adjoins its turn: no interval more than the last turn has


def test_names_of_implementations() -> None:
    """A word is a part of a name, with = in front it is all of it; this library is always measured."""
    assert peers.cudnn_flex().missing() == "nvidia-cudnn-frontend is not installed"
    assert peers.of_varlen("fa4")[0].missing() == "flash-attn-4 is not installed" and not peers.ours(None).missing()
    names = ("dualkv_sm90", "flex_fa4", "flex_fa4_static", "flex_packed")
    every = [Implementation(name, peers.arrange_ours, is_optional=name.endswith("static")) for name in names]
    benchmark = replace(bench_stream.BENCHMARK, implementations=lambda kernels: every)
    for words, expected in (
        (["fa4"], ["flex_fa4", "flex_fa4_static"]),
        (["=flex_fa4"], ["flex_fa4"]),
        (["=flex_fa4", "packed"], ["flex_fa4", "flex_packed"]),
        ([], ["flex_fa4", "flex_packed"]),
    ):
        arguments = ["--device", "cpu", *(["--impls", *words] if words else [])]
        options = command.parse_arguments(benchmark, arguments)
        assert [one.name for one in options.implementations] == ["dualkv_sm90", *expected]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_on_fa4_asks_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mask of the packed rows, in blocks of 128 x 128."""
    asked = []

    def eager(function: Any, dynamic: bool) -> Any:
        def call(*qkv: torch.Tensor, kernel_options: Any = None, **options: Any) -> Any:
            asked.append((kernel_options, options["block_mask"].BLOCK_SIZE))
            return function(*qkv, **options)

        return call

    monkeypatch.setattr(peers, "compiled_once", eager)
    for shape in (*SMALL[:4], shapes.parse("tree-tiny-H4-Hk2-d16")):
        asked.clear()
        q, k, v, _ = packing.make_source(shape, torch.float64, CPU)
        for impl in peers.peers()[1:3]:
            out = impl.arrange(shape, CPU).attention(q, k, v)
            torch.testing.assert_close(out, dense_attention(q, k, v, dense_mask(shape)))
        assert asked == [({"BACKEND": "FLASH"}, (128, 128)), (None, (128, 128))]


def test_replicated_rows_beyond_32_bits_are_refused() -> None:
    """By FlashAttention-2, which would end the process and with it all other measurements."""
    fa2 = peers.of_varlen("fa2", peers.torch_varlen)[0]
    assert not fa2.refuses(shapes.parse("28x16Kx2K")) and "fewer elements" in fa2.refuses(shapes.parse("32x16Kx2K"))


@pytest.mark.parametrize(
    ("built", "capability", "asked", "expected"),
    [
        (("sm80",), (9, 0), None, "sm80"),
        (("sm80", "sm90"), (9, 0), None, "sm90"),
        (("sm80", "sm90"), (9, 0), "sm80", "sm80"),
        (("sm80", "sm90"), (8, 9), None, "sm80"),
        (("sm80", "sm90"), (12, 0), None, "sm80"),
        (("sm90",), (8, 0), None, r"for sm_.8, 0., got kernels for \['sm90'\]"),
        ((), (9, 0), None, "got broken library"),
    ],
)
def test_own_kernels(built: tuple[str, ...], capability: tuple[int, int], asked: Any, expected: str) -> None:
    head_dims = {family: [128] for family in built}
    build = {"compiled_error": None if built else "broken library", "head_dims": head_dims}
    if len(expected) > 4:
        with pytest.raises(RuntimeError, match=expected):
            peers.own_kernels(build, capability, asked)
    else:
        assert peers.own_kernels(build, capability, asked) == expected


def test_every_implementation_has_a_label() -> None:
    for module in (bench_kernel, bench_layer, bench_model, bench_stream):
        found = module.BENCHMARK.implementations("sm90")
        assert found[0].name == report.OURS and not found[0].is_optional
        assert {one.name for one in found} <= {*report.LABELS, "stock_eager_replicated"}


# --- measuring ------------------------------------------------------------------------------------------------------


def measured(implementations: list[Implementation], shape: Shape = RAGGED, **changes: Any) -> list[dict[str, Any]]:
    config = measure.Config(CPU, **{"rounds": 2, "max_calls": 2, "warm_ms": 1.0, **changes})
    run = measure.ShapeRun(shape, implementations, config, measure.Matmul(config))
    run.run()
    return run.rows


OURS = peers.ours(None)


def test_rows_of_a_measured_shape() -> None:
    rows = measured([OURS])
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert (row["n"], row["p"], row["r"]) == (3, 70, round((33 + 1 + 90) / 3))
        assert row["tflops"] == pytest.approx(RAGGED.flops(row["direction"]) / row["ms"] / 1e9, rel=1e-3)
        assert row["fraction"] == pytest.approx(row["tflops"] / row["matmul_tflops"], rel=1e-3)
        assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["samples"] >= 2


@pytest.mark.parametrize(("ms", "expected"), [(5.0, [1, 29 + 10]), (25.0, [1, 5 + 3]), (400.0, [1, 1])])
def test_what_is_timed_is_warm(ms: float, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """150 ms of the same come first, then 60 ms, at least once and at most ten times."""
    asked = []

    def laps(config: measure.Config, steps: Any, rounds: int) -> list[list[float]]:
        asked.append(rounds)
        return [[ms] * rounds]

    real = measure.laps
    monkeypatch.setattr(measure, "laps", laps)
    (times,) = measure.laps_under_load(measure.Config(CPU), (lambda: None,))
    assert asked == expected and len(times) == {5.0: 10, 25.0: 3, 400.0: 1}[ms]
    calls: list[str] = []
    found = real(measure.Config(CPU), (lambda: calls.append("a"), lambda: calls.append("b")), 3)
    assert calls == ["a", "b"] * 3 and [len(one) for one in found] == [3, 3]


@pytest.mark.parametrize(
    ("error", "fact"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB"), {"oom": True}),
        (RuntimeError("cudnn: out of memory"), {"oom": True}),
        (RuntimeError("No available kernel.\nAborting."), {"error": "RuntimeError: No available kernel."}),
    ],
)
def test_a_failure_is_a_row(error: Exception, fact: dict[str, Any]) -> None:
    def arrange(shape: Shape, device: torch.device) -> Arrangement:
        raise error

    rows = measured([OURS, Implementation("broken", arrange)])
    assert all(row["ms"] > 0 for row in rows[:2])
    assert all(row["ms"] is row["tflops"] is None and fact.items() <= row.items() for row in rows[2:])


@pytest.mark.parametrize("what", ["output", "gradient"])
def test_an_implementation_that_computes_something_else_is_refused(what: str) -> None:
    def wrong(shape: Shape, device: torch.device) -> Arrangement:
        how = OURS.arrange(shape, device)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if what == "output":
                return 1.2 * how.attention(q, k, v)
            return how.attention(q, k.detach() + 0.8 * (k - k.detach()), v)  # four fifths of the gradient of k

        return Arrangement(how.rows, attention)

    rows = measured([OURS, Implementation("wrong", wrong)])
    assert rows[0]["rel_diff"] == rows[0]["gradient_rel_diff"] == 0
    assert f"{what} differs by 0.2" in rows[2]["error"] and rows[2]["ms"] is None


def test_slow_peers_get_fewer_rounds() -> None:
    """As many as fit the limit, at least one."""
    config = measure.Config(CPU, rounds=4, limit_s=1.0, max_calls=1, warm_ms=0.0)
    seconds = {OURS.name: 0.0, "slow": 0.2, "slowest": 0.6}
    found = [replace(OURS, name=name) for name in seconds]
    run = measure.ShapeRun(RAGGED, found, config, measure.Matmul(config))
    run.memory_pass = lambda impl: run.seconds.update({impl.name: seconds[impl.name]})
    run.run()
    assert [row["samples"] for row in run.rows] == [4, 4, 2, 2, 1, 1]


def test_budgets_hold() -> None:
    begin = time.monotonic()
    rows = measured([OURS], deadline=begin + 5, rounds=10**6, limit_s=1e9, max_calls=1)
    assert time.monotonic() - begin < 10 and all(row["ms"] for row in rows)
    assert {row["skipped"] for row in measured([OURS], deadline=0.0)} == {"left out: budget"}


def test_times_of_micro_batches_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the medians."""
    config = measure.Config(CPU)
    shape, impl = shapes.parse("tree-tiny-H4-Hk2-d16"), peers.of_varlen("math", lambda: peers.math_varlen)[2]
    monkeypatch.setattr(shapes, "MICRO_BATCH_TOKENS", 1)
    run, count = measure.ShapeRun(shape, [impl], config, measure.Matmul(config)), len(shape.micro_batches())
    laps = iter([[1.0, 2.0, 9.0], [10.0], [3.0, 3.0], [30.0]] * 10)
    monkeypatch.setattr(run, "laps", lambda impl, *steps: [next(laps)])
    run.timed_pass(impl)
    assert impl.name == "math_flattened" and count > 1
    assert run.times[impl.name, "forward"] == [sum((2.0, 3.0)[index % 2] for index in range(count))]
    assert run.times[impl.name, "backward"] == [sum((10.0, 30.0)[index % 2] for index in range(count))]


# --- the commands ---------------------------------------------------------------------------------------------------


def test_the_kernel_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--shape", "3x70x1-90-H4-Hk2-d16", "--impls", "replicated", "--rounds", "1"]
    assert bench_kernel.main([*arguments, "--out", str(tmp_path / "cpu"), "--name", "trial"]) == 0
    path = tmp_path / "cpu" / "trial.json"
    result = json.loads(path.read_text())
    assert [row["impl"] for row in result["rows"]] == ["dualkv_reference"] * 2 + ["math_replicated"] * 2
    assert result["header"]["matmul_tflops"] > 0 and str(path) in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown impl dualkv_reference|dirty tree"):
        report.check(path)


def test_the_stream_command(tmp_path: Path, packages: None) -> None:
    """Packing and a mask plan for every micro-batch; a peer that computes something else, and one without time."""
    assert bench_stream.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "stream-tiny.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 4 + ["cudnn_flex"] * 4
    assert len({row["packed_tokens"] for row in rows}) == 4
    for row in rows:
        assert "error" not in row and row["wall_ms"] > row["host_ms"] > 0
        assert row["ms"] == pytest.approx(row["wall_ms"] - row["attention_ms"], abs=1e-2)
        assert report.problems_of({**row, "dtype": "bf16", "impl": "cudnn_flex"}, "stream") == []
    ours, peer = bench_stream.implementations(None)

    def doubled(shape: Shape, device: torch.device) -> bench_stream.Steps:
        steps = peer.arrange(shape, device)

        def pack() -> Any:
            attention, unpack = steps.pack()
            return lambda q, k, v: 2 * attention(q, k, v), unpack

        return bench_stream.Steps(steps.rows, pack)

    for others, deadline, expected in ((doubled, 1e9, "output differs by"), (peer.arrange, 0.5, "left out: budget")):
        config = measure.Config(CPU, deadline=time.monotonic() + deadline)
        stream = bench_stream.parse("tiny")
        run = bench_stream.StreamRun(stream, [ours, replace(peer, arrange=others)], config, measure.Matmul(config))
        run.run()
        assert all(expected in (row.get("error") or row["skipped"]) and row["ms"] is None for row in run.rows[4:])


def test_a_gpu_that_fails_does_not_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def clear(config: measure.Config, after_failure: bool = False) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measure.Config, "clear", clear)
    assert bench_kernel.main(["--device", "cpu", "--impls", "dualkv", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernel-tiny.json").read_text())["rows"]
    assert {row["shape"] for row in rows} == set(bench_kernel.PRESETS["tiny"])
    assert {row["skipped"] for row in rows} == {"a failure before: RuntimeError"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "nothing"], "expected (a name like|one of rl, tiny)"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--preset", "nothing"], "invalid choice"),
        (["--impls", "=dualkv"], "dualkv_reference, .*cudnn_flex.*, got =dualkv"),
    ],
)
@pytest.mark.parametrize("main", [bench_kernel.main, bench_stream.main])
def test_bad_arguments(main: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *arguments])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_layer.main([])
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("head", "status", "commit", "expected"),
    [
        ("a" * 40, "", None, ("a" * 40, False)),
        ("a" * 40, " M setup.py", "b" * 40, ("b" * 40, False)),
        ("a" * 40, None, None, ("a" * 40, True)),
        (None, None, "b" * 40, ("b" * 40, False)),
        (None, None, None, ("unknown", True)),
    ],
)
def test_commit_and_dirtiness(
    monkeypatch: pytest.MonkeyPatch, head: Any, status: Any, commit: Any, expected: tuple[str, bool]
) -> None:
    answers = {"rev-parse HEAD": head, "rev-parse --show-toplevel": str(command.ROOT)}
    monkeypatch.setattr(command, "git", lambda *words: answers.get(" ".join(words), status))
    assert command.tree_state(commit) == expected
    # A copy inside another repository has no commit.
    answers["rev-parse --show-toplevel"] = str(command.ROOT.parent)
    assert command.tree_state(None) == ("unknown", True)


def test_builds_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The same package twice; what is no shape is said, and is a failure."""
    import compare_builds

    roots = [str(command.ROOT)] * 2
    names = ["2-groups-of-3x70x1-90-H4-Hk1-d16", "tree-tiny-H4-Hk2-d16", "causal-1x128-H4-Hk4-d16", "nothing"]
    assert compare_builds.main([*roots, "--rounds", "1", "--shape", *names]) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == names and "expected a name like" in lines[3]
    assert all(line.endswith("0.0e+00") and len(line.split()) == 14 for line in lines[:3])
    line, is_fine = compare_builds.line_of("one", *([{"one": ({"forward": ms, "backward": 1.0, "both": 1.0 + ms,
        "deterministic": 1.0}, [torch.ones(3) * ms])}] for ms in (1.0, 1.02)))  # fmt: skip
    assert not is_fine and line.count("*") == 1 and "1.020*" in line


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kernel", "tree", "layer", "model"])
def test_on_the_gpu(kind: str) -> None:
    """All but FlexAttention, whose compilation takes longer than all of these."""
    import flash_attn_dualkv

    kernels = peers.own_kernels(dict(flash_attn_dualkv.build_info()), torch.cuda.get_device_capability())
    module: Any = {"kernel": bench_kernel, "tree": bench_tree, "layer": bench_layer}.get(kind)
    module = module or bench_model
    nodes = shapes.TREES["tiny"]() if kind == "tree" else nodes_of([(1000, (131, 700, 64))])
    shape = Shape(kind, tuple((17 * length, parent) for length, parent in nodes))
    if kind in ("layer", "model"):
        shape = replace(shape, model=shapes.ModelShape(2, 512, 1024, 32, 8, 128, vocab=1024))
    found = [one for one in module.BENCHMARK.implementations(kernels) if not one.missing() and "flex_p" not in one.name]
    config = measure.Config(torch.device("cuda"), rounds=1, target_ms=1.0, dtype=torch.bfloat16)
    run = module.BENCHMARK.run_type(
        shape, [one for one in found if one.name != "flex_fa4"], config, measure.Matmul(config)
    )
    run.run()
    assert all(row["ms"] and row["peak_gib"] > 0 and row["rel_diff"] < 0.1 for row in run.rows), run.rows
