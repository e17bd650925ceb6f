"""The prediction: its counts against enumeration, its times against measured layers, its warnings, its command."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_attn_dualkv import predict
from flash_attn_dualkv.predict import MODELS, RATES, ModelShape, Rates

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import shapes  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = {"h200": "NVIDIA-H200", "h100": "NVIDIA-H100-80GB-HBM3"}
TINY = ModelShape(layers=2, hidden=6, intermediate=10, heads=4, kv_heads=2, head_dim=3, vocab=7)
GROUPS = [(1, [1]), (3, [2, 5]), (7, [1, 1, 1]), (20, [9]), (5, [4, 6, 1, 3])]


def visible_by_token(prompt: int, responses: list[int]) -> int:
    """Pairs of the packed group, from what every token is: (response or None for the prompt, logical position)."""
    tokens: list[tuple[int | None, int]] = [(None, position) for position in range(prompt)]
    for index, length in enumerate(responses):
        tokens += [(index, prompt + position) for position in range(length)]
    return sum(key[0] in (None, query[0]) and key[1] <= query[1] for query in tokens for key in tokens)


def linear_flops(model: ModelShape, tokens: int) -> int:
    """Two operations per multiply-add of each matrix product of a layer, written out one by one."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    products = [(model.hidden, queries), (model.hidden, keys), (model.hidden, keys), (queries, model.hidden)]
    products += [(model.hidden, model.intermediate)] * 2 + [(model.intermediate, model.hidden)]
    return sum(2 * tokens * rows * columns for rows, columns in products)


# --- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "responses"), GROUPS)
def test_pairs_and_tokens_against_enumeration(prompt: int, responses: list[int]) -> None:
    assert predict.shared_pairs(prompt, responses) == visible_by_token(prompt, responses)
    alone = [visible_by_token(prompt + length, []) for length in responses]
    assert predict.replicated_pairs(prompt, responses) == sum(alone)
    found = predict.predict(prompt, responses, TINY)
    assert found.shared.tokens == prompt + sum(responses)
    assert found.replicated.tokens == sum(prompt + length for length in responses)
    assert found.rho == pytest.approx(found.replicated.tokens / found.shared.tokens)


@pytest.mark.parametrize(("prompt", "responses"), GROUPS)
def test_operations_against_enumeration(prompt: int, responses: list[int]) -> None:
    found = predict.predict(prompt, responses, TINY)
    for packing in (found.shared, found.replicated):
        # Q K^T and P V forward; S again, dP, dV, dK and dQ backward: seven products over visible pairs
        attention = 7 * sum(2 * TINY.head_dim * packing.pairs for _ in range(TINY.heads))
        assert packing.attention_tflop == pytest.approx(attention / 1e12)
        linear = linear_flops(TINY, packing.tokens)
        assert packing.layer_tflop == pytest.approx((attention + 3 * linear) / 1e12)
        assert TINY.token_flops(packing.tokens, "backward") == 2 * linear
        assert TINY.layer_flops(packing.tokens, packing.pairs, "forward") == pytest.approx(linear + attention / 3.5)
    assert found.layer_speedup == pytest.approx(found.replicated.layer_tflop / found.shared.layer_tflop)
    assert found.attention_speedup == pytest.approx(found.replicated.pairs / found.shared.pairs)


def test_attention_shrinks_by_less_than_tokens() -> None:
    for prompt, responses in GROUPS:
        found = predict.predict(prompt, responses, TINY)
        assert found.attention_speedup <= found.layer_speedup + 1e-12 <= found.rho + 2e-12


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
    ],
)
def test_named_models_have_their_size(name: str, billions: float) -> None:
    assert MODELS[name].parameters == pytest.approx(billions * 1e9, rel=2e-3)


