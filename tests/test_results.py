"""Results: what may be published, the tables and plots made of it, and that the README says what the files say."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_kernel  # noqa: E402
import report  # noqa: E402
import schema  # noqa: E402
import shapes  # noqa: E402
from shapes import Shape  # noqa: E402

# --- schema ---------------------------------------------------------------------------------------------------------


def synthetic_row(shape: Shape, impl: str, direction: str, ms: float | None, **extra: Any) -> dict[str, Any]:
    tflops = shape.flops(direction) / ms / 1e9 if ms else None
    return {
        "shape": shape.name,
        "n": shape.num_responses,
        "p": shape.mean_prompt,
        "r": shape.mean_response,
        "impl": impl,
        "dtype": "bf16",
        "direction": direction,
        "ms": ms,
        "tflops": tflops,
        "peak_gib": 4.5 if ms else None,
        "matmul_tflops": 750.0,
        "fraction": tflops / 750 if tflops else None,
        "h": shape.heads,
        "h_k": shape.kv_heads,
        "d": shape.head_dim,
        "visible_pairs": shape.visible_pairs(),
        **extra,
    }


def synthetic(speed: float = 1.0) -> dict[str, Any]:
    """A result as a GPU would give it, one peer out of memory at one shape and left out at another."""
    rows = []
    for shape in shapes.PAPER[:3]:
        for impl, forward in (("dualkv_sm80", 40.0), ("flex_packed", 44.0), ("fa2_replicated", 200.0)):
            failed = impl == "fa2_replicated" and shape != shapes.PAPER[0]
            note = {"oom": True} if shape == shapes.PAPER[1] else {"skipped": "about 30 s a pass at the assumed rate"}
            for direction, factor in (("forward", 1.0), ("backward", 2.8)):
                ms = None if failed else forward * factor / speed
                rows.append(synthetic_row(shape, impl, direction, ms, **(note if failed else {})))
        if shape.deterministic:
            rows.append(synthetic_row(shape, "dualkv_sm80_deterministic", "backward", 140.0 / speed))
    header = {
        "gpu": "NVIDIA H200",
        "torch": "2.11.0",
        "cuda": "13.0",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "date": "2026-11-21T08:00:00+00:00",
        "matmul_tflops": 750.0 * speed,
        "dirty": False,
    }
    return {"header": header, "rows": rows}


Damage = Callable[[dict[str, Any]], object]
DAMAGES: list[tuple[str, Damage]] = [
    ("dirty tree", lambda result: result["header"].update(dirty=True)),
    ("dirty is missing", lambda result: result["header"].pop("dirty")),
    ("header: matmul_tflops is missing", lambda result: result["header"].pop("matmul_tflops")),
    ("header: matmul_tflops has the wrong type", lambda result: result["header"].update(matmul_tflops=None)),
    ("matmul_tflops must be positive", lambda result: result["header"].update(matmul_tflops=0)),
    ("commit is no commit hash", lambda result: result["header"].update(commit="unknown")),
    ("remark must be text", lambda result: result["header"].update(remark=None)),
    ("date is not ISO 8601", lambda result: result["header"].update(date="yesterday")),
    ("keys header and rows", lambda result: result.update(comment="")),
    ("keys header and rows", lambda result: result.pop("rows")),
    ("a list that is not empty", lambda result: result["rows"].clear()),
    (r"rows\[0\]: matmul_tflops is null", lambda result: result["rows"][0].update(matmul_tflops=None)),
    (r"rows\[1\]: n is missing", lambda result: result["rows"][1].pop("n")),
    (r"rows\[0\]: n has the wrong type, got True", lambda result: result["rows"][0].update(n=True)),
    (r"rows\[0\]: expected an object", lambda result: result["rows"].insert(0, 3)),
    ("direction must be one of", lambda result: result["rows"][0].update(direction="both")),
    ("dtype must be", lambda result: result["rows"][0].update(dtype="fp32")),
    ("ours must name sm80 or sm90", lambda result: result["rows"][0].update(impl="dualkv")),
    ("unknown impl 'magic'", lambda result: result["rows"][2].update(impl="magic")),
    ("tflops .* does not follow", lambda result: result["rows"][0].update(tflops=999.0)),
    ("must be positive", lambda result: result["rows"][0].update(peak_gib=0)),
    ("peak_gib is null", lambda result: result["rows"][0].update(peak_gib=None)),
    ("neither oom, skipped nor error", lambda result: result["rows"][0].update(ms=None)),
    ("dualkv_sm80 failed: RuntimeError", lambda result: result["rows"][0].update(ms=None, error="RuntimeError: x")),
    ("none of this library", lambda result: result.update(rows=[r for r in result["rows"] if "flex" in r["impl"]])),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGES)
def test_a_damaged_result_is_refused(message: str, damage: Damage) -> None:
    result = copy.deepcopy(synthetic())
    schema.validate(result, "NVIDIA-H200")
    damage(result)
    with pytest.raises(ValueError, match=message):
        schema.validate(result, "NVIDIA-H200")


def test_the_folder_is_the_gpus() -> None:
    assert schema.gpu_folder("NVIDIA A100-SXM4-80GB") == "NVIDIA-A100-SXM4-80GB"
    with pytest.raises(ValueError, match="folder: expected NVIDIA-H200, got NVIDIA-H100"):
        schema.validate(synthetic(), "NVIDIA-H100")


@pytest.mark.parametrize("path", report.result_files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_results_may_be_published(path: Path) -> None:
    result = json.loads(path.read_text())
    schema.validate(result, path.parent.name)
    assert path.with_suffix(".md").read_text() == report.table(result), "render it again"
    assert path.with_suffix(".png").exists()


def test_what_was_put_right_by_hand_is_said_beside_the_figures() -> None:
    result = synthetic()
    assert "by hand" not in report.table(result)
    result["header"]["remark"] = "the date, which was that of another clock"
    schema.validate(result, "NVIDIA-H200")
    assert report.table(result).endswith("\nCorrected by hand: the date, which was that of another clock.\n")


# --- tables, plot, README -------------------------------------------------------------------------------------------


def test_table() -> None:
    table = report.table(synthetic())
    lines = [line for line in table.splitlines() if line.startswith("| 28x16Kx2K")]
    assert len(lines) == 4
    assert "| out of memory |" in lines[3]
    rate = shapes.PAPER[1].flops("forward") / 40.0 / 1e9
    assert f"| 40.0 | {rate:.0f} | {100 * rate / 750:.0f}% | 112.0 |" in lines[0]
    assert "| 152.0 | 4.50 |" in lines[0]
    assert "not timed" in table
    assert "750 TFLOP/s" in table


def test_render_makes_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paper.json"
    path.write_text(json.dumps(synthetic()))
    assert bench_kernel.main(["--render", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == report.table(synthetic())
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert str(path.with_suffix(".png")) in capsys.readouterr().out


def test_readme_section_takes_the_median_of_runs(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    (folder / "NVIDIA-H200").mkdir(parents=True)
    for index, speed in enumerate((0.5, 1.0, 2.0)):
        (folder / "NVIDIA-H200" / f"paper-{index}.json").write_text(json.dumps(synthetic(speed)))
    section = report.readme_section(folder)
    forward, backward = (shapes.PAPER[0].flops(d) / ms / 1e9 for d, ms in (("forward", 40.0), ("backward", 112.0)))
    assert f"| 28x4Kx2K | 152.0 ({forward:.0f} / {backward:.0f}) |" in section
    assert "3 runs of commit `0123456789ab`" in section
    assert "375-1500 TFLOP/s" in section
    assert "1.25x at 28x16Kx2K" in section
    assert "[paper-2](benchmarks/results/NVIDIA-H200/paper-2.md)" in section
    assert "out of memory" in section


def test_readme_without_results(tmp_path: Path) -> None:
    section = report.readme_section(tmp_path)
    assert section.startswith("No results yet")
    command = re.search(r"`python (benchmarks/bench_kernel.py .*)`", section)
    assert command
    assert bench_kernel.parse(command[1].split()[1:]).preset == ["paper", "performance"]


def test_fill_readme() -> None:
    text = f"a\n{report.README_BEGIN}\nold\n{report.README_END}\nz\n"
    assert report.fill_readme(text, "new") == f"a\n{report.README_BEGIN}\nnew\n{report.README_END}\nz\n"
    with pytest.raises(ValueError, match="markers"):
        report.fill_readme("nothing", "new")


def readme_outside_results() -> str:
    before, _, rest = report.README.read_text(encoding="utf-8").partition(report.README_BEGIN)
    return before + rest.partition(report.README_END)[2]


def test_readme_figures_come_from_the_result_files() -> None:
    text = report.README.read_text(encoding="utf-8")
    assert report.fill_readme(text, report.readme_section()) == text, "python benchmarks/bench_kernel.py --readme"
    figures = re.findall(r"\d[\d.,]* ?(?:TFLOP/s|ms\b|GiB\b|times as fast|x faster)", readme_outside_results())
    assert figures == []


def test_readme_example_runs() -> None:
    # marked examples have tests of their own
    text = re.sub(r"^<!-- example: \w+ -->\n```python\n.*?^```$", "", readme_outside_results(), flags=re.S | re.M)
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    out, lse = names["out"], names["lse"]
    assert out.shape == (sum(names["lengths"]), names["heads"], names["head_dim"])
    assert lse.shape == (names["heads"], len(out))
    assert torch.isfinite(out).all()
    assert all(names[name].grad.abs().sum(dim=(1, 2)).all() for name in "kv")


def test_readme_names_files_that_exist() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", report.README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    subprocess.run([sys.executable, ROOT / "docs" / "picture.py", out], check=True)
    assert out.read_text() == (ROOT / "docs" / "shared_prompt.svg").read_text(), "run docs/picture.py again"
