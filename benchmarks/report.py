"""What is made of results: the table and the plot of one file, and the README's section over all of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import kernel_report
import layer_report
import memory_report
import model_report
from figures import Runs
from schema import Result, benchmark_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
README_BEGIN = "<!-- results: begin -->"
README_END = "<!-- results: end -->"

# In the order of the README. Each has table(result), plot(result, path) and section(gpu, runs, folder).
REPORTS: dict[str, ModuleType] = {
    "kernel": kernel_report,
    "model": model_report,
    "layer": layer_report,
    "memory": memory_report,
}


def report_of(result: Result) -> ModuleType:
    return REPORTS[benchmark_of(result["header"])]


def table(result: Result) -> str:
    """Everything in one result file, as Markdown."""
    text: str = report_of(result).table(result)
    return text


def render(path: Path) -> list[Path]:
    """Make the table and, where matplotlib is installed, the plot beside a result file. Returns what was written."""
    result = json.loads(path.read_text())
    written = [path.with_suffix(".md")]
    written[0].write_text(table(result))
    try:
        report_of(result).plot(result, path.with_suffix(".png"))
        written.append(path.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no plot: {error}")
    return written


def result_files(folder: Path = RESULTS) -> list[Path]:
    return sorted(folder.glob("*/*.json"))


def readme_section(folder: Path = RESULTS) -> str:
    """The README's measured results, benchmark by benchmark and GPU by GPU."""
    files = result_files(folder)
    if not files:
        command = "python benchmarks/bench_kernel.py --preset paper --preset performance"
        return f"No results yet: no run is recorded under `benchmarks/results`. To make one: `{command}`."
    runs: dict[tuple[str, str], Runs] = {}
    for path in files:
        result = json.loads(path.read_text())
        key = (benchmark_of(result["header"]), result["header"]["gpu"])
        runs.setdefault(key, []).append((path, result))
    return "\n\n".join(
        REPORTS[benchmark].section(gpu, own, folder)
        for benchmark in REPORTS
        for (of, gpu), own in runs.items()
        if of == benchmark
    )


def fill_readme(text: str, section: str) -> str:
    """The README with its results section replaced.

    Raises:
        ValueError: the markers are missing.
    """
    begin, found_begin, rest = text.partition(README_BEGIN)
    _, found_end, end = rest.partition(README_END)
    if not (found_begin and found_end):
        raise ValueError(f"README: expected the markers {README_BEGIN} and {README_END}")
    return f"{begin}{README_BEGIN}\n{section}\n{README_END}{end}"


def update_readme(readme: Path = README, folder: Path = RESULTS) -> None:
    readme.write_text(fill_readme(readme.read_text(), readme_section(folder)))
