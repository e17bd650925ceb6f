# SPDX-License-Identifier: BSD-3-Clause
"""A rule that a small random model learns and code can check: the task of trl_grpo.py, and its files for verl.

    python examples/rule_task.py --out rule                        # writes rule/model and rule/train.parquet
    MODEL=rule/model TRAIN=rule/train.parquet VAL=rule/train.parquet GPUS=2 PROMPTS=4 RESPONSE_LENGTH=16 \\
        LEARNING_RATE=4e-6 examples/verl_grpo.sh reward.custom_reward_function.path=examples/rule_task.py
    python examples/rule_task.py --out wide --preset qwen3-1.7b    # a model of that shape, for times

A prompt is a list of numbers and the name of a rule; the reward is the share of a completion's numbers that obey it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

RULES: dict[str, Callable[[int], bool]] = {
    "even": lambda number: number % 2 == 0,
    "small": lambda number: number < 50,
    "round": lambda number: number % 10 == 0,
}
_SMALL = dict(vocabulary=106, dtype="float32", completion=16, prompts=4)
_QWEN3 = dict(
    layers=28, heads=16, head_dim=128, vocabulary=151936, dtype="bfloat16", prompt=4096, completion=512, responses=16,
    prompts=8, micro_batch=16, page=256, learning_rate=1e-6,
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": dict(
        **_SMALL, layers=2, hidden=64, heads=2, head_dim=64, prompt=128, responses=8, micro_batch=32, page=16,
        learning_rate=5e-3,
    ),
    "gpu": dict(
        **_SMALL, layers=4, hidden=1024, heads=16, head_dim=64, prompt=2048, responses=16, micro_batch=64, page=256,
        learning_rate=4e-6,
    ),
    "qwen3-0.6b": dict(**_QWEN3, hidden=1024),
    "qwen3-1.7b": dict(**_QWEN3, hidden=2048),
}  # fmt: skip

# Tokens by which verl divides the turns of a model of type qwen3, and without which it runs none.
QWEN_TOKENS = ["\n", "<|im_end|>"]


def add_preset(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Options of the command line, whose defaults are the preset's."""
    for name, value in PRESETS["cpu"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help="instead of the preset's")
    options = parser.parse_args()
    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def make_tokenizer(vocabulary: int) -> Any:
    words = ["<pad>", "<bos>", "<eos>", *RULES]
    words += map(str, range(vocabulary - len(words)))
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )


def make_model(tokenizer: Any, options: argparse.Namespace, device: str) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads // 2,
        head_dim=options.head_dim,
        tie_word_embeddings=options.preset.startswith("qwen3"),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(options.seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=options.attention, dtype=getattr(torch, options.dtype)
        )


def make_prompts(options: argparse.Namespace) -> list[dict[str, str]]:
    """As many as all steps need, each with as many words as asked for: numbers, and in the end the rule."""
    draw = random.Random(options.seed)

    def prompt() -> dict[str, str]:
        numbers = [str(draw.randrange(options.vocabulary - 3 - len(RULES))) for _ in range(options.prompt - 1)]
        rule = draw.choice(list(RULES))
        return {"prompt": " ".join([*numbers, rule]), "rule": rule}

    return [prompt() for _ in range(options.prompts * options.steps)]


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's reward function: the share of words that are numbers and obey the rule `ground_truth`."""
    words = solution_str.split()
    return sum(word.isdigit() and RULES[ground_truth](int(word)) for word in words) / max(1, len(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the prompts")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--steps", type=int, default=100, help="with --prompts prompts each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default="sdpa")
    options = add_preset(parser)
    options.vocabulary -= len(QWEN_TOKENS)
    tokenizer = make_tokenizer(options.vocabulary)
    tokenizer.add_tokens(QWEN_TOKENS, special_tokens=True)
    for part in (tokenizer, make_model(tokenizer, options, "cuda" if torch.cuda.is_available() else "cpu")):
        part.save_pretrained(options.out / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "data_source": "rule",
            "reward_model": {"style": "rule", "ground_truth": row["rule"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(make_prompts(options))
    ]
    pd.DataFrame(rows).to_parquet(options.out / "train.parquet")


if __name__ == "__main__":
    main()
