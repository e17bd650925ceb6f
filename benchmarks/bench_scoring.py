#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Score few-shot tasks by lm-evaluation-harness's `hf` and by `dualkv`: tokens that a model computes, and seconds.

    python benchmarks/bench_scoring.py                          # Qwen3-1.7B, a part of each task; minutes on a GPU
    python benchmarks/bench_scoring.py --count                  # tokens of whole tasks, on the CPU, without a model
    python benchmarks/bench_scoring.py --preset tiny --device cpu

Requests are random tokens with lengths as those of ARC (Challenge, 25 shots), HellaSwag (10) and MMLU (5, one letter
for an answer). With the sampler `default` each question has shots of its own, with `first_n` all questions of a subject
have the same; MMLU has `first_n` as published. Weights are random, both score the same requests, `hf` on sdpa with its
cache of one-token answers. Times are of `_loglikelihood_tokens`, packing included, tokenisation not; either one
scores `--warm-up` questions before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from command import RESULTS, Result, gpu_folder, parser_of, place_of
from lm_eval.models.huggingface import HFLM
from measure import Row, timed
from models import ALL_MODELS, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from flash_attn_dualkv.integrations.common.scoring import MAX_TOKENS, MIN_SHARED, scoring_batches
from flash_attn_dualkv.integrations.lm_eval import DualKVLM
from flash_attn_dualkv.integrations.transformers import register
from flash_attn_dualkv.model_shape import ModelShape

FOLDER = RESULTS / "trainers" / "scoring"
Request = tuple[Any, list[int], list[int]]


@dataclass(frozen=True)
class Lengths:
    """Tokens: log-normal about a median, within bounds."""

    median: int
    spread: float
    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        return min(self.most, max(self.least, round(self.median * source.lognormvariate(0.0, self.spread))))


