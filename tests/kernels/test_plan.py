# SPDX-License-Identifier: BSD-3-Clause
"""The policy, compiled for the host: which kernels calls run on each card, and every threshold of the table.

plans.txt has the plans of the shapes that are measured, and those at each threshold. It is made by

    PYTHONPATH=tests/helpers:benchmarks:. python tests/kernels/test_plan.py
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from geometry import HERE, INCLUDE, load_shim
from shapes import TREES

from flash_attn_dualkv import SharedPromptLayout, explain_plan, kernels
from flash_attn_dualkv.plan import Plan

GOLDEN = Path(__file__).with_name("plans.txt")
CARDS = ("h200", "h100")
OWN_WORDS = re.compile(r"^[\w .'\"()\[\]-]+: expected .+, got .*", re.DOTALL)
JUNK: list[Any] = [
    None, True, 0, -1, 0.5, 2**70, float("nan"), 1j, "", "no", b"ab", [], [1], {}, (1, 2), torch.tensor(3),
]  # fmt: skip
Lines = list[tuple[str, str, str]]


class Problem(ctypes.Structure):
    """Mirror of the shim's Problem; 0 in a field of the card is that of the row."""

    CALL = "rows key_rows nodes mean_keys heads kv_heads head_dim head_dim_v window softcap deterministic portable"
    CARD = "capability num_sms shared_bytes gigabytes_per_s"
    _fields_ = [(name, ctypes.c_int64) for name in f"{CALL} {CARD}".split()]


class Shape(NamedTuple):
    """What a call asks for; 28 x 4K x 2K unless said."""

    rows: int = 61_440
    nodes: int = 29
    mean_keys: int = 4984
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0  # 0: as head_dim
    window: int = -1
    softcap: int = 0
    deterministic: int = 0
    portable: int = 0

    def problem(self, **card: int) -> Problem:
        fields = self._asdict() | {"key_rows": self.rows, "head_dim_v": self.head_dim_v or self.head_dim}
        return Problem(**fields, **card)

    def __str__(self) -> str:
        dims = f"d = {self.head_dim}" + (f" ({self.head_dim_v})" if self.head_dim_v else "")
        text = f"{self.heads} / {self.kv_heads} heads, {dims}, {self.rows} rows, {self.nodes} nodes"
        text += f", {self.mean_keys} keys"
        return text + (f", window {self.window}" if self.window >= 0 else "") + (", softcap" if self.softcap else "")


def read(function: Callable[..., int], *arguments: Any) -> str:
    text = ctypes.create_string_buffer(1 << 16)
    assert function(*arguments, text, len(text)) >= 0
    return text.value.decode()


def lines_of(shape: Shape, gpu: str, **card: int) -> Lines:
    """What the library's explain_plan() returns; ValueError with its words."""
    text = read(load_shim("plan").explain_call, gpu.encode(), ctypes.byref(shape.problem(**card)))
    if text.startswith("!"):
        raise ValueError(text[1:])
    return [(name, value, why) for name, value, why in (line.split("\t") for line in text.splitlines())]


def plan(shape: Shape, gpu: str, **card: int) -> Plan:
    return Plan.of(lines_of(shape, gpu, **card))


def brief(made: Plan) -> str:
    """One line: the family, tiles and heads in one of each kernel, and how dQ is made."""
    kernels = {"forward": made.forward, "backward": made.backward} | ({"dq": made.dq} if made.dq else {})
    tiles = [f"{name} {one.block_m} x {one.block_n} of {one.heads}" for name, one in kernels.items()]
    tiles += [f"{choice.value} steps" for choice in made.choices if choice[:2] == ("steps", "all")]
    return "; ".join([made.family, *tiles, f"dQ {made.dq_sums}"])


# Shapes


