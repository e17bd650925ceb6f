# SPDX-License-Identifier: BSD-3-Clause
"""lm-evaluation-harness: the model `dualkv` beside `hf`, on tiny random models and a task in local files."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from processes import run_ranks
from tiny_models import VERSION, VOCABULARY, stock_twin, tiny_model
from tiny_tokenizer import tokenizer

from flash_attn_dualkv.errors import SharedPromptError

lm_eval = importlib.import_module("flash_attn_dualkv.integrations.lm_eval")
scoring = importlib.import_module("flash_attn_dualkv.integrations.common.scoring")

Pair = tuple[str, str]
FAMILIES = ["qwen3", "llama", "gemma2", "gpt_oss", *(["gpt2", "lfm2"] if VERSION >= (5, 17) else [])]


def words(count: int, draw: random.Random) -> str:
    return " ".join(str(draw.randrange(3, VOCABULARY)) for _ in range(count))


def few_shot(questions: int, choices: int, *, header: int = 40, seed: int = 0, least: int = 1) -> list[Pair]:
    """Contexts and continuations: questions behind one header, choices of 1 to 4 words behind each question."""
    draw = random.Random(seed)
    shots = words(header, draw)
    pairs: list[Pair] = []
    for _ in range(questions):
        question = f"{shots} {words(draw.randrange(3, 30), draw)}"
        pairs += [(question, f" {words(draw.randrange(least, 5), draw)}") for _ in range(choices)]
    draw.shuffle(pairs)
    return pairs


def instances(pairs: list[Any], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in pairs]


def both(model: Any, attention: str | None = None, **options: Any) -> tuple[Any, Any]:
    """`dualkv`, and `hf` on stock attention."""
    own = {name: options.pop(name) for name in ("max_tokens", "min_shared", "self_check") if name in options}
    given = dict(tokenizer=tokenizer(), batch_size=3) | options
    return lm_eval.DualKVLM(model, **own, **given), HFLM(stock_twin(model, attention), **given)


def check_answers(got: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected):
        assert one[0] == pytest.approx(other[0], abs=tolerance)
        assert one[1] is other[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_hf(family: str) -> None:
    if family == "lfm2":
        from hybrid_models import hybrid_model

        model = hybrid_model("lfm2", torch.float32)
    else:
        model = tiny_model(family, dtype=torch.float32)
    ours, stock = both(model, "sdpa" if family == "lfm2" else None, max_tokens=200)
    pairs = few_shot(6, 4)
    # Requests of one token; equal ones; one that another begins with; without a context; with a
    # space behind it.
    pairs += [(pairs[0][0], f" {token}") for token in (5, 6, 7)] + pairs[:2]
    pairs += [(pairs[3][0], pairs[3][1] + " 9 9"), ("", "5 6 7"), ("", "<bos> 6"), ("5 6 ", "7 8")]
    check_answers(ours.loglikelihood(instances(pairs), True), stock.loglikelihood(instances(pairs), True))


def test_greedy_answers_are_found() -> None:
    """Continuations that the model would choose: all flags of random ones are False."""
    model = tiny_model("qwen3", dtype=torch.float32)
    ours, stock = both(model)
    contexts = [one for one, _ in few_shot(3, 1)]
    chosen = []
    for context in contexts:
        ids = torch.tensor([ours.tok_encode(context)])
        out = stock.model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
        chosen.append((context, f" {' '.join(ours.tokenizer.convert_ids_to_tokens(out.tolist()))}"))
    pairs = chosen + [(context, f"{answer} 5") for context, answer in chosen]
    got = ours.loglikelihood(instances(pairs), True)
    check_answers(got, stock.loglikelihood(instances(pairs), True))
    assert [one for _, one in got[:3]] == [True] * 3 and not all(one for _, one in got[3:])


@pytest.mark.parametrize("max_length", [8, 43, 60])
def test_truncation(max_length: int) -> None:
    """From the left: of contexts that no longer begin alike, those that still do share."""
    ours, stock = both(tiny_model("qwen3", dtype=torch.float32), max_length=max_length)
    pairs = few_shot(4, 3)
    check_answers(ours.loglikelihood(instances(pairs), True), stock.loglikelihood(instances(pairs), True))


ROPE = dict(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=48)
FACTORS = dict(short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_of_rope_are_those_of_each_request_alone(kind: str) -> None:
    """Whatever is scored beside and before it: they follow the longest sequence that a model sees at once, or saw."""
    name = "rope_parameters" if VERSION >= (5, 0) else "rope_scaling"
    rope = ROPE | dict(rope_type=kind) | (FACTORS if kind == "longrope" else {})
    model = tiny_model("llama", dtype=torch.float32, max_position_embeddings=48, **{name: rope})
    ours = lm_eval.DualKVLM(model, tokenizer=tokenizer(), max_length=100, min_shared=1)
    draw = random.Random(3)
    pairs = few_shot(4, 3, header=30)
    pairs += [(f"{pairs[0][0]} {words(count, draw)}", f" {words(2, draw)}") for count in (9, 9, 16, 17, 18, 40)]
    pairs += [(pairs[-1][0], f" {words(2, draw)}")]
    lengths = [*map(len, inputs_of(pairs))]
    assert min(lengths) < 48 < sorted(lengths)[-3] < max(lengths)

    def alone(pair: Pair) -> Any:
        stock = HFLM(stock_twin(model), tokenizer=tokenizer(), max_length=100, batch_size=1)
        return stock.loglikelihood(instances([pair]), True)[0]

    expected = [*map(alone, pairs)]
    for chosen in (range(len(pairs)), [at for at, length in enumerate(lengths) if length > 48], range(len(pairs))):
        got = ours.loglikelihood(instances([pairs[at] for at in chosen]), True)
        check_answers(got, [expected[at] for at in chosen])


@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_rolling(batch_size: Any) -> None:
    ours, stock = both(tiny_model("qwen3", dtype=torch.float32), max_length=16, batch_size=batch_size, max_tokens=50)
    texts = [(words(length, random.Random(length)),) for length in (1, 15, 16, 17, 40)]
    texts += texts[-1:]
    got = ours.loglikelihood_rolling(instances(texts, "loglikelihood_rolling"), True)
    if batch_size == "auto":  # hf would try which size fits
        stock.batch_size_per_gpu = 2
    expected = stock.loglikelihood_rolling(instances(texts, "loglikelihood_rolling"), True)
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-5)  # float32 has no more digits of a long text's sum
    assert ours.batch_size == batch_size


@pytest.mark.parametrize("options", [dict(softmax_dtype="float32"), dict(mixed_precision_dtype="bfloat16"), {}])
def test_types_are_those_of_hf(options: dict[str, Any], device: str) -> None:
    """The model's type, that of its products, and that in which logarithms and sums are rounded."""
    is_mixed = "mixed_precision_dtype" in options
    model = tiny_model("llama", dtype=torch.float32 if is_mixed else torch.bfloat16).to(device)
    ours, stock = both(model, **options)
    pairs = instances(few_shot(4, 3))
    got, expected = ours.loglikelihood(pairs, True), stock.loglikelihood(pairs, True)
    exact = HFLM(stock_twin(model).double(), tokenizer=tokenizer()).loglikelihood(pairs, True)
    error = [max(abs(one[0] - other[0]) for one, other in zip(answers, exact)) for answers in (got, expected)]
    assert 0 < error[0] <= 2 * error[1] + 1e-2
    rounded = [float(torch.tensor(one[0]).bfloat16()) == one[0] for one in got]
    assert all(rounded) == ("softmax_dtype" not in options)


