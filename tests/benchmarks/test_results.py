"""Results: what may be published, the pages made of it, and that the README says what the files say."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_trl
import bench_verl
import measure
import numpy as np
import pandas as pd
import pytest
import report
import results
import shapes
import torch
import trainers_report
from command import RESULTS, ROOT
from peers import Implementation, kernel_implementations, layer_implementations, tree_implementations

TRAINERS = RESULTS / "trainers"
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEADER = {
    "benchmark": "kernel",
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "cuda": "13.0",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-11-21T08:00:00+00:00",
    "dirty": False,
    "matmul_tflops": 750.0,
}


def rows_of(run_type: Any, shape: shapes.Shape, impl: Implementation, ms: float, **facts: Any) -> list[dict[str, Any]]:
    """As a GPU would give them: a forward of ``ms``, a backward of twice that."""
    config = measure.Config(device=torch.device("cpu"))
    run = run_type(shape, [impl], config, measure.Matmul(config))
    run.facts[impl.name] = {"peak_gib": 4.5, **facts}
    run.times = {(impl.name, "forward"): [ms], (impl.name, "backward"): [2 * ms]}
    run.matmul.readings.append(750.0)
    return run.rows


def kernel_result(speed: float = 1.0) -> dict[str, Any]:
    """One peer was out of memory at one shape and left out at another."""
    found = {one.name: one for one in kernel_implementations(["sm80", "sm90"])}
    rows = []
    for name in shapes.PAPER[:3]:
        for impl, ms in (
            ("dualkv_sm90", 10.0),
            ("flex_fa4", 11.0),
            ("fa2_replicated", 50.0),
            ("cudnn_replicated", 30.0),
        ):
            facts = {}
            if impl == "fa2_replicated" and name != "28x4Kx2K":
                facts = {"oom": True} if name == "28x16Kx2K" else {"skipped": "left out: budget"}
            rows += rows_of(measure.ShapeRun, shapes.parse(name), found[impl], ms / speed, **facts)
    rows += rows_of(measure.ShapeRun, shapes.parse("28x16Kx2K"), found["dualkv_sm90_deterministic"], 12.0)
    return {"header": HEADER, "rows": rows}


def tree_result() -> dict[str, Any]:
    """A peer was not installed."""
    found = {one.name: one for one in tree_implementations(["sm90"])}
    rows = []
    for name in shapes.TREE_PRESETS["trees"]:
        for impl, ms in (("dualkv_sm90", 1.0), ("flex_fa4", 2.0), ("fa4_gathered", 0.0), ("fa2_flattened", 8.0)):
            facts = {} if ms else {"skipped": "flash-attn-4 is not installed"}
            rows += rows_of(measure.ShapeRun, shapes.parse(name), found[impl], ms, **facts)
    saved = dict(short_nodes=4, node_tokens=64, rows_below=16384, attention_saved_ms=-1.5, products_saved_ms=1.0)
    rows += rows_of(measure.ShapeRun, shapes.parse("tree-pairs_64x8K"), found["dualkv_sm90"], 9.0, **saved)
    return {"header": {**HEADER, "benchmark": "tree"}, "rows": rows}


def layer_result() -> dict[str, Any]:
    """Peaks on a law, the largest out of memory; a tree, which is on no such law."""
    found = {one.name: one for one in layer_implementations(["sm90"])}
    rows = []
    for name in shapes.LAYER_PRESETS["memory"]:
        shape = shapes.parse(name, shapes.LayerShape)
        responses = sum(shape.responses)
        for impl, ms in (("dualkv_sm90", 24.0), ("fa2_replicated", 144.0)):
            prompts = found[impl].executed(shape)[0] - responses
            peak = 1.5 + (200 * 1024 * prompts + 250 * 1024 * responses) / report.GIB
            facts = {"peak_gib": peak} if peak < 100 else {"oom": True, "peak_gib": None}
            rows += rows_of(measure.LayerRun, shape, found[impl], ms, **facts)
    tree = shapes.parse("tree-agentic", shapes.LayerShape)
    rows += rows_of(measure.LayerRun, tree, found["dualkv_sm90"], 100.0)
    rows += rows_of(measure.LayerRun, tree, found["varlen_sm90_flattened"], 480.0)
    return {"header": {**HEADER, "benchmark": "layer"}, "rows": rows}


def model_result() -> dict[str, Any]:
    found = {one.name: one for one in layer_implementations(["sm90"])}
    shape = shapes.parse("16x8Kx131-2048", shapes.StepShape)
    rows = rows_of(measure.LayerRun, shape, found["dualkv_sm90"], 1000.0)
    rows += rows_of(measure.LayerRun, shape, found["flex_fa4"], 1100.0)
    other = shapes.parse("gemma3-4b-L6-16x8Kx131-2048", shapes.StepShape)
    stock = replace(found["fa2_replicated"], name="stock_flex_attention_replicated")
    rows += rows_of(measure.LayerRun, other, found["dualkv_sm90"], 100.0)
    return {"header": {**HEADER, "benchmark": "model"}, "rows": rows + rows_of(measure.LayerRun, other, stock, 450.0)}


def stream_result() -> dict[str, Any]:
    row = {**kernel_result()["rows"][0], "direction": "both", "wall_ms": 20.0, "attention_ms": 19.0, "host_ms": 0.5}
    row |= {"device_ms": 0.2, "graphs": 0}
    rows = [{**row, "shape": f"stream-64K-{index:02d}", "ms": ms} for index, ms in enumerate((1.0, 2.0, 9.0))]
    rows += [{**one, "impl": "flex_fa4", "ms": 40.0, "graphs": 1, "device_ms": None} for one in rows[:2]]
    rows.append({**rows[2], "impl": "flex_fa4", "ms": None, "error": "RuntimeError: no dynamic shapes"})
    return {"header": {**HEADER, "benchmark": "stream"}, "rows": rows}


def write(folder: Path, **files: dict[str, Any]) -> Path:
    machine = folder / "NVIDIA-H200"
    machine.mkdir(parents=True, exist_ok=True)
    for name, result in files.items():
        (machine / f"{name}.json").write_text(json.dumps(result))
    return machine


def test_of_this_library_the_newest_commit_counts() -> None:
    """Its ratio to a peer of an older run is that of the medians; a shape that was not measured again keeps its row."""
    old, new = kernel_result(), copy.deepcopy(kernel_result())
    new["header"] |= {"commit": "f" * 40, "date": "2099-01-01T00:00:00+00:00"}
    shape = new["rows"][0]["shape"]
    new["rows"] = [row for row in new["rows"] if row["impl"] == results.OURS and row["shape"] == shape]
    for row in new["rows"]:
        row["ms"] /= 2
    before, after = (
        results.medians(pd.concat([results.load_rows(one, str(index)) for index, one in enumerate(files)])).set_index(
            ["shape", "impl"]
        )
        for files in ((old,), (old, new))
    )
    halved = (shape, results.OURS)
    assert after["ms"][halved] == pytest.approx(before["ms"][halved] / 2) and after["ratio"][halved] == 1
    peers = [key for key in before.index if key[0] == shape and not key[1].startswith("dualkv")]
    assert peers and all(after["ratio"][key] == pytest.approx(2 * before["ratio"][key]) for key in peers)
    others = [key for key in before.index if key[0] != shape]
    assert others and after["ms"].loc[others].equals(before["ms"].loc[others])


# --- what may be published ------------------------------------------------------------------------------------------


Damage = Callable[[dict[str, Any], dict[str, Any]], object]  # of a header and of a row


@pytest.mark.parametrize("make", [kernel_result, tree_result, layer_result, model_result, stream_result])
@pytest.mark.parametrize(
    ("message", "damage"),
    [
        ("header: torch", lambda header, row: header.pop("torch")),
        ("header: dirty", lambda header, row: header.update(dirty=None)),
        ("dirty tree", lambda header, row: header.update(dirty=True)),
        ("without a commit", lambda header, row: header.update(commit="unknown")),
        ("another folder", lambda header, row: header.update(gpu="NVIDIA H100")),
        ("benchmark nothing", lambda header, row: header.update(benchmark="nothing")),
        (r"rows\[0\]: h_k, n missing", lambda header, row: (row.pop("n"), row.pop("h_k"))),
        ("unknown impl dualkv_reference", lambda header, row: row.update(impl="dualkv_reference")),
        ("direction sideways", lambda header, row: row.update(direction="sideways")),
        ("dtype fp32", lambda header, row: row.update(dtype="fp32")),
        ("neither oom, skipped nor error", lambda header, row: row.update(ms=None)),
        ("dualkv_sm90 failed: Error: x", lambda header, row: row.update(ms=None, error="Error: x")),
        ("pairs are not those", lambda header, row: row.update(visible_pairs=1)),
        ("tflops .* does not follow", lambda header, row: row.update(ms=row["ms"] * 2)),
        ("fraction .* does not follow", lambda header, row: row.update(matmul_tflops=1.0)),
        ("must be positive", lambda header, row: row.update(peak_gib=None)),
    ],
)
def test_a_damaged_result_is_refused(make: Any, message: str, damage: Damage, tmp_path: Path) -> None:
    result = copy.deepcopy(make())
    (path,) = [write(tmp_path, result=result) / "result.json"]
    results.check(path)
    damage(result["header"], result["rows"][0])
    write(tmp_path, result=result)
    if make is stream_result and re.search("follow|positive|pairs", message):
        return  # a stream's rows have no such figures
    with pytest.raises(results.ResultError, match=message):
        results.check(path)


@pytest.mark.parametrize("text", ["", "{}", '{"header": {}, "rows": []}', '{"header": {}, "rows": [3]}'])
def test_what_is_no_result(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    for wrong in (path, tmp_path / "missing.json"):
        with pytest.raises(SystemExit):
            report.main([str(wrong)])
        assert f"error: {wrong}: expected" in capsys.readouterr().err


# --- pages ----------------------------------------------------------------------------------------------------------


def test_pages_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    runs = {f"kernel-{index}": kernel_result(speed) for index, speed in enumerate((0.5, 1.0, 2.0))}
    others = {"tree": tree_result(), "layer": layer_result(), "model": model_result(), "stream": stream_result()}
    machine = write(tmp_path, **runs, **others)
    report.render(tmp_path)
    page = re.sub(" +", " ", (machine / "README.md").read_text())
    shape, layer = shapes.parse("28x16Kx2K"), shapes.parse("16x8Kx131-2048", shapes.LayerShape)
    rate = round(shape.flops("forward", 0, shape.visible_pairs) / 10.0 / 1e9)
    for line in (
        rf"\| 28 x 16K x 2K \| this library \| 10.0 \| {rate // 10}\d \| 247% \| 20.0 .* 30.0 \| 1.00 \| 4.5 \|",
        r"\| \| this library, deterministic \| \| \| \| 24.0 \|.*\| \| \| 4.5 \|",
        r"\| \| FlexAttention on FlashAttention-4 \|.*\| 33.0 \| 1.10 \| 4.5 \|",
        r"\| \| FlashAttention-2, prompt replicated \|.*\| out of memory \|.*",
        r"\| \| FlashAttention-2, prompt replicated \|.*\| not timed \|.*",
        rf".* 48.0 \| 72.0 \| 1.00 \| 7.6 \| {layer.packed_tokens / 72:.0f} \| {layer.replicated_tokens / 72:.0f} \|.*",
        r"\| this library \| M0 \+ cP P \+ cR \(sum of R\) \| 1.50 \| 200.0 \| 250.0 \| 1.00000 \| 12 \|",
        r"\| Gemma 3 4B: 6 layers, 16 x 8K x 131..2048 \| this library \| 100.0 \| \| 200.0 \| 300.0 \| 1.00 \|.*",
        r"\| \| stock model on FlexAttention, prompt replicated \| 450.0 \| 4.50 \| 900.0 \| 1350 \| 4.50 \|.*",
        r"\| this library \| 3 of 3 \| 2.00 \| 12 \| 0.50 \| 0.20 \| 19.0 \| 0 \| \|",
        r"\| tree branched \| 15 \| 9 \| 7 \| 24,512 \| 36,608 \| 1.15x \|",
        r"\| tree agentic \| this library \| 1.00 \|.*\| 2.00 \|.*\| 3.00 \| 1.00 \| 4.5 \|",
        r"\| 128 \| 16,384 \| 64 \| -3.000 \| 2.000 \| 96 \| no \|",
        r"\| \| FlashAttention-4, keys gathered along paths \|.*\| not installed \|.*",
        r"\| \| FlashAttention-2, flattened \| 8.00 \|.*\| 24.0 \| 8.00 \| 4.5 \|",
        r"\| \| this library's varlen kernels, flattened \| 480.0 \| 960.0 \| 1440 \| 4.80 \| 4.5 \|.*",
        r".*\| 2 of 3 \| 40.0 \| 80 \|.* failed: RuntimeError: no dynamic shapes \|",
    ):
        assert re.search(f"^{line}$", page, re.M), line
    assert "pairs of leaves" not in page
    text = re.sub(" +", " ", (tmp_path / "headline.md").read_text())
    assert "| Attention, 28 x 16K x 2K | 30.0 | 33.0 (1.10x) | out of memory |" in text
    assert "| One layer of Qwen3-8B, 16 x 8K x 131..2048 | 72.0 | not run | 432.0 (6.00x) |" in text
    assert text in re.sub(" +", " ", (tmp_path / "README.md").read_text())
    for image in (
        "headline.png",
        *(f"NVIDIA-H200/{name}.png" for name in ("attention", "trees", "layer", "memory", "model")),
    ):
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")
    assert report.main([str(path) for path in sorted(machine.glob("*.json"))]) == 0
    assert "FlexAttention on FlashAttention-4" in capsys.readouterr().out


def test_the_law_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how well it fits, leaves out peaks of several calls, and is not made of too few points."""
    frame = results.load_rows(layer_result())
    figures = results.medians(frame)
    figures = figures[~figures["is_tree"]]
    ours, theirs = (figures[figures["impl"] == name].copy() for name in ("dualkv_sm90", "fa2_replicated"))
    in_pieces = theirs.apply(results.in_pieces, axis=1)
    assert list(theirs[in_pieces]["shape"]) == ["16x32Kx131-2048"] and not ours.apply(results.in_pieces, axis=1).any()
    theirs.loc[in_pieces, "peak_gib"] = 1000.0
    law = report.fit(theirs)
    assert law is not None and law["m0"] == pytest.approx(1.5, abs=1e-3) and law["r2"] == pytest.approx(1)
    ours["peak_gib"] += np.resize([0.2, -0.2, 0.1], len(ours))
    law = report.fit(ours)
    assert law is not None and 0.9 < law["r2"] < 0.9999 and law["points"] == 12
    assert report.fit(ours[:3]) is None and report.fit(ours[ours["p"] == 8192]) is None


