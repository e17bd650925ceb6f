# SPDX-License-Identifier: BSD-3-Clause
"""GRPO from scratch with TRL: a small random model learns a rule that code can check. No network, no files needed.

    python examples/trl_grpo.py --out runs            # every prompt computed once
    python examples/trl_grpo.py --out runs --stock    # TRL's own trainer, for comparison

A prompt is a list of numbers and the name of a rule; the reward is the share of a completion's numbers that obey it.
Writes rewards and times of every step to <out>/shared.json or <out>/stock.json, and once both are there, compares them
in a table and in <out>/trl_grpo.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from flash_attn_dualkv.integrations.trl import SharedPromptGRPOTrainer

NUMBERS = 100
RULES: dict[str, Callable[[int], bool]] = {
    "even": lambda number: number % 2 == 0,
    "small": lambda number: number < NUMBERS // 2,
    "round": lambda number: number % 10 == 0,
}
PRESETS = {
    "cpu": dict(layers=2, hidden=64, prompt=128, completion=16, responses=8, prompts=4, learning_rate=5e-3),
    "gpu": dict(layers=4, hidden=1024, prompt=2048, completion=16, responses=16, prompts=4, learning_rate=4e-6),
}


def make_tokenizer() -> Any:
    words = ["<pad>", "<bos>", "<eos>", *RULES, *map(str, range(NUMBERS))]
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def make_model(tokenizer: Any, options: argparse.Namespace) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(2, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(options.seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=options.attention)


def make_prompts(options: argparse.Namespace) -> Dataset:
    """As many as all steps need, each with as many words as asked for: numbers, and in the end the rule."""
    draw = random.Random(options.seed)

    def prompt() -> dict[str, str]:
        numbers = [str(draw.randrange(NUMBERS)) for _ in range(options.prompt - 1)]
        rule = draw.choice(list(RULES))
        return {"prompt": " ".join([*numbers, rule]), "rule": rule}

    return Dataset.from_list([prompt() for _ in range(options.prompts * options.steps)])


def reward(completions: list[str], rule: list[str], **_: Any) -> list[float]:
    """The share of words that are numbers and obey the rule."""

    def share(text: str, obeys: Callable[[int], bool]) -> float:
        words = text.split()
        return sum(word.isdigit() and obeys(int(word)) for word in words) / max(1, len(words))

    return [share(text, RULES[name]) for text, name in zip(completions, rule)]


class Clock:
    """Seconds of each call of some methods; GPUs have finished what was begun before they are read."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            result = method(*args, **kwargs)
            self.seconds[name].append(self._now() - begin)
            return result

        setattr(owner, name, timed)

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def phases(self) -> dict[str, list[float]]:
        """Of each step: generation, rewards and reference, loss and backward."""
        rollout, prepare, step = (self.seconds[name] for name in ("_generate", "_prepare_inputs", "training_step"))
        return {
            "rollout": rollout,
            "rewards and reference": [whole - part for whole, part in zip(prepare, rollout)],
            "update": [whole - part for whole, part in zip(step, prepare)],
        }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what is to be compared."""
    on_gpu = torch.cuda.is_available() and options.preset == "gpu"
    tokenizer = make_tokenizer()
    arguments = trl.GRPOConfig(
        output_dir=str(options.out / "checkpoints"),
        max_steps=options.steps,
        per_device_train_batch_size=options.prompts * options.responses,
        num_generations=options.responses,
        max_completion_length=options.completion,
        # Of one length, as prompts are: stock attention is faster where nothing is padded.
        generation_kwargs={"min_new_tokens": options.completion},
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        num_iterations=options.iterations,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )
    trainer_class = trl.GRPOTrainer if options.stock else SharedPromptGRPOTrainer
    trainer = trainer_class(
        model=make_model(tokenizer, options),
        reward_funcs=reward,
        args=arguments,
        train_dataset=make_prompts(options),
        processing_class=tokenizer,
    )
    clock = Clock()
    for name in ("_generate", "_prepare_inputs", "training_step"):
        clock.watch(trainer, name)
    begin = time.perf_counter()
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    return {
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "versions": {one.__name__: one.__version__ for one in (torch, transformers, trl)},
        "total_seconds": time.perf_counter() - begin,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "phases": clock.phases(),
        "rewards": [one["reward"] for one in logs],
        "grad_norms": [one["grad_norm"] for one in logs],
        "entropies": [one["entropy"] for one in logs],
        "dedup_ratio": [one.get("shared_prompt/dedup_ratio") for one in logs],
        "fallbacks": [one.get("shared_prompt/fallbacks") for one in logs],
    }


def compare(out: Path) -> None:
    """Both runs in one table and one picture."""
    runs = {name: json.loads((out / f"{name}.json").read_text()) for name in ("stock", "shared")}
    print(f"{'median seconds a step':24} {'stock':>9} {'shared':>9} {'ratio':>7}")
    for phase in runs["stock"]["phases"]:
        stock, shared = (median(one["phases"][phase]) for one in runs.values())
        print(f"{phase:24} {stock:9.3f} {shared:9.3f} {stock / shared:6.2f}x")
    last = max(1, len(runs["stock"]["rewards"]) // 10)
    means = [sum(one["rewards"][-last:]) / last for one in runs.values()]
    print(f"{f'reward, last {last} steps':24} {means[0]:9.3f} {means[1]:9.3f}")
    if runs["stock"]["peak_memory_gib"]:
        peaks = [one["peak_memory_gib"] for one in runs.values()]
        print(f"{'peak memory, GiB':24} {peaks[0]:9.1f} {peaks[1]:9.1f}")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for (name, one), style in zip(runs.items(), ("-", "--")):
        left.plot(one["rewards"], style, label=name)
    left.set(xlabel="step", ylabel="reward")
    left.legend()
    below = [0.0, 0.0]
    for phase in runs["stock"]["phases"]:
        heights = [median(one["phases"][phase]) for one in runs.values()]
        right.bar(list(runs), heights, bottom=below, label=phase)
        below = [low + height for low, height in zip(below, heights)]
    right.set(ylabel="seconds a step (median)")
    right.legend()
    figure.savefig(out / "trl_grpo.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--stock", action="store_true", help="TRL's own GRPOTrainer")
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=1, help="updates on each generation (num_iterations)")
    parser.add_argument("--attention", default="sdpa", help="stock attention, of rollouts too")
    for name, value in PRESETS["cpu"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help="instead of the preset's")
    options = parser.parse_args()
    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.out.mkdir(parents=True, exist_ok=True)
    name = "stock" if options.stock else "shared"
    (options.out / f"{name}.json").write_text(json.dumps(run(options), indent=1))
    if all((options.out / f"{one}.json").exists() for one in ("stock", "shared")):
        compare(options.out)


if __name__ == "__main__":
    main()
