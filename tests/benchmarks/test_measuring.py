# SPDX-License-Identifier: BSD-3-Clause
"""How the benchmarks measure, and their commands."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_kernel
import bench_layer
import bench_model
import bench_stream
import command
import compare_builds
import gate
import measure
import pandas as pd
import peers
import pytest
import report
import shapes
import torch
from bench_cases import CPU, RAGGED
from bench_cases import packages as packages
from bench_cases import several_micro_batches as several_micro_batches
from packing import Arrangement
from peers import Implementation
from shapes import Shape, nodes_of


def measured(implementations: list[Implementation], shape: Shape = RAGGED, **changes: Any) -> list[dict[str, Any]]:
    config = measure.Config(CPU, **{"rounds": 2, "max_calls": 2, "warm_ms": 1.0, **changes})
    run = measure.ShapeRun(shape, implementations, config, measure.Matmul(config))
    run.run()
    return run.rows


def brief(benchmark: command.Benchmark) -> command.Benchmark:
    """The benchmark without its warm-ups, which are for clocks of GPUs."""
    return replace(benchmark, settings={**benchmark.settings, "warm_ms": 1.0, "target_ms": 1.0})


OURS = peers.ours(None)
TREE_PEERS = ["fa4_gathered", "fa4_flattened"]


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
        ("output", {"error": "output differs by 0.2 from the first implementation's"}),
        ("gradient", {"error": "gradient differs by 0.2 from the first implementation's"}),
    ],
)
def test_a_failure_is_a_row(error: Any, fact: dict[str, Any]) -> None:
    """And so is an implementation that computes something else."""

    def arrange(shape: Shape, device: torch.device) -> list[Arrangement]:
        if isinstance(error, Exception):
            raise error
        (how,) = OURS.arrange(shape, device)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if error == "output":
                return 1.2 * how.attention(q, k, v)
            return how.attention(q, k.detach() + 0.8 * (k - k.detach()), v)  # four fifths of the gradient of k

        return [Arrangement(how.rows, attention)]

    rows = measured([OURS, Implementation("broken", arrange)])
    assert all(row["ms"] > 0 and not row["rel_diff"] and not row["gradient_rel_diff"] for row in rows[:2])
    assert all(row["ms"] is row["tflops"] is None and fact.items() <= row.items() for row in rows[2:])


def test_times_of_micro_batches_are_added(monkeypatch: pytest.MonkeyPatch, packages: None) -> None:
    """The sum of the medians."""
    config = measure.Config(CPU)
    shape, impl = shapes.parse("tree-tiny-H4-Hk2-d16"), peers.of_varlen("fa4")[2]
    run, count = measure.ShapeRun(shape, [impl], config, measure.Matmul(config)), len(shape.micro_batches())
    laps = iter([[1.0, 2.0, 9.0], [10.0], [3.0, 3.0], [30.0]] * 10)
    monkeypatch.setattr(measure, "laps_under_load", lambda *_: [next(laps)])
    run.timed_pass(impl)
    assert impl.name == "fa4_flattened" and count > 1
    assert run.times[impl.name, "forward"] == [sum((2.0, 3.0)[index % 2] for index in range(count))]
    assert run.times[impl.name, "backward"] == [sum((10.0, 30.0)[index % 2] for index in range(count))]


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments", "peers_of"),
    [
        (
            bench_kernel,
            ["--impls", "fa4"],
            {"4x96x24-H4-Hk2-d16": ["fa4_replicated"], "tree-tiny-H4-Hk2-d16": TREE_PEERS},
        ),
        (bench_layer, ["--impls", "fa4"], {"tiny-3x70x1-90": ["fa4_replicated"], "tiny-tree-tiny": TREE_PEERS}),
        (bench_model, ["--shape", "tiny-3x70x1-90"], {"tiny-3x70x1-90": ["fa4_replicated", "cudnn_flex"]}),
    ],
)
def test_the_commands(
    module: Any, arguments: list[str], peers_of: dict[str, list[str]], tmp_path: Path, packages: None
) -> None:
    """Rows and header of what each writes; a CPU's are no result."""
    where = ["--device", "cpu", "--out", str(tmp_path), "--name", "trial"]
    assert brief(module.BENCHMARK).main([*where, "--rounds", "1", *arguments]) == 0
    header, rows = json.loads((tmp_path / "trial.json").read_text()).values()
    assert header["benchmark"] == module.BENCHMARK.name
    for name, expected in peers_of.items():
        found = [row["impl"] for row in rows if row["shape"] == name and row["direction"] == "backward"]
        assert found == ["dualkv_reference", *expected]
    for row in rows:
        assert row["matmul_tflops"] > 0 and row["ms_min"] <= row["ms"] <= row["ms_max"] and row["rel_diff"] < 1e-4
        assert (row["tflops"] is None) == (header["benchmark"] in ("layer", "model"))
        assert report.problems_of({**row, "impl": "dualkv_sm90"}, header["benchmark"]) == []
    with pytest.raises(report.ResultError, match="clean tree|another folder"):
        report.check(tmp_path / "trial.json")


