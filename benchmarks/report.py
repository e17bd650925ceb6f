"""What is made of results: the table and the plot of one file, and the README's section over all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from schema import Result, Row

from flash_attn_dualkv.predict import DIRECTIONS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
README_BEGIN = "<!-- results: begin -->"
README_END = "<!-- results: end -->"

LABELS = {
    "dualkv_sm80": "this library, sm_80 kernels",
    "dualkv_sm80_deterministic": "this library, sm_80 kernels, deterministic",
    "dualkv_sm90": "this library, sm_90 kernels",
    "dualkv_sm90_deterministic": "this library, sm_90 kernels, deterministic",
    "flex_packed": "FlexAttention, packed mask",
    "fa2_gathered": "FlashAttention-2, K/V gathered",
    "fa2_replicated": "FlashAttention-2, prompt replicated",
    "flash_attn_gathered": "flash_attn package, K/V gathered",
    "flash_attn_replicated": "flash_attn package, prompt replicated",
    "fa3_gathered": "FlashAttention-3, K/V gathered",
    "fa3_replicated": "FlashAttention-3, prompt replicated",
    "cudnn_replicated": "cuDNN SDPA, prompt replicated",
}
COLORS = {
    "dualkv_sm80": "#2a78d6",
    "dualkv_sm90": "#0b3d91",
    "dualkv_sm80_deterministic": "#86b6ef",
    "dualkv_sm90_deterministic": "#5f86c9",
    "flex_packed": "#1baf7a",
    "fa2_gathered": "#eda100",
    "fa2_replicated": "#e34948",
    "flash_attn_gathered": "#c08200",
    "flash_attn_replicated": "#a32d2c",
    "fa3_gathered": "#9085e9",
    "fa3_replicated": "#4a3aa7",
    "cudnn_replicated": "#898781",
}


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


class Figures:
    """Rows of one or several runs by (shape, impl, direction). Where several runs have a figure, it is their median."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.shapes = unique(row["shape"] for row in self.rows)
        known = [*LABELS]
        names = unique(row["impl"] for row in self.rows)
        self.impls = sorted(names, key=lambda name: known.index(name) if name in known else len(known))

    def all(self, shape: str, impl: str, direction: str) -> list[Row]:
        key = (shape, impl, direction)
        return [row for row in self.rows if (row["shape"], row["impl"], row["direction"]) == key]

    def get(self, shape: str, impl: str, direction: str, what: str) -> float | None:
        values = [row.get(what) for row in self.all(shape, impl, direction)]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def both_ms(self, shape: str, impl: str) -> float | None:
        times = [self.get(shape, impl, direction, "ms") for direction in DIRECTIONS]
        return None if None in times else sum(time for time in times if time is not None)

    def peak(self, shape: str, impl: str) -> float | None:
        peaks = [self.get(shape, impl, direction, "peak_gib") for direction in DIRECTIONS]
        return max((peak for peak in peaks if peak is not None), default=None)

    def reason(self, shape: str, impl: str) -> str:
        """Why there is no figure: '' if the shape was not tried."""
        for direction in DIRECTIONS:
            for row in self.all(shape, impl, direction):
                if row.get("oom"):
                    return "out of memory"
                if row.get("error"):
                    return "failed"
                if row.get("skipped"):
                    return "not timed"
        return ""


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    return number(value, 1 if value is None or value >= 10 else 2)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def markdown(header: list[str], body: list[list[str]], left: int = 1) -> str:
    """A Markdown table, the first ``left`` columns aligned to the left."""
    rule = [":--" if index < left else "--:" for index in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *body))


def describe(header: Row) -> str:
    return (
        f"{header['gpu']}, torch {header['torch']}, CUDA {header['cuda']}, commit `{header['commit'][:12]}`, "
        f"{header['date'][:10]}; 8192^3 bf16 matrix product of the same run: {header['matmul_tflops']:.0f} TFLOP/s"
    )


def table(result: Result) -> str:
    """Everything in one result file, as Markdown."""
    figures = Figures(result["rows"])
    head = ["shape (N x P x R)", "implementation"]
    for direction in DIRECTIONS:
        head += [f"{direction} ms", "TFLOP/s", "of matmul"]
    head += ["both ms", "peak GiB", "note"]
    body = []
    for shape in figures.shapes:
        for impl in figures.impls:
            if any(figures.all(shape, impl, direction) for direction in DIRECTIONS):
                cells = [shape, LABELS.get(impl, impl)]
                for direction in DIRECTIONS:
                    cells.append(milliseconds(figures.get(shape, impl, direction, "ms")))
                    cells.append(number(figures.get(shape, impl, direction, "tflops"), 0))
                    cells.append(percent(figures.get(shape, impl, direction, "fraction")))
                cells += [milliseconds(figures.both_ms(shape, impl)), number(figures.peak(shape, impl), 2)]
                body.append([*cells, figures.reason(shape, impl)])
    return f"# Kernel benchmark\n\n{describe(result['header'])}.\n\n{markdown(head, body, left=2)}\n"