def test_memory_grows_with_tokens_and_parameters() -> None:
    prompt, responses = 5, [4, 6]
    found = predict.predict(prompt, responses, TINY, bytes_per_parameter=16)
    for packing in (found.shared, found.replicated):
        activations = packing.tokens * TINY.saved_bytes_per_token()
        assert packing.layer_gib * predict.GIB == pytest.approx(activations + 16 * TINY.layer_parameters)
        assert packing.model_gib * predict.GIB == pytest.approx(2 * activations + 16 * TINY.parameters)
        inputs = 2 * 2 * 6 * packing.tokens  # two layers, 16 bits, hidden 6
        assert packing.checkpointed_gib * predict.GIB == pytest.approx(inputs + activations + 16 * TINY.parameters)
    assert found.memory_ratio == pytest.approx(found.shared.layer_gib / found.replicated.layer_gib)
    none = predict.predict(prompt, responses, TINY, bytes_per_parameter=0)
    assert none.memory_ratio == pytest.approx(1 / none.rho)


# --- times ----------------------------------------------------------------------------------------------------------

# One Qwen3-8B layer, forward and backward in plain PyTorch on one H200, R_i ~ U(131, 2048): milliseconds with
# FlashAttention-2 and the prompt replicated, with a published shared-prompt kernel, with FlexAttention packed; and the
# milliseconds of the attention alone.
MEASURED = [
    ((16, 8192), {"replicated": (424, 127.1), "published": (102, 44.3), "flex": (93, 36.2)}),
    ((8, 16384), {"replicated": (490, 213.3), "published": (110, 58.9), "flex": (98, 48.4)}),
    ((32, 5059), {"replicated": (515, 117.6), "published": (140, 52.2), "flex": (132, 45.8)}),
]


@pytest.mark.parametrize(("group", "measured"), MEASURED)
@pytest.mark.parametrize("peer", ["published", "flex"])
def test_measured_layers(group: tuple[int, int], measured: dict[str, tuple[float, float]], peer: str) -> None:
    """Times and their ratio within 10%.

    Of the measured responses only the distribution is known, whose mean stands here for each length.
    """
    n, prompt = group
    counts = predict.predict(prompt, [1090] * n, MODELS["qwen3-8b"])
    layers = {name: measured[name][0] for name in ("replicated", peer)}
    # Only the attention's rate is taken from the measurement of the attention alone; token-wise work has the preset's.
    rates = [
        packing.attention_tflop * 1e3 / measured[name][1]
        for name, packing in (("replicated", counts.replicated), (peer, counts.shared))
    ]
    own = Rates(RATES["h200"].token_wise, rates[1], rates[1], rates[0], rates[0])
    found = predict.predict(prompt, [1090] * n, MODELS["qwen3-8b"], own)
    assert found.replicated.attention_ms == pytest.approx(measured["replicated"][1])
    assert found.replicated.layer_ms == pytest.approx(layers["replicated"], rel=0.1)
    assert found.shared.layer_ms == pytest.approx(layers[peer], rel=0.1)
    assert found.layer_speedup == pytest.approx(layers["replicated"] / layers[peer], rel=0.1)


def committed_rows(gpu: str, benchmark: str) -> list[dict[str, Any]]:
    results = [json.loads(path.read_text()) for path in sorted((RESULTS / FOLDERS[gpu]).glob("*.json"))]
    wanted = (one for one in results if one["header"].get("benchmark", "kernel") == benchmark)
    return [row for result in wanted for row in result["rows"]]


def median_rate(gpu: str, impl: str, direction: str, executed: bool) -> float | None:
    """Of all committed results on a GPU with this head dimension and long prompts, TFLOP/s; None without any."""
    rates = []
    for row in committed_rows(gpu, "kernel"):
        is_it = row["impl"] == impl and row["direction"] == direction and row["groups"] == 1
        if is_it and row["tflops"] and row["p"] >= 4096 and (row["h"], row["h_k"], row["d"]) == (32, 8, 128):
            responses = [row["r"]] * row["n"]
            pairs = predict.replicated_pairs(row["p"], responses) if executed else row["visible_pairs"]
            rates.append(row["tflops"] * pairs / row["visible_pairs"])
    return statistics.median(rates) if rates else None


