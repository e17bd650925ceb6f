"""What all tables and plots of results are made with: names, colours, the figures of several runs, cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from schema import Result, Row
from shapes import fits_one_call

from flash_attn_dualkv.predict import DIRECTIONS

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
    "prefix_grouper": "prefix_grouper package, FlashAttention-2",
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
    "prefix_grouper": "#c45ab3",
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
        for row in self.rows:
            if (row["shape"], row["impl"]) == (shape, impl):
                if row.get("oom"):
                    return "out of memory"
                if row.get("error"):
                    return "failed"
                if row.get("skipped"):
                    return "not timed"
        return ""


def is_in_pieces(row: Row, tokens: int) -> bool:
    """Whether a peer computes the row's `tokens` of a layer in several calls."""
    return row["impl"].endswith("_replicated") and not fits_one_call(tokens * row["h"] * row["d"])


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
    matmul = header["matmul_tflops"]
    return (
        f"{header['gpu']}, torch {header['torch']}, CUDA {header['cuda']}, commit `{header['commit'][:12]}`, "
        f"{header['date'][:10]}; 8192^3 bf16 matrix product of the same run: "
        f"{'not measured' if matmul is None else f'{matmul:.0f} TFLOP/s'}"
    )


def remarks(header: Row) -> str:
    """A paragraph on the packages that could not be measured, and one on what was put right by hand; '' if neither."""
    names = ", ".join(f"`{name}`" for name in header.get("not_importable", []))
    text = f"\nNot importable where this was measured: {names}.\n" if names else ""
    return text + (f"\nCorrected by hand: {header['remark']}.\n" if "remark" in header else "")


Runs = list[tuple[Path, Result]]  # result files of one benchmark on one GPU


def introduction(gpu: str, runs: Runs) -> str:
    """What was measured on, for the README."""
    headers = [result["header"] for _, result in runs]
    rates = [header["matmul_tflops"] for header in headers]
    commits = unique(f"`{header['commit'][:12]}`" for header in headers)
    spread = f"{min(rates):.0f}" if min(rates) == max(rates) else f"{min(rates):.0f}-{max(rates):.0f}"
    dtypes = "/".join(unique(row["dtype"] for _, result in runs for row in result["rows"]))
    return (
        f"**{gpu}**, {dtypes}, torch {headers[-1]['torch']}, CUDA {headers[-1]['cuda']}, {len(runs)} "
        f"run{'s' if len(runs) > 1 else ''} of commit {', '.join(commits)}; 8192^3 bf16 matrix product in the same "
        f"runs: {spread} TFLOP/s."
    )


def links(runs: Runs, folder: Path) -> str:
    """A sentence that links tables and plots; ``folder`` is that of all results, in the checkout's ``benchmarks``."""
    base = folder.parent.parent
    names = ", ".join(
        f"[{path.stem}]({path.with_suffix('.md').relative_to(base).as_posix()})"
        f" ([plot]({path.with_suffix('.png').relative_to(base).as_posix()}))"
        for path, _ in runs
    )
    return f"All figures: {names}."


def bars(axis: Any, figures: Figures, impls: list[str], value: Callable[[str, str], float | None], label: str) -> None:
    """One bar per shape and implementation on a matplotlib axis; a missing one says so if memory did not suffice."""
    width = 0.84 / max(len(impls), 1)
    for index, impl in enumerate(impls):
        values = [value(shape, impl) for shape in figures.shapes]
        places = [place - 0.42 + (index + 0.5) * width for place in range(len(values))]
        color = COLORS.get(impl, "#52514e")
        axis.bar(places, [one or 0 for one in values], width * 0.92, color=color, label=LABELS.get(impl, impl))
        for place, shape in zip(places, figures.shapes, strict=True):
            if figures.reason(shape, impl) == "out of memory":
                axis.text(place, 0, " out of memory", rotation=90, ha="center", va="bottom", fontsize=7, color=color)
    axis.set_ylabel(label)
    plain_axis(axis)


def plain_axis(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e1e0d9", linewidth=0.8)
    axis.set_axisbelow(True)


def two_panels(result: Result, path: Path, draw: Callable[[Any, Figures, list[str]], None], impls: list[str]) -> None:
    """A PNG of two panels of bars over the shapes, with one legend and the run's header. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = Figures(result["rows"])
    inches = min(20.0, max(8.0, 0.22 * len(figures.shapes) * (len(impls) + 1)))
    canvas, axes = pyplot.subplots(2, 1, figsize=(inches, 7.5), sharex=True, layout="constrained")
    draw(axes, figures, impls)
    axes[-1].set_xticks(range(len(figures.shapes)), figures.shapes, rotation=20, ha="right", fontsize=8)
    finish(canvas, axes, result["header"], path)
    pyplot.close(canvas)


def finish(canvas: Any, axes: Iterable[Any], header: Row, path: Path) -> None:
    """Legend of all axes above, the header below, and the file."""
    legend: dict[str, Any] = {}
    for axis in axes:
        handles, names = axis.get_legend_handles_labels()
        legend.update(zip(names, handles, strict=True))
    canvas.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    canvas.supxlabel(describe(header).replace("`", ""), fontsize=8, color="#52514e")
    canvas.savefig(path, dpi=130, metadata={"Software": None})
