# SPDX-License-Identifier: BSD-3-Clause
"""The section about vLLM of the trainers' page, made of the result files of bench_vllm.py and mismatch_vllm.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from pages import Section, markdown, number, sections

LABELS = {  # of engines, by their names in bench_vllm.py; the first of a shape is what others are compared with
    "stock": "vLLM",
    "stock_invariant": "vLLM, batch-invariant",
    "triton": "vLLM, Triton",
    "arctic": "Arctic Inference, forest cascade",
    "dualkv": "this package",
    "trainer": 'this package, exact="trainer"',
    "split": 'this package, exact="split"',
    "dualkv_invariant": "this package, batch-invariant",
}
SHAPE = ["model", "layers", "groups", "n", "prompt", "new"]


def rollouts_of_vllm(folder: Path) -> str:
    """A table of every result file: medians of its runs. "" if there is none."""

    def section(header: dict[str, Any], rows: list[dict[str, Any]]) -> Section:
        frame = pd.DataFrame(rows)
        medians = frame.groupby([*SHAPE, "who"], sort=False)[["step_ms", "tokens_per_s"]].median().reset_index()
        firsts = medians.groupby(SHAPE, sort=False)[["step_ms", "tokens_per_s"]].transform("first")
        table = pd.DataFrame(
            {
                "model": [f"{row.model}, {row.layers} layers" for row in medians.itertuples()],
                "G x N x P x R": [f"{row.groups} x {row.n} x {row.prompt} x {row.new}" for row in medians.itertuples()],
                "attention": medians["who"].map(LABELS),
                "decoding step, ms": medians["step_ms"].map(lambda value: number(value, 2)),
                "x": (firsts["step_ms"] / medians["step_ms"]).map(lambda value: number(value, 2)),
                "tokens/s": medians["tokens_per_s"].map(number),
                "x, with the prefill": (medians["tokens_per_s"] / firsts["tokens_per_s"]).map(
                    lambda value: number(value, 2)
                ),
            }
        )
        return Section(f"vLLM {rows[0]['vllm']}, {header['gpu']}", markdown(table, 3))

    return sections(folder, section)


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