@pytest.mark.parametrize("gpu", FOLDERS)
def test_the_rates_of_a_gpu_are_those_of_the_results(gpu: str) -> None:
    rates = dataclasses.asdict(RATES[gpu])
    for direction in predict.DIRECTIONS:
        shared = median_rate(gpu, "dualkv_sm90", direction, False)
        replicated = median_rate(gpu, "fa2_replicated", direction, True)
        for name, measured in (("shared", shared), ("replicated", replicated)):
            assert rates[f"{name}_{direction}"] == pytest.approx(measured, rel=0.05), "bring predict.RATES up to date"


@pytest.mark.parametrize("gpu", FOLDERS)
def test_the_layers_of_the_results(gpu: str) -> None:
    """Times of every measured layer and their ratio: prompts of 5059 to 131072 tokens, 4 to 32 responses."""
    milliseconds: dict[tuple[str, str], list[float]] = {}
    for row in committed_rows(gpu, "layer"):
        if row["ms"] is not None:
            milliseconds.setdefault((row["shape"], row["impl"]), []).append(row["ms"])

    def measured(shape: str, impl: str) -> float | None:
        """Forward and backward, the mean of the results that have the shape."""
        return 2 * statistics.mean(found) if (found := milliseconds.get((shape, impl))) else None

    grid = shapes.by_name(shapes.LAYER_PRESETS)
    names = sorted({shape for shape, impl in milliseconds if impl == "dualkv_sm90"})
    assert names
    for name in names:
        (group,) = grid[name].groups
        found = predict.predict(group.prompt, list(group.responses), MODELS["qwen3-8b"], RATES[gpu])
        ours, theirs = measured(name, "dualkv_sm90"), measured(name, "fa2_replicated")
        assert found.shared.layer_ms == pytest.approx(ours, rel=0.06), name
        if theirs is not None:
            assert found.replicated.layer_ms == pytest.approx(theirs, rel=0.06), name
            assert found.layer_speedup == pytest.approx(theirs / ours, rel=0.06), name
    assert sum(measured(name, "fa2_replicated") is not None for name in names) >= 2


def test_times_follow_the_rates() -> None:
    prompt, responses = 4096, [1000] * 4
    base = predict.predict(prompt, responses, MODELS["qwen3-8b"], Rates(500, 400, 300, 200, 100))
    one = base.shared.attention_tflop / 3.5
    assert base.shared.attention_ms == pytest.approx(1e3 * (one / 400 + 2.5 * one / 300))
    token_wise = base.shared.layer_tflop - base.shared.attention_tflop
    assert base.shared.layer_ms - base.shared.attention_ms == pytest.approx(1e3 * token_wise / 500)
    twice = predict.predict(prompt, responses, MODELS["qwen3-8b"], Rates(500, 800, 600, 200, 100))
    assert twice.shared.attention_ms == pytest.approx(base.shared.attention_ms / 2)
    assert twice.replicated == base.replicated
    assert twice.layer_speedup > base.layer_speedup