def test_every_shared_token_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both(tiny_model("qwen3", dtype=torch.float32), min_shared=1)
    rows, scored = [], []
    stock = lm_eval.shared_prompt_logits

    def counted(model: Any, batch: Any, wanted: Any, *args: Any, **options: Any) -> Any:
        rows.append(batch.layout.num_tokens)
        scored.append(len(wanted))
        return stock(model, batch, wanted, *args, **options)

    monkeypatch.setattr(lm_eval, "shared_prompt_logits", counted)
    pairs = few_shot(5, 4, header=50) + [("9 9 9", f" {letter}") for letter in (3, 4, 5, 6)]
    ours.loglikelihood(instances(pairs), True)
    encoded = [(one.split(), (one + other).split()[:-1]) for one, other in pairs]
    nodes = {tuple(read[:end]) for _, read in encoded for end in range(1, len(read) + 1)}
    assert rows == [len(nodes)]  # the tokens of the trie: the last one of a request is not read
    assert scored == [sum(len(other.split()) for _, other in pairs)]  # no other row goes through the head


def test_a_budget_below_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several micro-batches, from trees of few sequences each."""
    model = tiny_model("qwen3", dtype=torch.float32)
    pairs = few_shot(8, 4, least=2)
    ours, stock = both(model, max_tokens=90)
    expected = stock.loglikelihood(instances(pairs), True)
    for tokens in (scoring.TREE_TOKENS, 300, 1):
        monkeypatch.setattr(scoring, "TREE_TOKENS", tokens)
        sizes = [batch.layout.num_tokens for _, batch in scoring.scoring_batches(inputs_of(pairs), max_tokens=90)]
        assert len(sizes) > 1 and max(sizes) <= 90
        check_answers(ours.loglikelihood(instances(pairs), True), expected)


def inputs_of(pairs: list[Pair]) -> list[list[int]]:
    return [[int(word) for word in (one + other).split()[:-1]] for one, other in pairs]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tp_plan="auto"), "tp_plan"),
        (dict(logits_cache=False), "logits_cache"),
        (dict(attn_implementation="sdpa"), "attn_implementation"),
        (dict(backend="seq2seq"), "backend"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(min_shared="8"), "min_shared"),
        (dict(self_check=1), "self_check"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SharedPromptError, match=message):
        lm_eval.DualKVLM(tiny_model("qwen3", dtype=torch.float32), tokenizer=tokenizer(), **options)


def test_refused_models_and_requests() -> None:
    model = tiny_model("qwen3", dtype=torch.float32, attention="sdpa")
    with pytest.raises(SharedPromptError, match="registered or wrapped attention"):
        lm_eval.DualKVLM(model, tokenizer=tokenizer())
    ours, _ = both(tiny_model("qwen3", dtype=torch.float32), max_length=4)
    with pytest.raises(SharedPromptError, match="1 to 4 tokens"):
        ours.loglikelihood(instances([("5 6", " 7 8 9 10 11")]), True)


ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/test.json
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: word_perplexity
"""
TASK = """
task: tiny{name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/train.json
    test: {folder}/test.json
output_type: multiple_choice
training_split: train
test_split: test
fewshot_split: train
fewshot_config:
  sampler: {sampler}
doc_to_text: "{{{{question}}}} 3"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
fewshot_delimiter: " 4 "
num_fewshot: 3
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a task of questions with four choices with either sampler of few-shot examples."""
    folder: Path = tmp_path_factory.mktemp("lm_eval")
    draw = random.Random(1)
    for split in ("train", "test"):
        docs = [
            dict(question=words(9, draw), choices=[words(3, draw) for _ in range(4)], answer=draw.randrange(4))
            for _ in range(8)
        ]
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, docs)))
    for name, sampler in (("", "default"), ("_first", "first_n")):
        (folder / f"tiny{name}.yaml").write_text(TASK.format(name=name, folder=folder, sampler=sampler))
    (folder / "rolling.yaml").write_text(ROLLING.format(folder=folder))
    tiny_model("qwen3", dtype=torch.float32, attention="sdpa").save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return folder


