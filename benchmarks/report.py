#!/usr/bin/env python
"""Make pages and plots of the result files, a page for each machine.

    python benchmarks/report.py              # everything under benchmarks/results
    python benchmarks/report.py FILE.json    # print the tables of these files

Of several runs the median counts, and of this library the newest commit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plots
from command import RESULTS
from results import LABELS, OURS, ResultError, check, in_pieces, load, medians, of_newest_code, result_files
from shapes import StepShape, family_of, parse, title
from short_nodes import HEADINGS, cells, short_nodes
from trees import is_of_pairs

GIB = 1 << 30
USUAL_HEADS = (32, 8, 128)
KINDS_OF_SHAPES: dict[str, Callable[[Any], bool]] = {
    "Windows, softcaps, sinks, values of another width": lambda row: not parse(row.shape).is_plain,
    "Without a prompt: plain causal attention": lambda row: row.p == 0,
    "Other heads and head dims": lambda row: (row.h, row.h_k, row.d) != USUAL_HEADS,
    "Responses longer than their prompts": lambda row: row.p < row.r,
    "Shared prompts": lambda row: True,
}
# The plot and the table of the README: shapes of each benchmark, and implementations.
HEADLINE = {
    "kernel": ("Attention", ("28x16Kx2K", "16x8Kx131-2048", "16-groups-of-8x256x131-2048")),
    "layer": ("One layer of Qwen3-8B", ("16x8Kx131-2048",)),
    "model": ("Qwen3-8B, all layers", ("16x8Kx131-2048",)),
}
HEADLINE_IMPLS = (OURS, "flex_fa4", "flex_packed", "fa2_replicated")


RATIOS = "Ratios to this library's time are those of the same process where both were measured in one."


def number(value: Any, digits: int = 0) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.{digits}f}"


def milliseconds(value: Any) -> str:
    return number(value, 0 if value >= 1000 else 1 if value >= 10 else 2)


def percent(value: Any) -> str:
    return "" if pd.isna(value) else f"{100 * value:.0f}%"


def markdown(table: pd.DataFrame, left: int = 2) -> str:
    """The first ``left`` columns to the left, figures to the right; columns without a figure are left out."""
    table = table.loc[:, [index < left or bool((table[name] != "").any()) for index, name in enumerate(table)]]
    align = ["left" if index < left else "right" for index in range(table.shape[1])]
    return str(table.to_markdown(index=False, disable_numparse=True, colalign=align))


def kernel_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    figures = medians(frame)
    kind = [next(name for name, is_it in KINDS_OF_SHAPES.items() if is_it(row)) for row in figures.itertuples()]
    is_usual = figures[["h", "h_k", "d"]].apply(tuple, axis=1) == USUAL_HEADS
    with_peers = figures[~figures["impl"].str.startswith("dualkv") & figures["ms"].notna()]["shape"]
    shown = figures[is_usual & figures["shape"].isin(with_peers)]
    plot = plots.bars_by_direction(shown, folder / "attention.png", "Attention")
    parts = [
        "## Attention",
        *plot,
        "Useful work over time: 4 H d operations a visible (query, key) pair forward, 2.5 times that backward (2 H d "
        "in a product, where q and v differ in width), whatever an implementation computes. Of this library the newest "
        "commit that measured a shape counts. Replicated: standard packing. Peak memory: forward and backward with "
        "inputs, outputs and gradients.",
    ]
    for name in reversed(KINDS_OF_SHAPES):
        chosen = figures[[one == name for one in kind]]
        if len(chosen):
            parts += [f"### {name}", markdown(table_of(chosen, "kernel"))]
    return parts


FLATTENED = (
    "Flattened: the path of every leaf of a tree as a sequence of its own, in micro-batches of at most as many tokens "
    "as the tree has (256K where it has fewer): the sum of their times, the largest of their peaks."
)


def tree_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    is_short = frame["shape"].map(is_of_pairs)
    parts = trees_section(frame[~is_short], folder) if not is_short.all() else []
    return parts + (short_nodes_section(frame[is_short]) if is_short.any() else [])


def short_nodes_section(frame: pd.DataFrame) -> list[str]:
    """Of several runs the newest."""
    newest = frame[frame["date"] == frame.groupby(["shape", "impl"])["date"].transform("max")]
    table = pd.DataFrame(map(cells, short_nodes(newest.to_dict("records"))), columns=list(HEADINGS))
    return [
        "## From how many tokens on a node of a tree pays",
        "Pairs of leaves that share a node, beside the same with a copy of its tokens in each leaf; forward and "
        "backward. A border costs tiles of keys that are not full in every row below it. A token that is not copied "
        "spares the products of its layer, here one of Qwen3-8B at the rate of the plain product of the same process. "
        "The cost of a border is what attention loses, in tokens of these products: a node of more tokens pays.",
        markdown(table, left=0),
    ]


def trees_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    figures = medians(frame)
    # A run that ended early leaves trees of which nothing is known.
    figures = figures[figures.groupby("shape")["ms"].transform("count") > 0]
    trees = [(name, parse(name)) for name in dict.fromkeys(figures["shape"])]
    facts = pd.DataFrame(
        {
            "tree": title(name),
            "nodes": str(len(tree.nodes)),
            "leaves": str(len(tree.leaves)),
            "depth": str(max(map(len, tree.paths))),
            "tokens": f"{tree.packed_tokens:,}",
            "tokens flattened": f"{tree.replicated_tokens:,}",
            "pairs saved": f"{tree.replicated_pairs / tree.visible_pairs:.2f}x",
        }
        for name, tree in trees
    )
    return [
        "## Prefix trees",
        *plots.bars_by_direction(figures, folder / "trees.png", "Prefix trees"),
        "Useful work over time: 4 H d operations a visible pair of the tree forward, 2.5 times that backward, whatever "
        "an implementation computes. Keys gathered along paths: TRL's way, index_select of the keys and values of "
        f"every node's path and a varlen kernel. {FLATTENED} The trees are those of [trees.py](../../trees.py).",
        markdown(facts, left=1),
        markdown(table_of(figures, "tree")),
    ]


def table_of(figures: pd.DataFrame, benchmark: str) -> pd.DataFrame:
    """A row per shape and implementation; a shape is named once. Attention alone has no throughput in tokens."""
    names, is_attention = figures["shape"].map(title), benchmark in ("kernel", "tree")
    shapes = names.where(names != names.shift(), "")
    table = pd.DataFrame({"tree" if benchmark == "tree" else "N x P x R": shapes})
    table["implementation"] = figures["impl"].map(lambda name: LABELS.get(name, name))
    for direction in ("forward", "backward"):
        table[f"{direction} ms"] = figures[f"{direction}_ms"].map(milliseconds)
        if is_attention:
            table[f"{direction} TFLOP/s"] = figures[f"{direction}_tflops"].map(number)
            table[f"{direction}, of matmul"] = figures[f"{direction}_fraction"].map(percent)
    table["both ms"] = figures["ms"].map(milliseconds).where(figures["why"] == "", figures["why"])
    table["time, ours = 1"] = figures["ratio"].map(lambda value: number(value, 2))
    table["peak GiB"] = figures["peak_gib"].map(lambda value: number(value, 1))
    if not is_attention:
        for name, tokens in (("executed", figures["executed_tokens"]), ("effective", figures["replicated_tokens"])):
            table[f"{name} ktok/s"] = (tokens / figures["ms"]).map(lambda rate: number(rate, 0 if rate >= 100 else 1))
    return table


EFFECTIVE = "Executed: the tokens that are computed. Effective: those of the replicated batch, whatever is computed."


def layer_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    figures = medians(frame)
    timed = figures[figures.groupby("shape")["ms"].transform("count") > 0]  # of others the memory alone was measured
    plot = plots.layer_bars(timed, folder / "layer.png", "One layer of Qwen3-8B, forward and backward")
    parts = [
        "## One layer of Qwen3-8B",
        *plot,
        f"Forward and backward, plain PyTorch around the attention, no checkpointing. {EFFECTIVE}",
        markdown(table_of(timed, "layer")),
        *([FLATTENED] if timed["is_tree"].any() else []),
    ]
    if any(in_pieces(row) for row in timed[timed["ms"].notna()].itertuples()):
        parts.append("FlashAttention-2 takes 2^31 and more elements of Q in several calls; outputs are joined.")
    return parts + memory_section(figures[~figures["is_tree"]], folder)


def memory_section(figures: pd.DataFrame, folder: Path) -> list[str]:
    """The law that peaks of a layer follow, where there are enough of them."""
    laws = {impl: law for impl, rows in figures.groupby("impl") if (law := fit(rows)) and law["r2"] > 0.99}
    if not laws:
        return []
    plots.memory_law(figures, laws, folder / "memory.png")
    table = pd.DataFrame(
        {
            "implementation": LABELS.get(impl, impl),
            "law": f"M0 + cP {'N P' if impl.endswith('_replicated') else 'P'} + cR (sum of R)",
            "M0, GiB": number(law["m0"], 2),
            "cP, KiB a token": number(law["prompt"] * GIB / 1024, 1),
            "cR, KiB a token": number(law["response"] * GIB / 1024, 1),
            "R^2": number(law["r2"], 5),
            "shapes": str(law["points"]),
        }
        for impl, law in laws.items()
    )
    return [
        "### Peak memory of the layer",
        "![Peak memory over the prompt's length](memory.png)",
        "Weights and all gradients included; a least-squares fit over all shapes but those that a peer computes in "
        "several calls, whose joined outputs are on top. With the prompt stored once it costs its memory once.",
        markdown(table),
    ]


def fit(rows: pd.DataFrame) -> dict[str, float] | None:
    """GiB over the tokens of prompts and of responses that are computed; None where points do not determine it."""
    rows = rows[rows["peak_gib"].notna() & ~rows.apply(in_pieces, axis=1)]
    prompt, response = prompt_tokens(rows), response_tokens(rows)
    points = np.column_stack([np.ones(len(rows)), prompt, response]).astype(float)
    peaks = rows["peak_gib"].to_numpy(float)
    if len(rows) < 4 or np.linalg.matrix_rank(points / points.max(axis=0), tol=1e-6) < 3:
        return None
    solution, *_ = np.linalg.lstsq(points, peaks, rcond=None)
    spread = ((peaks - peaks.mean()) ** 2).sum()
    r2 = 1 - ((peaks - points @ solution) ** 2).sum() / spread if spread else 1.0
    return dict(zip(("m0", "prompt", "response"), map(float, solution)), r2=float(r2), points=len(rows))


def response_tokens(rows: pd.DataFrame) -> pd.Series:
    """Of shapes with prompts of one length."""
    return rows["replicated_tokens"] - rows["n"] * rows["p"]


def prompt_tokens(rows: pd.DataFrame) -> pd.Series:
    return rows["executed_tokens"] - response_tokens(rows)


def model_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    is_family = frame["shape"].map(lambda name: family_of(parse(name, StepShape)) is not None)
    parts = qwen3_section(frame[~is_family], folder) if not is_family.all() else []
    return parts + (families_section(frame[is_family]) if is_family.any() else [])


def micro_batch_sizes(figures: pd.DataFrame) -> str:
    """How many sequences the stock models took at a time."""
    sizes = {family.sequences for name in figures["shape"] if (family := family_of(parse(name, StepShape)))}
    return " or ".join(str(size) for size in sorted(sizes)) + " sequences"


def differences(frame: pd.DataFrame) -> str:
    """A sentence on the largest relative difference of each model's log-probabilities from the stock model's."""
    models = frame["shape"].map(lambda name: getattr(family_of(parse(name, StepShape)), "model_type", ""))
    largest = frame.reindex(columns=["rel_diff"])["rel_diff"].astype(float).groupby(models).max().dropna()
    if largest.empty:
        return ""
    named = ", ".join(f"{value:.2f} ({model})" for model, value in largest.items())
    return (
        f"These differ between the two by {named} of their spread; where a token's experts are chosen, rounding turns "
        "choices over. "
    )


def families_section(frame: pd.DataFrame) -> list[str]:
    figures = medians(frame)
    peers = figures[figures["impl"] != OURS]
    ratios = peers["forward_ms"] / peers["shape"].map(figures[figures["impl"] == OURS].set_index("shape")["forward_ms"])
    table = table_of(figures, "model")
    table.insert(3, "forward, ours = 1", ratios.reindex(figures.index).map(lambda value: number(value, 2)))
    return [
        "## Other models",
        "The same step of models whose layers are not all alike, in stock transformers with prompts shared, and with "
        "prompts replicated on the attention that transformers has for the model: sequences padded to the longest of "
        f"their micro-batch ({micro_batch_sizes(figures)}), or of all where FlexAttention would compile again, which "
        "is not counted below. The forward keeps the input of each layer and no more: its time is that of "
        "log-probabilities. "
        f"{differences(frame)}"
        f"Configurations: [families.py](../../families.py). {EFFECTIVE} Installed: "
        f"{'; '.join(dict.fromkeys(frame['versions']))}.",
        markdown(table),
    ]


def qwen3_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    figures = medians(frame).sort_values(["h", "size"], ascending=[False, True], kind="stable", ignore_index=True)
    plot = plots.layer_bars(
        figures, folder / "model.png", "Qwen3 in stock transformers, log-probabilities and gradients"
    )
    return [
        "## A whole model",
        *plot,
        "Qwen3 in stock transformers, 8B where no other size is named: log-probabilities of all responses and the "
        f"gradients of all parameters, every layer checkpointed, without an optimizer. {EFFECTIVE}",
        markdown(table_of(figures, "model")),
        *(["Of a tree the last node of every sequence is trained. " + FLATTENED] if figures["is_tree"].any() else []),
    ]


def stream_section(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Medians and sums over the micro-batches of a stream."""
    frame = of_newest_code(frame)
    columns = {"ms": ["count", "median", "sum"], "host_ms": "median", "device_ms": "mean", "attention_ms": "median"}
    numbers = frame.reindex(columns=[*columns, "graphs"]).apply(pd.to_numeric)
    by_micro_batch = numbers.where(numbers["ms"].notna()).groupby([frame["impl"], frame["shape"]]).median()
    found = by_micro_batch.groupby("impl").agg({**columns, "graphs": "sum"})
    errors = frame.groupby("impl")["error"].first()
    total = frame["shape"].nunique()
    table = pd.DataFrame(
        {
            "implementation": LABELS[impl],
            "micro-batches": f"{found.loc[impl, ('ms', 'count')]:.0f} of {total}",
            "beside the attention, median ms": milliseconds(found.loc[impl, ("ms", "median")]),
            "sum ms": number(found.loc[impl, ("ms", "sum")] or None),
            "host, median ms": milliseconds(found.loc[impl, ("host_ms", "median")]),
            "device, mean ms": milliseconds(found.loc[impl, ("device_ms", "mean")]),
            "attention, median ms": milliseconds(found.loc[impl, ("attention_ms", "median")]),
            "graphs compiled": number(found.loc[impl, ("graphs", "sum")]),
            "note": f"failed: {errors[impl]}" if isinstance(errors[impl], str) else "",
        }
        for impl in LABELS
        if impl in found.index
    )
    tokens = frame.drop_duplicates("shape")["packed_tokens"].mean() / 1024
    return [
        "## A stream of micro-batches",
        f"{total} micro-batches of different lengths, {tokens:.0f}K packed tokens each on average. "
        "Beside the attention: wall time from the tokens of samples to gradients of one attention layer and values by "
        "sample, less the time of the attention's kernels (packing and layout against joining tokens and "
        "create_block_mask, compilation, launches, unpacking). Host, device: packing, mask and unpacking alone. "
        "[bench_stream.py](../../bench_stream.py) says more.",
        markdown(table),
    ]


