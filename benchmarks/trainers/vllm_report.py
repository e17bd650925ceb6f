# SPDX-License-Identifier: BSD-3-Clause
"""The section about vLLM of the trainers' page, made of the result files of bench_vllm.py and mismatch_vllm.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from pages import Section, markdown, number, read, sections

LABELS = {  # of engines, by their names in bench_vllm.py; the first of a shape is what others are compared with
    "stock": "vLLM",
    "stock_invariant": "vLLM, batch-invariant",
    "triton": "vLLM, Triton",
    "arctic": "Arctic Inference, forest cascade",
    "dualkv": "this package",
    "trainer": 'this package, exact="trainer"',
    "dualkv_invariant": "this package, batch-invariant",
}
SHAPE = ["model", "layers", "groups", "n", "prompt", "new"]
FIGURES = ["step_ms", "tokens_per_s"]


def rollouts_of_vllm(folder: Path) -> str:
    """One table: medians of the runs of every result file, beside the first engine of the same shape. "" if empty."""
    tables, titles = [], set[str]()
    for path in sorted(folder.glob("*.json")):
        header, rows = read(path)
        titles.add(f"vLLM {rows[0]['vllm']}, {header['gpu']}, torch {header['torch']}")
        by_engine = pd.DataFrame(rows).groupby([*SHAPE, "who"], sort=False)
        medians = by_engine[FIGURES].median().assign(runs=by_engine.size()).reset_index()
        ratios = medians[FIGURES] / medians.groupby(SHAPE, sort=False)[FIGURES].transform("first")
        medians["file"] = f"[`{header['commit'][:7]}`]({folder.name}/{path.name})"
        tables.append(medians.assign(faster=1 / ratios["step_ms"], more=ratios["tokens_per_s"]))
    if not tables:
        return ""
    found = pd.concat(tables).sort_values(SHAPE[:2], kind="stable")
    table = pd.DataFrame(
        {
            "model": [f"{row.model}, {row.layers} layers" for row in found.itertuples()],
            "G x N x P x R": [f"{row.groups} x {row.n} x {row.prompt} x {row.new}" for row in found.itertuples()],
            "attention": found["who"].map(LABELS),
            "decoding step, ms": found["step_ms"].map(lambda value: number(value, 2)),
            "x": found["faster"].map(lambda value: number(value, 2)),
            "tokens/s": found["tokens_per_s"].map(number),
            "x, with the prefill": found["more"].map(lambda value: number(value, 2)),
            "runs": found["runs"].map(str),
            "file, by its commit": found["file"],
        }
    )
    return f"### {'; '.join(sorted(titles))}\n\n{markdown(table, 3)}"


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
