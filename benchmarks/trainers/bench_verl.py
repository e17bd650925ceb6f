#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure verl's policy update and old log-probabilities, its own engines beside the plug-in, on the same batch.

    python benchmarks/trainers/bench_verl.py --preset paper          # Qwen3-1.7B, N = 32, P up to 8192, R up to 2048
    python benchmarks/trainers/bench_verl.py --preset math-1k --gpus 4
    python benchmarks/trainers/bench_verl.py --preset moe-x4 --gpus 4
    python benchmarks/trainers/bench_verl.py --preset once-8b --gpus 2    # prompts once for micro-batches of 4
    python benchmarks/report.py                                      # the page, of the result files

Random weights, tokens and advantages; verl's worker, engine, loss and optimizer in a process for each GPU, see
verl_rig.py. Times are those of the slowest rank in the last of the calls, in seconds; log-probabilities include
entropies, as verl's trainer asks for them. bf16 with fp32 sums, FSDP 2, activation checkpointing, verl's defaults else.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import command
from command import RESULTS, Result, gpu_folder, parser_of
from measure import Row
from shapes import parse
from verl_inputs import MODELS, Batch, Case, Found, TreeBatch
from verl_rig import run

FOLDER = RESULTS / "trainers" / "verl"
WHO = ("verl", "plug-in")
BRIEF = ("preset", "who", "how", "sp", "update_s", "infer_s", "error")  # of a row, as it is printed
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
DAPO = (f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=token-mean")
FP32 = (
    *(f"+{ACTOR}.fsdp_config.mixed_precision.{name}_dtype=fp32" for name in ("param", "reduce", "buffer")),
    f"{MODEL}.use_remove_padding=False",
)


class Setting(NamedTuple):
    """The plug-in or not, micro-batches of so many sequences or tokens, ranks of Ulysses, precision, fused head.

    ``fp32`` is padded, on PyTorch's attention: what bf16 is compared with. ``head``: torch or triton. ``once``: the
    plug-in's prompt_once.
    """

    shares: bool
    micro: int | None = None
    tokens: int | None = None
    sp: int = 1
    fp32: bool = False
    head: str | None = None
    once: bool = False

    @property
    def names(self) -> tuple[str, str, int]:
        """Who, how, and ranks of Ulysses, as rows and pages say them."""
        how = f"micro {self.micro}" if self.micro else f"tokens {self.tokens}"
        how += (" in fp32" if self.fp32 else "") + (f", {self.head} head" if self.head else "")
        how += ", prompts once" if self.once else ""
        return WHO[self.shares], how, self.sp

    @property
    def overrides(self) -> tuple[str, ...]:
        fused = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend={self.head}")
        return (*DAPO, *(FP32 if self.fp32 else ()), *(fused if self.head else ()))


def preset_of(model: str, batch: dict[str, Any], settings: list[Any]) -> tuple[str, Batch, list[Setting]]:
    """The model, a batch, whose prompts are those of one GPU, and what is measured with them."""
    made = TreeBatch.of(batch["tree"]) if "tree" in batch else Batch(**batch)
    return model, made, [Setting(who == WHO[True], **facts) for who, facts in settings]


PRESETS = {name: preset_of(**facts) for name, facts in command.PRESETS["verl"].items()}
# Presets whose log-probabilities are compared with those of verl in fp32.
ACCURACY = ("accuracy", "turns-accuracy")
# Models whose calls take long: a few samples of each rank warm up, calls run once, and one worker,
# whose weights stay as they are, runs all micro-batches.
LARGE = ("paper-8b", "moe", "moe-x4", "turns", "once-8b", "once-4-layers")


def case_of(preset: str, setting: Setting, gpus: int, is_cpu: bool) -> Case:
    model, batch, _ = PRESETS[preset]
    is_large = preset in LARGE
    return Case(
        "/".join([preset, *map(str, setting.names)]),
        shares=setting.shares,
        model=MODELS[model],
        batch=replace(batch, prompts=batch.prompts * gpus),
        micro=setting.micro,
        tokens=setting.tokens,
        sp=setting.sp,
        attention="sdpa" if setting.fp32 else "flash_attention_2",
        balance="groups" if setting.shares else "lengths",
        overrides=(*setting.overrides, *([f"{ACTOR}.fsdp_config.use_torch_compile=False"] if is_cpu else [])),
        updates=1 if is_large else 20 if preset == "steps" else 2,
        inferences=1 if is_large else 2,
        learning_rate=0.0 if is_large else 1e-6,
        infers_at_the_end=False,
        # Two parts of a prompt, if it is kept.
        warm=(setting.micro or 4) * (1 + setting.once) if is_large else 0,
        once=setting.once,
    )


def row_of(preset: str, setting: Setting, case: Case, found: Found, gpus: int, base: torch.Tensor | None) -> Row:
    """`base`: log-probabilities of verl's first of the preset: how far verl is from itself, too."""
    samples = case.batch.samples(case.model.vocabulary)
    # What sharing can leave: prompts lie once in the batch, and nodes of a tree.
    if isinstance(case.batch, TreeBatch):
        least = parse(f"tree-{case.batch.tree}").packed_tokens
    else:
        prompts = {one.uid: len(one.prompt) for one in samples}
        least = sum(prompts.values()) + sum(len(one.response) for one in samples)
    row = {
        "preset": preset,
        "model": PRESETS[preset][0],
        **dict(zip(("who", "how", "sp"), setting.names)),
        "gpus": gpus,
        "batch": asdict(case.batch),
        "tokens": found.tokens,
        "token_ratio": found.tokens / least if found.tokens else None,
        "update_s": found.update_s[-1] if found.update_s else None,
        "infer_s": found.infer_s[-1] if found.infer_s else None,
        "update_gib": found.update_gib or None,
        "infer_gib": found.infer_gib or None,
        "losses": [one["loss"] for one in found.metrics],
        "grad_norms": [one["grad_norm"] for one in found.metrics],
        "metrics": found.metrics[-1] if found.metrics else {},
        "error": found.error,
    }
    if found.values and base is not None:
        apart = (found.log_probs - base).abs()
        row |= {"log_prob_max_difference": apart.max().item(), "log_prob_mean_difference": apart.mean().item()}
    return row


def measure(options: argparse.Namespace) -> None:
    every = [(preset, one) for preset in options.preset for one in PRESETS[preset][2] if options.gpus % one.sp == 0]
    # verl's own come first: a process that has loaded the plug-in never runs them again.
    every.sort(key=lambda one: one[1].shares)
    cases = [(case_of(*one, options.gpus, options.cpu), *one) for one in every]
    cases = [one for one in cases if not options.only or any(word in one[0].name for word in options.only)]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not options.cpu else "cpu"
    name = "-".join([gpu_folder(gpu), *options.preset])
    result = Result(options, FOLDER, name, gpu, gpus=options.gpus, attention_of_verl=options.attention)
    here = Path(__file__).parent
    paths = os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")]))
    found = run([case for case, *_ in cases], options.gpus, {"PYTHONPATH": paths}, options.limit_s)
    bases: dict[str, torch.Tensor] = {}
    for case, preset, setting in (one for one in cases if one[0].name in found):
        if found[case.name].values and not case.shares:
            bases.setdefault(preset, found[case.name].log_probs)
        row = row_of(preset, setting, case, found[case.name], options.gpus, bases.get(preset))
        result.add(row, line=lambda row: ", ".join(f"{key} {row[key]}" for key in BRIEF))


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--preset", action="append", choices=PRESETS, help="what is measured; repeatable (default: paper)")
    add("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="processes, one a GPU (default: all)")
    add("--only", nargs="+", metavar="WORD", help="only rows whose names (preset/plug-in/micro 4/1) contain a word")
    add("--cpu", action="store_true", help="a trial run in the environment of tests/verl, never a result")
    add("--limit-s", type=float, default=3600.0, help="end then, with what there is")
    add("--attention", default="verl's attention: the flash-attn package.", help="a sentence on the attention of verl")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    options.preset = options.preset or ["tiny" if options.cpu else "paper"]
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