def test_the_stream_command(tmp_path: Path, packages: None) -> None:
    """Packing and a mask plan for every micro-batch; a peer that computes something else, and one without time."""
    assert brief(bench_stream.BENCHMARK).main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "stream-tiny.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 4 + ["cudnn_flex"] * 4
    assert len({row["packed_tokens"] for row in rows}) == 4
    for row in rows:
        assert "error" not in row and row["wall_ms"] > row["host_ms"] > 0
        assert row["ms"] == pytest.approx(row["wall_ms"] - row["attention_ms"], abs=1e-2)
        assert report.problems_of({**row, "impl": "cudnn_flex"}, "stream") == []
    ours, peer = bench_stream.implementations(None)

    def doubled(shape: Shape, device: torch.device) -> tuple[torch.Tensor, bench_stream.Pack]:
        rows, pack = peer.arrange(shape, device)

        def packed() -> Any:
            attention, unpack = pack()
            return lambda q, k, v: 2 * attention(q, k, v), unpack

        return rows, packed

    for others, deadline, expected in ((doubled, 1e9, "output differs by"), (peer.arrange, 0.0, "left out: budget")):
        config = measure.Config(CPU, deadline=time.monotonic() + deadline)
        stream = bench_stream.parse("tiny")
        run = bench_stream.StreamRun(stream, [ours, replace(peer, arrange=others)], config, measure.Matmul(config))
        run.run()
        assert all(expected in (row.get("error") or row["skipped"]) and row["ms"] is None for row in run.rows[4:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "nothing"], "expected (a name like|one of rl, tiny)"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--preset", "nothing"], "invalid choice"),
        (["--impls", "=dualkv"], "dualkv_reference, .*cudnn_flex.*, got =dualkv"),
    ],
)
@pytest.mark.parametrize("main", [bench_kernel.BENCHMARK.main, bench_stream.BENCHMARK.main])
def test_bad_arguments(main: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *arguments])
    assert re.search(message, capsys.readouterr().err)


def test_commit_and_dirtiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tree's own repository; changes of results do not count, and what the caller states does."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert command.tree_state(None) == ("unknown", True) and command.tree_state("b" * 40) == ("b" * 40, False)
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-qm", "first", "--allow-empty"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/one.json").touch()
    assert command.tree_state(None) == (head, False)
    (tmp_path / "new.py").touch()
    assert command.tree_state(None) == (head, True)
    monkeypatch.setattr(command, "ROOT", tmp_path / "benchmarks")  # a copy inside another repository
    assert command.tree_state(None) == ("unknown", True)


