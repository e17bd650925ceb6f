#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure verl's policy update and old log-probabilities, its own engines beside the plug-in, on the same batch.

    python benchmarks/trainers/bench_verl.py --preset paper          # Qwen3-1.7B, N = 32, P up to 8192, R up to 2048
    python benchmarks/trainers/bench_verl.py --preset math-1k --gpus 4
    python benchmarks/trainers/bench_verl.py --render                # the page, of the result files

Random weights, tokens and advantages; verl's worker, engine, loss and optimizer in a process for each GPU, see
verl_rig.py. Times are those of the slowest rank in the last of the calls, in seconds; log-probabilities include
entropies, as verl's trainer asks for them. bf16 with fp32 sums, FSDP 2, activation checkpointing, verl's defaults else.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, add_commit, gpu_folder, make_header, write
from trainers_report import render
from verl_cases import PRESETS, Case, Found, cases_of
from verl_rig import run

FOLDER = RESULTS / "trainers" / "verl"


def row_of(case: Case, found: Found, gpus: int) -> dict[str, Any]:
    preset, who, how, sp = case.name.split("/")
    samples = case.batch.samples(case.model.vocabulary)
    prompts = {one.uid: len(one.prompt) for one in samples}
    responses = sum(len(one.response) for one in samples)
    scores = torch.cat(found.values[0]["log_probs"]) if found.values else torch.zeros(0)
    return {
        "preset": preset,
        "model": PRESETS[preset][0],
        "who": who,
        "how": how,
        "sp": int(sp.removeprefix("SP ")),
        "gpus": gpus,
        "batch": asdict(case.batch),
        "tokens": found.tokens,
        # What sharing can save at most: prompts lie once in the batch.
        "token_ratio": found.tokens / (sum(prompts.values()) + responses) if found.tokens else None,
        "update_s": found.update_s[-1] if found.update_s else None,
        "infer_s": found.infer_s[-1] if found.infer_s else None,
        "update_gib": found.update_gib or None,
        "infer_gib": found.infer_gib or None,
        "left_gib": found.left_gib,
        "losses": [one["loss"] for one in found.metrics],
        "grad_norms": [one["grad_norm"] for one in found.metrics],
        "ppo_kl": [one["actor/ppo_kl"] for one in found.metrics],
        "mean_log_prob": scores.mean().item() if len(scores) else None,
        "metrics": found.metrics[-1] if found.metrics else {},
        "error": found.error,
    }


def differences(rows: list[dict[str, Any]], cases: list[Case], found: dict[str, Found]) -> None:
    """Log-probabilities against those of verl's first of each preset: how far verl is from itself, and the plug-in."""
    first: dict[str, torch.Tensor] = {}
    for row, case in zip(rows, cases):
        if not found[case.name].values:
            continue
        scores = torch.cat(found[case.name].values[0]["log_probs"])
        if not case.shares:
            first.setdefault(row["preset"], scores)
        if (base := first.get(row["preset"])) is None:
            continue
        row["log_prob_max_difference"] = (scores - base).abs().max().item()
        row["log_prob_mean_difference"] = (scores - base).abs().mean().item()


def measure(options: argparse.Namespace) -> Path:
    cases = [case for preset in options.preset for case in cases_of(preset, options.gpus, options.cpu, options.updates)]
    cases = [case for case in cases if not options.only or any(word in case.name for word in options.only)]
    cases.sort(key=lambda one: one.shares)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not options.cpu else "cpu"
    header = make_header(options.commit, gpu, gpus=options.gpus, attention_of_verl=options.attention)
    path = (options.out or FOLDER) / f"{options.name or '-'.join([gpu_folder(gpu), *options.preset])}.json"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(one for one in paths if one)}

    def keep(found: dict[str, Found]) -> None:
        measured = [case for case in cases if case.name in found]
        rows = [row_of(case, found[case.name], options.gpus) for case in measured]
        differences(rows, measured, found)
        write(path, header, rows)

    run(cases, options.gpus, environment, options.limit_s, keep=keep)
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", action="append", choices=PRESETS, help="what is measured; repeatable (default: paper)")
    add("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="processes, one a GPU (default: all)")
    add("--only", nargs="+", metavar="WORD", help="only rows whose names (preset/plug-in/micro 4/SP 1) contain a word")
    add("--cpu", action="store_true", help="a trial run in the environment of tests/verl, never a result")
    add("--updates", type=int, default=2, help="of each configuration; the last one is reported (default: 2)")
    add("--limit-s", type=float, default=3600.0, help="end then, with what there is")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result (default: {FOLDER.relative_to(RESULTS)})")
    add("--name", help="of the result file")
    add_commit(parser)
    add("--attention", default="verl's attention: the flash-attn package.", help="a sentence on the attention of verl")
    add("--render", action="store_true", help="make the page of the result files and leave")
    options = parser.parse_args(arguments)
    if options.render:
        print(*render(FOLDER.parent), sep="\n")
        return 0
    if not options.cpu and not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    options.preset = options.preset or ["tiny" if options.cpu else "paper"]
    print(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
