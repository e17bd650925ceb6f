"""The model benchmark: that all ways of packing give the same training step, and what is counted."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import varlen

pytest.importorskip("transformers", "4.57")

import bench_model
import measure
import model
import packing
import peers
import results
import shapes
import stock
from families import FAMILIES, FULL, TINY, WINDOW
from shapes import Group, Shape, StepShape, of_model, parse
from transformers import CONFIG_MAPPING

from flash_attn_dualkv import pack_shared_prompts

CPU = torch.device("cpu")
TWO_GROUPS = of_model(
    Shape("two groups", (Group(50, (20, 31)), Group(64, (64,)))), shapes.ALL_MODELS["tiny"], StepShape
)
SMALL = (parse("tiny-3x70x1-90", StepShape), parse("tiny-4x64x24", StepShape), TWO_GROUPS)
OURS, REPLICATED = model.implementations(None)[:2]
KNOWN = [name for name, one in TINY.items() if one.model_type in CONFIG_MAPPING]


def prepare(shape: Shape, impl: peers.Implementation, dtype: str) -> packing.Prepared:
    config = measure.Config(dtype=dtype, device=CPU)
    return next(model.StepRun(shape, [impl], config, measure.Matmul(config)).prepared(impl))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_all_compute_the_same_step(shape: StepShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities in the order of the responses, and the gradients of every parameter."""
    monkeypatch.setitem(measure.DTYPES, "fp32", torch.float64)
    outcomes = []
    for impl in (OURS, REPLICATED, peers.on_cpu(flex=True)[1]):
        prepared = prepare(shape, impl, "fp32")
        out = prepared.run()
        assert out.shape == (sum(shape.responses),)
        gradients: tuple[torch.Tensor, ...] = ()
        if "backward" in impl.directions:
            gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout.double())
        outcomes.append((out, *gradients))
    for others in outcomes[1:]:
        for got, expected in zip(others, outcomes[0]):
            assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_hidden_prompts_would_be_noticed() -> None:
    """The check between implementations fails an attention that forgets the prompt, with a margin."""
    shape = SMALL[0]

    def forgetful(shape: Shape, device: torch.device) -> packing.Arrangement:
        pieces = [len(one) for pair in packing.response_rows(shape) for one in pair]
        calls = [varlen.VarlenCall.of(pieces, device)]
        return packing.Arrangement(packing.replicated_rows(shape), varlen.varlen_attention(varlen.math_varlen, calls))

    wrong = peers.Implementation("forgetful", forgetful, is_replicated=True)
    prepared = [prepare(shape, impl, "fp32") for impl in (OURS, wrong)]
    outs = [one.take(one.run().detach(), torch.arange(shape.packed_tokens)) for one in prepared]
    right, got = (out - out.mean() for out in outs)
    assert measure.relative_difference(got, right) > 2 * model.StepRun.largest_difference


def test_executed_work() -> None:
    """Tokens are those of the library's layout; the backward repeats the forward, of the head too."""
    shape = parse("16x8Kx131-2048", StepShape)
    by_name = {one.name: one for one in model.implementations(["sm90"])}
    weights = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
    head = 2 * 4096 * 151936 * sum(shape.responses)
    moved = shape.packed_tokens + 15
    pairs = shape.visible_pairs + 15 * 8192  # a copy of the last token sees the whole prompt
    dense = (shape.replicated_tokens, shape.replicated_pairs)
    for name, (tokens, seen) in (("dualkv_sm90", (moved, pairs)), ("fa2_replicated", dense)):
        assert by_name[name].executed(shape) == (tokens, seen)
        forward = 36 * (2 * weights * tokens + 4 * 32 * 128 * seen) + head
        backward = 36 * (4 * weights * tokens + 10 * 32 * 128 * seen) + 2 * head
        assert shape.flops("forward", tokens, seen) == forward
        assert shape.flops("backward", tokens, seen) == forward + backward
    for small in SMALL:
        layout = pack_shared_prompts(*model.samples(small, model.make_ids(small, CPU)[0])).layout
        assert layout.num_tokens == OURS.executed(small)[0]


