"""Plots of the results, in Okabe and Ito's colours, which colour-blind readers can tell apart. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from results import LABELS
from shapes import title

BLUE, SKY, GREEN, VERMILION, PURPLE, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#F0E442"
ORANGE, BLACK, GREY = "#E69F00", "#000000", "#999999"
COLORS = {
    "dualkv_sm90": BLUE,
    "flex_fa4": SKY,
    "flex_packed": GREEN,
    "fa4_replicated": PURPLE,
    "prefix_grouper": YELLOW,
    "fa2_replicated": VERMILION,
    "fa4_gathered": ORANGE,
    "fa2_gathered": GREY,
    "varlen_sm90_flattened": BLACK,
    "fa4_flattened": PURPLE,
    "fa2_flattened": VERMILION,
}
MARKERS = {"flex_fa4": "x", "flex_packed": "+", "fa4_replicated": "^", "fa2_replicated": "s"}
LARGEST_PLOT = 9  # shapes; of more, those with as many responses as most


def shown(figures: pd.DataFrame) -> list[str]:
    """Implementations of a plot, in the order of their bars: the others are in the tables."""
    return [impl for impl in COLORS if (figures["impl"] == impl).any()]


def bars(axis: Any, figures: pd.DataFrame, column: str, label: str) -> None:
    """A horizontal bar for each shape and implementation with its figure; where there is none, why."""
    shapes, impls = list(dict.fromkeys(figures["shape"])), shown(figures)
    known = figures.set_index(["shape", "impl"])
    height = 0.86 / len(impls)
    largest = figures[figures["impl"].isin(impls)][column].max()
    for index, impl in enumerate(impls):
        for place, shape in enumerate(shapes):
            at = place - 0.43 + (index + 0.5) * height
            row = known.loc[(shape, impl)] if (shape, impl) in known.index else None
            value = None if row is None or pd.isna(row[column]) else row[column]
            if value is None:
                text = (row["why"] if row is not None else "") or "not run"
                axis.text(0.004 * largest, at, text, va="center", fontsize=6, color="#666666", style="italic")
                continue
            name = LABELS[impl] if LABELS[impl] not in axis.get_legend_handles_labels()[1] else None
            axis.barh(at, value, height * 0.92, color=COLORS[impl], label=name)
            text = f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
            axis.text(value + 0.006 * largest, at, text, va="center", fontsize=6)
    axis.set_yticks(range(len(shapes)), [title(shape) for shape in shapes], fontsize=8)
    axis.set_ylim(len(shapes) - 0.45, -0.55)
    axis.set_xlim(0, 1.08 * largest)
    axis.set_xlabel(label, fontsize=9)
    plain(axis, "x")


def plain(axis: Any, grid: str) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis=grid, color="#e1e0d9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)


def finish(figure: Any, axes: Any, heading: str, path: Path) -> None:
    """Heading, one legend of all axes, and the file."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    figure.suptitle(heading, fontsize=11)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def panels(figures: pd.DataFrame, columns: dict[str, str], heading: str, path: Path) -> list[str]:
    """Bars of several columns side by side; ``columns``: labels of the axes. Returns what a page shows it with."""
    if not shown(figures):
        return []
    rows = figures["shape"].nunique() * len(shown(figures))
    figure, axes = plt.subplots(1, len(columns), figsize=(11, 1.7 + 0.135 * rows), sharey=True, layout="constrained")
    for axis, (column, label) in zip(axes, columns.items()):
        bars(axis, figures, column, label)
    finish(figure, axes, heading, path)
    return [f"![{heading}]({path.name})"]


def bars_by_direction(figures: pd.DataFrame, path: Path, what: str) -> list[str]:
    columns = {f"{one}_tflops": f"{one}, useful TFLOP/s" for one in ("forward", "backward")}
    return panels(figures, columns, f"{what}: useful TFLOP/s (longer is faster)", path)


def layer_bars(figures: pd.DataFrame, path: Path, heading: str) -> list[str]:
    """Effective throughput and peak memory; of many shapes those with 16 responses, and trees."""
    if figures["shape"].nunique() > LARGEST_PLOT:
        figures = figures[(figures["n"] == 16) | figures["is_tree"]]
    figures = figures.assign(rate=figures["replicated_tokens"] / figures["ms"])
    columns = {"rate": "effective thousand tokens/s (longer is faster)", "peak_gib": "peak memory, GiB"}
    return panels(figures, columns, heading, path)


def memory_law(figures: pd.DataFrame, laws: dict[str, dict[str, float]], path: Path) -> None:
    """Peaks over the prompt's length as points and their law as lines, a panel for each number of responses."""
    figures = figures[figures["impl"].isin(laws) & figures["impl"].isin(COLORS)]
    sizes = sorted(figures["n"].unique())
    figure, axes = plt.subplots(1, len(sizes), figsize=(11, 4.4), sharey=True, layout="constrained", squeeze=False)
    for axis, size in zip(axes[0], sizes):
        for impl in shown(figures):
            rows = figures[(figures["impl"] == impl) & (figures["n"] == size)].sort_values("p")
            law, peaks = laws[impl], rows[rows["peak_gib"].notna()]
            style = {"marker": MARKERS.get(impl, "o"), "markersize": 6 if impl in MARKERS else 4, "linestyle": ""}
            axis.plot(peaks["p"] / 1024, peaks["peak_gib"], color=COLORS[impl], label=LABELS[impl], **style)
            responses = rows["replicated_tokens"] - rows["n"] * rows["p"]
            line = law["m0"] + law["prompt"] * (rows["executed_tokens"] - responses) + law["response"] * responses
            axis.plot(rows["p"] / 1024, line, color=COLORS[impl], linewidth=1)
        axis.set_title(f"{size} responses", fontsize=9)
        axis.set_xlabel("prompt, thousand tokens (K = 1024)", fontsize=8)
        plain(axis, "both")
    axes[0][0].set_ylabel("peak memory of one layer, GiB", fontsize=9)
    axes[0][0].set_ylim(0, 1.1 * figures["peak_gib"].max())
    finish(figure, axes[0], "Peak memory of one layer of Qwen3-8B: measured (points) and the law (lines)", path)


def headline(table: pd.DataFrame, gpu: str, path: Path) -> None:
    """Times as multiples of this library's."""
    figures = table.assign(shape=table["what"])
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.16 * len(figures)), layout="constrained")
    bars(axis, figures, "ratio", "time of forward and backward, this library = 1 (shorter is faster)")
    finish(figure, [axis], f"Training on shared prompts, {gpu}", path)
