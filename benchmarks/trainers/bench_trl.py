#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Train with TRL's GRPOTrainer and with the one that shares prompts, from the same seed, by examples/trl_grpo.py.

    python benchmarks/trainers/bench_trl.py                           # with the example's defaults; minutes on a GPU
    python benchmarks/trainers/bench_trl.py -- --steps 20 --layers 8  # options of the example
    python benchmarks/trainers/bench_verl.py --render                 # the page of trainers, of the result files

Each run is a process of its own, TRL's first. A row is a run: what the example writes about it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, ROOT, add_commit, gpu_folder, make_header, write
from report import BLUE, VERMILION

FOLDER = RESULTS / "trainers" / "trl"
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
LABELS = {"stock": "TRL", "shared": "shared prompts"}
WINDOW = 10  # steps over which rewards are averaged


def measure(options: argparse.Namespace) -> Path:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in LABELS:
            switch = ["--stock"] if name == "stock" else []
            subprocess.run([sys.executable, EXAMPLE, "--out", folder, *switch, *options.example], check=True)
            rows.append({"who": name, **json.loads((Path(folder) / f"{name}.json").read_text())})
    gpu = rows[0]["device"]
    path: Path = options.out / f"{options.name or gpu_folder(gpu)}.json"
    write(path, make_header(options.commit, gpu), rows)
    return path


def section(folder: Path) -> str:
    """The page's tables and plots of the result files; a plot is written beside its file. "" if there is none.

    Raises:
        SystemExit: a file is of a tree with changes, or lacks a run.
    """
    parts = []
    for path in sorted(folder.glob("*.json")):
        header, rows = json.loads(path.read_text()).values()
        if header["dirty"] or [row["who"] for row in rows] != list(LABELS):
            raise SystemExit(f"{path}: expected both runs of a clean tree")
        asked, image = rows[0]["arguments"], path.with_suffix(".png")
        rewards = pd.DataFrame({LABELS[row["who"]]: row["rewards"] for row in rows})
        phases = {LABELS[row["who"]]: pd.DataFrame(row["phases"]) for row in rows}
        seconds = pd.DataFrame({name: one.assign(step=one.sum(axis=1)).median() for name, one in phases.items()})
        plot(rewards, seconds, image)
        parts += [
            f"### {asked['steps']} steps of {asked['prompts']} prompts, {asked['responses']} x {asked['prompt']} x"
            f" {asked['completion']}, {asked['layers']} layers of width {asked['hidden']}, {header['gpu']}",
            table(rows, rewards, seconds),
            f"![Reward and seconds a step]({folder.name}/{image.name})",
            f"{closeness(rows, rewards)} [File]({folder.name}/{path.name}), commit `{header['commit'][:12]}`.",
        ]
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]], rewards: pd.DataFrame, seconds: pd.DataFrame) -> str:
    """Medians, peaks and means of rewards of both runs, and TRL's over the other."""
    lines = [
        (f"{phase}, s", *one.map("{:.3f}".format), f"{one.iloc[0] / one.iloc[1]:.2f}")
        for phase, one in seconds.iterrows()
    ]
    if all(peaks := [row["peak_memory_gib"] for row in rows]):
        lines.append(("peak memory, GiB", *map("{:.1f}".format, peaks), f"{peaks[0] / peaks[1]:.2f}"))
    for what, part in ((f"reward, first {WINDOW} steps", rewards[:WINDOW]), (f"last {WINDOW}", rewards[-WINDOW:])):
        lines.append((what, *part.mean().map("{:.3f}".format), ""))
    return str(pd.DataFrame(lines, columns=["", *rewards, "x"]).to_markdown(index=False, disable_numparse=True))


def closeness(rows: list[dict[str, Any]], rewards: pd.DataFrame) -> str:
    """How far the two runs are from each other, and a run's steps from their neighbours."""
    apart = rewards.rolling(WINDOW).mean().diff(axis=1).abs().max(axis=None)
    neighbours = rewards[LABELS["stock"]].diff().abs().mean()
    ratio, fallbacks = (pd.Series(rows[1][name]).mean() for name in ("dedup_ratio", "fallbacks"))
    first, norms = rewards.iloc[0], [row["grad_norms"][0] for row in rows]
    return (
        f"In the first step, the rewards are {first.iloc[0]:.4f} and {first.iloc[1]:.4f}, the norms of the gradient"
        f" {norms[0]:.4f} and {norms[1]:.4f}. Rounding then leads to other samples: means of {WINDOW} steps differ by"
        f" {apart:.3f} at most, while a step of TRL's run differs from the next by {neighbours:.3f} in the mean. A"
        f" forward has {ratio:.1f} times fewer tokens with shared prompts; of all forwards, {fallbacks:.0%} fell back"
        f" to stock attention ({rows[0]['arguments']['attention']})."
        f" {', '.join(f'{name} {version}' for name, version in rows[0]['versions'].items())}."
    )


def plot(rewards: pd.DataFrame, seconds: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rewards.plot(ax=left, color=[VERMILION, BLUE], xlabel="step, from 0", ylabel="reward", fontsize=8)
    left.lines[0].set(linewidth=4, alpha=0.5)  # the other lies on it
    seconds.plot.barh(ax=right, color=[VERMILION, BLUE], legend=False, fontsize=8)
    for bars in right.containers:
        right.bar_label(bars, fmt=" %.2f", fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("seconds a step, median (shorter is faster)")
    figure.suptitle("GRPO with TRL: the same curve in less time", fontsize=11)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("example", nargs="*", metavar="OPTION", help="of the example, behind --")
    add("--out", type=Path, metavar="FOLDER", default=FOLDER, help="where the result is written (default: %(default)s)")
    add("--name", help="of the result file (default: the GPU's)")
    add_commit(parser)
    print(measure(parser.parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