def test_the_command_on_the_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--rounds", "1", "--shape", "tiny-3x70x1-90", "--out", str(tmp_path)]
    assert bench_model.main([*arguments, "--name", "model"]) == 0
    rows: list[dict[str, Any]] = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 2 + ["math_replicated"] * 2
    for row in rows:
        assert "error" not in row and row["rel_diff"] < 1e-4
        assert results.problems_of({**row, "dtype": "bf16", "impl": "dualkv_sm90", "peak_gib": 1.0}, "model") == []


# --- other models -----------------------------------------------------------------------------------------------------


def family_runs(name: str, **settings: Any) -> tuple[StepShape, list[peers.Implementation], measure.Config]:
    shape = parse(f"{name}-5x70x1-90", StepShape)
    assert isinstance(shape, StepShape)
    found = [one for one in bench_model.all_implementations(None) if one.refuses(shape) is None]
    return shape, found, measure.Config(dtype="fp32", device=CPU, rounds=1, target_ms=1.0, warm_ms=0.0, **settings)


@pytest.mark.parametrize("name", KNOWN)
def test_other_models_compute_the_same_step(name: str) -> None:
    """Ours and the stock model's micro-batches: log-probabilities, and the sum of all gradients."""
    shape, found, config = family_runs(name)
    assert len(found) == 2 and len(stock.micro_batches(shape)) == 3
    outcomes = []
    for impl in found:
        run = stock.run_of(shape, [impl], config, measure.Matmul(config))
        every, out, sums = torch.arange(sum(shape.responses)), 0.0, 0.0
        for prepared in run.prepared(impl):
            part = prepared.run()
            gradients = torch.autograd.grad(part, prepared.leaves, prepared.dout)
            out = out + prepared.take(part.detach(), every)
            sums = sums + torch.cat([one.flatten() for one in gradients])
        outcomes.append((out, sums))
    (expected, all_expected), (got, all_got) = outcomes
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
    assert (all_got - all_expected).norm() <= 1e-4 * all_expected.norm()


@pytest.mark.skipif("gpt_oss" not in CONFIG_MAPPING, reason="this transformers has no gpt-oss")
def test_gpt_oss_on_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers tells FlashAttention-4 of windows and sinks, by a stand-in of its signatures."""
    import fake_fa4
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    known = getattr(modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    if 4 not in known:
        pytest.skip("this transformers does not know FlashAttention-4")
    monkeypatch.setitem(known, 4, {**known[4], "general_availability_check": lambda: True})
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    monkeypatch.setitem(sys.modules, "flash_attn", fake_fa4)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake_fa4)
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(fake_fa4, "flash_attn_func", counted(fake_fa4.flash_attn_func, called))
    tiny = replace(TINY["tiny-gpt-oss"], stock=("eager", "flash_attention_4"))
    monkeypatch.setitem(shapes.ALL_MODELS, "tiny-gpt-oss", tiny)
    shape, found, config = family_runs("tiny-gpt-oss")
    assert [one.name for one in found[1:]] == ["stock_eager_replicated", "stock_flash_attention_4_replicated"]
    run = stock.run_of(shape, [replace(one, package=None) for one in found], config, measure.Matmul(config))
    list(run.run())
    assert [(row["impl"], row.get("error")) for row in run.rows if row["rel_diff"] > 1e-4 or not row["ms"]] == []
    padded = [row.get("padded_tokens") for row in run.rows]
    assert padded == [None, None, *[sum(2 * one.length for one in stock.micro_batches(shape)) - 128] * 4]
    assert {tuple(one.get("window_size", ())) for one in called} == {(), (19, 19)}
    assert all(one["causal"] and len(one["learnable_sink"]) == 4 for one in called)


def counted(function: Any, calls: list[dict[str, Any]]) -> Any:
    """The same, of the same signature; keyword arguments of its calls are kept."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return function(*args, **options)

    return call