def test_committed_results_and_their_pages(tmp_path: Path) -> None:
    """Every file may be published, and pages are what would be made of them now."""
    for path in results.result_files():
        target = tmp_path / path.relative_to(RESULTS)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    written = report.render(tmp_path)
    for page in written:
        committed = RESULTS / page.relative_to(tmp_path)
        assert committed.read_text() == page.read_text(), "run benchmarks/report.py"
    images = {path.relative_to(RESULTS) for path in RESULTS.rglob("*.png") if TRAINERS not in path.parents}
    assert images == {path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")}


# --- the README -----------------------------------------------------------------------------------------------------


def test_readme_figures_come_from_the_result_files() -> None:
    """Its table is the headline's; there are no other figures."""
    table = (RESULTS / "headline.md").read_text()
    if "headline.png" in README:
        assert table in README, "copy benchmarks/results/headline.md into README.md"
    figures = re.findall(r"\d[\d.,]* ?(?:TFLOP/s|ms\b|GiB\b|times as fast|x faster)", README.replace(table, ""))
    assert figures == []


def test_pages_of_trainers(tmp_path: Path) -> None:
    """The page and the README's table are those of the committed files."""
    folders = (bench_verl.FOLDER, bench_trl.FOLDER)
    for folder in folders:
        assert list(folder.glob("*.json"))
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.png"))
    page, short = trainers_report.render(tmp_path)
    assert page.read_text() == (TRAINERS / page.name).read_text(), "run python benchmarks/bench_verl.py --render"
    assert short.read_text() in README, "copy benchmarks/results/trainers/headline.md into README.md"
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")} == {
        path.relative_to(TRAINERS) for path in TRAINERS.rglob("*.png")
    }


