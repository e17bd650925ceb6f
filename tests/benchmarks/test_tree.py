"""The benchmark of prefix trees: the trees, that all ways to their attention do the same work, and the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bench_layer
import bench_tree
import command
import layer
import measure
import packing
import peers
import pytest
import results
import shapes
import short_nodes
import torch
from bench_cases import dense_attention
from shapes import Shape
from torch import Tensor
from tree_cases import visible
from trees import Nodes

CPU = torch.device("cpu")
CHAIN: Nodes = ((5, -1), (30, 0), (9, 1), (4, 2))
FOREST: Nodes = ((40, -1), (7, 0), (1, 1), (20, 1), (33, 0), (12, -1), (3, 5), (64, 5), (5, 7), (6, 7))
SMALL = (
    shapes.parse("tree-tiny-H4-Hk2-d16"),
    Shape("chain", (), 4, 1, 16, CHAIN),
    Shape("forest", (), 2, 2, 8, FOREST),
)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def dense_mask(nodes: Nodes) -> Tensor:
    """(T, T) bool: which row sees which."""
    lengths, parents = map(list, zip(*nodes))
    return visible((lengths, parents), sum(lengths))[0]


@pytest.fixture(autouse=True)
def several_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tree is flattened."""
    monkeypatch.setattr(shapes, "MICRO_BATCH_TOKENS", 1)


# --- the trees ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "leaves", "depth", "tokens", "flattened", "saved"),
    [
        ("balanced_d4", 31, 16, 5, 16384, 49152, 1.99),
        ("branched", 15, 9, 7, 24512, 36608, 1.15),
        ("comb", 129, 65, 65, 25600, 349184, 8.83),
        ("agentic", 248, 149, 11, 275618, 1765807, 3.68),
        ("agentic_wide", 22, 13, 5, 19074, 53305, 1.98),
    ],
)
def test_trees(name: str, nodes: int, leaves: int, depth: int, tokens: int, flattened: int, saved: float) -> None:
    shape = shapes.parse(f"tree-{name}")
    assert shape.name in shapes.TREE_PRESETS["trees"] and (shape.heads, shape.kv_heads, shape.head_dim) == (32, 8, 128)
    assert (len(shape.nodes), len(shape.leaves), max(map(len, shape.paths))) == (nodes, leaves, depth)
    assert (shape.packed_tokens, shape.replicated_tokens) == (tokens, flattened)
    assert round(shape.replicated_pairs / shape.visible_pairs, 2) == saved
    # In depth-first order a node's parent is on the path of the node before it.
    paths = [[-1], *shape.paths]
    assert all(parent in (-1, *before) for before, (_, parent) in zip(paths, shape.nodes))
    layered = shapes.parse(f"qwen3-1.7b-tree-{name}", shapes.StepShape)
    assert (
        layered.tree == shape.tree and layered.heads == 16 and shapes.title(layered.name) == f"Qwen3-1.7B: tree {name}"
    )


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_work_against_brute_force(shape: Shape) -> None:
    mask = dense_mask(shape.tree)
    assert (shape.packed_tokens, shape.visible_pairs) == (len(mask), mask.sum())
    seen = mask.sum(1)  # of the last token of a leaf: its whole sequence
    ends = [packing.spans(shape)[leaf].end - 1 for leaf in shape.leaves]
    assert shape.replicated_lengths == seen[ends].tolist()
    assert torch.equal(packing.packed_positions(shape), seen - 1)
    rows = packing.path_rows(shape, shape.leaves)
    assert all(torch.equal(one, mask[end].nonzero().view(-1)) for one, end in zip(rows, ends))
    pieces = shapes.micro_batches(shape)
    assert [leaf for piece in pieces for leaf in piece] == shape.leaves
    assert all(sum(shape.ends[leaf] for leaf in piece) <= shape.packed_tokens for piece in pieces)


# --- the implementations --------------------------------------------------------------------------------------------


