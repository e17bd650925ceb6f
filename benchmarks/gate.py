#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Whether the kernels are as fast on this GPU as the results say: for whoever changes one. Two minutes.

    python benchmarks/gate.py
    python benchmarks/gate.py --shape 28x16Kx2K tree-comb --rounds 5

A rate is compared as its fraction of the same process's matrix product, so that cards of one kind compare: of the
median over its shapes, because an H100 multiplies at 659 to 722 TFLOP/s beside the shapes of one process. The recorded
one is the newest in benchmarks/results. Ends with 1 if one is more than 3% below it; to tell a change of 1%, compare
two builds in alternating processes (compare_builds.py).
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


def rates(files: Iterable[dict[str, Any]], impl: str) -> pd.Series:
    """Fractions of an implementation by shape and direction: of each the newest."""
    columns = [*KEYS, "impl", "tflops", "matmul_tflops"]
    tables = [pd.DataFrame(columns=[*columns, "date", "fraction"], dtype=object)]
    for one in files:
        rows = pd.DataFrame(one["rows"]).reindex(columns=columns)
        product = rows.drop_duplicates("shape")["matmul_tflops"].median()
        tables.append(rows.assign(date=one["header"]["date"], fraction=rows["tflops"] / product))
    found = pd.concat(tables)
    own = found[found["impl"] == impl].dropna(subset="fraction")
    newest = own.sort_values("date", kind="stable").drop_duplicates(KEYS, keep="last")
    return newest.set_index(KEYS)["fraction"].astype(float)


def compared(now: pd.Series, recorded: pd.Series) -> pd.DataFrame:
    """Both, and their ratio; NaN where nothing is recorded."""
    return pd.DataFrame({"now": now, "recorded": recorded.reindex(now.index)}).assign(
        ratio=lambda both: both["now"] / both["recorded"]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="visits of each shape (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    folder = RESULTS / gpu_folder(torch.cuda.get_device_name())
    impl = f"dualkv_{own_kernels()}"
    files = (path for path in sorted(folder.glob("*.json")) if is_of_kernels(path))
    recorded = rates((json.loads(path.read_text()) for path in files), impl)
    with tempfile.TemporaryDirectory() as made:
        where = ["--out", made, "--name", "now", "--impls", f"={impl}", "--rounds", str(options.rounds)]
        bench_kernel.BENCHMARK.main([*where, "--shape", *options.shape])
        now = rates([json.loads(Path(made, "now.json").read_text())], impl)
    table = compared(now, recorded)
    print(table.to_string(float_format="%.3f", na_rep="-"))
    slower = table.index[table["ratio"] < LEAST]
    print("slower: " + ", ".join(f"{shape} {direction}" for shape, direction in slower) if len(slower) else "as fast")
    return int(len(slower) > 0)


def is_of_kernels(path: Path) -> bool:
    return path.name.startswith(("kernel", "tree"))


if __name__ == "__main__":
    sys.exit(main())
