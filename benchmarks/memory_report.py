"""Table, plot and README section of the memory benchmark: peaks, and the law that fits them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from figures import (
    COLORS,
    LABELS,
    Figures,
    Runs,
    describe,
    finish,
    introduction,
    is_in_pieces,
    links,
    markdown,
    number,
    plain_axis,
    remarks,
)
from law import Law, fit
from schema import Result, Row


def laws(rows: Iterable[Row]) -> dict[str, Law | None]:
    """The law of every implementation, None where its points do not determine one."""
    points: dict[str, list[tuple[int, int, float]]] = {}
    for row in rows:
        own = points.setdefault(row["impl"], [])
        if row["peak_gib"] is not None and not is_in_pieces(row, row["prompt_tokens"] + row["response_tokens"]):
            own.append((row["prompt_tokens"], row["response_tokens"], row["peak_gib"]))
    return {impl: fit(own) for impl, own in points.items()}


def tokens_of_prompt(impl: str) -> str:
    return "mb P" if impl.endswith("_replicated") else "P"


def law_table(figures: Figures, found: dict[str, Law | None]) -> str:
    head = ["implementation", "law", "M0, GiB", "cP, KiB/token", "cR, KiB/token", "R^2", "points"]
    body = []
    for impl in figures.impls:
        law = found[impl]
        cells = [LABELS.get(impl, impl), f"M0 + cP {tokens_of_prompt(impl)} + cR mb R"]
        if law is None:
            cells += ["too few points", "", "", "", ""]
        else:
            cells += [f"{law.m0_gib:.2f}", f"{law.prompt_bytes / 1024:.1f}", f"{law.response_bytes / 1024:.1f}"]
            cells += [f"{law.r2:.5f}", str(law.points)]
        body.append(cells)
    return markdown(head, body, left=2)


def table(result: Result) -> str:
    """Everything in one result file, as Markdown."""
    figures = Figures(result["rows"])
    found = laws(result["rows"])
    head = ["shape (mb x P x R)", "implementation", "prompt tokens", "response tokens", "peak GiB", "law, GiB", "note"]
    body = []
    for row in result["rows"]:
        law = found[row["impl"]]
        expected = None if law is None else law.gib(row["prompt_tokens"], row["response_tokens"])
        cells = [row["shape"], LABELS.get(row["impl"], row["impl"])]
        cells += [str(row["prompt_tokens"]), str(row["response_tokens"])]
        cells += [number(row["peak_gib"], 2), number(expected, 2)]
        note = figures.reason(row["shape"], row["impl"]).replace("timed", "measured")
        if row["peak_gib"] is not None and is_in_pieces(row, row["prompt_tokens"] + row["response_tokens"]):
            note = "in several calls: not in the fit"
        body.append([*cells, note])
    header = result["header"]
    parts = [
        "# Memory benchmark",
        f"{describe(header)}.",
        "Peak memory of forward and backward of one layer with its weights, all gradients, input and output. Tokens "
        "are those that the implementation computes.",
        law_table(figures, found),
        markdown(head, body, left=2),
    ]
    return "\n\n".join(parts) + "\n" + remarks(header)


def plot(result: Result, path: Path) -> None:
    """Peaks over the prompt's length, a line of the law for every micro-batch size, as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = Figures(result["rows"])
    found = laws(result["rows"])
    sizes = sorted({row["n"] for row in result["rows"]})
    canvas, axes = pyplot.subplots(
        1, len(sizes), figsize=(max(5.0, 3.2 * len(sizes)), 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, size in zip(axes[0], sizes, strict=True):
        for impl in figures.impls:
            rows = sorted(
                (row for row in figures.rows if row["impl"] == impl and row["n"] == size), key=lambda row: int(row["p"])
            )
            color, law = COLORS.get(impl, "#52514e"), found[impl]
            known = [row for row in rows if row["peak_gib"] is not None]
            prompts, peaks = [row["p"] for row in known], [row["peak_gib"] for row in known]
            axis.plot(prompts, peaks, "o", color=color, label=LABELS.get(impl, impl))
            if law is not None:
                line = [law.gib(row["prompt_tokens"], row["response_tokens"]) for row in rows]
                axis.plot([row["p"] for row in rows], line, color=color, linewidth=1)
        axis.set_title(f"micro-batch of {size}", fontsize=9)
        axis.set_xlabel("prompt tokens", fontsize=8)
        axis.set_yscale("log")
        plain_axis(axis)
    axes[0][0].set_ylabel("peak memory of one layer, GiB")
    finish(canvas, axes[0], result["header"], path)
    pyplot.close(canvas)


def section(gpu: str, runs: Runs, folder: Path) -> str:
    """The README's part on one GPU: the laws over all runs."""
    rows = [row for _, result in runs for row in result["rows"]]
    parts = [
        "Peak memory of one Qwen3-8B layer, forward and backward, over the prompt's length P and the micro-batch size "
        "mb, fitted by least squares:",
        introduction(gpu, runs),
        law_table(Figures(rows), laws(rows)),
        links(runs, folder),
    ]
    return "\n\n".join(parts)