# The module as a command, without the harness's own tasks: to read their 14,000 files takes half a
# minute.
COMMAND = """
import runpy
from lm_eval.tasks import TaskManager
stock = TaskManager.__init__
TaskManager.__init__ = lambda self, *given, **options: stock(self, *given, **{**options, "include_defaults": False})
runpy.run_module("flash_attn_dualkv.integrations.lm_eval", run_name="__main__", alter_sys=True)
"""


def test_the_command(folder: Path) -> None:
    """The line of the documentation: accuracies and every log-likelihood as of `hf`."""
    arguments, tasks = f"pretrained={folder / 'model'},dtype=float32,max_tokens=500", ["tiny", "tiny_first"]
    out = folder / "out"
    line = [sys.executable, "-c", COMMAND, "run", "--model", "dualkv", "--model_args", arguments]
    line += ["--tasks", ",".join(tasks), "--include_path", str(folder), "--device", "cpu"]
    line += ["--output_path", str(out), "--log_samples"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    run = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(next(out.rglob("results_*.json")).read_text())
    assert results["config"]["model"] == "dualkv"
    expected = evaluate(folder, "hf", tasks)
    for name in tasks:
        for metric in ("acc,none", "acc_norm,none"):
            assert results["results"][name][metric] == expected["results"][name][metric]
        samples = [json.loads(one) for one in next(out.rglob(f"samples_{name}_2*.jsonl")).read_text().splitlines()]
        assert len(samples) == 8
        by_number = {one["doc_id"]: one["filtered_resps"] for one in expected["samples"][name]}
        for one in samples:
            for own, other in zip(one["filtered_resps"], by_number[one["doc_id"]], strict=True):
                assert float(own[0]) == pytest.approx(other[0], abs=1e-5)
                assert str(own[1]) == str(other[1])


def evaluate(folder: Path, model: str, tasks: list[str], limit: int | None = None) -> Any:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    given = dict(pretrained=str(folder / "model"), dtype="float32", device="cpu")
    return simple_evaluate(model, given, tasks=tasks, task_manager=manager, limit=limit, log_samples=True)


def test_processes(folder: Path) -> None:
    """Two ranks, one of which has a document less and scores one of its own twice."""
    tasks = ["tiny_first", "rolling"]
    got = run_ranks(_evaluate, 2, folder, tasks, 7)
    expected = evaluate(folder, "hf", tasks, 7)
    assert got[1] is None  # the first one has the documents of both
    results, samples = got[0]
    for name, metrics in (("tiny_first", ("acc,none", "acc_norm,none")), ("rolling", ("word_perplexity,none",))):
        for metric in metrics:
            assert results[name][metric] == pytest.approx(expected["results"][name][metric])
        answers = {one["doc_id"]: one["filtered_resps"] for one in samples[name]}
        assert len(samples[name]) == len(answers) == 7
        for one in expected["samples"][name]:
            torch.testing.assert_close(torch.tensor(answers[one["doc_id"]]), torch.tensor(one["filtered_resps"]))


def _evaluate(rank: int, folder: Path, tasks: list[str], limit: int, results: Any) -> None:
    """As accelerate's launcher starts it; the harness counts GPUs before it divides its documents."""
    ranks = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ.update(ranks, ACCELERATE_USE_CPU="true")
    with patch.object(torch.cuda, "device_count", lambda: 2):
        found = evaluate(folder, "dualkv", tasks, limit)
    results[rank] = found and (found["results"], found["samples"])


def test_in_python(folder: Path) -> None:
    """What importing the module is for; generation is hf's."""
    options = dict(pretrained=str(folder / "model"), dtype="float32", device="cpu")
    made = [get_model(name)(**options) for name in ("dualkv", "hf")]
    assert type(made[0]) is lm_eval.DualKVLM
    assert made[0].model.config._attn_implementation == "dualkv"
    requests = instances([(words(7, random.Random(0)), dict(until=["3"], max_gen_toks=5))], "generate_until")
    ours, stock = (one.generate_until(requests, True) for one in made)
    assert ours == stock
