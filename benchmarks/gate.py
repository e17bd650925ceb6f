#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Whether the kernels are as fast on this GPU as the results say: for whoever changes one. Two minutes.

    python benchmarks/gate.py
    python benchmarks/gate.py --shape 28x16Kx2K tree-comb --rounds 5

A rate is compared twice with the newest in benchmarks/results: in TFLOP/s, and as its fraction of the same process's
matrix product. Cards of one kind differ by 6% in either: in a cooler one the product, which runs at the limit of power,
gains more than a kernel that does not, and a hotter one is slower in all. Ends with 1 if a shape is more than 3% lower
in both; to tell a change of 1%, compare two builds in alternating processes (compare_builds.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench_kernel
import pandas as pd
import torch
from command import RESULTS, gpu_folder
from peers import own_kernels

# Long and short prompts and responses, many groups, plain causal, d = 64 with sinks, windows,
# trees.
SHAPES = (
    "28x16Kx2K", "16x8Kx131-2048", "32x8Kx32-256", "4-groups-of-8x200x4K-16K", "16-groups-of-8x128x64-512",
    "causal-8x4K", "causal-8x8K-H64-Hk8-d64-sinks", "causal-8x8K-H32-Hk16-w1K", "tree-branched", "tree-comb",
)  # fmt: skip
LEAST = 0.97
KEYS = ["shape", "direction"]
RATES = ["fraction", "tflops"]


def rates(files: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Rates of this library's kernels by shape and direction: of each the newest."""
    rows = [
        {"date": one["header"]["date"], **{name: row.get(name) for name in (*KEYS, "impl", *RATES)}}
        for one in files
        for row in one["rows"]
    ]
    found = pd.DataFrame(rows, columns=["date", *KEYS, "impl", *RATES]).dropna(subset=RATES)
    own = found[found["impl"].isin(("dualkv_sm90", "dualkv_sm80"))].sort_values("date", kind="stable")
    return own.drop_duplicates(KEYS, keep="last").set_index(KEYS)[RATES].astype(float)


def compared(now: pd.DataFrame, recorded: pd.DataFrame) -> pd.DataFrame:
    """Rates over recorded ones, and the larger ratio; NaN where nothing is recorded."""
    ratios = now / recorded.reindex(now.index)
    return now.join(ratios.add_suffix(", ratio")).assign(ratio=ratios.max(axis=1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="visits of each shape (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    folder = RESULTS / gpu_folder(torch.cuda.get_device_name())
    recorded = rates(json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if is_of_kernels(path))
    with tempfile.TemporaryDirectory() as made:
        where = ["--out", made, "--name", "now", "--impls", f"=dualkv_{own_kernels()}", "--rounds", str(options.rounds)]
        bench_kernel.BENCHMARK.main([*where, "--shape", *options.shape])
        now = rates([json.loads(Path(made, "now.json").read_text())])
    table = compared(now, recorded)
    print(table.to_string(float_format="%.3f", na_rep="-"))
    slower = table.index[table["ratio"] < LEAST]
    print("slower: " + ", ".join(f"{shape} {direction}" for shape, direction in slower) if len(slower) else "as fast")
    return int(len(slower) > 0)


def is_of_kernels(path: Path) -> bool:
    return path.name.startswith(("kernel", "tree"))


if __name__ == "__main__":
    sys.exit(main())
