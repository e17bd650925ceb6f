# SPDX-License-Identifier: BSD-3-Clause
"""GRPO or RLOO from scratch with TRL: a small random model learns a rule that code can check. Needs no network.

    python examples/trl_grpo.py --out runs                       # every prompt computed once in an update
    python examples/trl_grpo.py --out runs --rollouts decode     # in rollouts too: continuous batching on this package
    python examples/trl_grpo.py --out runs --stock               # TRL's own trainer, for comparison
    python examples/trl_grpo.py --out runs --stock --rollouts batching    # and transformers' continuous batching
    python examples/trl_grpo.py --out runs --rollouts vllm-decode         # by vLLM on this package (vllm: on its own)

A prompt is a list of numbers and the name of a rule; the reward is the share of a completion's numbers that obey it.
Writes rewards and times of every step to <out>/shared.json, stock.json, shared-decode.json and so on, and compares the
runs that are there in a table and in <out>/trl_grpo.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
import trl
from datasets import Dataset
from rule_task import PRESETS, add_preset, compute_score, make_model, make_prompts, make_tokenizer

from flash_attn_dualkv.integrations.transformers import register_decode
from flash_attn_dualkv.integrations.trl import SharedPromptGRPOTrainer, SharedPromptRLOOTrainer

# Configuration, TRL's trainer, the one that shares prompts.
TRAINERS = {
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer, SharedPromptGRPOTrainer),
    "rloo": (trl.RLOOConfig, trl.RLOOTrainer, SharedPromptRLOOTrainer),
}
# Rollouts by transformers' generate, by its continuous batching and that on this package, by vLLM
# and that on this package.
ROLLOUTS = ("generate", "batching", "decode", "vllm", "vllm-decode")


def reward(completions: list[str], rule: list[str], **_: Any) -> list[float]:
    return [compute_score("rule", text, name) for text, name in zip(completions, rule)]


class Clock(transformers.TrainerCallback):
    """Seconds of each step's phases; GPUs have finished what was begun before they are read.

    Args:
        trainer: whose methods are watched.
    """

    def __init__(self, trainer: Any) -> None:
        self.phases: dict[str, list[float]] = defaultdict(list)
        self._seconds: dict[str, float] = defaultdict(float)
        self._begin = 0.0
        for name in ("_generate", "_prepare_inputs", "training_step"):
            self._watch(trainer, name)
        trainer.add_callback(self)

    def _watch(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = method(*args, **kwargs)
            self._seconds[name] += self._now() - begin
            return result

        setattr(owner, name, timed)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._seconds.clear()
        self._begin = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        rollout, prepare, update = (self._seconds[one] for one in ("_generate", "_prepare_inputs", "training_step"))
        self.phases["rollout"].append(rollout)
        self.phases["rewards and reference"].append(prepare - rollout)
        self.phases["update"].append(update - prepare)  # loss and gradients
        self.phases["optimizer"].append(self._now() - self._begin - update)


class Record(transformers.TrainerCallback):
    """Writes the run's file after every step, so that a run which is ended early has one."""

    def __init__(self, clock: Clock, path: Path, **facts: Any) -> None:
        self._clock, self._path, self._facts = clock, path, facts

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = [one for one in state.log_history if "loss" in one]
        found = self._facts | {"phases": self._clock.phases}
        if torch.cuda.is_available():
            found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        for name, key in LOGGED.items():
            found[name] = [one.get(key) for one in logs]
        self._path.write_text(json.dumps(found, indent=1))


# Numbers of each step, by their names in files and in the trainer's log.
LOGGED = {
    "rewards": "reward",
    "grad_norms": "grad_norm",
    "entropies": "entropy",
    "dedup_ratio": "shared_prompt/dedup_ratio",
    "fallbacks": "shared_prompt/fallbacks",
}


