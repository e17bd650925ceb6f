# SPDX-License-Identifier: BSD-3-Clause
"""The section about vLLM of the trainers' page, made of the result files of bench_vllm.py and mismatch_vllm.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from pages import Section, markdown, number, read, sections

LABELS = {  # of engines, by their names in bench_vllm.py; ratios are to the first one of a shape
    "stock": "vLLM",
    "stock_invariant": "vLLM, batch-invariant",
    "triton": "vLLM, Triton",
    "arctic": "Arctic Inference, forest cascade",
    "dualkv": "this package",
    "trainer": 'this package, exact="trainer"',
    "dualkv_invariant": "this package, batch-invariant",
}
# Commits before divided walks were the default, and then asked for as "split".
BEFORE_DIVIDED = ("0f7635d", "1ff7a3e", "5e56ef0", "a0aa464")
OLD_LABELS = {"dualkv": "this package, walks undivided", "split": LABELS["dualkv"]}
SHAPE = ["gpu", "model", "layers", "groups", "n", "prompt", "new"]
FIGURES = ["step_ms", "tokens_per_s"]


def rollouts_of_vllm(folder: Path) -> str:
    """A table: medians of the runs of all result files, engines beside vLLM's own on the same shape. "" if empty."""
    frames, titles = [], set[str]()
    for path in sorted(folder.glob("*.json")):
        header, rows = read(path)
        labels = LABELS | (OLD_LABELS if header["commit"].startswith(BEFORE_DIVIDED) else {})
        titles.add(f"vLLM {rows[0]['vllm']}, torch {header['torch']}")
        frame = pd.DataFrame(rows).assign(gpu=header["gpu"].removesuffix(" 80GB HBM3").removeprefix("NVIDIA "))
        file = f"[`{header['commit'][:7]}`]({folder.name}/{path.name})"
        frames.append(frame.assign(who=frame["who"].map(labels), file=file))
    if not frames:
        return ""
    everything = pd.concat(frames)
    by_engine = everything.groupby([*SHAPE, "who"], sort=False)
    files = by_engine["file"].agg(lambda of_engine: ", ".join(of_engine.unique()))
    found = by_engine[FIGURES].median().assign(runs=by_engine.size(), files=files).reset_index()
    all_labels = [*dict.fromkeys([*LABELS.values(), *OLD_LABELS.values()])]
    keys = [*SHAPE[:3], "prompt", "groups", "n", "new"]
    found = found.assign(order=found["who"].map(all_labels.index)).sort_values([*keys, "order"], key=shortest_first)
    ratios = found[FIGURES] / found.groupby(SHAPE, sort=False)[FIGURES].transform("first")
    table = pd.DataFrame(
        {
            "GPU": found["gpu"],
            "model": [f"{row.model}, {row.layers} layers" for row in found.itertuples()],
            "G x N x P x R": [f"{row.groups} x {row.n} x {row.prompt} x {row.new}" for row in found.itertuples()],
            "attention": found["who"],
            "decoding step, ms": found["step_ms"].map(lambda value: number(value, 2)),
            "x": (1 / ratios["step_ms"]).map(lambda value: number(value, 2)),
            "tokens/s": found["tokens_per_s"].map(number),
            "x, with the prefill": ratios["tokens_per_s"].map(lambda value: number(value, 2)),
            "runs": found["runs"].map(str),
            "files": found["files"],
        }
    )
    return f"### {'; '.join(sorted(titles))}\n\n{markdown(table, 4)}"


def shortest_first(column: pd.Series) -> pd.Series:
    """New tokens, which are text, by how many they are at most."""
    return column.map(lambda text: int(text.rpartition("-")[2])) if column.name == "new" else column


def mismatches_of_vllm(folder: Path) -> str:
    """A table of every result file. "" if there is none."""

    def section(header: dict[str, Any], rows: list[dict[str, Any]]) -> Section:
        table = pd.DataFrame(
            {
                "sampler": LABELS[row["who"]],
                "trainer": trainer,
                "mean": f"{found['mean']:.1e}",
                "largest": f"{found['largest']:.1e}",
                "k3": f"{found['k3']:.1e}",
                "equal to the bit": f"{100 * found['equal']:.1f}%",
                "first token, mean": f"{found['first_token']:.1e}",
            }
            for row in rows
            for trainer, found in (("this library", row), ("stock, on sdpa", row.get("stock_trainer")))
            if found
        )
        title = f"{header['what']}, vLLM {rows[0]['vllm']}, {header['gpu']}"
        return Section(title, markdown(table), f"Mean log-probability {rows[0]['logprob']:.2f}. ")

    return sections(folder, section)