def outcome(impl: peers.Implementation, shape: Shape, prepare: Callable[..., packing.Prepared]) -> list[Tensor]:
    """Output and gradients of the packed rows, then gradients of what has no rows: sums over micro-batches."""
    shares = []
    for how in packing.arrangements(impl.arrange(shape, CPU)):
        prepared, rows = prepare(shape, torch.float64, CPU, 0, how), torch.arange(shape.packed_tokens)
        out = prepared.run()
        share = [prepared.take(out.detach(), rows)]
        if "backward" in impl.directions:
            gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout)
            folded = prepared.fold(gradients, rows)
            share += [*folded, *gradients[len(folded) :]]
        shares.append(share)
    assert ("flattened" in impl.name and len(shape.leaves) > 1) == (len(shares) > 1)
    return [sum(parts) for parts in zip(*shares)]


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("most", [1.0, 0.5])
def test_all_implementations_do_the_same_work(shape: Shape, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys are gathered in several calls too."""
    elements = sum(shape.ends) * shape.heads * shape.head_dim
    monkeypatch.setattr(shapes, "MOST_ELEMENTS", 1 + int(most * elements))
    assert (len(shapes.gathered_calls(shape)) > 1) == (most < 1)
    *qkv, dout = packing.make_source(shape, torch.float64, CPU)
    leaves = [packing.leaf(one) for one in qkv]
    out = dense_attention(*leaves, dense_mask(shape.tree))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    found = [one for one in peers.tree_implementations(None) if one.refuses(shape) is None]
    for impl in found:
        for value, reference in zip(outcome(impl, shape, packing.prepare_attention), expected):
            torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=impl.name)
    assert [one.name for one in found] == [
        "dualkv_reference", "flex_packed", "math_gathered", "math_flattened", "varlen_reference_flattened"
    ]  # fmt: skip
    prompts = {one.name for one in peers.layer_implementations(None) if one.refuses(shapes.parse("4x96x24")) is None}
    assert prompts == {"dualkv_reference", "flex_packed", "math_replicated", "prefix_grouper"}


def test_all_compute_the_same_layer() -> None:
    shape = shapes.of_model(SMALL[2], shapes.ALL_MODELS["tiny"])
    expected, *others = [
        outcome(impl, shape, layer.prepare_layer)
        for impl in peers.layer_implementations(None)
        if impl.refuses(shape) is None
    ]
    assert [len(one) for one in others] == [1, 13, 13, 13]  # FlexAttention has no backward here
    for got in others:
        for value, reference in zip(got, expected):
            assert (value - reference).abs().max() < 1e-9 * reference.abs().max()


def test_all_compute_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of the last node of every sequence, and gradients of all parameters, through a model."""
    pytest.importorskip("transformers", "4.57")
    import model

    monkeypatch.setitem(measure.DTYPES, "fp32", torch.float64)
    shape = shapes.of_model(SMALL[2], shapes.ALL_MODELS["tiny"], shapes.StepShape)
    config = measure.Config(dtype="fp32", device=CPU)
    outcomes = []
    for impl in model.implementations(None):
        if impl.refuses(shape) is None:
            sums: list[Tensor] = []
            for prepared in model.StepRun(shape, [impl], config, measure.Matmul(config)).prepared(impl):
                out = prepared.run()
                gradients = torch.autograd.grad(out, prepared.leaves, prepared.dout.double())
                share = [prepared.take(out.detach(), torch.arange(sum(shape.responses))), *gradients]
                sums = [one + other for one, other in zip(sums, share)] if sums else share
            outcomes.append(sums)
    assert len(outcomes) == 4 and model.as_packed(shape) == (shape.packed_tokens, shape.visible_pairs)
    for others in outcomes[1:]:
        for got, expected in zip(others, outcomes[0]):
            assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()


# --- short nodes -----------------------------------------------------------------------------------------------------


def test_copies_of_short_nodes() -> None:
    """The same attention; the work that is counted is what is computed."""
    shape = shapes.parse("tree-pairs_tiny-H4-Hk2-d16")
    ours, copied = (one for one in peers.tree_implementations(None) if one.is_ours)
    assert copied.refuses(shape) is None and copied.refuses(SMALL[1]) is not None
    expected, got = (outcome_of_one(one, shape) for one in (ours, copied))
    for value, reference in zip(got, expected):
        torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)
    flat = Shape("", (), tree=((20, -1), *((18, 0),) * 6))
    assert copied.executed(shape) == (flat.packed_tokens, flat.visible_pairs) == (128, 210 + 6 * (18 * 20 + 171))
    assert len(copied.arrange(shape, CPU).rows) == 128 and shape.packed_tokens == 20 + 3 * (7 + 22)


def outcome_of_one(impl: peers.Implementation, shape: Shape) -> list[Tensor]:
    prepared = packing.prepare_attention(shape, torch.float64, CPU, 0, impl.arrange(shape, CPU))
    out, rows = prepared.run(), torch.arange(shape.packed_tokens)
    return [prepared.take(out, rows), *prepared.fold(torch.autograd.grad(out, prepared.leaves, prepared.dout), rows)]