def tree(lengths: Sequence[int], parents: Sequence[int]) -> dict[str, int]:
    layout = SharedPromptLayout.from_tree(lengths, parents)
    return {"rows": layout.num_tokens, "nodes": len(lengths), "mean_keys": layout.mean_keys}


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """Lengths at equal distances."""
    return [shortest + (longest - shortest) * index // max(count - 1, 1) for index in range(count)]


def prompts(groups: int, samples: int, prompt: int, shortest: int, longest: int | None = None) -> dict[str, int]:
    """`groups` prompts with `samples` responses each, of one length or from the shortest to the longest."""
    group = [prompt, *spread(samples, shortest, longest or shortest)]
    parents = [-1, *[0] * samples]
    above = [one + len(group) * index if one >= 0 else -1 for index in range(groups) for one in parents]
    return tree(group * groups, above)


def sequences(count: int, shortest: int, longest: int | None = None) -> dict[str, int]:
    return tree(spread(count, shortest, longest or shortest), [-1] * count)


def named_tree(name: str) -> dict[str, int]:
    return tree(*zip(*TREES[name]))


def shapes() -> dict[str, Shape]:
    """Those of the pages of results: prompts, responses that dominate, trees, masks and head dims."""
    long = sequences(8, 8192)
    gpt_oss = long | {"heads": 64, "kv_heads": 8, "head_dim": 64}
    gemma2 = long | {"heads": 16, "kv_heads": 8, "head_dim": 256, "softcap": 1}
    made = {
        "28 x 16K x 2K": prompts(1, 28, 16384, 2048),
        "28 x 4K x 2K": prompts(1, 28, 4096, 2048),
        "16 x 8K x U": prompts(1, 16, 8192, 131, 2048),
        "32 x 5059 x U": prompts(1, 32, 5059, 131, 2048),
        "32 x 8K x U(32, 256)": prompts(1, 32, 8192, 32, 256),
        "4 x 8 x 200 x U(4K, 16K)": prompts(4, 8, 200, 4096, 16384),
        "8 x 1 x 2K x 2K": prompts(8, 1, 2048, 2048),
        "16 x 8 x 256 x U": prompts(16, 8, 256, 131, 2048),
        "1 x 8 x 1024 x U": prompts(1, 8, 1024, 131, 2048),
        "16 x 8 x 128 x U(64, 512)": prompts(16, 8, 128, 64, 512),
        "32 x 4 x 64 x U(8, 64)": prompts(32, 4, 64, 8, 64),
        **{f"tree {name}": named_tree(name) for name in ("balanced_d4", "branched", "comb", "agentic", "agentic_wide")},
        "causal 16K": sequences(1, 16384),
        "causal 128 x U": sequences(128, 387, 2304),
        "28 x 4K x 2K, H_k = 1": prompts(1, 28, 4096, 2048) | {"kv_heads": 1},
        "16 x 8 x 256 x U, H_k = 1": prompts(16, 8, 256, 131, 2048) | {"kv_heads": 1},
        "28 x 4K x 2K, d = 64": prompts(1, 28, 4096, 2048) | {"head_dim": 64},
        "16 x 8 x 128 x U(64, 512), d = 64": prompts(16, 8, 128, 64, 512) | {"head_dim": 64},
        "28 x 4K x 2K, d = 96": prompts(1, 28, 4096, 2048) | {"head_dim": 96},
        "28 x 4K x 2K, window 1024": prompts(1, 28, 4096, 2048) | {"window": 1024},
        "gpt-oss, full": gpt_oss,
        "gpt-oss, window 128": gpt_oss | {"window": 128},
        "Gemma 3, window 1024": long | {"heads": 32, "kv_heads": 16, "window": 1024},
        "Gemma 2, full": gemma2,
        "Gemma 2, window 4096": gemma2 | {"window": 4096},
        "softcap, d = 128": long | {"softcap": 1},
        "MLA": long | {"heads": 16, "kv_heads": 16, "head_dim": 192, "head_dim_v": 128},
        "MLA, window 512": long | {"heads": 16, "kv_heads": 16, "head_dim": 192, "head_dim_v": 128, "window": 512},
        "d = 192": long | {"head_dim": 192},
        "d = 256": long | {"head_dim": 256},
        "d = 512": long | {"heads": 16, "kv_heads": 8, "head_dim": 512},
    }
    return {name: Shape(**fields) for name, fields in made.items()}


# Thresholds


class Threshold(NamedTuple):
    gpu: str
    field: str
    head_dim: int
    head_dim_v: int
    value: int

    def beside(self) -> Iterator[tuple[int, Shape]]:
        """Calls at the threshold, one below and one above, that nothing else decides. A field needs its case here."""
        shape = Shape(head_dim=self.head_dim, head_dim_v=self.head_dim_v, mean_keys=100_000)
        for value in self.values():
            yield value, shape._replace(**self.fields(value))

    def values(self) -> Iterator[int]:
        if self.field == "narrow_forward_percent":  # of columns, which windows decide
            is_narrow = [plan(self.window(one), self.gpu).forward.block_n < 128 for one in range(600)]
            for window in range(1, len(is_narrow)):
                if is_narrow[window] != is_narrow[window - 1]:
                    yield from (window - 1, window)
        else:
            yield from range(self.value - 1, self.value + 2)

    def window(self, window: int) -> Shape:
        return Shape(head_dim=self.head_dim, head_dim_v=self.head_dim_v, window=window)

    def fields(self, value: int) -> dict[str, int]:
        return {
            "dq_rows": {"rows": value, "mean_keys": 1},
            "pack_window": {"window": value},
            "narrow_forward_percent": {"window": value},
            "dq_window": {"window": value},
            "dq_keys": {"mean_keys": value},
            "dq_keys_ordered": {"mean_keys": value, "deterministic": 1, "nodes": 1},
            "dq_node_ordered": {"nodes": 1000, "rows": 1000 * value, "deterministic": 1},
            "every_step_node": {"nodes": 1000, "rows": 1000 * value},
            "narrow_dq_keys": {"mean_keys": value, "window": 1024, "deterministic": 1},
            "narrow_dq_window": {"window": value, "deterministic": 1},
        }[self.field]


def thresholds() -> list[Threshold]:
    rows = (line.split("\t") for line in read(load_shim("plan").read_thresholds).splitlines())
    return [Threshold(gpu, field, *map(int, numbers)) for gpu, field, *numbers in rows]


# The golden file

# One of each.
REASONS = (
    ("16 x 8 x 128 x U(64, 512)", "h200", 0),
    ("28 x 4K x 2K", "h100", 1),
    ("32 x 5059 x U", "h100", 1),
    ("28 x 4K x 2K, window 1024", "h200", 1),
    ("MLA, window 512", "h200", 0),
    ("MLA", "h200", 0),
    ("MLA", "h200", 1),
    ("Gemma 2, window 4096", "h200", 0),
)


def golden() -> str:
    text = ["Which kernels run: the plans of shapes. Made by tests/kernels/test_plan.py.", ""]
    alike: dict[tuple[str, ...], list[str]] = {}  # shapes of the same plans
    for name, shape in shapes().items():
        modes: dict[str, list[str]] = {}  # of each plan
        for deterministic, gpu in itertools.product((0, 1), CARDS):
            mode = f"{gpu} deterministic" if deterministic else gpu
            modes.setdefault(brief(plan(shape._replace(deterministic=deterministic), gpu)), []).append(mode)
        plans = tuple(f"  {', '.join(those)}: {one}" for one, those in modes.items())
        alike.setdefault(plans, []).append(f"{name}: {shape}")
    text += [line for plans, names in alike.items() for line in (*names, *plans)]
    text += ["", "On an A100", ""]
    for name in ("28 x 4K x 2K", "gpt-oss, window 128", "MLA", "Gemma 2, full"):
        text.append(f"{name:20}  {brief(plan(shapes()[name], 'a100'))}")
    text += ["", "At every threshold", ""]
    borders: dict[str, list[str]] = {}  # cards of each line
    for one in thresholds():
        values: dict[str, list[int]] = {}  # of each plan; of a share of columns a plan comes again
        for value, shape in one.beside():
            values.setdefault(brief(plan(shape, one.gpu)), []).append(value)
        sides = {made: made.split("; ") for made in values}
        line = f"({one.head_dim}, {one.head_dim_v}) {one.field} = {one.value}"
        for made, those in values.items():
            own = [part for part in sides[made] if not all(part in side for side in sides.values())]
            line += f"; {', '.join(map(str, those))}: {', '.join(own)}"
        borders.setdefault(line, []).append(one.gpu)
    text += [f"{', '.join(cards)} {line}" for line, cards in borders.items()]
    text += ["", "Why dQ is made so", ""]
    for name, gpu, deterministic in REASONS:
        made = plan(shapes()[name]._replace(deterministic=deterministic), gpu)
        mode = f"{gpu} deterministic" if deterministic else gpu
        text += [f"{name}, {mode}: {one.why}" for one in made.choices if one.name == "dq"]
    text += ["", "All of gpt-oss, window 128 on h100", "", str(plan(shapes()["gpt-oss, window 128"], "h100"))]
    return "\n".join(text) + "\n"


def test_plans_are_those_of_the_file() -> None:
    assert golden() == GOLDEN.read_text(), "if it is meant to change, make the file anew and read what became of it"


def test_thresholds_decide() -> None:
    """The plan changes once between one below and one above; a threshold that changes nothing should go."""
    for one in thresholds():
        plans = [brief(plan(shape, one.gpu)) for _, shape in one.beside()]
        if one.field == "narrow_forward_percent":
            assert plans and all(before != behind for before, behind in zip(plans[::2], plans[1::2])), one
        else:
            below, at, above = plans
            assert (below == at) != (at == above), one


# Cards


def test_cards_between_the_rows() -> None:
    """The nearest bandwidth for each multiprocessor decides."""
    few = Shape(mean_keys=500)
    for name, num_sms, gigabytes_per_s, row in (
        ("H200", 132, 4917, "h200"),
        ("GH200, HBM3e", 132, 4900, "h200"),
        ("H20", 78, 4000, "h200"),
        ("H100 SXM", 132, 3352, "h100"),
        ("H100 NVL", 132, 3938, "h100"),
        ("GH200, HBM3", 132, 4000, "h100"),
        ("H100 PCIe", 114, 2039, "h100"),
        ("one below half-way", 132, 4134, "h100"),
        ("one above half-way", 132, 4135, "h200"),
    ):
        made = plan(few, "h200", num_sms=num_sms, gigabytes_per_s=gigabytes_per_s)
        assert made.gpu == row, name
        assert made.dq_sums == ("own kernel" if row == "h100" else "summed in any order"), name


def test_other_cards_run_the_portable_kernels() -> None:
    hopper, portable = plan(Shape(), "h200"), plan(Shape(portable=1), "h200")
    assert (hopper.family, portable.family) == ("sm90", "sm80")
    for capability in (8, 10, 12):
        made = plan(Shape(), "a100", capability=capability)
        assert (made.gpu, made.family, made.forward) == ("a100", "sm80", portable.forward)


def nodes_of_a_tile(**changes: int) -> tuple[str, str]:
    """The most nodes that share a query tile of the forward, and why."""
    made = plan(shapes()["28 x 4K x 2K"]._replace(**changes), "h200")
    return next((one.value, one.why) for one in made.choices if one.name == "forward nodes")


def test_siblings_share_tiles_in_whole_packs() -> None:
    """On 132 multiprocessors, with 8, 32 and 4 packs."""
    assert nodes_of_a_tile() == (
        "3",
        "the last slices of siblings join where a pack of heads has as many tiles: 33 of 48",
    )
    assert nodes_of_a_tile(kv_heads=32)[1].endswith(" 9 of 192")
    assert nodes_of_a_tile(heads=64, kv_heads=4)[1].endswith(" 66 of 12")
    assert nodes_of_a_tile(heads=28, kv_heads=4)[0] == "1"
    assert nodes_of_a_tile(head_dim=256)[0] == nodes_of_a_tile(portable=1)[0] == "1"


def test_small_blocks_have_compact_tiles() -> None:
    full, compact = (plan(Shape(head_dim=256), "a100", shared_bytes=kilobytes << 10) for kilobytes in (163, 99))
    assert compact.backward.block_m < full.backward.block_m
    with pytest.raises(ValueError, match="needs at least .* bytes of shared memory a block"):
        plan(Shape(head_dim=256), "a100", shared_bytes=20 << 10)


@pytest.mark.parametrize(
    ("shape", "gpu", "words"),
    [
        (Shape(head_dim=520), "h200", "head dim 520 is larger than every one in this build .*256.*portable kernels"),
        (Shape(head_dim=264), "a100", "head dim 264 .*64, 96, 128, 192, 256.* above 256 there are kernels for Hopper"),
        (Shape(head_dim=8, head_dim_v=512), "a100", r"head dim 8 \(v: 512\)"),
    ],
)
def test_head_dims_that_no_kernel_holds(shape: Shape, gpu: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(shape, gpu)


def test_unknown_cards_are_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="expected one of h200, h100, a100, got h300"):
        plan(Shape(), "h300")


def test_the_backward_packs_as_many_heads_as_fit() -> None:
    for heads in range(1, 129):
        fitting = max(pack for pack in (1, 2, 4, 8, 16) if heads % pack == 0)
        shape = Shape(heads=heads, kv_heads=1)
        assert plan(shape, "h200").backward.heads == fitting
        assert plan(shape._replace(window=4096), "h200").backward.heads == 1
        assert plan(shape._replace(portable=1), "h200").backward.heads == 1


def test_all_kernels_of_the_instances_are_planned() -> None:
    """The shim's list of head dims is that of csrc/instances."""
    names = {path.stem for path in (INCLUDE / "instances").glob("*.cu")}
    source = (HERE / "plan_shim.cpp").read_text()
    for direction in ("forward", "backward", "backward_dq"):
        for family in ("sm80", "sm90"):
            built = (name.rpartition("_d") for name in names if name.rpartition("_d")[0] == f"{family}_{direction}")
            dims = {tuple(dims.split("v")) for _, _, dims in built}
            assert dims
            assert all(f"add_{family}<{', '.join(one)}>()" in source for one in dims)
            assert source.count(f"add_{family}<") == len(dims)


# Decoding


def test_splits_are_of_1k_keys_or_of_a_32nd_of_the_most_of_a_request() -> None:
    """Splits of latents are 2K, as their states are wide."""
    read_split_keys = load_shim("plan").read_split_keys
    read_split_keys.restype, read_split_keys.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    for most, keys in ((16, 1024), (2048 * 16, 1024), (2049 * 16, 1025), (1 << 25, 1 << 20)):
        assert read_split_keys(most, 128, 128) == keys
        assert read_split_keys(most, 576, 512) == max(keys, 2048)


def test_kernels_of_decoding_are_those_of_the_head_dim() -> None:
    """Hopper's where there is one; heads are never padded."""
    portable, hopper, none = 0, 1, -1
    for head_dim, capability, wants_portable, family in (
        (64, 9, False, hopper), (128, 9, False, hopper), (128, 9, True, portable), (128, 8, False, portable),
        (256, 9, False, portable), (96, 9, False, none), (512, 8, False, none), (576, 9, False, none),
    ):  # fmt: skip
        assert load_shim("plan").read_decode_family(head_dim, head_dim, capability, 227, wants_portable) == family
    for dims, kilobytes, family in (((576, 512), 163, portable), ((576, 512), 99, none), ((576, 448), 163, none)):
        assert load_shim("plan").read_decode_family(*dims, 8, kilobytes, False) == family


# explain_plan


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim in the place of the compiled module."""

    def call(*arguments: Any) -> str:
        heads, kv_heads, head_dim, head_dim_v, rows, nodes, options, deterministic, _, gpu = arguments
        sizes = (rows, nodes, options.mean_keys, heads, kv_heads, head_dim, head_dim_v, options.window_left)
        try:
            shape = Shape(*sizes, options.softcap > 0, deterministic)
            return "\n".join(map("\t".join, lines_of(shape, gpu or "h200")))
        except ValueError as error:
            raise ValueError(f"gpu: {error}") from None

    monkeypatch.setattr(kernels, "load", lambda: (SimpleNamespace(explain_plan=call), None))


VALID: dict[str, Any] = dict(
    num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, rows=4096, nodes=9, mean_keys=300, window_size=(-1, -1),
    softcap=0.0, deterministic=False, gpu="h200", layout=None,
)  # fmt: skip


def test_explain_plan(extension: None) -> None:
    made = explain_plan(**VALID)
    assert (made.gpu, made.family, made.dq_sums) == ("h200", "sm90", "own kernel")
    assert made.backward.launch == "dualkv_sm90_backward" and made.backward.heads == 4
    assert made.dq is not None and made.dq.launch == "dualkv_sm90_backward_dq_narrow"
    printed = str(made)
    assert all(f"{name} " in printed and why in printed for name, _, why in made.choices)
    assert "mean keys 300 <= 320" in printed and len(printed.splitlines()) == len(made.choices)
    in_order = explain_plan(**VALID | {"mean_keys": 4000, "deterministic": True})
    assert in_order.dq is None and in_order.backward.launch == "dualkv_sm90_backward_in_order"


def test_defaults_and_layouts(extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mean_keys a call is taken for one of long sequences, as by flash_attn_tree_varlen_func."""
    few = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "gpu": "h200"}
    assert "mean keys 4096 > 320" in str(explain_plan(**few, rows=4096))
    layout = SharedPromptLayout.from_tree([64] * 64, [-1] * 64)
    assert explain_plan(**few, layout=layout) == explain_plan(**few, rows=4096, nodes=64, mean_keys=33)
    assert explain_plan(**few | {"head_dim": 192}, head_dim_v=128, rows=9) != explain_plan(
        **few | {"head_dim": 192}, rows=9
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert explain_plan(**few, rows=4096).dq_sums == "summed in a fixed order"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    few["gpu"] = None
    with pytest.raises(RuntimeError, match="gpu: expected the name of a card"):
        explain_plan(**few, rows=4096)
    monkeypatch.setenv("DUALKV_GPU", "h200")
    assert explain_plan(**few, rows=4096).gpu == "h200"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": None}, "rows: expected"),
        ({"rows": 0}, "rows: expected an int >= 1 and <= 1073741824, got 0"),
        ({"num_kv_heads": 5}, "num_kv_heads: expected a number that divides 32, got 5"),
        ({"head_dim": 100}, "head_dim: expected a multiple of 8, got 100"),
        ({"head_dim_v": 12}, "head_dim_v: expected a multiple of 8, got 12"),
        ({"layout": SharedPromptLayout.from_tree([4], [-1])}, "rows: expected None beside layout, got 4096"),
    ],
)
def test_wrong_arguments(extension: None, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        explain_plan(**VALID | changes)


@pytest.mark.parametrize("name", VALID)
def test_garbage(extension: None, name: str) -> None:
    for junk in JUNK:
        try:
            explain_plan(**VALID | {name: junk})
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            if not OWN_WORDS.match(str(error)):
                pytest.fail(f"{type(error).__name__}: {error}")


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", lambda: (None, None))
    with pytest.raises(RuntimeError, match="cannot run on CUDA tensors: it has no kernels"):
        explain_plan(**VALID)


if __name__ == "__main__":
    GOLDEN.write_text(golden())
