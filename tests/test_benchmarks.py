"""The benchmarks: the work that is counted, that all peers do the same work, and how it is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_kernel  # noqa: E402
import command  # noqa: E402
import figures  # noqa: E402
import flex  # noqa: E402
import measure  # noqa: E402
import packing  # noqa: E402
import peers  # noqa: E402
import schema  # noqa: E402
import shapes  # noqa: E402
from shapes import Group, Shape  # noqa: E402

from flash_attn_dualkv.predict import causal_pairs  # noqa: E402

CPU = torch.device("cpu")
SMALL = (
    *shapes.TINY,
    Shape("one token", (Group(1, (1,)),), 2, 1, 8),
    Shape("three responses", (Group(37, (5, 9, 130)),), 4, 2, 16),
    Shape("mqa", (Group(130, (2, 2, 2)),), 6, 1, 8),
)


def by_name(shape: Shape) -> str:
    return shape.name


def dense_mask(shape: Shape) -> torch.Tensor:
    """Visibility in the packed layout, token by token from what each token is."""
    owners: list[tuple[int, int | None, int]] = []  # (group, response or None, position in the sequence)
    for number, group in enumerate(shape.groups):
        owners += [(number, None, position) for position in range(group.prompt)]
        for response, length in enumerate(group.responses):
            owners += [(number, response, group.prompt + position) for position in range(length)]
    rows = [
        [key[0] == query[0] and key[1] in (None, query[1]) and key[2] <= query[2] for key in owners] for query in owners
    ]
    return torch.tensor(rows)


# --- the work that is counted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=by_name)
def test_pairs_against_brute_force(shape: Shape) -> None:
    assert shape.visible_pairs() == dense_mask(shape).sum()
    assert shape.packed_tokens == len(dense_mask(shape))
    assert shape.replicated_pairs() == sum(sum(range(1, length + 1)) for length in shape.replicated_lengths())
    assert shape.replicated_tokens == sum(shape.replicated_lengths())


def test_flops_of_both_directions() -> None:
    shape = Shape("two tokens", (Group(1, (1,)),), 3, 1, 5)
    assert shape.visible_pairs() == 3
    assert shape.flops("forward") == 4 * 3 * 5 * 3
    assert shape.flops("backward") == 2.5 * shape.flops("forward")
    with pytest.raises(ValueError, match="direction"):
        shape.flops("sideways")


def test_the_papers_table() -> None:
    table = [(shape.num_responses, shape.mean_prompt, shape.mean_response) for shape in shapes.PRESETS["paper"]]
    k = 1024
    assert table == [
        (28, 4 * k, 2 * k),
        (28, 16 * k, 2 * k),
        (16, 32 * k, 2 * k),
        (28, 32 * k, 2 * k),
        (16, 64 * k, 2 * k),
    ]
    assert {(shape.heads, shape.kv_heads, shape.head_dim) for shape in shapes.PRESETS["paper"]} == {(32, 8, 128)}


def test_names_are_unique_and_lengths_repeatable() -> None:
    everything = [shape for preset in shapes.PRESETS.values() for shape in preset]
    assert all(shapes.SHAPES[shape.name] == shape for shape in everything)
    again = shapes.ragged("again", 32, 5059, 131, 2048)
    assert again.groups == shapes.SHAPES["32x5059xU(131,2048)"].groups
    assert all(131 <= length <= 2048 for length in again.responses)


def test_the_same_pairs_in_one_group_and_in_several() -> None:
    one, several = (shapes.SHAPES[name] for name in ("1-group-of-32x4Kx2K", "4-groups-of-8x4Kx2K"))
    assert one.responses == several.responses
    assert several.visible_pairs() - one.visible_pairs() == 3 * causal_pairs(4096)


def test_select() -> None:
    assert [shape.name for shape in shapes.select(["quick"], ["28x4Kx2K", "8x1Kx256"])] == [
        *(shape.name for shape in shapes.QUICK),
        "28x4Kx2K",
    ]
    with pytest.raises(ValueError, match="preset: expected one of .*paper.*, got 'large'"):
        shapes.select(["large"], [])
    with pytest.raises(ValueError, match="shape: expected one of .*, got '1x1x1'"):
        shapes.select([], ["1x1x1"])


# --- the peers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SMALL, ids=by_name)
def test_flex_mask_against_the_dense_relation(shape: Shape) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    packed = flex.PackedMask.of(shape, CPU)
    total = shape.packed_tokens
    rows = torch.arange(total)
    assert torch.equal(packed.function()(rows[:0], rows[:0], rows[:, None], rows[None]), dense_mask(shape))
    for block in (16, flex.FLEX_BLOCK):
        ours = packed.block_mask(block)
        theirs = create_block_mask(packed.function(), 1, 1, total, total, device="cpu", BLOCK_SIZE=block)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (block, name)
        for name in ("kv", "full_kv", "q", "full_q"):
            used = torch.arange(getattr(ours, f"{name}_indices").shape[-1])
            used = used < getattr(ours, f"{name}_num_blocks")[..., None]
            mine, other = (getattr(mask, f"{name}_indices") for mask in (ours, theirs))
            assert torch.equal(mine[used], other[used]), (block, name)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", SMALL, ids=by_name)
def test_all_implementations_do_the_same_work(shape: Shape) -> None:
    """Output and gradients, folded into the packed layout, against a dense softmax."""
    source = packing.make_source(shape, torch.float64, CPU)
    expected = dense_attention(source)
    rows = torch.arange(shape.packed_tokens)
    compared = []
    for implementation in peers.cpu_implementations():
        if implementation.refuses(shape) is None:
            prepared = implementation.build(source)
            out = prepared.run()
            got = [prepared.take(out, rows)]
            assert prepared.dout.shape == out.shape
            if "backward" in implementation.directions:
                got += prepared.fold(torch.autograd.grad(out, prepared.leaves, prepared.dout))
            for value, reference in zip(got, expected, strict=False):
                torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10, msg=implementation.name)
            compared.append(implementation.name)
    assert {"dualkv_reference", "flex_packed", "math_replicated"} <= set(compared)


def dense_attention(source: packing.Source) -> list[torch.Tensor]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (source.q, source.k, source.v))
    ratio = source.shape.heads // source.shape.kv_heads
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(ratio, 1)) / source.shape.head_dim**0.5
    weights = scores.masked_fill(~dense_mask(source.shape), -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(ratio, 1))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), source.dout)]


def test_gathering_refuses_several_groups_and_none() -> None:
    ragged, groups, free = (shapes.SHAPES[name] for name in ("ragged-tiny", "groups-tiny", "causal-tiny"))
    assert peers.refuses_gathered(ragged) is None
    assert peers.refuses_gathered(groups)
    assert peers.refuses_gathered(free)
    assert peers.refuses_dense(ragged)
    with pytest.raises(ValueError, match="one group, got 2"):
        packing.gathered_rows(groups)


BOTH = ("forward", "backward")


@pytest.mark.parametrize(
    ("families", "capability", "expected"),
    [
        (("sm80",), (8, 0), {"sm80": BOTH}),
        (("sm80",), (9, 0), {"sm80": BOTH}),
        (("sm80", "sm90"), (9, 0), {"sm80": BOTH, "sm90": ("forward",)}),
        (("sm80", "sm90"), (8, 9), {"sm80": BOTH}),
        (("sm80", "sm90"), (12, 0), {"sm80": BOTH}),
    ],
)
def test_own_families(
    families: tuple[str, ...], capability: tuple[int, int], expected: dict[str, tuple[str, ...]]
) -> None:
    build = {
        "compiled": True,
        "compiled_error": None,
        "head_dims": {family: [128] for family in families},
        "backward_head_dims": {"sm80": [128], "sm90": []},
    }
    found = peers.own_families(build, capability)
    assert found == expected
    for implementation in peers.own_implementations(found):
        assert schema.OURS.fullmatch(implementation.name)


def test_own_families_without_kernels() -> None:
    nothing: dict[str, list[int]] = {}
    broken = {"compiled": False, "compiled_error": "broken library", "head_dims": nothing}
    with pytest.raises(RuntimeError, match="not installed: broken library"):
        peers.own_families(broken, (9, 0))
    built = {"sm90": [128]}
    hopper = {"compiled": True, "compiled_error": None, "head_dims": built, "backward_head_dims": built}
    with pytest.raises(RuntimeError, match=r"\['sm90'\], the GPU is sm_"):
        peers.own_families(hopper, (8, 0))


def test_every_implementation_has_a_known_name() -> None:
    for implementation in peers.cuda_implementations({"sm80": BOTH}):
        assert schema.OURS.fullmatch(implementation.name) or schema.PEERS.fullmatch(implementation.name)
        assert implementation.name in figures.LABELS
        assert implementation.name in figures.COLORS


# --- measuring ------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> measure.Config:
    # The assumed rate is a CPU's, so that the plan for these shapes is what it would be for real ones on a GPU.
    return measure.Config(
        **{"dtype": "fp32", "device": CPU, "rounds": 2, "max_calls": 2, "assumed_tflops": 0.01, **changes}
    )


def measured(implementations: list[peers.Implementation], **changes: Any) -> list[dict[str, Any]]:
    settings = config(**changes)
    run = measure.ShapeRun(shapes.SHAPES["ragged-tiny"], implementations, settings, measure.Matmul(settings))
    steps = list(run.run())
    assert len(steps) <= len(run)
    return run.rows


def reference() -> peers.Implementation:
    return peers.cpu_implementations()[0]


def broken(error: Exception) -> peers.Implementation:
    def build(source: packing.Source) -> packing.Prepared:
        raise error

    return peers.Implementation("broken", build)


def test_rows_of_a_measured_shape() -> None:
    shape = shapes.SHAPES["ragged-tiny"]
    rows = measured([reference()])
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert (row["n"], row["p"], row["r"]) == (3, 70, round((33 + 1 + 90) / 3))
        assert row["tflops"] == pytest.approx(shape.flops(row["direction"]) / row["ms"] / 1e9, rel=1e-3)
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["matmul_tflops"] > 0
        assert row["oom"] is False
        assert row["samples"] >= 2


@pytest.mark.parametrize(
    ("error", "key", "value"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB"), "oom", True),
        (RuntimeError("cudnn: out of memory"), "oom", True),
        (RuntimeError("No available kernel.\nAborting."), "error", "RuntimeError: No available kernel."),
    ],
)
def test_a_failure_is_a_row(error: Exception, key: str, value: object) -> None:
    rows = measured([reference(), broken(error)])
    assert all(row["ms"] > 0 for row in rows[:2])
    assert [row["impl"] for row in rows[2:]] == ["broken", "broken"]
    for row in rows[2:]:
        assert row[key] == value
        assert row["ms"] is None
        assert row["tflops"] is None


def test_an_implementation_that_computes_something_else_is_refused() -> None:
    def build(source: packing.Source) -> packing.Prepared:
        prepared = reference().build(source)
        right = prepared.run
        prepared.run = lambda: 1.1 * right()
        return prepared

    rows = measured([reference(), peers.Implementation("louder", build)])
    assert rows[0]["rel_diff"] == 0
    assert "output differs by 0.1" in rows[2]["error"]
    assert rows[2]["ms"] is None


def test_slow_peers_get_fewer_rounds_or_none() -> None:
    shape, slow = (
        shapes.SHAPES["16x64Kx2K"],
        peers.Implementation("slow", reference().build, pairs=Shape.replicated_pairs),
    )
    seconds = measure.seconds_per_pass(slow, shape, config(assumed_tflops=300.0))
    assert seconds == pytest.approx(3.5 * 4 * 32 * 128 * shape.replicated_pairs() / 300e12)
    assert measure.planned_rounds(slow, shape, config(assumed_tflops=300.0, limit_s=2.1 * seconds)) == 1
    assert measure.planned_rounds(slow, shape, config(assumed_tflops=300.0, limit_s=1.9 * seconds)) == 0
    assert measure.planned_rounds(reference(), shape, config(assumed_tflops=1e6)) == 2
    rows = measured([slow], limit_s=1e-9)
    assert "s a pass at the assumed rate" in rows[0]["skipped"]


def test_nothing_is_started_when_the_time_is_over() -> None:
    rows = measured([reference()], deadline=0.0)
    assert all(row["skipped"] == "the time given was used up" and row["ms"] is None for row in rows)


def test_one_direction_alone() -> None:
    assert [row["direction"] for row in measured([reference()], directions=("forward",))] == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["8x1Kx256", "8x2KxU(32,512)"])
def test_peers_on_the_gpu(name: str) -> None:
    """All but FlexAttention, whose compilation takes longer than all of these; cuDNN may be missing."""
    found = [one for one in peers.cuda_implementations({"sm80": BOTH}) if one.name != "flex_packed"]
    settings = measure.Config(rounds=1, target_ms=1.0)
    run = measure.ShapeRun(shapes.SHAPES[name], found, settings, measure.Matmul(settings))
    list(run.run())
    for row in run.rows:
        if row["impl"] != "cudnn_replicated":
            assert row["ms"], row
            assert row["peak_gib"] > 0
            assert schema.problems_of_row(row, row["impl"]) == []
    assert any(row["impl"] == "fa2_gathered" for row in run.rows)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_whole_command_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    out = tmp_path / "results" / "trial.json"
    arguments = ["--device", "cpu", "--shape", "ragged-tiny", "--impls", "dualkv", "replicated", "--rounds", "1"]
    assert bench_kernel.main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {row["impl"] for row in result["rows"]} == {"dualkv_reference", "math_replicated"}
    assert result["header"]["matmul_tflops"] > 0
    assert set(schema.HEADER_TYPES) <= set(result["header"])
    assert "ragged-tiny" in out.with_suffix(".md").read_text()
    assert str(out) in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown impl 'dualkv_reference'"):
        schema.validate(result)


def test_list_and_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernel.main(["--list"]) == 0
    assert "28x16Kx2K" in capsys.readouterr().out
    for arguments in (["--shape", "nothing"], ["--rounds", "0"], ["--preset", "nothing"]):
        with pytest.raises(SystemExit):
            bench_kernel.main(arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernel.main(["--preset", "quick"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("head", "status", "commit", "is_clean", "expected"),
    [
        ("a" * 40, "", None, False, ("a" * 40, False)),
        ("a" * 40, " M setup.py", "b" * 40, True, ("a" * 40, True)),
        ("a" * 40, None, None, True, ("a" * 40, True)),
        (None, None, "b" * 40, True, ("b" * 40, False)),
        (None, None, "b" * 40, False, ("b" * 40, True)),
        (None, None, None, True, ("unknown", True)),
    ],
)
def test_commit_and_dirtiness(
    monkeypatch: pytest.MonkeyPatch,
    head: str | None,
    status: str | None,
    commit: str | None,
    is_clean: bool,
    expected: tuple[str, bool],
) -> None:
    answers = {"rev-parse HEAD": head, "rev-parse --show-toplevel": str(ROOT)}
    monkeypatch.setattr(command, "git", lambda *words: answers.get(" ".join(words), status))
    assert command.tree_state(commit, is_clean) == expected


def test_a_copy_inside_another_repository_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "git", lambda *words: str(ROOT.parent) if "--show-toplevel" in words else "a" * 40)
    assert command.tree_state(None, False) == ("unknown", True)