def plot(result: Result, path: Path) -> None:
    """Bars of useful TFLOP/s per shape, one panel per direction, as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = Figures(result["rows"])
    impls = [impl for impl in figures.impls if any(row["ms"] for row in figures.rows if row["impl"] == impl)]
    width = 0.84 / max(len(impls), 1)
    inches = min(20.0, max(8.0, 0.22 * len(figures.shapes) * (len(impls) + 1)))
    canvas, axes = pyplot.subplots(2, 1, figsize=(inches, 7.5), sharex=True, layout="constrained")
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for index, impl in enumerate(impls):
            rates = [figures.get(shape, impl, direction, "tflops") for shape in figures.shapes]
            places = [place - 0.42 + (index + 0.5) * width for place in range(len(rates))]
            color = COLORS.get(impl, "#52514e")
            axis.bar(places, [rate or 0 for rate in rates], width * 0.92, color=color, label=LABELS.get(impl, impl))
            for place, shape in zip(places, figures.shapes, strict=True):
                if figures.reason(shape, impl) == "out of memory":
                    axis.text(
                        place, 0, " out of memory", rotation=90, ha="center", va="bottom", fontsize=7, color=color
                    )
        axis.set_ylabel(f"{direction}, useful TFLOP/s")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e1e0d9", linewidth=0.8)
        axis.set_axisbelow(True)
    axes[-1].set_xticks(range(len(figures.shapes)), figures.shapes, rotation=20, ha="right", fontsize=8)
    handles, names = axes[0].get_legend_handles_labels()
    extra_handles, extra_names = axes[1].get_legend_handles_labels()
    legend = dict(zip(names + extra_names, handles + extra_handles, strict=True))
    canvas.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    canvas.supxlabel(describe(result["header"]).replace("`", ""), fontsize=8, color="#52514e")
    canvas.savefig(path, dpi=130, metadata={"Software": None})
    pyplot.close(canvas)


def render(path: Path) -> list[Path]:
    """Make the table and, where matplotlib is installed, the plot beside a result file. Returns what was written."""
    result = json.loads(path.read_text())
    written = [path.with_suffix(".md")]
    written[0].write_text(table(result))
    try:
        plot(result, path.with_suffix(".png"))
        written.append(path.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"no plot: {error}")
    return written


def result_files(folder: Path = RESULTS) -> list[Path]:
    return sorted(folder.glob("*/*.json"))


def readme_section(folder: Path = RESULTS) -> str:
    """The README's measured results: per GPU, times with rates and peak memory by shape."""
    files = result_files(folder)
    if not files:
        command = "python benchmarks/bench_kernel.py --preset paper --preset performance"
        return f"No results yet: no run is recorded under `benchmarks/results`. To make one: `{command}`."
    by_gpu: dict[str, list[tuple[Path, Result]]] = {}
    for path in files:
        result = json.loads(path.read_text())
        by_gpu.setdefault(result["header"]["gpu"], []).append((path, result))
    return "\n\n".join(gpu_section(gpu, runs, folder) for gpu, runs in by_gpu.items())


def gpu_section(gpu: str, runs: list[tuple[Path, Result]], folder: Path) -> str:
    headers = [result["header"] for _, result in runs]
    figures = Figures(row for _, result in runs for row in result["rows"])
    rates = [header["matmul_tflops"] for header in headers]
    commits = unique(f"`{header['commit'][:12]}`" for header in headers)
    spread = f"{min(rates):.0f}" if min(rates) == max(rates) else f"{min(rates):.0f}-{max(rates):.0f}"
    dtypes = "/".join(unique(row["dtype"] for row in figures.rows))
    intro = (
        f"**{gpu}**, {dtypes}, torch {headers[-1]['torch']}, CUDA {headers[-1]['cuda']}, {len(runs)} "
        f"run{'s' if len(runs) > 1 else ''} of commit {', '.join(commits)}; 8192^3 bf16 matrix product in the same "
        f"runs: {spread} TFLOP/s."
    )
    impls = [impl for impl in figures.impls if not impl.endswith("_deterministic")]
    head = ["N x P x R", *(LABELS.get(impl, impl) for impl in impls)]
    times = [[shape, *(time_cell(figures, shape, impl) for impl in impls)] for shape in figures.shapes]
    trained = [impl for impl in impls if any(figures.both_ms(shape, impl) for shape in figures.shapes)]
    peaks = [[shape, *(number(figures.peak(shape, impl), 1) for impl in trained)] for shape in figures.shapes]
    base = folder.parent.parent
    links = ", ".join(
        f"[{path.stem}]({path.with_suffix('.md').relative_to(base).as_posix()})"
        f" ([plot]({path.with_suffix('.png').relative_to(base).as_posix()}))"
        for path, _ in runs
    )
    parts = [
        intro,
        "Forward + backward, milliseconds (useful TFLOP/s forward / backward):",
        markdown(head, times),
        "Peak memory of forward + backward with inputs, outputs and gradients, GiB:",
        markdown(["N x P x R", *(LABELS.get(impl, impl) for impl in trained)], peaks),
        *deterministic_lines(figures),
        f"All figures: {links}.",
    ]
    return "\n\n".join(parts)


def time_cell(figures: Figures, shape: str, impl: str) -> str:
    total = figures.both_ms(shape, impl)
    forward, backward = (number(figures.get(shape, impl, direction, "tflops"), 0) for direction in DIRECTIONS)
    if total is not None:
        return f"{milliseconds(total)} ({forward} / {backward})"
    for direction, rate in zip(DIRECTIONS, (forward, backward)):
        if rate:
            return f"{direction} {milliseconds(figures.get(shape, impl, direction, 'ms'))} ({rate})"
    return figures.reason(shape, impl)


def deterministic_lines(figures: Figures) -> list[str]:
    """One sentence: what ``deterministic=True`` costs in the backward."""
    costs = []
    for impl in figures.impls:
        for shape in figures.shapes if impl.endswith("_deterministic") else ():
            ordered = figures.get(shape, impl, "backward", "ms")
            default = figures.get(shape, impl.removesuffix("_deterministic"), "backward", "ms")
            if ordered and default:
                costs.append(f"{ordered / default:.2f}x at {shape}")
    return [f"`deterministic=True`, backward time against the default: {', '.join(costs)}."] if costs else []


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
