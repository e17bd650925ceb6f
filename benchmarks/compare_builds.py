#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the kernels of two checkouts, each built in place, in alternating processes on one GPU.

    python benchmarks/compare_builds.py OLD_ROOT NEW_ROOT                # every shape of a page, about 10 minutes
    python benchmarks/compare_builds.py OLD_ROOT NEW_ROOT --shape 28x16Kx2K tree-comb

Each process measures its own checkout's package as bench_kernel.py does. A time is the median of the processes'. A
ratio above 1 means that NEW is slower; `*` marks more than 1%, or 3% in deterministic mode. Sampled rows of outputs and
gradients are compared too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_kernel
import bench_tree
import pandas as pd
import torch
from measure import Config, Matmul, ShapeRun, relative_difference
from peers import deterministic, ours
from shapes import parse

KERNEL_PRESETS = ("shared", "responses", "causal", "heads", "options", "wide")
SHAPES = [*(name for preset in KERNEL_PRESETS for name in bench_kernel.PRESETS[preset]), *bench_tree.PRESETS["trees"]]
MODES = {"forward": 1.01, "backward": 1.01, "both": 1.01, "deterministic": 1.03}  # and the ratio that is marked


def measure(name: str, config: Config, matmul: Matmul) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Times of one shape, and sampled rows of its output and gradients.

    Raises:
        ValueError: there is no such shape.
        RuntimeError: a call has failed.
    """
    own = ours("own")
    run = ShapeRun(parse(name), [own, deterministic(own)], config, matmul)
    run.run()
    if failed := [row for row in run.rows if row["ms"] is None]:
        raise RuntimeError(failed[0].get("error") or failed[0].get("skipped") or "out of memory")
    forward, backward, same_every_time = (row["ms"] for row in run.rows)
    times = {"forward": forward, "backward": backward, "both": forward + backward, "deterministic": same_every_time}
    return times, [one.cpu() for one in run.sample]


def child(root: Path, names: list[str], path: Path) -> None:
    """All shapes with the package of `root`, which PYTHONPATH names first."""
    import flash_attn_dualkv

    is_cuda = torch.cuda.is_available()  # else a trial run
    config = Config(torch.device("cuda"), dtype=torch.bfloat16) if is_cuda else Config(torch.device("cpu"), warm_ms=0.0)
    config.rounds = 1
    if not Path(flash_attn_dualkv.__file__).resolve().is_relative_to(root):
        raise SystemExit(f"{root}: expected its package, got {flash_attn_dualkv.__file__}")
    if is_cuda and not flash_attn_dualkv.build_info()["compiled"]:
        raise SystemExit(f"{root}: expected compiled kernels beside the package")
    found: dict[str, Any] = {}
    matmul = Matmul(config)
    for name in names:
        try:
            found[name] = measure(name, config, matmul)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    torch.save(found, path)


def line_of(name: str, old: list[Any], new: list[Any]) -> tuple[str, bool]:
    """A line of the table: times of the old checkout and of the new one, and their ratio, mode by mode; is all well?"""
    if failures := [one[name] for one in (*old, *new) if isinstance(one[name], str)]:
        return f"{name:40s} {failures[0]}", False
    before, after = (pd.DataFrame([one[name][0] for one in runs]).median() for runs in (old, new))
    cells = [
        f"{before[mode]:8.3f} {after[mode]:8.3f} {ratio:6.3f}{'*' if ratio > MODES[mode] else ' '}"
        for mode, ratio in (after / before).items()
    ]
    difference = max(map(relative_difference, new[0][name][1], old[0][name][1]))
    is_same = difference < 0.02
    line = f"{name:40s} {'  '.join(cells)}  {difference:.1e}{'' if is_same else ' DIFFERS'}"
    return line, is_same and "*" not in line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", type=Path, nargs=2, metavar="ROOT", help="the old and the new checkout")
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NAME", help="as of bench_kernel.py")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout (default: %(default)s)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    roots = [root.resolve() for root in options.roots]
    if options.child:
        child(roots[0], options.shape, options.child)
        return 0
    found: list[list[Any]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * options.rounds):
            which = (number + number // 2) % 2  # old, new, new, old, old, new
            path, root = Path(folder) / "found.pt", str(roots[which])
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
            command = [sys.executable, __file__, root, root, "--child", str(path), "--shape", *options.shape]
            subprocess.run(command, env=environment, check=True)
            found[which].append(torch.load(path))
    print("old ms, new ms, new over old:".ljust(40), "  ".join(mode.ljust(25) for mode in MODES), " difference")
    lines = [line_of(name, *found) for name in options.shape]
    print(*(line for line, _ in lines), sep="\n")
    return int(not all(is_fine for _, is_fine in lines))


if __name__ == "__main__":
    sys.exit(main())
