# SPDX-License-Identifier: BSD-3-Clause
"""How the benchmarks measure, and their commands."""

from __future__ import annotations

import json
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
import gate
import measure
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
from shapes import Shape


def measured(implementations: list[Implementation], shape: Shape = RAGGED, **changes: Any) -> list[dict[str, Any]]:
    config = measure.Config(CPU, **{"rounds": 2, "max_calls": 2, "warm_ms": 1.0, **changes})
    run = measure.ShapeRun(shape, implementations, config, measure.Matmul(config))
    run.run()
    return run.rows


def brief(benchmark: command.Benchmark) -> command.Benchmark:
    """The benchmark without its warm-ups, which are for clocks of GPUs."""
    return replace(benchmark, settings={**benchmark.settings, "warm_ms": 1.0, "target_ms": 1.0})


OURS = peers.ours(None)


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


# --- the commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (bench_kernel, "4x96x24-H4-Hk2-d16", ["fa4_replicated", "cudnn_flex"]),
        (bench_layer, "tiny-tree-tiny", ["fa4_gathered", "fa4_flattened", "cudnn_flex"]),
        (bench_model, "tiny-3x70x1-90", ["fa4_replicated", "cudnn_flex"]),
    ],
)
def test_the_commands(module: Any, shape: str, expected: list[str], tmp_path: Path, packages: None) -> None:
    """Rows and header of what each writes; a CPU's are no result."""
    where = ["--device", "cpu", "--out", str(tmp_path), "--name", "trial", "--rounds", "1", "--shape", shape]
    assert brief(module.BENCHMARK).main(where) == 0
    header, rows = json.loads((tmp_path / "trial.json").read_text()).values()
    assert header["benchmark"] == module.BENCHMARK.name
    assert [row["impl"] for row in rows if row["direction"] == "backward"] == ["dualkv_reference", *expected]
    for row in rows:
        assert row["matmul_tflops"] > 0 and row["ms_min"] <= row["ms"] <= row["ms_max"] and row["rel_diff"] < 1e-4
        assert report.problems_of({**row, "impl": "dualkv_sm90"}, header["benchmark"]) == []
    with pytest.raises(report.ResultError, match="clean tree|another folder"):
        report.check(tmp_path / "trial.json")


def test_the_stream(packages: None) -> None:
    """Packing and a mask plan for every micro-batch; a peer that computes something else is none."""
    ours, peer = bench_stream.implementations(None)

    def doubled(shape: Shape, device: torch.device) -> tuple[torch.Tensor, bench_stream.Pack]:
        rows, pack = peer.arrange(shape, device)

        def packed() -> Any:
            attention, unpack = pack()
            return lambda q, k, v: 2 * attention(q, k, v), unpack

        return rows, packed

    config = measure.Config(CPU, warm_ms=1.0, deadline=time.monotonic() + 1e9)
    for other in (peer, replace(peer, arrange=doubled)):
        run = bench_stream.StreamRun(bench_stream.parse("tiny"), [ours, other], config, measure.Matmul(config))
        run.run()
        assert len({row["packed_tokens"] for row in run.rows}) == 4
        for row in run.rows if other is peer else run.rows[:4]:
            assert row["wall_ms"] > row["host_ms"] > 0
            assert row["ms"] == pytest.approx(row["wall_ms"] - row["attention_ms"], abs=1e-2)
    assert all("output differs by" in row["error"] and row["ms"] is None for row in run.rows[4:])


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


def test_the_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest rate of each shape is compared, as a fraction of the median product of its process."""

    def result(date: str, rates: dict[str, float], impl: str = "dualkv_sm90") -> str:
        products = dict.fromkeys([*rates, "more", "and more"], 500.0) | {"d": 900.0}  # one is read far off
        rows = [
            dict(shape=shape, direction="forward", impl=impl, tflops=500 * rates.get(shape, 0.1), matmul_tflops=product)
            for shape, product in products.items()
        ]
        return json.dumps({"header": {"date": date}, "rows": rows})

    (tmp_path / "card").mkdir()
    for name, date, rates, impl in (
        ("kernel-old", "2026-01-01", {"a": 0.5, "b": 0.8}, "dualkv_sm90"),
        ("kernel-new", "2026-02-01", {"a": 0.9}, "dualkv_sm90"),
        ("kernel-peer", "2026-03-01", {"a": 0.1}, "cudnn_flex"),
        ("kernel-portable", "2026-03-01", {"a": 0.3}, "dualkv_sm80"),
        ("layer", "2026-03-01", {"a": 0.2}, "dualkv_sm90"),
    ):
        (tmp_path / "card" / f"{name}.json").write_text(result(date, rates, impl))
    monkeypatch.setattr(gate, "RESULTS", tmp_path)
    monkeypatch.setattr(gate, "own_kernels", lambda: "sm90")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")

    def bench(arguments: list[str]) -> None:
        Path(arguments[1], "now.json").write_text(result("now", now))

    monkeypatch.setattr(bench_kernel, "BENCHMARK", SimpleNamespace(main=bench))
    now = {"a": 0.9, "b": 0.777}
    assert gate.main([]) == 0 and capsys.readouterr().out.endswith("as fast\n")
    now = {"a": 0.87, "b": 0.78}
    assert gate.main([]) == 1 and capsys.readouterr().out.endswith("slower: a forward\n")
    assert all(shapes.parse(name) for name in gate.SHAPES)