def test_the_command_of_short_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--preset", "tiny_min_shared", "--impls", "dualkv", "--rounds", "1"]
    assert bench_tree.main([*arguments, "--out", str(tmp_path), "--name", "short"]) == 0
    rows = json.loads((tmp_path / "short.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == ["dualkv_reference"] * 2 + ["dualkv_reference_copied"] * 2
    for row, copied in zip(rows[:2], rows[2:]):
        assert (row["short_nodes"], row["node_tokens"], row["rows_below"]) == (3, 7, 22)
        assert row["attention_saved_ms"] == pytest.approx(copied["ms"] - row["ms"], abs=2e-3)
        weights = 4096 * 128 * (32 + 32 + 8 + 8) + 3 * 4096 * 12288
        flops = 2 * weights * 21 * {"forward": 1, "backward": 2}[row["direction"]]
        assert row["products_saved_ms"] == pytest.approx(flops / row["matmul_tflops"] / 1e9, rel=1e-3)
        assert "node_tokens" not in copied
    (node,) = short_nodes.short_nodes(rows)
    assert (node.head_dim, node.rows, node.tokens) == (16, 22, 7)
    assert " | ".join(short_nodes.cells(node)) in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("attention_ms", "cost", "pays"), [(-0.5, 8, True), (-2.0, 32, False), (0.25, -4, True)])
def test_what_a_border_costs(attention_ms: float, cost: float, pays: bool) -> None:
    """In tokens of the products: a node of more pays."""
    node = short_nodes.ShortNode(128, 2048, 16, attention_ms, products_ms=1.0)
    assert (node.cost, node.pays) == (cost, pays) and node.pays == (node.tokens > node.cost)
    assert short_nodes.conclusion([]) == ""


# --- the commands ---------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    """What is not installed has rows too."""
    absent = [one for one in peers.on_trees("fa4") if one.missing()]
    found = lambda families: [*peers.tree_implementations(families), *absent]  # noqa: E731
    benchmark = replace(bench_tree.BENCHMARK, implementations=found)
    assert command.main(benchmark, ["--device", "cpu", "--rounds", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "tree-tiny.json").read_text())["rows"]
    names = [one.name for one in found(None) if one.refuses(SMALL[0]) is None]
    assert [row["impl"] for row in rows if row["direction"] == "forward"] == names and "fa4_flattened" in names
    for row in rows:
        if row["impl"].startswith("fa4"):
            assert row["skipped"] == "flash-attn-4 is not installed" and row["ms"] is None
            continue
        assert row["ms"] > 0 and row["rel_diff"] < 1e-5 and row["n"] == len(SMALL[0].leaves)
        renamed = {**row, "dtype": "bf16", "impl": "fa4_flattened", "peak_gib": 1.0}
        assert results.problems_of(renamed, "tree") == []
        assert row["tflops"] == pytest.approx(
            SMALL[0].flops(row["direction"], 0, SMALL[0].visible_pairs) / row["ms"] / 1e9, rel=1e-3
        )


def test_times_of_micro_batches_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each the median."""
    config = measure.Config(dtype="fp32", device=CPU, rounds=1, assumed_tflops=0.01)
    impl = peers.tree_peers(None)[1]
    run = measure.ShapeRun(SMALL[2], [impl], config, measure.Matmul(config))
    laps = iter([[1.0, 2.0, 9.0], [10.0], [3.0, 3.0], [30.0]] * 10)
    monkeypatch.setattr(run, "laps", lambda impl, *steps: [next(laps)])
    count = len(shapes.micro_batches(SMALL[2]))
    run.timed_pass(impl)
    assert impl.name == "math_flattened" and count > 1
    assert run.times[impl.name, "forward"] == [sum((2.0, 3.0)[index % 2] for index in range(count))]
    assert run.times[impl.name, "backward"] == [sum((10.0, 30.0)[index % 2] for index in range(count))]


def test_the_layer_command(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--shape", "tiny-tree-tiny", "--rounds", "1", "--out", str(tmp_path)]
    assert bench_layer.main([*arguments, "--name", "layer"]) == 0
    rows = json.loads((tmp_path / "layer.json").read_text())["rows"]
    shape = shapes.parse("tiny-tree-tiny", shapes.LayerShape)
    names = {one.name for one in peers.tree_implementations(None) if one.refuses(shape) is None}
    assert {row["impl"] for row in rows} == names
    for row in rows:
        flattened = (shape.replicated_tokens, shape.replicated_pairs)
        expected = flattened if "flattened" in row["impl"] else (shape.packed_tokens, shape.visible_pairs)
        assert row["ms"] > 0 and row["rel_diff"] < 1e-4
        assert (row["executed_tokens"], row["executed_pairs"]) == expected or row["impl"] == "flex_packed"


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    """All but FlexAttention, whose compilation takes longer than all of these."""
    import flash_attn_dualkv

    families = peers.own_families(dict(flash_attn_dualkv.build_info()), torch.cuda.get_device_capability())
    tree = tuple((17 * length, parent) for length, parent in FOREST)
    found = [one for one in peers.tree_implementations(families) if not one.name.startswith("flex")]
    config = measure.Config(rounds=1, target_ms=1.0)
    run = measure.ShapeRun(Shape("forest", (), tree=tree), found, config, measure.Matmul(config))
    list(run.run())
    for row in run.rows:
        assert row.get("skipped", "").endswith("is not installed") or (row["ms"] and row["rel_diff"] < 0.02), row