def rollout_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Of TRL's configuration. Completions have one length, as prompts do: stock attention is faster without padding."""
    if options.rollouts.startswith("vllm"):
        os.environ["DUALKV_VLLM"] = str(int(options.rollouts == "vllm-decode"))
        return {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,
            "vllm_max_model_length": options.prompt + options.completion + 1,
            "generation_kwargs": {"ignore_eos": True},
        }
    samples = options.prompts * options.responses
    is_old = "page_size" not in transformers.ContinuousBatchingConfig.__dataclass_fields__
    batching = {
        "block_size" if is_old else "page_size": options.page,
        # Pages for all samples by themselves: stock batching can read no more keys in a step than
        # fit them, shared or not.
        "num_blocks": samples * -(-(options.prompt + options.completion) // options.page),
        "max_memory_percent": 0.9,  # TRL leaves half of the free memory to others, for which these pages are too many
        "max_requests_per_batch": samples,  # more of them would be CUDA graphs that nobody replays
    }
    return {
        "use_transformers_continuous_batching": options.rollouts != "generate",
        "transformers_continuous_batching_config": batching
        | {"max_batch_tokens": 2 * options.prompt + samples},  # two prompts beside requests that decode
        # Continuous batching knows no least length, and to suppress the token that ends a
        # completion is a copy from the host, which no CUDA graph captures: no token does.
        "generation_kwargs": {"min_new_tokens": options.completion}
        if options.rollouts == "generate"
        else {"eos_token_id": -1},
    }


def run(options: argparse.Namespace, path: Path) -> None:
    """Train, and write what is to be compared."""
    on_gpu = torch.cuda.is_available() and options.preset != "cpu"
    tokenizer = make_tokenizer(options.vocabulary)
    samples = options.prompts * options.responses
    config_class, *trainer_classes = TRAINERS[options.trainer]
    arguments = config_class(
        output_dir=str(options.out / "checkpoints"),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=samples // options.micro_batch,
        num_generations=options.responses,
        max_completion_length=options.completion,
        **rollout_settings(options),
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        **({"loss_type": "dapo"} if options.trainer == "grpo" else {}),
        num_iterations=options.iterations,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )
    if options.rollouts == "decode":
        register_decode()
    model = make_model(tokenizer, options, "cuda" if on_gpu else "cpu")
    if options.rollouts.startswith("vllm"):  # which loads its model, and gets the weights of each step
        model.name_or_path = str(options.out / "model")
        for one in (model, tokenizer):
            one.save_pretrained(model.name_or_path)
    trainer = trainer_classes[0 if options.stock else 1](
        **({} if options.stock else {"prompt_once": options.prompt_once}),
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(make_prompts(options)),
        processing_class=tokenizer,
    )
    facts = {
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {one.__name__: one.__version__ for one in (torch, transformers, trl)},
        "peak_memory_gib": None,
    }
    trainer.add_callback(Record(Clock(trainer), path, **facts))
    trainer.train()


def compare(out: Path) -> None:
    """All runs in one table and one picture."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    seconds = pd.DataFrame({name: pd.DataFrame(one["phases"]).median() for name, one in runs.items()})
    table = seconds.copy()
    table.loc["reward, last 10 steps"] = {name: pd.Series(one["rewards"])[-10:].mean() for name, one in runs.items()}
    table.loc["peak memory, GiB"] = {name: one["peak_memory_gib"] for name, one in runs.items()}
    print(table.rename_axis("median seconds a step").dropna().to_string(float_format="%.3f"))
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    pd.DataFrame({name: pd.Series(one["rewards"]) for name, one in runs.items()}).plot(
        ax=left, xlabel="step", ylabel="reward", style=["-", "--", "-.", ":"]
    )
    seconds.T.plot.bar(ax=right, stacked=True, ylabel="seconds a step (median)", rot=0)
    figure.savefig(out / "trl_grpo.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--stock", action="store_true", help="TRL's own trainer")
    parser.add_argument("--trainer", choices=TRAINERS, default="grpo")
    parser.add_argument("--rollouts", choices=ROLLOUTS, default="generate", help="what generates the completions")
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=1, help="updates on each generation (num_iterations)")
    parser.add_argument(
        "--prompt-once", action=argparse.BooleanOptionalAction, help="of micro-batches (default: where it pays)"
    )
    parser.add_argument("--attention", default="sdpa", help="stock attention, of rollouts too")
    options = add_preset(parser)
    if (samples := options.prompts * options.responses) % options.micro_batch:
        parser.error(f"--micro-batch: expected a divisor of the {samples} samples of a step, got {options.micro_batch}")
    options.out.mkdir(parents=True, exist_ok=True)
    name = "stock" if options.stock else "shared"
    name += "" if options.rollouts == "generate" else f"-{options.rollouts}"
    run(options, options.out / f"{name}.json")
    compare(options.out)


if __name__ == "__main__":
    main()
