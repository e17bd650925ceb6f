# SPDX-License-Identifier: BSD-3-Clause
"""Results: what may be published, the pages made of it, and that the README says what the files say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import bench_kernel
import measure
import pytest
import report
import shapes
import torch
from command import RESULTS, ROOT
from matplotlib.figure import Figure

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
OLDER = {"commit": "f" * 40, "date": "2026-11-20T08:00:00+00:00"}


def result(module: Any, name: str, times: dict[str, Any], header: dict[str, Any] | None = None) -> dict[str, Any]:
    """As a GPU would give it: of each implementation a forward of these ms, a backward of twice that, or no time."""
    found = {one.name: one for one in module.BENCHMARK.implementations("sm90")}
    shape, config = shapes.parse(name), measure.Config(torch.device("cpu"), dtype=torch.bfloat16)
    run = module.BENCHMARK.run_type(shape, [found[impl] for impl in times], config, measure.Matmul(config))
    for impl, ms in times.items():
        run.facts[impl] = {"peak_gib": 4.5} if isinstance(ms, float) else dict(ms)
        if isinstance(ms, float):
            run.times |= {(impl, "forward"): [ms], (impl, "backward"): [2 * ms]}
    run.matmul.readings.append(750.0)
    return {"header": {**HEADER, "benchmark": module.BENCHMARK.name, **(header or {})}, "rows": run.rows}


def kernel_result(name: str = "28x16Kx2K", speed: float = 1.0, **header: Any) -> dict[str, Any]:
    """One peer was out of memory."""
    peers = {"cudnn_flex": 10.4 / speed, "flex_fa4": 11.0 / speed, "fa4_replicated": 43.0 / speed}
    times = {report.OURS: 10.0 / speed, f"{report.OURS}_deterministic": 6.0, **peers, "fa2_replicated": {"oom": True}}
    return result(bench_kernel, name, times, header)


def write(folder: Path, **files: dict[str, Any]) -> Path:
    machine = folder / "NVIDIA-H200"
    machine.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (machine / f"{name}.json").write_text(json.dumps(content))
    return machine


# --- what may be published ------------------------------------------------------------------------------------------


def test_a_damaged_result_is_refused(tmp_path: Path) -> None:
    """Whatever is changed in a file that may be published."""
    good = kernel_result()
    path = write(tmp_path, result=good) / "result.json"
    report.check(path)
    for message, header, row in (
        ("clean tree", {"dirty": True}, {}),
        ("clean tree with a commit", {"commit": "unknown"}, {}),
        ("another folder", {"gpu": "NVIDIA H100"}, {}),
        ("dualkv_reference on 28x16Kx2K: unknown", {}, {"impl": "dualkv_reference"}),
        ("nothing says why", {}, {"ms": None}),
        ("dualkv_sm90 on 28x16Kx2K: failed: Error: x", {}, {"ms": None, "error": "Error: x"}),
        ("another number of pairs", {}, {"visible_pairs": 1}),
    ):
        first, *others = good["rows"]
        write(tmp_path, result={"header": good["header"] | header, "rows": [first | row, *others]})
        with pytest.raises(report.ResultError, match=message):
            report.check(path)
    for rows, message in ((good["rows"][4:], "no time of this library"), ([], "expected rows of a clean tree")):
        write(tmp_path, result=good | {"rows": rows})
        with pytest.raises(report.ResultError, match=message):
            report.check(path)


# --- pages ----------------------------------------------------------------------------------------------------------


def test_ratios_are_of_one_process(tmp_path: Path) -> None:
    """The newest file of each peer that has this library; files without it, and replaced ones, go."""
    old, new, peer = kernel_result(**OLDER), kernel_result(speed=2.0), kernel_result(speed=4.0)
    new["rows"] = [row for row in new["rows"] if row["impl"] in (report.OURS, "cudnn_flex")]
    peer["rows"] = [row for row in peer["rows"] if row["impl"] != report.OURS]
    machine = write(tmp_path, old=old, new=new, peer=peer)
    figures = report.newest(report.cells(report.load(sorted(machine.glob("*.json"))))).set_index(["file", "impl"])
    assert {file for file, _ in figures.index} == {"old", "new"}
    assert {impl for file, impl in figures.index if file == "new"} == {report.OURS, "cudnn_flex"}
    assert figures["ms"]["new", report.OURS] == pytest.approx(15) and figures["ms"]["old", report.OURS] == 30
    for (file, impl), ratio in figures["ratio"].items():
        if not impl.endswith("deterministic") and ratio == ratio:
            assert ratio == pytest.approx(figures["ms"][file, impl] / figures["ms"][file, report.OURS])
    (machine / "peer.json").unlink()
    write(tmp_path, newer=kernel_result(date="2026-11-22T08:00:00+00:00"))
    with pytest.raises(report.ResultError, match="newer files have all that is in new, old, which can go"):
        report.page(report.load(sorted(machine.glob("*.json"))), machine)


def test_committed_results_and_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file may be published, pages are what would be made of them, and the README has those tables."""
    # Plots are made, but not their pixels.
    monkeypatch.setattr(Figure, "savefig", lambda _figure, path, **_options: Path(path).touch())
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.png", "*.md"))
    for page in report.render(tmp_path):
        committed = RESULTS / page.relative_to(tmp_path)
        assert committed.read_text() == page.read_text(), "run benchmarks/report.py"
        assert page.name != "headline.md" or page.read_text() in README, f"copy {committed} into README.md"
    images = [{path.relative_to(folder) for path in folder.rglob("*.png")} for folder in (RESULTS, tmp_path)]
    assert images[0] == images[1]


