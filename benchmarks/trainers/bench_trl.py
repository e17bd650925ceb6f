#!/usr/bin/env python
"""Train with TRL's GRPOTrainer and with the one that shares prompts, from the same seed, by examples/trl_grpo.py.

    python benchmarks/trainers/bench_trl.py                           # with the example's defaults; minutes on a GPU
    python benchmarks/trainers/bench_trl.py -- --steps 20 --layers 8  # options of the example
    python benchmarks/trainers/bench_verl.py --render                 # the page of trainers, of the result files

Each run is a process of its own, TRL's first. A row is a run: what the example writes about it.
"""

from __future__ import annotations

import argparse
import json
import statistics
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


# --- the page ---------------------------------------------------------------------------------------------------------

SECTION = """## TRL

[A run from scratch](../../../examples/trl_grpo.py) with TRL's GRPOTrainer and with SharedPromptGRPOTrainer, rollouts by
Hugging Face generate. A random model learns to write numbers that obey a rule, the last word of its prompt; the reward
is the share of numbers that do. N x P x R: N completions of R tokens to each prompt of P, so that nothing is padded.
Times of a step are medians; "x" divides TRL's by the other. Rollouts run the same code in both, as fast as the host
launches it.

{parts}

"""


def section(folder: Path) -> str:
    """Of the page of trainers: table and plot of each result file, which is written beside it; "" if there is none.

    Raises:
        SystemExit: a file is of a tree with changes, or lacks a run.
    """
    parts = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        runs = {row["who"]: row for row in result["rows"]}
        if result["header"]["dirty"] or list(runs) != list(LABELS):
            raise SystemExit(f"{path}: expected both runs of a clean tree")
        image = path.with_suffix(".png")
        plot(runs, image)
        parts.append(
            f"### {title(result['header'], runs)}\n\n{table(runs)}\n\n![Reward and seconds a step]({folder.name}/"
            f"{image.name})\n\n{closeness(runs)} [File]({folder.name}/{path.name}), commit"
            f" `{result['header']['commit'][:12]}`."
        )
    return SECTION.format(parts="\n\n".join(parts)) if parts else ""


def title(header: dict[str, Any], runs: dict[str, Any]) -> str:
    asked = runs["stock"]["arguments"]
    return (
        f"{asked['steps']} steps of {asked['prompts']} prompts, {asked['responses']} x {asked['prompt']} x"
        f" {asked['completion']}, {asked['layers']} layers of width {asked['hidden']}, {header['gpu']}"
    )


def steps_of(run: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step by phase, and of all of them."""
    phases: dict[str, list[float]] = run["phases"]
    return {**phases, "step": [sum(one) for one in zip(*phases.values())]}


def table(runs: dict[str, Any]) -> str:
    stock, shared = (steps_of(run) for run in runs.values())
    lines: list[tuple[str, ...]] = []
    for phase in stock:
        before, after = statistics.median(stock[phase]), statistics.median(shared[phase])
        lines.append((f"{phase}, s", f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}"))
    peaks = [run["peak_memory_gib"] for run in runs.values()]
    if all(peaks):
        lines.append(("peak memory, GiB", *(f"{peak:.1f}" for peak in peaks), f"{peaks[0] / peaks[1]:.2f}"))
    for what, part in ((f"reward, first {WINDOW} steps", slice(WINDOW)), (f"last {WINDOW}", slice(-WINDOW, None))):
        lines.append((what, *(f"{statistics.mean(run['rewards'][part]):.3f}" for run in runs.values()), ""))
    frame = pd.DataFrame(lines, columns=["", *LABELS.values(), "x"])
    return str(frame.to_markdown(index=False, disable_numparse=True))


def running_mean(values: list[float]) -> list[float]:
    return [statistics.mean(values[at - WINDOW : at]) for at in range(WINDOW, len(values) + 1)]


def closeness(runs: dict[str, Any]) -> str:
    """How far the two runs are from each other, and a run's steps from their neighbours."""
    stock, shared = runs.values()
    apart = max(abs(a - b) for a, b in zip(*(running_mean(run["rewards"]) for run in (stock, shared))))
    neighbours = statistics.mean(abs(a - b) for a, b in zip(stock["rewards"], stock["rewards"][1:]))
    first = [run["rewards"][0] for run in (stock, shared)]
    norms = [run["grad_norms"][0] for run in (stock, shared)]
    versions = ", ".join(f"{name} {version}" for name, version in stock["versions"].items())
    return (
        f"In the first step, the rewards are {first[0]:.4f} and {first[1]:.4f}, the norms of the gradient"
        f" {norms[0]:.4f} and {norms[1]:.4f}. Rounding then leads to other samples: means of {WINDOW} steps differ by"
        f" {apart:.3f} at most, while a step of TRL's run differs from the next by {neighbours:.3f} in the mean. A"
        f" forward has {statistics.mean(shared['dedup_ratio']):.1f} times fewer tokens with shared prompts; of all"
        f" forwards, {statistics.mean(shared['fallbacks']):.0%} fell back to stock attention"
        f" ({stock['arguments']['attention']}). {versions}."
    )


def plot(runs: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rewards = pd.DataFrame({LABELS[name]: run["rewards"] for name, run in runs.items()})
    rewards.index += 1
    rewards.plot(ax=left, color=[VERMILION, BLUE], xlabel="step", ylabel="reward", fontsize=8)
    medians = pd.DataFrame({LABELS[name]: pd.DataFrame(steps_of(run)).median() for name, run in runs.items()})
    medians.plot.barh(ax=right, color=[VERMILION, BLUE], legend=False, fontsize=8)
    for bars in right.containers:
        right.bar_label(bars, fmt=" %.2f", fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("seconds a step, median (shorter is faster)")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
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