@pytest.mark.parametrize("in_processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_builds_are_compared(
    in_processes: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same package twice: a row of four times and ratios for each shape; and what a slower build looks like."""
    names = ["2-groups-of-3x70x1-90-H4-Hk1-d16", "tree-tiny-H4-Hk2-d16"]
    roots = [str(command.ROOT)] * 2

    def run_here(arguments: list[str], env: dict[str, str], check: bool) -> None:
        assert arguments[1] == bench_kernel.__file__ and env["PYTHONPATH"].split(":")[0] == roots[0] and check
        assert brief(bench_kernel.BENCHMARK).main(arguments[2:]) == 0

    if not in_processes:
        monkeypatch.setattr(compare_builds, "subprocess", SimpleNamespace(run=run_here))
    compare_builds.main([*roots, "--processes", "1", "--device", "cpu", "--shape", *names])
    lines = [line.replace("*", "").split() for line in capfd.readouterr().out.splitlines()[-2:]]
    assert [line[0] for line in lines] == names and all(len(line) == 13 for line in lines)
    for line in lines:
        # Columns are old ms, new ms and ratio of each mode, rounded to 0.001: much of a time of
        # 0.05 ms.
        before, after, ratio = map(float, line[1:4])
        rounding = 6e-4 * (1 / before + 1 / after)
        assert ratio == pytest.approx(after / before, rel=0, abs=6e-4 + rounding * after / before)
    old = pd.DataFrame({"forward": [1.0], "backward": 1.0, "both": 2.0, "deterministic": 1.0}, index=["one"])
    assert [cell[-7:] for cell in compare_builds.table(old, 1.02 * old).loc["one"]] == [" 1.020*"] * 3 + [" 1.020 "]
    with pytest.raises(SystemExit):
        compare_builds.main(["nowhere", roots[0]])
    assert "expected checkouts with flash_attn_dualkv" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kernel", "tree", "layer", "model"])
def test_on_the_gpu(kind: str) -> None:
    """All but FlexAttention, whose compilation takes longer than all of these."""
    kernels = peers.own_kernels()
    module: Any = {"layer": bench_layer, "model": bench_model}.get(kind, bench_kernel)
    nodes = shapes.TREES["tiny"] if kind == "tree" else nodes_of([(1000, (131, 700, 64))])
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


def test_the_gate_knows_the_newest_rate_and_names_what_is_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(date: str, rates: dict[str, float | None], impl: str = "dualkv_sm90") -> dict[str, Any]:
        # The product of one shape is read far off, and of a shape that was left out not at all.
        products = dict.fromkeys([*rates, "more", "and more"], 500.0) | {"d": 900.0, "left out": None}
        rows = [
            dict(shape=one, direction="forward", impl=impl, tflops=500 * rate if rate else None, matmul_tflops=product)
            for (one, product), rate in zip(products.items(), map(rates.get, products))
        ]
        return {"header": {"date": date}, "rows": rows}

    recorded = {
        "kernel-old.json": result("2026-01-01", {"a": 0.5, "b": 0.8}),
        "kernel-new.json": result("2026-02-01", {"a": 0.9, "b": None}),
        "kernel-peer.json": result("2026-03-01", {"a": 0.1}, "cudnn_flex"),
        "tree.json": result("2026-02-01", {"c": 0.7}),
        "layer.json": result("2026-03-01", {"a": 0.2}),
    }
    (tmp_path / "card").mkdir()
    for name, found in recorded.items():
        (tmp_path / "card" / name).write_text(json.dumps(found))
    monkeypatch.setattr(gate, "RESULTS", tmp_path)
    monkeypatch.setattr(gate, "own_kernels", lambda: "sm90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")

    def bench(arguments: list[str]) -> None:
        where = Path(arguments[arguments.index("--out") + 1])
        assert arguments[arguments.index("--impls") + 1] == "=dualkv_sm90"
        assert arguments[arguments.index("--shape") + 1 :] == [*gate.SHAPES]
        (where / "now.json").write_text(json.dumps(result("2026-04-01", now)))

    monkeypatch.setattr(gate.bench_kernel, "BENCHMARK", type("Bench", (), {"main": staticmethod(bench)}))
    now: dict[str, float | None] = {"a": 0.9, "b": 0.777, "c": 0.71, "d": 0.1}
    assert gate.main([]) == 0 and capsys.readouterr().out.endswith("as fast\n")
    now = {"a": 0.87, "b": 0.78, "c": 0.6}
    assert gate.main([]) == 1 and capsys.readouterr().out.endswith("slower: a forward, c forward\n")
    assert all(shapes.parse(one) for one in gate.SHAPES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card without records")
    assert gate.main([]) == 0 and "NaN" not in capsys.readouterr().out
