#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Make pages and plots of the result files, a page for each machine and one for the trainers.

    python benchmarks/report.py

A ratio is of one process: that of a peer is to this library's time in the same file, and a shape in whose file this
library has no time is left out. A table is of one commit, or of several whose kernels have the same code. Of several
files the newest one with that peer counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from command import RESULTS, gpu_folder
from models import FamilyModel
from pages import COLORS, WORDS, ResultError, bars, filled, load, markdown, milliseconds, number, read
from shapes import parse, title

from flash_attn_dualkv.model_shape import DIRECTIONS

sys.path.append(str(Path(__file__).with_name("trainers")))

import trainers_report

OURS = "dualkv_sm90"  # on the kernels that a Hopper GPU takes by itself
LABELS = WORDS["attention"]  # of implementations, in the order of tables
# The plot and the table of the README: shapes of each benchmark, and peers.
HEADLINE = {
    "kernel": ("28x16Kx2K", "16x8Kx131-2048", "32x8Kx32-256", "16-groups-of-8x256x131-2048"),
    "tree": ("tree-branched", "tree-comb", "tree-agentic"),
    "layer": ("16x8Kx131-2048",),
    "model": ("16x8Kx131-2048",),
}  # fmt: skip
HEADLINE_PEERS = ("cudnn_flex", "flex_fa4", "fa4_replicated", "flex_packed", "fa2_replicated")
WHAT = {"kernel": "Attention, ", "tree": "Attention, ", "layer": "One layer of Qwen3-8B, ", "model": "Qwen3-8B, "}
WIDEST = 1.3  # ratio that a plot has room for; larger ones stand at its edge


# --- files ------------------------------------------------------------------------------------------------------------


def check(path: Path) -> None:
    """Refuse a result that must not be published.

    Raises:
        ResultError: lists everything that is wrong.
    """
    header, rows = read(path)
    problems = [problem for row in rows for problem in problems_of(row, header["benchmark"])]
    if header["benchmark"] not in (*KINDS, "stream") or gpu_folder(header["gpu"]) != path.parent.name:
        problems.append(f"header: {header['benchmark']} of {header['gpu']}, which is another folder or no benchmark")
    if not any(row["impl"] == OURS and row["ms"] for row in rows):
        problems.append("rows: no time of this library")
    if problems:
        raise ResultError(f"{path}: " + "; ".join(problems))


def problems_of(row: dict[str, Any], benchmark: str) -> list[str]:
    """Faults of a row."""
    shape = None if benchmark == "stream" else parse(row["shape"])
    wrong = {
        "unknown": row["impl"] not in LABELS,
        f"failed: {row.get('error')}": row.get("error") and row["impl"].startswith("dualkv"),
        "no time, and nothing says why": not any(row.get(fact) for fact in ("ms", "oom", "skipped", "error")),
        "another number of pairs": shape and row["visible_pairs"] != shape.visible_pairs,
    }
    return [f"{row['impl']} on {row['shape']}: {problem}" for problem, is_so in wrong.items() if is_so]