SECTIONS = {
    "kernel": kernel_section,
    "tree": tree_section,
    "model": model_section,
    "layer": layer_section,
    "stream": stream_section,
}


def page(frame: pd.DataFrame, folder: Path) -> str:
    """The page of one machine; its plots are written beside it."""
    gpu = frame["gpu"].iloc[0]
    runs = frame.drop_duplicates("file").sort_values("file")
    versions = {name: "/".join(frame[name].unique()) for name in ("dtype", "torch", "cuda")}
    matmul = frame["matmul_tflops"].dropna()
    parts = [
        f"# {gpu}",
        f"{versions['dtype']}, torch {versions['torch']}, CUDA {versions['cuda']}. Under load: everything is warmed up "
        "by 150 ms of itself, implementations are interleaved in one process; medians of rounds and runs. "
        f"{RATIOS} "
        f'"Of matmul": of an 8192^3 bf16 matrix product in the same process, {matmul.min():.0f} to {matmul.max():.0f} '
        "TFLOP/s.",
        "A shape is N x P x R: N responses of R tokens to each prompt of P tokens, K = 1024; a..b: lengths drawn "
        "between a and b, once and for all. H = 32 query heads, H_k = 8 KV heads and head dim d = 128 where no others "
        "are named.",
    ]
    for benchmark, section in SECTIONS.items():
        own = frame[frame["benchmark"] == benchmark]
        if len(own):
            parts += section(own, folder)
    table = pd.DataFrame(
        {
            "file": [f"[{name}]({name}.json)" for name in runs["file"]],
            "commit": [f"`{commit[:12]}`" for commit in runs["commit"]],
            "date": [date[:10] for date in runs["date"]],
        }
    )
    return "\n\n".join([*parts, "## Files", markdown(table, left=3)]) + "\n"