def test_one_length_for_what_compiles() -> None:
    """FlexAttention sees one length, other attentions that of a micro-batch."""
    shape = parse("gpt-oss-20b-16x8Kx131-2048", StepShape)
    flex, others = (stock.micro_batches(shape, stock.KERNELS[name]) for name in ("flex_attention", "flash_attention_4"))
    longest = max(shape.replicated_lengths)
    assert {one.length for one in flex} == {-(-longest // 128) * 128} and len({one.length for one in others}) > 4
    assert [one.leaves for one in flex] == [one.leaves for one in others]
    assert all(one.length >= max(shape.ends[leaf] for leaf in one.leaves) for one in others)


@pytest.mark.parametrize("name", KNOWN[:1])
def test_a_model_that_computes_something_else_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of timed passes are compared, those of all micro-batches together."""
    shape, found, config = family_runs(name)
    for is_wrong in (False, True):
        if is_wrong:
            monkeypatch.setattr(
                stock, "score", lambda head, hidden, *others: model.score(head, hidden.flip(0), *others)
            )
        run = stock.run_of(shape, found, config, measure.Matmul(config))
        list(run.run())
        errors = [row.get("error") for row in run.rows if not row["impl"].startswith("dualkv")]
        assert len(errors) == 2 and all(("output differs" in str(one)) == is_wrong for one in errors)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].model_type in CONFIG_MAPPING])
def test_sizes_are_those_of_the_configuration(name: str) -> None:
    """Weights that a token is multiplied with: all matrices of a layer, of the experts those that it is sent to."""
    shape = parse(f"{name}-1x16x16", StepShape)
    assert isinstance(shape, StepShape)
    family = FAMILIES[name]
    sparse = {"num_local_experts": "num_experts_per_tok", "n_routed_experts": "num_experts_per_tok"}
    shares = [family.options[some] / family.options[every] for every, some in sparse.items() if every in family.options]
    found = model.make_model(shape, "eager", torch.bfloat16, torch.device("meta"), 0)
    layers = found.model.layers
    assert len(layers) == family.layers and found.lm_head.weight.shape == (family.vocab, family.hidden)
    for index, kind in enumerate(family.kinds):
        types = getattr(found.config, "layer_types", None)
        expected = {FULL: "full_attention", WINDOW: "sliding_attention"}.get(kind, "linear_attention")
        assert types is None or types[index] == expected
        count = 0.0
        for weight, one in layers[index].named_parameters():
            is_matrix = one.dim() > 1 and "conv" not in weight and not weight.endswith("_bias")
            count += one.numel() * (shares[0] if ".experts." in weight else 1) * is_matrix
        # DeepSeek's first layer has no router.
        assert count == pytest.approx(family.mixers[kind] + family.mlp, rel=1e-9 if index else 2e-3)
    window = getattr(found.config, "sliding_window", None)
    assert not family.window or window == family.window


def test_work_of_windows() -> None:
    """Every token of a window's layer counts with a whole window."""
    whole, first = (parse(f"{name}16x8Kx131-2048", StepShape) for name in ("gemma3-4b-", "gemma3-4b-L6-"))
    assert isinstance(first, StepShape) and first.model.layers == 6
    tokens, pairs = first.packed_tokens, first.visible_pairs
    head = 2 * 2560 * 262208 * sum(first.responses)
    weights = 6 * (2560 * 24 * 256 + 3 * 2560 * 10240)
    forward = 2 * weights * tokens + 4 * 8 * 256 * (pairs + 5 * 1024 * tokens) + head
    assert first.flops("forward", tokens, pairs) == forward
    assert whole.flops("forward", tokens, pairs) > 5 * (forward - head)
    for kind in (shapes.LayerShape, shapes.Shape):
        for name in ("gemma3-4b-16x8Kx131-2048", "qwen3-8b-L6-16x8Kx131-2048"):
            with pytest.raises(ValueError, match="expected a model of equal layers"):
                parse(name, kind)
    with pytest.raises(ValueError, match="layers: expected 1 to 36, got 37"):
        parse("qwen3-8b-L37-16x8Kx131-2048", StepShape)
    with pytest.raises(ValueError, match="expected a name like"):
        parse("L6-16x8Kx131-2048", StepShape)