def cells(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per file, shape and implementation, both directions side by side; only where this library has times.

    ``ratio``: the time of the directions that were measured, as a multiple of this library's in the same file.
    """
    keys, times = ["file", "shape", "impl"], [f"ms_{one}" for one in DIRECTIONS]
    frame = frame[frame["direction"].isin(DIRECTIONS)]
    figures = ["ms", "tflops", "fraction"]
    facts = frame.astype(dict.fromkeys(figures, float)).pivot(index=keys, columns="direction", values=figures)
    facts.columns = pd.Index(map("_".join, facts.columns))
    facts = facts.reindex(columns=[f"{figure}_{one}" for figure in figures for one in DIRECTIONS])
    whole = frame.assign(oom=frame["oom"].eq(True)).groupby(keys)
    firsts = ["benchmark", "kernels", "date", "h", "h_k", "d", "p", "r"]
    facts = facts.join(whole[firsts].first())
    facts = facts.join(whole[["packed_tokens", "replicated_tokens", "visible_pairs", "peak_gib", "oom"]].max())
    facts = facts.reset_index()
    own = facts[facts["impl"] == OURS].dropna(subset=times).set_index(["file", "shape"])[times]
    facts = facts.join(own.add_prefix("own_"), on=["file", "shape"]).dropna(subset=[f"own_{one}" for one in times])
    known = facts[times].notna().to_numpy()
    facts["ratio"] = facts[times].sum(axis=1) / (facts[[f"own_{one}" for one in times]] * known).sum(axis=1)
    facts["ms"] = facts[times].sum(axis=1, skipna=False)
    facts["rank"] = facts["impl"].map(list(LABELS).index)
    return facts[facts[times].notna().any(axis=1) | facts["oom"]]


def newest(facts: pd.DataFrame) -> pd.DataFrame:
    """The newest file of each shape and peer, with this library in it; the largest shapes last."""
    facts = facts.sort_values("date", kind="stable")
    peers = facts[facts["impl"] != OURS].groupby(["benchmark", "shape", "impl"]).tail(1)
    own = facts[facts["impl"] == OURS]
    alone = own[~own["shape"].isin(peers["shape"])].groupby(["benchmark", "shape"]).tail(1)
    own = own.merge(pd.concat([peers, alone])[["file", "shape"]].drop_duplicates())
    found = pd.concat([own, peers]).assign(size=lambda one: one["visible_pairs"] * one["h"] * one["d"])
    return found.sort_values(["size", "shape", "date", "file", "rank"], ignore_index=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def table_of(figures: pd.DataFrame) -> pd.DataFrame:
    """A row per shape and implementation; a shape is named once in each process."""
    names = figures["shape"].map(title)
    is_new = (figures[["shape", "file"]] != figures[["shape", "file"]].shift()).any(axis=1)
    table = pd.DataFrame({"N x P x R": names.where(is_new, ""), "implementation": figures["impl"].map(LABELS)})
    for direction in DIRECTIONS:
        table[f"{direction} ms"] = figures[f"ms_{direction}"].map(milliseconds)
        table[f"{direction} TFLOP/s"] = figures[f"tflops_{direction}"].map(number)
        share = 100 * figures[f"fraction_{direction}"]
        table[f"{direction}, of matmul"] = share.map(lambda one: number(one) and f"{one:.0f}%")
    table["both ms"] = figures["ms"].map(milliseconds).where(~figures["oom"], "out of memory")
    table["time, ours = 1"] = figures["ratio"].where(~figures["oom"]).map(lambda one: number(one, 2))
    table["peak GiB"] = figures["peak_gib"].map(lambda one: number(one, 1))
    if not figures["benchmark"].isin(("kernel", "tree")).any():  # the batch with every prompt replicated, over time
        table["effective ktok/s"] = (figures["replicated_tokens"] / figures["ms"]).map(lambda one: number(one, 1))
    return table


def newest_streams(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of streams: of each implementation the newest file that has this library too."""
    timed = frame[frame["ms"].notna()]
    timed = timed[timed["file"].isin(timed.loc[timed["impl"] == OURS, "file"])].sort_values("date", kind="stable")
    last = timed.groupby("impl")["file"].last()
    return timed[timed["file"] == timed["impl"].map(last)]


def stream_table(frame: pd.DataFrame) -> str:
    """Medians and sums over the micro-batches."""
    lines = []
    for impl in (one for one in LABELS if (frame["impl"] == one).any()):
        rows = frame[frame["impl"] == impl]
        middle = rows[["ms", "host_ms", "attention_ms"]].astype(float).median().map(milliseconds)
        lines.append((LABELS[impl], rows["commit"].iloc[0][:12], str(len(rows)), *middle))
        lines[-1] += (number(rows["ms"].sum()), number(rows["graphs"].sum()))
    names = ["implementation", "commit", "micro-batches", "beside the attention, median ms", "host, median ms"]
    names += ["attention, median ms", "sum beside it, ms", "graphs compiled"]
    return markdown(pd.DataFrame(lines, columns=names), left=2)


Kinds = dict[str, Callable[[Any], bool]]  # headings, and what stands under them: the first that is true
KINDS: dict[str, Kinds] = {
    "kernel": {
        "Windows, softcaps, sinks, values of another width": lambda row: not parse(row.shape).is_plain,
        "Without a prompt: plain causal attention": lambda row: row.p == 0,
        "Other heads and head dims": lambda row: (row.h, row.h_k, row.d) != (32, 8, 128),
        "Responses longer than their prompts": lambda row: row.p < row.r,
        "Shared prompts": lambda row: True,
    },
    "model": {
        "Other models": lambda row: isinstance(parse(row.shape).model, FamilyModel),
        "Qwen3": lambda row: True,
    },
    "tree": {"": lambda row: True},
    "layer": {"": lambda row: True},
}


def most_measured(figures: pd.DataFrame) -> str:
    """The kernels that have the most of these figures, of several the newest: those of a page and the headline."""
    found = figures.groupby("kernels").agg(cells=("impl", "size"), date=("date", "max"))
    return str(found.sort_values(["cells", "date"]).index[-1])


def section(figures: pd.DataFrame, kinds: Kinds, main: str) -> list[str]:
    """The tables of a benchmark, kind by kind; in each one for each commit: `main`, then the others, newest first."""
    kind = pd.Series([next(name for name, is_it in kinds.items() if is_it(row)) for row in figures.itertuples()])
    parts = []
    for name in (one for one in reversed(kinds) if (kind == one).any()):
        chosen = figures[kind == name]
        parts += [f"### {name}"] if name else []
        dates = chosen.groupby("kernels")["date"].max().sort_values(ascending=False)
        for commit in sorted(dates.index, key=lambda one: one != main):
            parts += [] if commit == main else [f"Other kernels, `{commit[:12]}` of {dates[commit][:10]}:"]
            parts.append(markdown(table_of(chosen[chosen["kernels"] == commit].reset_index(drop=True)), left=2))
    return parts


def page(frame: pd.DataFrame, folder: Path) -> str:
    """The page of one machine; its plots are written beside it.

    Raises:
        ResultError: newer files have all that is in one.
    """
    figures, streams = newest(cells(frame)), newest_streams(frame[frame["benchmark"] == "stream"])
    runs = frame.drop_duplicates("file").sort_values("file")
    if unused := sorted({*runs["file"]} - {*figures["file"], *streams["file"]}):
        raise ResultError(f"{folder}: newer files have all that is in {', '.join(unused)}, which can go")
    # A machine may have streams alone.
    gpu, main = frame["gpu"].iloc[0], most_measured(figures if len(figures) else frame)
    last = frame.loc[frame["date"].where(frame["kernels"] == main).idxmax()]
    parts = {"stream": stream_table(streams) if len(streams) else ""}
    for name, kinds in KINDS.items():
        own = figures[figures["benchmark"] == name].reset_index(drop=True)
        plot = plot_of(own.assign(what=own["shape"].map(title)), gpu, folder / f"{name}.png", main)
        parts[name] = "\n\n".join([*plot, *section(own, kinds, main)])
    links = runs["file"].map("[{0}]({0}.json)".format)
    files = pd.DataFrame({"file": links, "commit": runs["commit"].str[:12], "date": runs["date"].str[:10]})
    matmul = frame["matmul_tflops"].dropna()
    return filled(
        "machine", parts, gpu=gpu, commit=main[:12], date=last["date"][:10],
        torch=" and ".join(frame["torch"].unique()), cuda=" and ".join(frame["cuda"].unique()),
        versions=last["versions"] and f"; {last['versions']}", slowest=matmul.min(), fastest=matmul.max(),
        others=" Tables that name another commit are of its kernels." if frame["kernels"].nunique() > 1 else "",
        files=markdown(files, left=3),
    )  # fmt: skip


# --- the headline -----------------------------------------------------------------------------------------------------


def headline(frame: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """Rows of one commit, their table, and the commit."""
    facts = cells(frame[frame["benchmark"].isin(HEADLINE)])
    wanted = [(name, shape) for name, shapes in HEADLINE.items() for shape in shapes]
    facts = facts.merge(pd.DataFrame(wanted, columns=["benchmark", "shape"]).reset_index(names="group"))
    facts = facts[facts["impl"].isin((OURS, *HEADLINE_PEERS)) & facts["ms"].notna()]
    facts["peers"] = facts.groupby(["file", "shape"])["impl"].transform("count") - 1
    facts = facts[facts["peers"] > 0]
    commit = most_measured(facts)
    # The process of a shape with the most peers, of equal ones the newest.
    facts = facts[facts["kernels"] == commit].sort_values(["group", "peers", "date", "rank"])
    facts = facts[facts["file"] == facts.groupby("group")["file"].transform("last")]
    facts = facts.assign(what=facts["benchmark"].map(WHAT) + facts["shape"].map(title))
    lines = []
    for what, rows in facts.groupby("what", sort=False):
        times, ratios = rows.set_index("impl")["ms"], rows.set_index("impl")["ratio"].drop(OURS)
        found = {LABELS[impl]: f"{milliseconds(times[impl])} ({ratios[impl]:.2f}x)" for impl in ratios.index}
        line = {"forward + backward, ms": what, LABELS[OURS]: milliseconds(times[OURS])}
        line |= {LABELS[impl]: found.get(LABELS[impl], "") for impl in HEADLINE_PEERS}
        lines.append(line | {"strongest peer over this library": f"{ratios.min():.2f}x"})
    return facts, markdown(pd.DataFrame(lines), left=1), commit


def plot_of(figures: pd.DataFrame, heading: str, path: Path, main: str) -> list[str]:
    """A bar for each shape and peer: its time over this library's. Returns what a page shows the plot with.

    It is of the kernels `main`, or the newest where these have no figures.
    """
    figures = figures[figures["ratio"].notna() & ~figures["impl"].str.startswith("dualkv")]
    if figures.empty:
        return []
    newest = figures.loc[figures["date"] == figures["date"].max(), "kernels"].max()
    figures = figures[figures["kernels"] == (main if (figures["kernels"] == main).any() else newest)]
    last = figures.drop_duplicates(["what", "impl"], keep="last")
    ratios = last.pivot(index="what", columns="rank", values="ratio").loc[figures["what"].unique()[::-1], ::-1]
    names = [list(LABELS)[rank] for rank in ratios]
    colors = [next(color for start, color in COLORS.items() if name.startswith(start)) for name in names]
    commit = figures["kernels"].iloc[0][:12]
    ratios = ratios.set_axis([LABELS[name] for name in names], axis=1)
    bars(ratios, colors, f"{heading}, commit {commit}", path, " in the same process", WIDEST)
    return [f"![{heading}]({path.name})"]


# --- decoding ---------------------------------------------------------------------------------------------------------


def decoding(folder: Path) -> list[Path]:
    """The page of every GPU's file of all shapes of decoding, and its plot; returns what was written.

    Raises:
        ResultError: a result must not be published.
    """
    parts, labels = [], WORDS["decode"]
    ours, *others = labels
    for machine in sorted(path for path in folder.iterdir() if path.is_dir()):
        rows = load([machine / "decode.json"])
        if rows["us"].isna().any() or not (rows["impl"] == ours).any():
            raise ResultError(f"{machine}: expected times of all that ran, this library among them")
        heading = f"One layer of decoding, {rows['gpu'].iloc[0]}, commit {rows['commit'].iloc[0][:12]}"
        times = rows.pivot(index="shape", columns="impl", values="us").loc[rows["shape"].unique()]
        floors = rows.groupby("shape")["floor_us"].first().loc[times.index]
        table = pd.DataFrame({"groups x requests x prompt": times.index, "floor": [*floors.map(number)]})
        for impl in (impl for impl in labels if impl in times):
            table[labels[impl]] = [*times[impl].map(number)]
        table["ours, of copy"] = [f"{share:.0%}" for share in floors / times[ours]]
        peers = [impl for impl in others if impl in times and not impl.startswith(ours)]
        colors = dict(zip(peers, COLORS.values()))
        ratios = times.loc[::-1, peers[::-1]].div(times[ours], axis=0).loc[times.index[::-1]]
        bars(
            ratios.set_axis([labels[impl] for impl in ratios], axis=1),
            [colors[impl] for impl in ratios],
            heading,
            machine / "decode.png",
        )
        parts.append(f"## {heading}\n\n![{heading}]({machine.name}/decode.png)\n\n{markdown(table, left=1)}")
    page = folder / "README.md"
    page.write_text(filled("decode", {}, machines="\n\n".join(parts)))
    return [page]


def render(folder: Path = RESULTS) -> list[Path]:
    """All pages, plots and the headline. Returns what was written.

    Raises:
        ResultError: there are no results, or one must not be published.
    """
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        raise ResultError(f"{folder}: expected <gpu>/<name>.json in it")
    for path in paths:
        check(path)
    written, frames = [], {}
    for machine in sorted({path.parent for path in paths}):
        frame = frames[machine] = load([path for path in paths if path.parent == machine])
        written.append(machine / "README.md")
        written[-1].write_text(page(frame, machine))
    best = max(frames, key=lambda machine: (frames[machine]["benchmark"].nunique(), len(frames[machine])))
    gpu = frames[best]["gpu"].iloc[0]
    figures, table, commit = headline(frames[best])
    plot_of(figures, f"Forward and backward on shared prompts, {gpu}", folder / "headline.png", commit)
    kernels = f"all of the kernels of commit `{commit[:12]}`"
    text = f"{table}\n\nEvery row is of one process, {kernels}; ratios are to this library's time."
    machines = [f"- [{frame['gpu'].iloc[0]}]({machine.name}/README.md)" for machine, frame in frames.items()]
    index = filled("index", {}, machines="\n".join(machines), gpu=gpu, headline=text)
    for name, content in (("headline.md", text + "\n"), ("README.md", index)):
        (folder / name).write_text(content)
        written.append(folder / name)
    others = {"decode": decoding, "trainers": trainers_report.render}
    return written + [path for name, make in others.items() if (folder / name).is_dir() for path in make(folder / name)]


if __name__ == "__main__":
    try:
        print(*render(), sep="\n")
    except ResultError as error:
        sys.exit(str(error))