def headline(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Forward and backward of the chosen implementations, as figures and as a Markdown table."""
    parts = [medians(own).assign(benchmark=name) for name, own in frame.groupby("benchmark") if name in HEADLINE]
    wanted = [
        (name, shape, impl) for name, (_, shapes) in HEADLINE.items() for shape in shapes for impl in HEADLINE_IMPLS
    ]
    table = (
        pd.concat(parts).set_index(["benchmark", "shape", "impl"])[["ms", "ratio", "why"]].reindex(wanted).reset_index()
    )
    table["why"] = table["why"].fillna("not run")
    table["what"] = [f"{HEADLINE[row.benchmark][0]}, {title(row.shape)}" for row in table.itertuples()]
    measured = table[(table["impl"] == OURS) & table["ms"].notna()]["what"]
    table = table[table["what"].isin(measured)].reset_index(drop=True)
    ratios = ["" if row.impl == OURS else f" ({row.ratio:.2f}x)" for row in table.itertuples()]
    table["cell"] = (table["ms"].map(milliseconds) + ratios).where(table["ms"].notna(), table["why"])
    wide = table.pivot(index="what", columns="impl", values="cell").loc[list(dict.fromkeys(table["what"]))]
    columns = [impl for impl in HEADLINE_IMPLS if (wide[impl] != "not run").any()]
    wide = wide[columns].rename(columns=LABELS).rename_axis("forward + backward, ms").reset_index()
    return table, f"{markdown(wide, left=1)}\n\n{RATIOS}"


INDEX = """# Results

{machines}
- [Trainers: verl's policy update, a run with TRL](trainers/README.md)

A page for each machine, with tables and plots made from the JSON files beside it by `python benchmarks/report.py`. In
short, on {gpu} ([plot](headline.png)):

{headline}

A file is one run of a benchmark: a header (GPU, versions, commit) and a row for every shape, implementation and
direction, with the heads `h`, `h_k` and `d`, the time `ms`, `tflops`, and `fraction`, that of the matrix product of the
same run (`matmul_tflops`). A row without a time says why. Each file names its commit; some are of earlier
kernels.

To add a run: `python benchmarks/bench_kernel.py --preset shared` (or `bench_tree.py`, `bench_layer.py`,
`bench_model.py`, `bench_stream.py`) on a clean commit, then `python benchmarks/report.py`.
"""


def render(folder: Path = RESULTS) -> list[Path]:
    """All pages, plots and the headline. Returns what was written.

    Raises:
        ResultError: there are no results, or one must not be published.
    """
    paths = result_files(folder)
    if not paths:
        raise ResultError(f"{folder}: expected <gpu>/<name>.json in it")
    for path in paths:
        check(path)
    written, frames = [], {}
    for machine in sorted({path.parent for path in paths}):
        frame = frames[machine] = load([path for path in paths if path.parent == machine])
        written.append(machine / "README.md")
        written[-1].write_text(page(frame, machine))
    newest = max(frames, key=lambda machine: (frames[machine]["benchmark"].nunique(), len(frames[machine])))
    gpu = frames[newest]["gpu"].iloc[0]
    table, text = headline(frames[newest])
    plots.headline(table, gpu, folder / "headline.png")
    machines = [f"- [{frame['gpu'].iloc[0]}]({machine.name}/README.md)" for machine, frame in frames.items()]
    index = INDEX.format(machines="\n".join(machines), gpu=f"an {gpu}", headline=text)
    for name, content in (("headline.md", text + "\n"), ("README.md", index)):
        (folder / name).write_text(content)
        written.append(folder / name)
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="result files whose tables are printed")
    files = parser.parse_args(arguments).files
    try:
        if not files:
            print(*render(), sep="\n")
            return 0
        frame = load(files)
    except ResultError as error:
        parser.error(str(error))
    for name, rows in frame.groupby("benchmark", sort=False):
        print(stream_section(rows, RESULTS)[-1] if name == "stream" else markdown(table_of(medians(rows), str(name))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