def test_gains_of_verl() -> None:
    """Of rows with the same budget and Ulysses on both sides; fixed micro-batches and lonely rows say nothing."""

    def row(who: str, how: str, sp: int, update_s: float) -> dict[str, Any]:
        times = dict(update_s=update_s, infer_s=update_s / 4)
        return dict(who=who, how=how, sp=sp, token_ratio=4.0, metrics={"shared_prompt/dedup_ratio": 3.5}, **times)

    rows = [
        row("verl", "micro 4", 1, 9.0),
        row("verl", "tokens 64", 1, 12.0),
        row("verl", "tokens 64", 2, 14.0),
        row("plug-in", "micro 4", 1, 3.0),
        row("plug-in", "tokens 64", 1, 4.0),
        row("plug-in", "tokens 64", 2, 4.0),
    ]
    alone, with_ulysses = (
        f" At equal budgets{how}, 3.50 was run: updates gain {gain}, log-probabilities {gain}."
        for how, gain in (("", "3.00x (0.75 of it)"), (" with Ulysses 2", "3.50x (0.88 of it)"))
    )
    assert trainers_report.gains(pd.DataFrame(rows)) == alone + with_ulysses
    assert trainers_report.gains(pd.DataFrame(rows[:-1])) == alone
    assert trainers_report.gains(pd.DataFrame(rows[:4])) == ""
    failed = rows[-1] | dict(update_s=None, infer_s=None, metrics=None)
    assert trainers_report.gains(pd.DataFrame([*rows[:-1], failed])) == alone


