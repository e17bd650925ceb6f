#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure whole GRPO steps of verl with vLLM, verl alone and on this package, by examples/verl_grpo.sh.

    python examples/rule_task.py --out task --preset qwen3-1.7b --prompts 16 --steps 5
    python benchmarks/trainers/bench_step.py --task task --gpus 2                      # 16 prompts x 16 x 4K x 1K
    python benchmarks/trainers/bench_step.py --task task --prompt 8192 --steps 2
    python benchmarks/trainers/bench_step.py --task task -- actor_rollout_ref.rollout.enforce_eager=True

A run is a process of its own, with random weights and responses of full length. Times are seconds of verl's own phases,
medians of the steps behind the first one; a run that its limit ends has the steps until then. verl's attention in the
actor is that of the flash-attn package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, ROOT, Result, gpu_folder, parser_of
from measure import Row

FOLDER = RESULTS / "trainers" / "steps"
SCRIPT, TASK = ROOT / "examples" / "verl_grpo.sh", ROOT / "examples" / "rule_task.py"
PHASES = ("gen", "update_weights", "old_log_prob", "ref", "adv", "update_actor", "step")
MORE = (
    "perf/total_num_tokens", "actor/perf/max_memory_allocated_gb", "actor/perf/cpu_memory_used_gb", "actor/grad_norm",
    "actor/shared_prompt/dedup_ratio", "actor/shared_prompt/fallback_micro_batches", "critic/score/mean",
    "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean", "response_length/mean",
)  # fmt: skip


def overrides(options: argparse.Namespace, is_stock: bool) -> list[str]:
    """Settings of verl behind the script's own."""
    # Requests decode in groups: graphs of their sizes, with some room for a router's slack.
    most = options.prompts * options.n // options.gpus + 3 * options.n
    sizes = sorted({1, 2, 4, 8, *range(options.n, most + 1, options.n)})
    rollout = "actor_rollout_ref.rollout"
    return [
        f"reward.custom_reward_function.path={TASK}", "trainer.logger=[console,file]", "trainer.resume_mode=disable",
        f"trainer.total_training_steps={1 + options.steps}", f"{rollout}.ignore_eos=True",
        f"{rollout}.max_model_len={options.prompt + options.response + 16}",
        f"{rollout}.cudagraph_capture_sizes={json.dumps(sizes)}", "data.dataloader_num_workers=0",
        *(["actor_rollout_ref.model.external_lib=null"] if is_stock else []), *options.overrides,
    ]  # fmt: skip


def settings(options: argparse.Namespace, is_stock: bool, steps: Path) -> dict[str, str]:
    """The environment of the script."""
    data = str(options.task / "train.parquet")
    found = {"MODEL": str(options.task / "model"), "TRAIN": data, "VAL": data, "VERL_FILE_LOGGER_PATH": str(steps)}
    sizes = {"GPUS": options.gpus, "N": options.n, "PROMPTS": options.prompts, "PROMPT_LENGTH": options.prompt}
    sizes |= {"RESPONSE_LENGTH": options.response, "TOKENS": options.tokens, "EPOCHS": 1000}
    router = resources.files("flash_attn_dualkv") / "integrations" / "verl" / "router.yaml"
    found |= {"ATTENTION": "", "ROUTER": ""} if is_stock else {"ROUTER": str(router)}
    # Ray's monitor reads at its start how much memory there is, and ends workers where that grows
    # with its use.
    return {**found, **{name: str(size) for name, size in sizes.items()}, "RAY_memory_monitor_refresh_ms": "0"}


def row_of(lines: list[str]) -> Row:
    """Medians of the steps behind the first, of lines of verl's file logger."""
    steps = [json.loads(line)["data"] for line in lines]
    timed = steps[1:] or steps
    names = {**{phase: f"timing_s/{phase}" for phase in PHASES}, **{name: name for name in MORE}}
    row: Row = {"steps": len(timed), "step_s": [step.get("timing_s/step") for step in steps]}
    for short, name in names.items():
        found = [step[name] for step in timed if name in step]
        row[short] = statistics.median(found) if found else math.nan
    return row


def one_run(who: str, folder: Path, options: argparse.Namespace) -> Row:
    steps, is_stock = folder / f"{who}.jsonl", who == "verl"
    command = [str(SCRIPT), *overrides(options, is_stock), f"trainer.default_local_dir={folder}/checkpoints"]
    row: Row = {"who": who}
    try:
        subprocess.run(
            command, check=True, timeout=options.limit, env=os.environ | settings(options, is_stock, steps)
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        row["error"] = f"did not end within {options.limit:.0f} s"
    except subprocess.CalledProcessError as error:
        row["error"] = f"failed with {error.returncode}"
    return row | (row_of(steps.read_text().splitlines()) if steps.exists() else {})


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--task", type=Path, required=True, help="folder that examples/rule_task.py has written")
    parser.add_argument("--runs", nargs="+", choices=("verl", "plug-in"), default=["verl", "plug-in"])
    sizes = {"prompts": 16, "n": 16, "prompt": 4096, "response": 1024, "tokens": 40960, "steps": 3}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--limit", type=float, default=1800.0, metavar="S", help="seconds of a run")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of verl, behind --")
    options = parser.parse_args(arguments)
    options.task = options.task.resolve()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    given = {name: getattr(options, name) for name in (*sizes, "gpus", "overrides")}
    result = Result(options, FOLDER, f"{gpu_folder(gpu)}-{options.prompt}", gpu, **given)
    with tempfile.TemporaryDirectory() as folder:
        for who in options.runs:
            result.add(one_run(who, Path(folder), options))
    return int(any("error" in row for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
