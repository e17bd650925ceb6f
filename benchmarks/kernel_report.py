"""Table, plot and README section of the kernel benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures import (
    LABELS,
    Figures,
    Runs,
    bars,
    describe,
    introduction,
    links,
    markdown,
    milliseconds,
    number,
    percent,
    remarks,
    two_panels,
)
from schema import Result

from flash_attn_dualkv.predict import DIRECTIONS


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
    header = result["header"]
    text = f"# Kernel benchmark\n\n{describe(header)}.\n\n{markdown(head, body, left=2)}\n"
    return text + remarks(header)


def plot(result: Result, path: Path) -> None:
    """Bars of useful TFLOP/s per shape, one panel per direction, as a PNG."""
    measured = Figures(row for row in result["rows"] if row["ms"])

    def draw(axes: Any, figures: Figures, impls: list[str]) -> None:
        for axis, direction in zip(axes, DIRECTIONS, strict=True):
            bars(
                axis,
                figures,
                impls,
                lambda shape, impl, d=direction: figures.get(shape, impl, d, "tflops"),  # type: ignore[misc]
                f"{direction}, useful TFLOP/s",
            )

    two_panels(result, path, draw, measured.impls)


def section(gpu: str, runs: Runs, folder: Path) -> str:
    """The README's part on one GPU: times with rates and peak memory by shape, the median of all runs."""
    figures = Figures(row for _, result in runs for row in result["rows"])
    impls = [impl for impl in figures.impls if not impl.endswith("_deterministic")]
    head = ["N x P x R", *(LABELS.get(impl, impl) for impl in impls)]
    times = [[shape, *(time_cell(figures, shape, impl) for impl in impls)] for shape in figures.shapes]
    trained = [impl for impl in impls if any(figures.both_ms(shape, impl) for shape in figures.shapes)]
    # Where only one direction was measured, the peak is that direction's.
    peaks = [
        [shape, *(number(figures.peak(shape, impl), 1) if figures.both_ms(shape, impl) else "" for impl in trained)]
        for shape in figures.shapes
    ]
    parts = [
        introduction(gpu, runs),
        "Forward + backward, milliseconds (useful TFLOP/s forward / backward):",
        markdown(head, times),
        "Peak memory of forward + backward with inputs, outputs and gradients, GiB:",
        markdown(["N x P x R", *(LABELS.get(impl, impl) for impl in trained)], peaks),
        *deterministic_lines(figures),
        links(runs, folder),
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
    """One sentence for each family: what ``deterministic=True`` costs in the backward."""
    lines = []
    for impl in figures.impls:
        if not impl.endswith("_deterministic"):
            continue
        default = impl.removesuffix("_deterministic")
        costs = []
        for shape in figures.shapes:
            ordered, usual = (figures.get(shape, one, "backward", "ms") for one in (impl, default))
            if ordered and usual:
                costs.append(f"{ordered / usual:.2f}x at {shape}")
        if costs:
            label = LABELS.get(default, default)
            lines.append(f"`deterministic=True`, backward time against the default, {label}: {', '.join(costs)}.")
    return lines