def test_section_of_trl(tmp_path: Path) -> None:
    """Medians, their ratios, what the curves differ by; half a result is none."""
    assert bench_trl.section(tmp_path) == ""
    asked = dict(steps=20, prompts=4, responses=16, prompt=4096, completion=32, layers=4, hidden=1024, attention="sdpa")
    rows = []
    for who, update, shift in (("stock", 1.5, 0.0), ("shared", 0.25, 0.01)):
        rewards = [0.1 + 0.04 * step + (shift if step else 0.0) for step in range(20)]
        rows.append(
            {
                "who": who,
                "arguments": asked,
                "versions": {"trl": "1.16.0"},
                "peak_memory_gib": 60.0 * update,
                "phases": {"rollout": [0.5] * 20, "update": [update] * 19 + [9.0]},
                "rewards": rewards,
                "grad_norms": [2.0] * 20,
                "dedup_ratio": [12.0] * 20,
                "fallbacks": [0.0] * 20,
            }
        )
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"header": HEADER, "rows": rows}))
    text = re.sub(" +", " ", bench_trl.section(tmp_path))
    for line in (
        "### 20 steps of 4 prompts, 16 x 4096 x 32, 4 layers of width 1024, NVIDIA H200",
        "| update, s | 1.500 | 0.250 | 6.00 |",
        "| step, s | 2.000 | 0.750 | 2.67 |",
        "| peak memory, GiB | 90.0 | 15.0 | 6.00 |",
        "| reward, first 10 steps | 0.280 | 0.289 | |",
        "| last 10 | 0.680 | 0.690 | |",
    ):
        assert f"\n{line}\n" in text
    assert "means of 10 steps differ by 0.010 at most, while a step of TRL's run differs from the next by 0.040" in text
    assert "has 12.0 times fewer tokens" in text and "0% fell back to stock attention (sdpa). trl 1.16.0." in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for header, kept in (({**HEADER, "dirty": True}, rows), (HEADER, rows[:1])):
        path.write_text(json.dumps({"header": header, "rows": kept}))
        with pytest.raises(SystemExit, match=r"result\.json: expected both runs of a clean tree"):
            bench_trl.section(tmp_path)
