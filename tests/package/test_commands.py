# SPDX-License-Identifier: BSD-3-Clause
"""The prediction: counts against enumeration and the paper, times against measured layers; and its command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_decode
import pytest
import torch
from shapes import parse

from flash_attn_dualkv import build_info
from flash_attn_dualkv.cli import demo, predict
from flash_attn_dualkv.cli.command import CommandLine, spread
from flash_attn_dualkv.cli.predict import MODELS, RATES, ModelShape, Rates

ROOT = Path(__file__).resolve().parents[2]
GPUS = {"h200": "H200", "h100": "H100"}  # in the name of a result's GPU
K = 1024
QWEN = MODELS["qwen3-8b"]
TINY = ModelShape(layers=2, hidden=6, intermediate=10, heads=4, kv_heads=2, head_dim=3, vocab=7)
GROUPS = [(1, [1]), (3, [2, 5]), (7, [1, 1, 1]), (20, [9]), (5, [4, 6, 1, 3])]


def visible_by_token(prompt: int, responses: list[int]) -> int:
    """Pairs of the packed group, from what every token is: (response or None for the prompt, logical position)."""
    tokens: list[tuple[int | None, int]] = [(None, position) for position in range(prompt)]
    for index, length in enumerate(responses):
        tokens += [(index, prompt + position) for position in range(length)]
    return sum(key[0] in (None, query[0]) and key[1] <= query[1] for query in tokens for key in tokens)


# --- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "responses"), GROUPS)
def test_counts_against_enumeration(prompt: int, responses: list[int]) -> None:
    found = predict.predict(prompt, responses, TINY, bytes_per_parameter=16)
    pairs = [visible_by_token(prompt + length, []) for length in responses]
    assert found.shared.pairs == visible_by_token(prompt, responses) and found.replicated.pairs == sum(pairs)
    assert found.shared.tokens == prompt + sum(responses)
    assert found.replicated.tokens == sum(prompt + length for length in responses)
    # Every matrix product of a layer: two operations per multiply-add
    queries, keys = TINY.heads * TINY.head_dim, TINY.kv_heads * TINY.head_dim
    products = [(TINY.hidden, queries), (TINY.hidden, keys), (TINY.hidden, keys), (queries, TINY.hidden)]
    products += [(TINY.hidden, TINY.intermediate)] * 2 + [(TINY.intermediate, TINY.hidden)]
    for packing in (found.shared, found.replicated):
        # Q K^T and P V forward; S again, dP, dV, dK and dQ backward: seven products over visible
        # pairs
        attention = 7 * 2 * TINY.head_dim * TINY.heads * packing.pairs
        linear = sum(2 * packing.tokens * rows * columns for rows, columns in products)
        assert packing.attention_tflop == pytest.approx(attention / 1e12)
        assert packing.layer_tflop == pytest.approx((attention + 3 * linear) / 1e12)
        assert TINY.token_flops(packing.tokens, "backward") == 2 * linear
        activations = packing.tokens * TINY.saved_bytes_per_token()
        assert packing.layer_gib * predict.GIB == pytest.approx(activations + 16 * TINY.layer_parameters)
        assert packing.model_gib * predict.GIB == pytest.approx(2 * activations + 16 * TINY.parameters)
        inputs = 2 * 2 * 6 * packing.tokens  # two layers, 16 bits, hidden 6
        assert packing.checkpointed_gib * predict.GIB == pytest.approx(inputs + activations + 16 * TINY.parameters)
    assert found.attention_speedup == pytest.approx(found.replicated.pairs / found.shared.pairs)
    assert found.layer_speedup == pytest.approx(found.replicated.layer_tflop / found.shared.layer_tflop)
    assert found.attention_speedup <= found.layer_speedup + 1e-12 <= found.rho + 2e-12
    assert found.memory_ratio == pytest.approx(found.shared.layer_gib / found.replicated.layer_gib)


def test_named_models_have_their_size() -> None:
    billions = {"qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77}
    billions |= {"qwen3-32b": 32.76, "llama3-8b": 8.03, "llama3-70b": 70.55}
    assert {name: model.parameters / 1e9 for name, model in MODELS.items()} == pytest.approx(billions, rel=2e-3)


# --- the paper ------------------------------------------------------------------------------------------------------


def test_ratios_of_the_paper() -> None:
    assert round(predict.predict(32 * K, [2 * K] * 16, QWEN).rho, 1) == 8.5
    assert predict.predict(4 * K, [2 * K] * 60_000, QWEN).rho == pytest.approx(1 + 4 / 2, rel=1e-4)  # N -> inf


# --- times ----------------------------------------------------------------------------------------------------------


def measured_rows(gpu: str, benchmark: str) -> list[dict[str, Any]]:
    """The newest committed time of each thing that a benchmark measured on a GPU."""
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*/*.json")]
    wanted = [one for one in results if GPUS[gpu] in one["header"]["gpu"] and one["header"]["benchmark"] == benchmark]
    newest = {}
    for one in sorted(wanted, key=lambda one: str(one["header"]["date"])):
        for row in one["rows"]:
            if row["ms"] and "deterministic" not in row["impl"]:
                newest[row["shape"], row["impl"], row["direction"]] = row
    return [*newest.values()]


@pytest.mark.parametrize("rates", [name for name in RATES if name != "equal"])
def test_the_attention_of_the_results(rates: str) -> None:
    """Forward and backward of every shape with these heads that takes 2 ms: sequences of a hundred to 128K tokens."""
    gpu, _, peer = rates.partition("-")
    packings, found = {"dualkv_sm90": "shared", f"{peer or 'fa2'}_replicated": "replicated"}, defaultdict(list)
    for row in measured_rows(gpu, "kernel"):
        heads = row["h"], row["h_k"], row["d"]
        if row["impl"] in packings and heads == (32, 8, 128) and parse(row["shape"]).is_plain:
            found[row["impl"], row["shape"]].append(row)
    for (impl, shape), rows in found.items():
        both = sum(row["ms"] for row in rows)
        if len(rows) == 2 and both >= 2:
            measured, packing = parse(shape), packings[impl]
            sizes = measured.packed_tokens, measured.visible_pairs
            sizes = sizes if packing == "shared" else (measured.replicated_tokens, measured.replicated_pairs)
            predicted = RATES[rates].attention_ms(packing, QWEN, *sizes)
            bound = 0.1 if rows[0]["p"] + rows[0]["r"] >= 1000 else 0.2  # tokens of a sequence on average
            assert predicted == pytest.approx(both, rel=bound), f"{impl}, {shape}: bring predict.RATES up to date"
    assert {impl for impl, _ in found} == {*packings} and len(found) >= 12


@pytest.mark.parametrize("gpu", GPUS)
def test_the_layers_of_the_results(gpu: str) -> None:
    """Times of every measured layer and their ratio: prompts of 256 to 131072 tokens, responses up to 16K."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in measured_rows(gpu, "layer"):
        if "tree-" not in row["shape"]:  # whose leaves are no responses to a prompt
            found[row["shape"]][row["impl"]] += row["ms"]
    packings, compared = {"dualkv_sm90": "shared", "fa2_replicated": "replicated"}, 0
    for shape, milliseconds in found.items():
        measured = parse(shape)
        predicted = predict.predict(measured.mean_prompt, measured.responses, QWEN, RATES[gpu])
        times = {name: milliseconds[one] for one, name in packings.items() if one in milliseconds}
        for name, both in times.items():  # forward and backward
            assert getattr(predicted, name).layer_ms == pytest.approx(both, rel=0.06), shape
        if len(times) == 2:
            compared += 1
            ratio = times["replicated"] / times["shared"]
            assert predicted.layer_speedup == pytest.approx(ratio, rel=0.06), shape
    assert compared >= 2


