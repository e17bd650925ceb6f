#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure verl's policy update and old log-probabilities, its own engines beside the plug-in, on the same batch.

    python benchmarks/trainers/bench_verl.py --preset paper          # Qwen3-1.7B, N = 32, P up to 8192, R up to 2048
    python benchmarks/trainers/bench_verl.py --preset math-1k --gpus 4
    python benchmarks/report.py                                      # the page, of the result files

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

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, add_result, gpu_folder, make_header, result_path, write
from measure import Row
from verl_cases import PRESETS, Case, Found, cases_of
from verl_rig import run

FOLDER = RESULTS / "trainers" / "verl"


def row_of(case: Case, found: Found, gpus: int, scores: torch.Tensor | None, base: torch.Tensor | None) -> Row:
    """`scores`: log-probabilities; `base`: those of verl's first of the preset: how far verl is from itself, too."""
    preset, who, how, _ = case.name.split("/")
    samples = case.batch.samples(case.model.vocabulary)
    prompts = {one.uid: len(one.prompt) for one in samples}
    responses = sum(len(one.response) for one in samples)
    row = {
        "preset": preset,
        "model": PRESETS[preset][0],
        "who": who,
        "how": how,
        "sp": case.sp,
        "gpus": gpus,
        "batch": asdict(case.batch),
        "tokens": found.tokens,
        # What sharing can save at most: prompts lie once in the batch.
        "token_ratio": found.tokens / (sum(prompts.values()) + responses) if found.tokens else None,
        "update_s": found.update_s[-1] if found.update_s else None,
        "infer_s": found.infer_s[-1] if found.infer_s else None,
        "update_gib": found.update_gib or None,
        "infer_gib": found.infer_gib or None,
        "losses": [one["loss"] for one in found.metrics],
        "grad_norms": [one["grad_norm"] for one in found.metrics],
        "ppo_kl": [one["actor/ppo_kl"] for one in found.metrics],
        "mean_log_prob": None if scores is None else scores.mean().item(),
        "metrics": found.metrics[-1] if found.metrics else {},
        "error": found.error,
    }
    if scores is not None and base is not None:
        apart = (scores - base).abs()
        row |= {"log_prob_max_difference": apart.max().item(), "log_prob_mean_difference": apart.mean().item()}
    return row


def measure(options: argparse.Namespace) -> Path:
    cases = [case for preset in options.preset for case in cases_of(preset, options.gpus, options.cpu)]
    cases = [case for case in cases if not options.only or any(word in case.name for word in options.only)]
    cases.sort(key=lambda one: one.shares)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not options.cpu else "cpu"
    header = make_header(options.commit, gpu, gpus=options.gpus, attention_of_verl=options.attention)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    found = run(cases, options.gpus, {"PYTHONPATH": os.pathsep.join(filter(None, paths))}, options.limit_s)
    rows: list[Row] = []
    bases: dict[str, torch.Tensor] = {}
    for case in (one for one in cases if one.name in found):
        values, preset = found[case.name].values, case.name.split("/")[0]
        scores = torch.cat(values[0]["log_probs"]) if values else None
        if scores is not None and not case.shares:
            bases.setdefault(preset, scores)
        rows.append(row_of(case, found[case.name], options.gpus, scores, bases.get(preset)))
    path = result_path(options, FOLDER, "-".join([gpu_folder(gpu), *options.preset]))
    write(path, header, rows)
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", action="append", choices=PRESETS, help="what is measured; repeatable (default: paper)")
    add("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="processes, one a GPU (default: all)")
    add("--only", nargs="+", metavar="WORD", help="only rows whose names (preset/plug-in/micro 4/SP 1) contain a word")
    add("--cpu", action="store_true", help="a trial run in the environment of tests/verl, never a result")
    add("--limit-s", type=float, default=3600.0, help="end then, with what there is")
    add("--attention", default="verl's attention: the flash-attn package.", help="a sentence on the attention of verl")
    add_result(parser)
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    options.preset = options.preset or ["tiny" if options.cpu else "paper"]
    print(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