# --- warnings and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "responses", "rates", "expected"),
    [
        (8192, [1024] * 16, RATES["h200"], []),
        (8192, [1024] * 16, RATES["equal"], []),
        (8192, [1024], RATES["equal"], ["there is one response", "layer becomes only 1.00x"]),
        (600, [8000] * 8, RATES["equal"], ["rho is 1.07"]),
        (300, [8000] * 8, RATES["equal"], ["rho is 1.03", "layer becomes only 1.0"]),
        (200, [100] * 8, RATES["equal"], ["the prompt has 200 tokens"]),
        (2048, [512] * 8, Rates(550, 50, 50, 400, 400), ["attention alone is slower"]),
    ],
)
def test_warnings(prompt: int, responses: list[int], rates: Rates, expected: list[str]) -> None:
    found = predict.predict(prompt, responses, MODELS["qwen3-8b"], rates).warnings
    assert len(found) == len(expected), found
    for warning, part in zip(found, expected):
        assert part in warning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, [1]), "prompt: expected at least 1 token, got 0"),
        ((5, []), "responses: expected at least one, got none"),
        ((5, [3, 0]), "responses: expected at least 1 token each, got 0"),
    ],
)
def test_bad_lengths(arguments: tuple[int, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict.predict(*arguments, TINY)


def test_bad_models_and_rates() -> None:
    with pytest.raises(ValueError, match="hidden: expected at least 1, got 0"):
        dataclasses.replace(TINY, hidden=0)
    with pytest.raises(ValueError, match=r"heads: expected a multiple of kv_heads \(3\), got 4"):
        dataclasses.replace(TINY, kv_heads=3)
    with pytest.raises(ValueError, match="token_wise: expected a rate > 0, got 0"):
        dataclasses.replace(RATES["h200"], token_wise=0)
    with pytest.raises(ValueError, match="direction: expected one of"):
        TINY.layer_flops(1, 1, "sideways")
    with pytest.raises(ValueError, match="bytes_per_parameter: expected a number >= 0, got -1"):
        predict.predict(5, [3], TINY, bytes_per_parameter=-1)


# --- the command ----------------------------------------------------------------------------------------------------

GROUP = ["--responses", "16", "--prompt", "8192", "--response", "1024"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main([*GROUP, "--rates", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "qwen3-8b, 16 responses of 1,024 tokens to a prompt of 8,192" in lines[0]
    found = predict.predict(8192, [1024] * 16, MODELS["qwen3-8b"], RATES["h200"])
    (tokens,) = (line for line in lines if line.startswith("tokens"))
    assert tokens.split()[-3:] == ["147,456", "24,576", "6.00x"]
    (layer,) = (line for line in lines if line.startswith("layer, ms"))
    assert layer.split()[-3:] == [
        f"{found.replicated.layer_ms:.2f}",
        f"{found.shared.layer_ms:.2f}",
        f"{found.layer_speedup:.2f}x",
    ]
    assert not any(line.startswith("warning") for line in lines)


def test_no_milliseconds_without_rates_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--responses", "1", "--prompt", "8192", "--response", "1024"]) == 0
    out = capsys.readouterr().out
    assert " ms" not in out
    assert "warning: there is one response" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main([*GROUP, "--rates", "h200", "--shared-backward", "500", "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    rates = dataclasses.replace(RATES["h200"], shared_backward=500.0)
    found = predict.predict(8192, [1024] * 16, MODELS["qwen3-8b"], rates)
    assert printed["layer_speedup"] == found.layer_speedup
    assert printed["shared"] == dataclasses.asdict(found.shared)
    assert printed["rates"] == dataclasses.asdict(rates)


def test_custom_and_changed_models(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "2", "--hidden", "6", "--intermediate", "10", "--heads", "4", "--kv-heads", "2"]
    custom = [*GROUP, "--model", "custom", *sizes, "--head-dim", "3", "--json"]
    assert predict.main([*custom, "--no-qk-norm", "--bytes-per-parameter", "18"]) == 0
    model = dataclasses.replace(TINY, vocab=0, qk_norm=False)
    expected = predict.predict(8192, [1024] * 16, model, bytes_per_parameter=18)
    assert json.loads(capsys.readouterr().out)["shared"] == dataclasses.asdict(expected.shared)
    assert predict.main([*GROUP, "--heads", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["heads"] == 64


def test_the_readmes_command(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (RESULTS.parent.parent / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m flash_attn_dualkv\.predict (.*)$", readme, re.M)
    assert commands
    for command in commands:
        assert predict.main(command.split()) == 0
        assert "tokens (the ratio is rho)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GROUP, "--model", "custom", "--layers", "2"], "a custom model needs --hidden, --intermediate"),
        (["--responses", "0", "--prompt", "1", "--response", "1"], "responses: expected at least one, got 0"),
        ([*GROUP, "--token-wise", "500"], "must be complete: --shared-forward"),
        ([*GROUP, "--rates", "h200", "--token-wise", "-1"], "token_wise: expected a rate > 0"),
    ],
)
def test_errors_of_the_command(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(arguments) == 2
    assert message in capsys.readouterr().err