@pytest.mark.parametrize(
    ("prompt", "responses", "rates", "expected"),
    [
        (8192, [1024] * 16, RATES["h200"], []),
        (8192, [1024], RATES["equal"], ["there is one response", "layer becomes only 1.00x"]),
        (600, [8000] * 8, RATES["equal"], ["rho is 1.07"]),
        (2048, [512] * 8, Rates(550, 50, 50, 400, 400), ["attention alone is slower"]),
    ],
)
def test_warnings(prompt: int, responses: list[int], rates: Rates, expected: list[str]) -> None:
    found = predict.predict(prompt, responses, QWEN, rates).warnings
    assert len(found) == len(expected) and all(map(str.__contains__, found, expected)), found


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predict.predict(0, [1], TINY), "prompt: expected an int >= 1, got 0"),
        (lambda: predict.predict(5, [], TINY), "responses: expected at least one, got none"),
        (lambda: predict.predict(5, [3], TINY, RATES["h200"], -1), "bytes_per_parameter: expected .* >= 0, got -1"),
        (lambda: predict.predict_decode(0, [1], TINY), "prompt: expected an int >= 1, got 0"),
        (lambda: predict.predict_decode(5, [], TINY), "responses: expected at least one, got none"),
        (lambda: predict.predict_decode(5, [3], TINY, 0.0), "copy_rate: expected .*, got 0"),
        (lambda: dataclasses.replace(TINY, hidden=0), "hidden: expected an int >= 1, got 0"),
        (lambda: dataclasses.replace(TINY, kv_heads=3), r"heads: expected a multiple of kv_heads \(3\), got 4"),
        (lambda: dataclasses.replace(RATES["h200"], token_wise=math.nan), "token_wise: expected a finite .*, got nan"),
        (lambda: Rates(1, 1, 1, 1, 1, -1), "shared_forward_ns: expected a finite number >= 0, got -1"),
    ],
)
def test_bad_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- the command ----------------------------------------------------------------------------------------------------

