"""Every violated precondition is an error that names the argument, what was expected and what was got."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from groups import cumulative
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_dualkv import attention, checks, flash_attn_dualkv_varlen_func, flash_attn_varlen_func, ops
from flash_attn_dualkv import segments as tables

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def shared_arguments(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Arguments:
    """A legal call of flash_attn_dualkv_varlen_func: a context of 5 rows, two sequences."""

    def rows(total: int, heads: int) -> Tensor:
        return torch.zeros(total, heads, 16, dtype=dtype, device=device)

    offsets = cumulative([2, 4], device)
    return {
        "q": rows(6, 4),
        "k_context": rows(5, 2),
        "v_context": rows(5, 2),
        "k_decoded": rows(6, 2),
        "v_decoded": rows(6, 2),
        "cu_seqlens_q": offsets,
        "cu_seqlens_k_decoded": offsets.clone(),
        "max_seqlen_q": 4,
        "context_seqlen": 5,
        "max_seqlen_k_decoded": 4,
    }


def plain_arguments(device: str = "cpu") -> Arguments:
    """A legal call of flash_attn_varlen_func."""
    shared = shared_arguments(device)
    names = {"q": "q", "k": "k_decoded", "v": "v_decoded", "cu_seqlens_q": "cu_seqlens_q"}
    return {name: shared[source] for name, source in names.items()} | {
        "cu_seqlens_k": shared["cu_seqlens_k_decoded"],
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }


def replace_by(name: str, value: Any) -> Change:
    return lambda arguments: {name: value}


def alter(name: str, function: Callable[[Tensor], Any]) -> Change:
    return lambda arguments: {name: function(arguments[name])}


def heads(tensor: Tensor, number: int) -> Tensor:
    return tensor.new_zeros(tensor.shape[0], number, tensor.shape[2])


def head_dim(tensor: Tensor, number: int) -> Tensor:
    return tensor.new_zeros(tensor.shape[0], tensor.shape[1], number)


def all_head_dims(number: int, names: tuple[str, ...]) -> Change:
    return lambda arguments: {name: head_dim(arguments[name], number) for name in names}


def strided_last(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape[:2], 2 * tensor.shape[2])[..., ::2]


def strided(offsets: Tensor) -> Tensor:
    return offsets.repeat_interleave(2)[::2]


def grouped(contexts: Any = (0, 2, 5), owned: Any = (0, 1, 2), dtype: torch.dtype = torch.int32) -> Change:
    """Give the group arguments, from lists or as they are."""

    def tensor(values: Any) -> Any:
        return torch.tensor(values, dtype=dtype) if isinstance(values, tuple) else values

    return lambda arguments: {"cu_seqlens_context": tensor(contexts), "cu_seqs_per_context": tensor(owned)}


MANY_ROWS = (checks.MAX_ROWS, 2, 16)
SHARED_TENSORS = ("q", "k_context", "v_context", "k_decoded", "v_decoded")
PLAIN_TENSORS = ("q", "k", "v")

Row = tuple[str, Change, type[Exception], str, str]


def tensor_rows(names: tuple[str, ...]) -> list[Row]:
    """Errors that every one of the packed tensors can have."""
    rows: list[Row] = []
    for name in names:
        rows += [
            ("not a tensor", replace_by(name, [1.0]), TypeError, name, "list"),
            ("integer dtype", alter(name, Tensor.int), TypeError, name, "torch.int32"),
            ("rank", alter(name, lambda t: t[None]), ValueError, name, "shape (1, "),
            ("strided last dimension", alter(name, strided_last), ValueError, name, "stride 2"),
            ("device", alter(name, lambda t: t.to("meta")), ValueError, name, "meta"),
            ("rows", alter(name, lambda t: t[:1, :1].expand(MANY_ROWS)), ValueError, name, str(checks.MAX_ROWS)),
        ]
    for name in names[1:]:
        rows += [
            ("another dtype", alter(name, Tensor.double), TypeError, name, "torch.float64"),
            ("heads", alter(name, lambda t: heads(t, 3)), ValueError, name, "3"),
            ("no heads", alter(name, lambda t: heads(t, 0)), ValueError, name, "0"),
        ]
    rows += [
        ("no heads", alter("q", lambda t: heads(t, 0)), ValueError, "q", "(6, 0, 16)"),
        ("head_dim above the limit", all_head_dims(264, names), ValueError, "q", "264"),
        ("head_dim not a multiple of 8", all_head_dims(12, names), ValueError, "q", "12"),
        ("head_dim 0", all_head_dims(0, names), ValueError, "q", "0"),
    ]
    return rows


def offset_rows(name: str) -> list[Row]:
    """Errors that a tensor of offsets can have."""
    return [
        ("not a tensor", replace_by(name, [0, 2, 6]), TypeError, name, "list"),
        ("int64", alter(name, Tensor.long), TypeError, name, "torch.int64"),
        ("rank", alter(name, lambda t: t[None]), ValueError, name, "shape (1, 3)"),
        ("no elements", alter(name, lambda t: t[:0]), ValueError, name, "0"),
        ("not contiguous", alter(name, strided), ValueError, name, "stride 2"),
        ("device", alter(name, lambda t: t.to("meta")), ValueError, name, "meta"),
    ]


def length_rows(name: str) -> list[Row]:
    return [
        ("negative", replace_by(name, -1), ValueError, name, "-1"),
        ("bool", replace_by(name, True), TypeError, name, "bool"),
        ("float", replace_by(name, 4.0), TypeError, name, "float"),
        ("tensor", replace_by(name, torch.tensor(4)), TypeError, name, "Tensor"),
    ]


COMMON_ROWS: list[Row] = [
    *offset_rows("cu_seqlens_q"),
    *length_rows("max_seqlen_q"),
    ("zero", replace_by("softmax_scale", 0.0), ValueError, "softmax_scale", "0.0"),
    ("negative", replace_by("softmax_scale", -1.0), ValueError, "softmax_scale", "-1.0"),
    ("infinite", replace_by("softmax_scale", math.inf), ValueError, "softmax_scale", "inf"),
    ("nan", replace_by("softmax_scale", math.nan), ValueError, "softmax_scale", "nan"),
    ("bool", replace_by("softmax_scale", True), TypeError, "softmax_scale", "bool"),
    ("tensor", replace_by("softmax_scale", torch.tensor(0.5)), TypeError, "softmax_scale", "Tensor"),
    ("int", replace_by("causal", 1), TypeError, "causal", "int"),
    ("None", replace_by("deterministic", None), TypeError, "deterministic", "NoneType"),
]

SHARED_ROWS: list[Row] = [
    *tensor_rows(SHARED_TENSORS),
    *COMMON_ROWS,
    ("head_dim", alter("k_context", lambda t: head_dim(t, 8)), ValueError, "k_context", "8"),
    ("head_dim", alter("v_context", lambda t: head_dim(t, 8)), NotImplementedError, "v_context", "8"),
    ("rows", alter("v_context", lambda t: t[1:]), ValueError, "v_context", "4"),
    ("head_dim", alter("k_decoded", lambda t: head_dim(t, 8)), ValueError, "k_decoded", "8"),
    ("head_dim", alter("v_decoded", lambda t: head_dim(t, 8)), NotImplementedError, "v_decoded", "8"),
    ("rows", alter("v_decoded", lambda t: t[1:]), ValueError, "v_decoded", "5"),
    (
        "heads of the other keys",
        lambda arguments: {name: heads(arguments[name], 1) for name in ("k_decoded", "v_decoded")},
        ValueError,
        "k_decoded",
        "1",
    ),
    *offset_rows("cu_seqlens_k_decoded"),
    ("length", alter("cu_seqlens_k_decoded", lambda t: t[:2]), ValueError, "cu_seqlens_k_decoded", "2"),
    *length_rows("context_seqlen"),
    *length_rows("max_seqlen_k_decoded"),
    ("not the rows", replace_by("context_seqlen", 4), ValueError, "context_seqlen", "4"),
    ("alone", grouped(owned=None), ValueError, "cu_seqs_per_context", "None"),
    ("alone", grouped(contexts=None), ValueError, "cu_seqlens_context", "None"),
    ("length", grouped(owned=(0, 2)), ValueError, "cu_seqs_per_context", "2"),
    ("no group", grouped((0,), (0,)), ValueError, "cu_seqlens_context", "0"),
    ("int64", grouped(dtype=torch.int64), TypeError, "cu_seqlens_context", "torch.int64"),
    ("int64", grouped(owned=torch.zeros(3, dtype=torch.int64)), TypeError, "cu_seqs_per_context", "torch.int64"),
    ("not a tensor", grouped(contexts=[0, 5]), TypeError, "cu_seqlens_context", "list"),
    ("not a tensor", grouped(owned=[0, 1, 2]), TypeError, "cu_seqs_per_context", "list"),
    ("str", replace_by("return_lse", "yes"), TypeError, "return_lse", "str"),
]

PLAIN_ROWS: list[Row] = [
    *tensor_rows(PLAIN_TENSORS),
    *COMMON_ROWS,
    ("head_dim", alter("k", lambda t: head_dim(t, 8)), ValueError, "k", "8"),
    ("head_dim", alter("v", lambda t: head_dim(t, 8)), NotImplementedError, "v", "8"),
    ("rows", alter("v", lambda t: t[1:]), ValueError, "v", "5"),
    *offset_rows("cu_seqlens_k"),
    ("length", alter("cu_seqlens_k", lambda t: t[:2]), ValueError, "cu_seqlens_k", "2"),
    *length_rows("max_seqlen_k"),
    ("int", replace_by("return_attn_probs", 1), TypeError, "return_attn_probs", "int"),
    ("used", replace_by("dropout_p", 0.1), NotImplementedError, "dropout_p", "0.1"),
    ("used", replace_by("window_size", (128, 0)), NotImplementedError, "window_size", "(128, 0)"),
    ("an int", replace_by("window_size", 128), TypeError, "window_size", "int"),
    ("only causal", replace_by("window_size", (-1, 0)), NotImplementedError, "window_size", "(-1, 0)"),
    ("used", replace_by("softcap", 30.0), NotImplementedError, "softcap", "30.0"),
    ("used", replace_by("alibi_slopes", torch.ones(4)), NotImplementedError, "alibi_slopes", "Tensor"),
    ("used", replace_by("block_table", torch.ones(1, 1)), NotImplementedError, "block_table", "Tensor"),
]


def parametrize(rows: list[Row]) -> pytest.MarkDecorator:
    parameters = [pytest.param(*row[1:], id=f"{row[3]}: {row[0]}") for row in rows]
    return pytest.mark.parametrize(("change", "error", "name", "got"), parameters)


def check_raises(function: Any, arguments: Arguments, error: type[Exception], name: str, got: str) -> None:
    with pytest.raises(error) as caught:
        function(**arguments)
    head, _, tail = str(caught.value).partition(", got ")
    assert head.startswith(f"{name}: expected ")
    assert got in tail


@parametrize(SHARED_ROWS)
def test_shared_context_function(
    change: Change, error: type[Exception], name: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = shared_arguments()
    flash_attn_dualkv_varlen_func(**arguments)
    monkeypatch.setattr(attention, "ops", None)  # nothing may be launched
    check_raises(flash_attn_dualkv_varlen_func, arguments | change(arguments), error, name, got)


@parametrize(PLAIN_ROWS)
def test_context_free_function(
    change: Change, error: type[Exception], name: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = plain_arguments()
    flash_attn_varlen_func(**arguments)
    monkeypatch.setattr(attention, "ops", None)
    check_raises(flash_attn_varlen_func, arguments | change(arguments), error, name, got)


@pytest.mark.parametrize("which", ["k", "v"])
def test_all_keys_for_those_behind_the_context(which: str) -> None:
    """Offsets may end early, so `k` for `k[prompt:]` would pass for padding."""
    arguments = shared_arguments()
    packed = torch.cat([arguments[f"{which}_context"], arguments[f"{which}_decoded"]])
    prompt = len(arguments[f"{which}_context"])
    arguments |= {f"{which}_context": packed[:prompt], f"{which}_decoded": packed[prompt:]}
    flash_attn_dualkv_varlen_func(**arguments)
    behind = {"k_decoded": packed, "v_decoded": arguments["v_decoded"].new_zeros(packed.shape)}
    wrong = {**behind, f"{which}_decoded": packed}
    if which == "v":
        wrong["k_decoded"] = packed.clone()
    with pytest.raises(ValueError, match=rf"^{which}_decoded: expected the rows behind the context, such as k\["):
        flash_attn_dualkv_varlen_func(**{**arguments, **wrong})


LEGAL: list[tuple[str, Change]] = [
    ("numpy integers", lambda arguments: {"max_seqlen_q": torch.tensor(4).numpy()[()]}),
    ("lengths that are too short", lambda arguments: {"max_seqlen_q": 0, "max_seqlen_k_decoded": 1}),
    ("an int as the scale", replace_by("softmax_scale", 1)),
    ("one KV head", lambda arguments: {name: heads(arguments[name], 1) for name in SHARED_TENSORS[1:]}),
    ("groups", grouped()),
    ("no sequences", lambda arguments: {name: cumulative([]) for name in ("cu_seqlens_q", "cu_seqlens_k_decoded")}),
    ("rows that no sequence owns", replace_by("cu_seqlens_q", torch.tensor([1, 2, 5], dtype=torch.int32))),
]


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in LEGAL])
def test_legal_arguments(change: Change) -> None:
    arguments = shared_arguments()
    arguments |= change(arguments)
    assert flash_attn_dualkv_varlen_func(**arguments).shape == arguments["q"].shape


@pytest.mark.parametrize("dtype", checks.CPU_DTYPES, ids=str)
def test_cpu_dtypes(dtype: torch.dtype) -> None:
    assert flash_attn_dualkv_varlen_func(**shared_arguments(dtype=dtype)).dtype == dtype


def test_window_that_says_causal_is_accepted() -> None:
    arguments = plain_arguments()
    expected = flash_attn_varlen_func(**arguments, causal=True)
    assert flash_attn_varlen_func(**arguments, causal=True, window_size=(-1, 0)).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8], ids=str)
def test_cuda_takes_16_bit_tensors_only(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        check_raises(flash_attn_dualkv_varlen_func, shared_arguments("cuda:0", dtype), TypeError, "q", str(dtype))
        arguments = shared_arguments("cuda:0", torch.bfloat16)
        assert flash_attn_dualkv_varlen_func(**arguments).device == torch.device("cuda:0")


@pytest.mark.parametrize("kind", ["ROCm", "mps", "xpu"])
def test_other_devices_are_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0" if kind == "ROCm" else None)
    with FakeTensorMode():
        arguments = shared_arguments("cuda:0" if kind == "ROCm" else kind, torch.bfloat16)
        check_raises(flash_attn_dualkv_varlen_func, arguments, ValueError, "q", kind)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


VALUE_ROWS: list[Row] = [
    ("negative", replace_by("cu_seqlens_q", offsets(-1, 2, 6)), ValueError, "cu_seqlens_q", "-1"),
    ("decreasing", replace_by("cu_seqlens_q", offsets(0, 4, 3)), ValueError, "cu_seqlens_q", "3 after 4 at index 2"),
    ("past the end", replace_by("cu_seqlens_q", offsets(0, 2, 7)), ValueError, "cu_seqlens_q", "7"),
    ("negative", replace_by("cu_seqlens_k_decoded", offsets(-2, 2, 6)), ValueError, "cu_seqlens_k_decoded", "-2"),
    (
        "decreasing",
        replace_by("cu_seqlens_k_decoded", offsets(0, 4, 3)),
        ValueError,
        "cu_seqlens_k_decoded",
        "3 after 4",
    ),
    ("past the end", replace_by("cu_seqlens_k_decoded", offsets(0, 2, 9)), ValueError, "cu_seqlens_k_decoded", "9"),
    ("negative", grouped((-1, 2, 5)), ValueError, "cu_seqlens_context", "-1"),
    ("decreasing", grouped((0, 4, 3)), ValueError, "cu_seqlens_context", "3 after 4"),
    ("past the end", grouped((0, 2, 6)), ValueError, "cu_seqlens_context", "6"),
    ("not from 0", grouped(owned=(1, 1, 2)), ValueError, "cu_seqs_per_context", "1"),
    ("not to N", grouped(owned=(0, 1, 1)), ValueError, "cu_seqs_per_context", "1"),
    ("beyond N", grouped(owned=(0, 1, 3)), ValueError, "cu_seqs_per_context", "3"),
    ("decreasing", grouped(owned=(0, 3, 2)), ValueError, "cu_seqs_per_context", "2 after 3"),
]


@parametrize(VALUE_ROWS)
def test_values_of_offsets(
    change: Change, error: type[Exception], name: str, got: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALKV_DEBUG", "1" if device == "cuda" else "0")  # on the CPU they are always checked
    arguments = shared_arguments(device, torch.bfloat16)
    changed = {key: value.to(device) for key, value in change(arguments).items()}
    with pytest.raises(error) as caught:
        flash_attn_dualkv_varlen_func(**arguments | changed)
    head, _, tail = str(caught.value).partition(", got ")
    assert head.startswith(name)
    assert got in tail


TABLE_ROWS: list[tuple[str, str, tuple[int, int, int], str, str]] = [
    ("row of q", "segments", (1, 1, 5), "cu_seqlens_q", "7"),
    ("negative row", "segments", (1, 0, -1), "cu_seqlens_q", "-1"),
    ("decoded row", "segments", (0, 6, 9), "cu_seqlens_k_decoded", "9"),
    ("unknown group", "segments", (0, 7, 2), "segments", "2 in row 0"),
    ("another group", "segments", (0, 7, 1), "groups", "[1, 2)"),
    ("another context", "segments", (0, 4, 1), "segments", "(0, 1)"),
    ("rows of q twice", "segments", (1, 0, 1), "segments", "row 1 twice"),
    ("decoded rows twice", "segments", (1, 5, 1), "segments", "row 1 twice"),
    ("context row", "groups", (1, 1, 4), "cu_seqlens_context", "6"),
    ("segments beyond the table", "groups", (1, 3, 3), "groups", "[1, 3)"),
]


@pytest.mark.parametrize(("table", "change", "name", "got"), [pytest.param(*row[1:], id=row[0]) for row in TABLE_ROWS])
def test_tables_given_to_the_operator(table: str, change: tuple[int, int, int], name: str, got: str) -> None:
    arguments = shared_arguments()
    offsets_q = arguments["cu_seqlens_q"]
    segments, groups = ops.segment_tables(offsets_q, offsets_q, offsets(0, 2, 5), offsets(0, 1, 2), 5)
    tables.check_tables(segments, groups, 6, 5, 6)
    row, column, value = change
    {"segments": segments, "groups": groups}[table][row, column] = value
    with pytest.raises(ValueError, match=f"^{name}") as caught:
        ops.forward(*(arguments[one] for one in SHARED_TENSORS), segments, groups, 0.5, True)
    assert got in str(caught.value).partition(", got ")[2]