def test_readme_has_no_other_figures() -> None:
    """And the columns of its table divide."""
    table = (RESULTS / "headline.md").read_text()
    figures = re.findall(r"\d[\d.,]* ?(?:TFLOP/s|ms\b|GiB\b|times as fast|x faster)", README.replace(table, ""))
    assert figures == []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for cell in cells[2:-1]:
            if found := re.fullmatch(r"([\d.]+) \(([\d.]+)x\)", cell):
                peer, ratio, own = float(found[1]), float(found[2]), float(cells[1])
                assert ratio == pytest.approx(peer / own, rel=0.01), line  # both are rounded


def test_the_first_figures_of_the_readme_are_of_the_results() -> None:
    """What a user gains end to end, in the first lines, is what the tables of trainers say."""
    page = (RESULTS / "trainers" / "README.md").read_text()
    trl = re.split(r"^### GRPO: .* 8 prompts, 16 x 4096 x 512, 28 layers of width 1024", page, flags=re.M)[1]
    verl = re.split(r"^### Qwen3-8B, 32 x 8192 x 2048, .* 2 prompts, 2 GPUs$", page, flags=re.M)[1]
    rollouts = "\n".join(re.findall(r"^\| H200 .* qwen3-8b, 36 .*\| 16 x 16 x 8192 x 512 .*", page, re.M))
    steps = r"\| {} +\| +([\d.]+) .*?\| this package +\| +([\d.]+) "
    expected = [
        re.search(r"^\| step, s +\| ([\d.]+) +\| ([\d.]+)", trl, re.M),
        re.search(r"\| verl, tokens 40960 +\| ([\d.]+) .*?\n\| plug-in, tokens 40960 +\| ([\d.]+) ", verl, re.S),
        *(re.search(steps.format(engine), rollouts, re.S) for engine in ("vLLM", "SGLang")),
    ]
    found = re.findall(r"^\| \[(\w+)\].* \| ([\d.]+) → ([\d.]+) \(([\d.]+)x\) \|", README.partition("```")[0], re.M)
    assert [name for name, *_ in found] == ["TRL", "verl", "vLLM", "SGLang"]
    for (name, *figures), match in zip(found, expected):
        assert match is not None, name
        stock, own = map(float, match.groups())
        assert figures == [f"{stock:.1f}", f"{own:.1f}", f"{stock / own:.1f}"], name