GROUP = ["--responses", "16", "--prompt", "8K", "--response", "1K"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main([*GROUP, "--rates", "h200"]) == 0
    out = capsys.readouterr().out
    assert "16 responses of 1,024 tokens to a prompt of 8,192" in out and "warning" not in out
    cells = {line.partition("  ")[0]: line.split()[-3:] for line in out.splitlines()}
    assert cells["tokens (the ratio is rho)"] == ["147,456", "24,576", "6.00x"]
    found = predict.predict(8192, [1024] * 16, QWEN, RATES["h200"])
    milliseconds = [f"{one.layer_ms:.2f}" for one in (found.replicated, found.shared)]
    assert cells["layer, ms"] == [*milliseconds, f"{found.layer_speedup:.2f}x"]
    assert predict.main([*GROUP[2:], "--responses", "1"]) == 0
    out = capsys.readouterr().out
    assert "warning: there is one response" in out and " ms" not in out, "there are none without a GPU's rates"


def test_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a group that a budget does not hold: forwards of rows as counted, and kept bytes as the design has them."""
    shape = predict.MODELS["qwen3-1.7b"]
    cut = predict.predict_cut(32768, [4096] * 16, shape, 49152)
    assert cut is not None and (cut.divisions, cut.divided_tokens, cut.parts) == (4, 196608, 16)
    assert cut.kept_gib == pytest.approx(32768 * 28 * 256 * 8 * 6 / 2**30)
    assert cut.ratio == pytest.approx(4 * 196608 / (5 * 32768 + 4 * 65536))
    assert predict.predict_cut(32768, [4096] * 4, shape, 49152) is None
    options = "--prompt 32K --responses 16 --response 4K --model qwen3-1.7b --max-tokens"
    assert predict.main([*options.split(), "48K"]) == 0
    assert "16 parts, 10.5 GiB of the prompt's keys and sums kept, 1.85x" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        predict.main([*options.split(), "8K"])
    assert (
        "max_tokens: expected more, as what is kept above a part takes as much as 7,690 rows" in capsys.readouterr().err
    )


def test_decode(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes as bench_decode.py counts those of one layer, of requests that have half of their responses."""
    step = bench_decode.make_step("16x16x8K")
    responses = [2 * (keys - cut) for keys, cut in zip(step.keys[:16], step.cuts)]
    shape = ModelShape(1, 64, 64, step.heads, step.kv_heads, step.head_dim)
    alone = bench_decode.Step(8, 1, 16, 0, step.tables[:16], step.keys[:16], step.cuts[:16], step.trunks[:1])
    found = predict.predict_decode(8192, responses, shape, 1e12)
    assert found.shared_gb == pytest.approx(alone.bytes / 1e9) and found.shared_ms == pytest.approx(found.shared_gb)
    assert found.ratio == pytest.approx(found.apart_gb / found.shared_gb)
    assert found.apart_gb - found.shared_gb == pytest.approx(15 * 8192 * 4096 / 1e9)
    assert predict.main([*GROUP, "--decode", "h200"]) == 0
    assert "with the prompt read once (" in capsys.readouterr().out
    assert predict.main([*GROUP, "--decode", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decode"]["ratio"] > 1


def test_decode_on_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of a prompt against all ways to place four samples, and what each of them adds."""
    ways = [len({*way}) for way in itertools.product(range(3), repeat=4)]
    alone, scattered, kept = (
        predict.predict_decode(8192, [1024] * 4, QWEN, 1e12, replicas, router)
        for replicas, router in ((1, "samples"), (3, "samples"), (3, "prompts"))
    )
    assert scattered.copies == pytest.approx(sum(ways) / len(ways))
    assert kept == alone and kept.copies == 1
    more = (scattered.copies - 1) * 8192 * 4 * QWEN.kv_heads * QWEN.head_dim * QWEN.layers
    assert scattered.shared_gb - alone.shared_gb == pytest.approx(more / 1e9)
    assert scattered.apart_gb == alone.apart_gb and scattered.ratio < alone.ratio
    for router, copies in (([], "7.1"), (["--router", "samples"], "7.1"), (["--router", "prompts"], "1.0")):
        assert predict.main([*GROUP, "--decode", "h200", "--replicas", "8", *router]) == 0
        assert f"8 replicas, of which {copies} compute" in capsys.readouterr().out
    for options, message in (
        (["--replicas", "8"], "--replicas: expected with --decode"),
        (["--decode", "h200", "--router", "prompts"], "--router: expected with --replicas"),
    ):
        with pytest.raises(SystemExit):
            predict.main([*GROUP, *options])
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="router: expected 'samples' or 'prompts', got 'verl'"):
        predict.predict_decode(5, [3], TINY, router="verl")


MODEL, FIVE_RATES = dataclasses.replace(TINY, vocab=0, qk_norm=False), Rates(500, 400, 300, 200.5, 100)


@pytest.mark.parametrize(
    ("arguments", "lengths", "assumptions"),
    [
        ("--responses 3 --response 1.5K", [1536] * 3, ()),
        ("--response 500,2K,1200 --rates h100", [500, 2048, 1200], (QWEN, RATES["h100"])),
        ("--responses 2 --response 500,900 --model llama3-8b", [500, 900], (MODELS["llama3-8b"],)),
        ("--responses 5 --response 1..10", [2, 4, 6, 8, 10], ()),
        ("--responses 1 --response 100..201 --model 2,6,10,4,2,3 --no-qk-norm --rates 500,400,300,200.5,100 "
         "--bytes-per-parameter 18", [151], (MODEL, FIVE_RATES, 18)),
    ],
)  # fmt: skip
def test_json(arguments: str, lengths: list[int], assumptions: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--prompt", "1000", *arguments.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model, rates, *_ = (*assumptions, *(QWEN, RATES["equal"])[len(assumptions) :])
    assert found.pop("model") == dataclasses.asdict(model) and found.pop("rates") == dataclasses.asdict(rates)
    expected = predict.predict(1000, lengths, *(assumptions or (QWEN,)))
    assert found == {**dataclasses.asdict(expected), "warnings": list(expected.warnings)}


def test_a_range_has_the_mean_of_its_distribution() -> None:
    for n in (1, 2, 7, 16, 1917, 65536):
        responses = spread(CommandLine("", ""), range(131, 2049), n)
        assert abs(statistics.mean(responses) - (131 + 2048) / 2) <= 0.5 and len(responses) == n
        assert min(responses) >= 131 and max(responses) <= 2048 and responses == sorted(responses)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (predict, "--responses 1000000000 --response 1", "--responses: expected .* 1 to 65,536 .*, got '1000000000'"),
        (predict, "--response 9", "--responses: expected how many, got nothing"),
        (predict, "--response 9,10 --responses 3", "--responses: expected 2, the lengths of --response, got 3"),
        (predict, "--response 1,024", "--response: expected a whole number .*, got '024'"),
        (predict, "--response 10..9", "--response: expected .* A..B with A <= B.*, got '10..9'"),
        (predict, "--response 9 --model gpt", "--model: expected qwen3-0.6b, .*, got 'gpt'"),
        (predict, "--response 9 --model 1,1,1,3,2,1", "--model: heads: expected a multiple .*, got 3"),
        (predict, "--response 9 --rates 1,2", "--rates: expected equal, .* or token_wise.*, got '1,2'"),
        (predict, "--response 9 --rates nan,1,1,1,1", "--rates: expected a number .*, got 'nan'"),
        (predict, "--response 9 --bytes-per-parameter inf", "--bytes-per-parameter: expected a number .*, got 'inf'"),
        (predict, "", "arguments are required: --response"),
        (demo, "--prompt 100000000", "--prompt, .* expected a group that fits in [0-9,]+ GiB, got one .* [0-9,]+ GiB"),
        (demo, "--device tpu", "--device: invalid choice: 'tpu' .choose from"),
        *((one, f"--prompt {text} --responses 2 --response 9", "--prompt: expected a whole number from 1 to .*, got ")
          for one in (predict, demo) for text in ("-5", "0", "1e3", "nan", "8G", "1.3K", "9" * 40)),
    ],
)  # fmt: skip
def test_hostile_command_lines(command: Any, arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what was expected and what was got, and status 2."""
    prompt = [] if "--prompt" in arguments else ["--prompt", "8"]
    with pytest.raises(SystemExit) as caught:
        command.main([*prompt, *arguments.split()])
    streams = capsys.readouterr()
    assert caught.value.code == 2 and not streams.out
    assert re.fullmatch(f"error: .*{message}.*\n", streams.err)


def test_the_documented_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [path.read_text("utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    in_text = [
        command for page in pages for command in re.findall(r"`python -m flash_attn_dualkv\.predict (-[^`]*)`", page)
    ]
    commands = [*in_text, *re.findall(r"python -m flash_attn_dualkv\.predict (.*)", predict.__doc__ or "")]
    assert len(commands) >= 3
    for command in commands:
        assert predict.main(command.split()) == 0
        assert "rho" in capsys.readouterr().out


SMALL = ["--device", "cpu", "--prompt", "48", "--response", "2,20,7"]


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "flash_attn_dualkv.demo", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens = "replicated 173, shared 77: rho = 2.25"
    for expected in ("CPU: asked for with --device cpu", tokens, "MiB", "the same", "works on"):
        assert expected in done.stdout
    assert "time, ms" not in done.stdout, "that of the reference says nothing of the kernels"
    for name in ("out", "dQ", "dK", "dV"):
        assert f"\n{name}  " in done.stdout


@pytest.mark.skipif(torch.cuda.is_available() and build_info()["compiled"], reason="the demo takes the GPU here")
def test_says_why_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    device, reason = demo.choose_device("auto")
    assert device == "cpu" and reason
    assert demo.main(SMALL[2:]) == 0
    assert f"CPU: {reason}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        demo.main(["--device", "cuda", *SMALL[2:]])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.gpu
def test_runs_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cuda", "--prompt", "700", "--responses", "5", "--response", "131..300"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name() in out and "time, ms" in out


# Of the output, with the function and its arguments.
DAMAGES: dict[str, Callable[..., torch.Tensor]] = {
    "one value": lambda out, *_: out + torch.zeros_like(out).index_fill_(0, torch.tensor([5]), 1e-3),
    "not a number": lambda out, *_: out.index_fill(0, torch.tensor([5]), torch.nan),
    "half of a gradient": lambda out, call, q, k, *rest: call(q, (k + k.detach()) / 2, *rest),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_wrong_results_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call, damage = demo.flash_attn_dualkv_varlen_func, DAMAGES[name]
    monkeypatch.setattr(demo, "flash_attn_dualkv_varlen_func", lambda *x: damage(call(*x), call, *x))
    assert demo.main(SMALL) == 1
    assert re.search("NOT THE SAME.*DOES NOT WORK", capsys.readouterr().out, re.DOTALL)
