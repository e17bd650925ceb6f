#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the kernels of two checkouts, each built in place, in alternating processes on one GPU.

    python benchmarks/compare_builds.py OLD_ROOT NEW_ROOT                # every shape of a page, about 10 minutes
    python benchmarks/compare_builds.py OLD_ROOT NEW_ROOT --shape 28x16Kx2K tree-comb

Each process is a bench_kernel.py with one checkout's package; it gets all other options. A time is the median of the
processes'. A ratio above 1 means that NEW is slower; `*` marks more than 1%, or 3% in deterministic mode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

SHAPES = [f"--preset={name}" for name in ("shared", "responses", "causal", "heads", "options", "trees")]
MODES = {"forward": 1.01, "backward": 1.01, "both": 1.01, "deterministic": 1.03}  # and the ratio that is marked


def measure(root: Path, options: list[str]) -> pd.DataFrame:
    """Milliseconds in each mode, a row for each shape."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    bench = str(Path(__file__).with_name("bench_kernel.py"))
    with tempfile.TemporaryDirectory() as folder:
        where = ["--out", folder, "--name", "found"]
        command = [sys.executable, bench, "--impls", "dualkv", "--rounds", "1", *where, *options]
        subprocess.run(command, env=environment, check=True)
        rows = pd.DataFrame(json.loads(Path(folder, "found.json").read_text())["rows"])
    rows["mode"] = rows["direction"].where(~rows["impl"].str.endswith("_deterministic"), "deterministic")
    found = rows.pivot(index="shape", columns="mode", values="ms")
    return found.assign(both=found["forward"] + found["backward"])[[*MODES]]


def table(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Text: old ms, new ms and their ratio in each mode."""
    ratio = new / old
    marks = ratio.le(pd.Series(MODES)).replace({True: " ", False: "*"})
    return old.map("{:8.3f} ".format) + new.map("{:8.3f} ".format) + ratio.map("{:6.3f}".format) + marks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", type=Path, nargs=2, metavar="ROOT", help="the old and the new checkout")
    parser.add_argument("--processes", type=int, default=3, help="of each checkout (default: %(default)s)")
    options, others = parser.parse_known_args(arguments)
    roots = [root.resolve() for root in options.roots]
    if wrong := [str(root) for root in roots if not (root / "flash_attn_dualkv").is_dir()]:
        parser.error(f"ROOT: expected checkouts with flash_attn_dualkv, got {' '.join(wrong)}")
    found: list[list[pd.DataFrame]] = [[], []]
    for number in range(2 * options.processes):
        which = (number + number // 2) % 2  # old, new, new, old, old, new
        found[which].append(measure(roots[which], others or SHAPES))
    old, new = (pd.concat(runs).groupby(level=0, sort=False).median() for runs in found)
    compared = table(old, new)
    print("old ms, new ms, new over old:", compared.to_string(), sep="\n")
    return int(compared.apply(lambda column: column.str.endswith("*")).any(axis=None))


if __name__ == "__main__":
    sys.exit(main())
