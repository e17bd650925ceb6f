# SPDX-License-Identifier: BSD-3-Clause
"""The page and the plot of decoding, of the result files of bench_decode.py."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from pages import COLORS, ResultError, filled, load, markdown, number, save

OURS = "dualkv"
LABELS = {
    OURS: "this library",
    "dualkv_split": "this library, divided walks",
    "dualkv_step": "this library and its plan",
    "fa3": "FlashAttention-3, siblings adjacent",
    "fa3_splits": "FlashAttention-3, splits of its choice",
    "fa3_shuffled": "FlashAttention-3, shuffled",
    "flashinfer": "FlashInfer decode",
    "cascade": "FlashInfer cascade, groups given",
}


def table_of(rows: pd.DataFrame) -> str:
    """A row a shape, an implementation a column; microseconds."""
    times = rows.pivot(index="shape", columns="impl", values="us").loc[rows["shape"].unique()]
    floors = rows.groupby("shape")["floor_us"].first()
    table = pd.DataFrame({"groups x requests x prompt": times.index})
    table["floor"] = floors.loc[times.index].map(number).to_numpy()
    for impl in (one for one in LABELS if one in times):
        table[LABELS[impl]] = times[impl].map(number).to_numpy()
    shares = 100 * floors.loc[times.index] / times[OURS]
    table["ours, of copy"] = shares.map(lambda one: f"{one:.0f}%").to_numpy()
    return markdown(table, left=1)


def plot(rows: pd.DataFrame, heading: str, path: Path) -> None:
    """Bars of the time of each implementation over this library's."""
    import matplotlib

    matplotlib.use("Agg")
    times = rows.pivot(index="shape", columns="impl", values="us").loc[rows["shape"].unique()[::-1]]
    peers = [impl for impl in LABELS if impl in times and not impl.startswith(OURS)]
    ratios = times[peers[::-1]].div(times[OURS], axis=0)
    colors = dict(zip(peers, [one for one in COLORS.values() if one != "grey"]))
    size = (10, 1.4 + 0.16 * (ratios.size + len(ratios)))
    axis = ratios.set_axis([LABELS[one] for one in ratios], axis=1).plot.barh(
        width=0.8, color=[colors[one] for one in ratios], figsize=size, fontsize=8, legend=False
    )
    for container in axis.containers:
        axis.bar_label(container, fmt=" %.2f", fontsize=7)
    axis.set(ylabel="", xlabel="time of the peer over this library's; right of 1.00 this library is faster")
    axis.axvline(1.0, color="black", linewidth=1)
    axis.spines[["top", "right"]].set_visible(False)
    figure = axis.figure
    figure.set_layout_engine("constrained")
    figure.suptitle(heading, fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8, reverse=True)
    save(figure, path)


def render(folder: Path) -> list[Path]:
    """The page of every GPU's file of all shapes and its plot; returns what was written.

    Raises:
        ResultError: a result must not be published.
    """
    parts = []
    for machine in sorted(path for path in folder.iterdir() if path.is_dir()):
        rows = load([machine / "decode.json"])
        if rows["us"].isna().any() or not (rows["impl"] == OURS).any():
            raise ResultError(f"{machine}: expected times of all that ran, this library among them")
        heading = f"One layer of decoding, {rows['gpu'].iloc[0]}, commit {rows['commit'].iloc[0][:12]}"
        plot(rows, heading, machine / "decode.png")
        parts.append(f"## {heading}\n\n![{heading}]({machine.name}/decode.png)\n\n{table_of(rows)}")
    page = folder / "README.md"
    page.write_text(filled("decode", {}, machines="\n\n".join(parts)))
    return [page]