@dataclass(frozen=True)
class Task:
    """Questions with choices behind shots: other questions, each with its right choice.

    Attributes:
        subjects: with `first_n`, how many sets of shots there are; all have equally many questions.
        sampler: "default" draws shots for each question.
    """

    questions: int
    shots: int
    choices: int
    question: Lengths
    choice: Lengths
    subjects: int = 1
    sampler: str = "default"

    def requests(self, vocabulary: int, count: int | None = None) -> list[Request]:
        """Those of the first `count` questions, or of all."""
        source = random.Random(0)

        def tokens(lengths: Lengths) -> list[int]:
            return [source.randrange(3, vocabulary) for _ in range(lengths.draw(source))]

        def shot() -> list[int]:
            return tokens(self.question) + tokens(self.choice)

        # A pool, as a training split is.
        pool = [shot() for _ in range(1000)] if self.sampler == "default" else []
        fixed = [[token for _ in range(self.shots) for token in shot()] for _ in range(self.subjects)]
        letters = [[source.randrange(3, vocabulary)] for _ in range(self.choices)]
        found: list[Request] = []
        for number in range(min(self.questions, count or self.questions)):
            drawn = source.sample(pool, self.shots) if pool else [fixed[number * self.subjects // self.questions]]
            header = [token for one in drawn for token in one]
            context = header + tokens(self.question)
            answers = letters if self.choice.most == 1 else [tokens(self.choice) for _ in range(self.choices)]
            found += [((str(number), str(at)), context, answer) for at, answer in enumerate(answers)]
        return found


def tasks() -> Iterator[tuple[str, Task]]:
    """Those of the page, and tiny ones."""
    shots = {
        "arc": Task(1172, 25, 4, Lengths(32, 0.5, 10, 130), Lengths(5, 0.7, 1, 30)),
        "hellaswag": Task(10042, 10, 4, Lengths(42, 0.5, 12, 120), Lengths(27, 0.45, 5, 70)),
        "mmlu": Task(14042, 5, 4, Lengths(85, 0.6, 30, 700), Lengths(1, 0.0, 1, 1), subjects=57),
        "tiny": Task(6, 4, 4, Lengths(9, 0.5, 4, 20), Lengths(3, 0.5, 2, 6)),
    }
    yield from ((name, task) for name, task in shots.items() if name != "mmlu")
    yield from ((f"{name}-first_n", replace(task, sampler="first_n")) for name, task in shots.items())


TASKS = dict(tasks())
PRESETS = {"tasks": [name for name in TASKS if "tiny" not in name], "tiny": ["tiny", "tiny-first_n"]}


def tokens_of_hf(requests: list[Request]) -> int:
    """What `hf` computes, padding apart: one input for all continuations of one token behind the same tokens."""
    return sum(map(len, {(*context, *answer[:-1]): None for _, context, answer in requests}))


def tokens_of_ours(requests: list[Request], max_tokens: int, min_shared: int) -> tuple[int, int]:
    """Rows of all micro-batches, and how many these are."""
    inputs = [*{(*context, *answer[:-1]): None for _, context, answer in requests}]
    packed = scoring_batches(inputs, max_tokens=max_tokens, min_shared=min_shared)
    sizes = [batch.layout.num_tokens for _, batch in packed]
    return sum(sizes), len(sizes)


def tokenizer() -> Any:
    """`hf` wants one; nothing is tokenised."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), **special)


def scorers(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[list[Request]], Any]]]:
    """Each implementation with the attention that it runs on; the logarithms of both in float32."""
    given: dict[str, Any] = dict(tokenizer=tokenizer(), batch_size=options.batch_size, softmax_dtype="float32")
    model.set_attn_implementation("dualkv")
    ours = DualKVLM(model, max_tokens=options.max_tokens, min_shared=options.min_shared, **given)
    yield "dualkv", lambda requests: ours._loglikelihood_tokens(requests, disable_tqdm=True)
    model.set_attn_implementation("sdpa")
    stock = HFLM(model, **given)
    yield "hf", lambda requests: stock._loglikelihood_tokens(requests, disable_tqdm=True)


def measured(model: Any, requests: list[Request], options: argparse.Namespace) -> Row:
    """Seconds of both, and how far their answers are apart."""
    device, choices = model.device, options.choices
    found, answers = dict[str, Row](), dict[str, list[float]]()
    for name, score in scorers(model, options):
        score(requests[: options.warm_up * choices])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        scores, seconds, peak = timed(partial(score, requests), device)
        answers[name] = [logprob for logprob, _ in scores]
        found[name] = {"seconds": seconds} | ({"peak_gib": peak / 2**30} if peak else {})
    differences = [abs(one - other) for one, other in zip(answers["dualkv"], answers["hf"])]
    best = {name: torch.tensor(values).view(-1, choices).argmax(1) for name, values in answers.items()}
    same = float((best["dualkv"] == best["hf"]).float().mean())
    row: Row = {f"{name}_{key}": value for name, one in found.items() for key, value in one.items()}
    row |= {"time_ratio": row["hf_seconds"] / row["dualkv_seconds"], "largest_difference": max(differences)}
    return row | {"median_difference": statistics.median(differences), "same_choices": same}


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, on_cpu=True)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tasks")
    add("--tasks", nargs="+", choices=TASKS, default=[], help="instead of a preset's")
    add("--questions", type=int, help="of each task that are timed (default: 200 on a GPU; all of tiny ones)")
    add("--count", action="store_true", help="count the tokens of whole tasks, and run no model")
    add("--model", choices=[name for name, one in ALL_MODELS.items() if type(one) is ModelShape and one.qk_norm])
    add("--batch-size", type=int, default=16, help="of hf (default: %(default)s)")
    add("--max-tokens", type=int, default=MAX_TOKENS, help="of dualkv (default: %(default)s)")
    add("--min-shared", type=int, default=MIN_SHARED, help="of dualkv (default: %(default)s)")
    add("--warm-up", type=int, default=16, help="questions (default: %(default)s)")
    options = parser.parse_args(arguments)
    name = options.model or ("tiny" if options.preset == "tiny" else "qwen3-1.7b")
    shape, (device, dtype, gpu) = ALL_MODELS[name], place_of("cpu" if options.count else options.device)
    keep = ("batch_size", "max_tokens", "min_shared")
    more = {"model": name, **{key: getattr(options, key) for key in keep}}
    result = Result(options, FOLDER, "tokens" if options.count else gpu_folder(gpu), gpu, **more)
    model = None
    if not options.count:
        register()
        model = make_model(shape, "dualkv", dtype, device).eval()
    for task in options.tasks or PRESETS[options.preset]:
        options.choices = TASKS[task].choices
        count = None if options.count or "tiny" in task else options.questions or 200
        requests = TASKS[task].requests(shape.vocab, count)
        ours, batches = tokens_of_ours(requests, options.max_tokens, options.min_shared)
        row: Row = {"task": task, "questions": len(requests) // options.choices, "requests": len(requests)}
        row |= {"tokens_hf": (stock := tokens_of_hf(requests)), "tokens": ours, "token_ratio": stock / ours}
        row["micro_batches"] = batches
        if model is not None:
            row |= measured(model, requests, options)
        result.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
