# SPDX-License-Identifier: BSD-3-Clause
"""Every violated precondition is an error that names the argument; whatever is unusual but legal is computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from groups import cumulative
from legal_calls import (
    PLAIN_TENSORS,
    SHARED_TENSORS,
    Arguments,
    Change,
    Row,
    alter,
    check_raises,
    grouped,
    head_dim,
    heads,
    packed_arguments,
    parametrize,
    plain_arguments,
    replace_by,
    shared_arguments,
    tree_arguments,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_dualkv import (
    SharedPromptError,
    SharedPromptLayoutError,
    attention,
    checks,
    flash_attn_dualkv_varlen_func,
    flash_attn_tree_varlen_func,
    flash_attn_varlen_func,
    ops,
    packed_attention,
    shared_prompt_attention,
)
from flash_attn_dualkv import nodes as tables

MANY_ROWS = (checks.MAX_ROWS, 2, 16)


def all_head_dims(number: int, names: tuple[str, ...]) -> Change:
    return lambda arguments: {name: head_dim(arguments[name], number) for name in names}


def strided_last(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape[:2], 2 * tensor.shape[2])[..., ::2]


def strided(offsets: Tensor) -> Tensor:
    return offsets.repeat_interleave(2)[::2]


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
        ("head_dim above the limit", all_head_dims(520, names), ValueError, "q", "520"),
        ("head_dim not a multiple of 8", all_head_dims(12, names), ValueError, "q", "12"),
        ("head_dim 0", all_head_dims(0, names), ValueError, "q", "0"),
    ]
    return rows


def half_of_the_rows(arguments: Arguments) -> Arguments:
    """Each of both tensors of keys has half as many rows as both may have."""
    rows = checks.MAX_ROWS // 2
    keys = {name: arguments[name][:1].expand(rows, -1, -1) for name in SHARED_TENSORS[1:]}
    return keys | {"context_seqlen": rows}


def other_heads(arguments: Arguments) -> Arguments:
    return {name: heads(arguments[name], 1) for name in ("k_decoded", "v_decoded")}


def offset_rows(name: str) -> list[Row]:
    """Errors that a tensor of offsets can have."""
    return [
        ("not a tensor", replace_by(name, [0, 2, 6]), TypeError, name, "list"),
        ("int64", alter(name, Tensor.long), TypeError, name, "torch.int64"),
        ("rank", alter(name, lambda t: t[None]), ValueError, name, "shape (1, "),
        ("no elements", alter(name, lambda t: t[:0]), ValueError, name, "0"),
        ("not contiguous", alter(name, strided), ValueError, name, "stride 2"),
        ("device", alter(name, lambda t: t.to("meta")), ValueError, name, "meta"),
    ]


def length_rows(name: str) -> list[Row]:
    return [
        ("negative", replace_by(name, -1), ValueError, name, "-1"),
        ("bool", replace_by(name, True), TypeError, name, "True"),
        ("float", replace_by(name, 4.0), TypeError, name, "4.0"),
        ("tensor", replace_by(name, torch.tensor(4)), TypeError, name, "a tensor"),
    ]


COMMON_ROWS: list[Row] = [
    ("zero", replace_by("softmax_scale", 0.0), ValueError, "softmax_scale", "0.0"),
    ("negative", replace_by("softmax_scale", -1.0), ValueError, "softmax_scale", "-1.0"),
    ("infinite", replace_by("softmax_scale", math.inf), ValueError, "softmax_scale", "inf"),
    ("nan", replace_by("softmax_scale", math.nan), ValueError, "softmax_scale", "nan"),
    ("bool", replace_by("softmax_scale", True), TypeError, "softmax_scale", "True"),
    ("tensor", replace_by("softmax_scale", torch.tensor(0.5)), TypeError, "softmax_scale", "a tensor"),
    ("None", replace_by("deterministic", None), TypeError, "deterministic", "None"),
    ("an int", replace_by("window_size", 128), TypeError, "window_size", "int"),
    ("floats", replace_by("window_size", (1.0, 0)), TypeError, "window_size", "tuple"),
    ("below -1", replace_by("window_size", (-2, 0)), ValueError, "window_size", "(-2, 0)"),
    ("negative", replace_by("softcap", -1.0), ValueError, "softcap", "-1.0"),
    ("None", replace_by("softcap", None), TypeError, "softcap", "None"),
]

KEYS_BEHIND: Row = (
    "keys behind", lambda _: {"causal": False, "window_size": (4, 1)}, NotImplementedError, "window_size", "(4, 1)"
)  # fmt: skip

# Of the functions that may be called without causality.
CAUSAL_ROWS: list[Row] = [
    *offset_rows("cu_seqlens_q"),
    *length_rows("max_seqlen_q"),
    KEYS_BEHIND,
    ("int", replace_by("causal", 1), TypeError, "causal", "1"),
]

SINK_ROWS: list[Row] = [
    ("a list", replace_by("sinks", [0.0] * 4), TypeError, "sinks", "list"),
    ("integers", replace_by("sinks", torch.zeros(4).int()), TypeError, "sinks", "torch.int32"),
    ("one for each KV head", replace_by("sinks", torch.zeros(2)), ValueError, "sinks", "(2,)"),
    ("device", replace_by("sinks", torch.zeros(4, device="meta")), ValueError, "sinks", "meta"),
]

# Of the functions with one tensor of keys and one of values.
ONE_KV_ROWS: list[Row] = [
    *tensor_rows(PLAIN_TENSORS),
    ("head_dim", alter("v", lambda t: head_dim(t, 12)), ValueError, "v", "12"),
    ("rows", alter("v", lambda t: t[1:]), ValueError, "v", "5"),
]

SHARED_ROWS: list[Row] = [
    *tensor_rows(SHARED_TENSORS),
    *COMMON_ROWS,
    *SINK_ROWS,
    *CAUSAL_ROWS,
    ("head_dim", alter("k_context", lambda t: head_dim(t, 8)), ValueError, "k_context", "8"),
    ("head_dim", alter("v_context", lambda t: head_dim(t, 12)), ValueError, "v_context", "12"),
    ("rows", alter("v_context", lambda t: t[1:]), ValueError, "v_context", "4"),
    ("head_dim", alter("k_decoded", lambda t: head_dim(t, 8)), ValueError, "k_decoded", "8"),
    ("head_dim", alter("v_decoded", lambda t: head_dim(t, 8)), ValueError, "v_decoded", "8"),
    ("head_dim", alter("v_decoded", lambda t: head_dim(t, 520)), ValueError, "v_decoded", "520"),
    ("rows", alter("v_decoded", lambda t: t[1:]), ValueError, "v_decoded", "5"),
    ("rows of all keys", half_of_the_rows, ValueError, "k_decoded", str(checks.MAX_ROWS)),
    ("heads of the other keys", other_heads, ValueError, "k_decoded", "1"),
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
    ("str", replace_by("return_lse", "yes"), TypeError, "return_lse", "'yes'"),
]

PLAIN_ROWS: list[Row] = [
    *ONE_KV_ROWS,
    *COMMON_ROWS,
    *CAUSAL_ROWS,
    ("head_dim", alter("k", lambda t: head_dim(t, 8)), ValueError, "k", "8"),
    *offset_rows("cu_seqlens_k"),
    ("length", alter("cu_seqlens_k", lambda t: t[:2]), ValueError, "cu_seqlens_k", "2"),
    *length_rows("max_seqlen_k"),
    ("int", replace_by("return_attn_probs", 1), TypeError, "return_attn_probs", "1"),
    ("used", replace_by("dropout_p", 0.1), NotImplementedError, "dropout_p", "0.1"),
    ("used", replace_by("alibi_slopes", torch.ones(4)), NotImplementedError, "alibi_slopes", "Tensor"),
    ("used", replace_by("block_table", torch.ones(1, 1)), NotImplementedError, "block_table", "Tensor"),
]

TREE_ROWS: list[Row] = [
    *ONE_KV_ROWS,
    *COMMON_ROWS,
    *SINK_ROWS,
    *offset_rows("cu_seqlens"),
    *(row for row in offset_rows("parents") if row[0] != "no elements"),
    ("length", alter("parents", lambda t: t[:1]), ValueError, "parents", "1"),
    ("rows", lambda a: {"k": a["k"][1:], "v": a["v"][1:]}, ValueError, "k", "5"),
    ("str", replace_by("return_lse", "yes"), TypeError, "return_lse", "'yes'"),
    ("float", replace_by("mean_keys", 4.0), TypeError, "mean_keys", "4.0"),
    ("bool", replace_by("mean_keys", True), TypeError, "mean_keys", "True"),
    ("tensor", replace_by("mean_keys", torch.tensor(4)), TypeError, "mean_keys", "a tensor"),
    ("negative", replace_by("mean_keys", -1), ValueError, "mean_keys", "-1"),
]


PACKED_ROWS: list[Row] = [
    *ONE_KV_ROWS,
    *(row for row in COMMON_ROWS if row[3] != "window_size" and row[::3] != ("None", "softcap")),
    *SINK_ROWS,
    ("rows of q", alter("q", lambda t: t[1:]), SharedPromptLayoutError, "layout", "5"),
    ("rows of k", lambda a: {"k": a["k"][1:], "v": a["v"][1:]}, SharedPromptLayoutError, "layout", "5"),
    ("device", alter("layout", lambda layout: layout.to("meta")), SharedPromptLayoutError, "layout", "meta"),
    ("none", replace_by("layout", None), TypeError, "layout", "None"),
    ("nothing", replace_by("sliding_window", 0), SharedPromptError, "sliding_window", "0"),
    ("float", replace_by("sliding_window", 2.0), TypeError, "sliding_window", "2.0"),
    ("nan", replace_by("softcap", math.nan), ValueError, "softcap", "nan"),
    ("str", replace_by("softcap", "1"), TypeError, "softcap", "'1'"),
]


CALLS: dict[str, tuple[Any, Callable[..., Arguments], Any]] = {
    "shared": (flash_attn_dualkv_varlen_func, shared_arguments, attention),
    "plain": (flash_attn_varlen_func, plain_arguments, attention),
    "tree": (flash_attn_tree_varlen_func, tree_arguments, packed_attention),
    "packed": (shared_prompt_attention, packed_arguments, packed_attention),
}
ROWS = [
    pytest.param(call, *row[1:], id=f"{call}, {row[3]}: {row[0]}")
    for call, rows in (("shared", SHARED_ROWS), ("plain", PLAIN_ROWS), ("tree", TREE_ROWS), ("packed", PACKED_ROWS))
    for row in rows
]


@pytest.mark.parametrize(("call", "change", "error", "name", "got"), ROWS)
def test_errors(
    call: str, change: Change, error: type[Exception], name: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, make, module = CALLS[call]
    arguments = make()
    function(**arguments)
    monkeypatch.setattr(module, "ops", None)  # nothing may be launched
    check_raises(function, arguments | change(arguments), error, name, got)


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
    with pytest.raises(ValueError, match=rf"^{which}_decoded: expected the rows behind the context, such as {which}\["):
        flash_attn_dualkv_varlen_func(**{**arguments, **wrong})


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


@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width(width: int) -> None:
    for function, make, _ in CALLS.values():
        arguments = make()
        values = {name: head_dim(one, width) for name, one in arguments.items() if name.startswith("v")}
        assert function(**arguments | values).shape == (6, 4, width)


@pytest.mark.parametrize(("name", "value"), [("window_size", (3, 0)), ("softcap", 2.0)])
def test_windows_and_softcaps_of_cuda_tensors(name: str, value: Any) -> None:
    for call in ("shared", "plain", "tree"):
        function, make, _ = CALLS[call]
        function(**make(), **{name: value})
        with FakeTensorMode():
            arguments = {
                key: one.bfloat16() if isinstance(one, Tensor) and one.is_floating_point() else one
                for key, one in make("cuda:0").items()
            }
            assert function(**arguments, **{name: value}).shape == (6, 4, 16)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def value_rows(name: str, rows: int, change: Callable[..., Change]) -> list[Row]:
    """Wrong offsets of so many rows."""
    return [
        ("negative", change((-1, 2, rows)), ValueError, name, "-1"),
        ("decreasing", change((0, 4, 3)), ValueError, name, "3 after 4 at index 2"),
        ("past the end", change((0, 2, rows + 1)), ValueError, name, str(rows + 1)),
    ]


VALUE_ROWS: list[Row] = [
    *value_rows("cu_seqlens_q", 6, lambda values: replace_by("cu_seqlens_q", offsets(*values))),
    *value_rows("cu_seqlens_k_decoded", 6, lambda values: replace_by("cu_seqlens_k_decoded", offsets(*values))),
    *value_rows("cu_seqlens_context", 5, grouped),
    ("not from 0", grouped(owned=(1, 1, 2)), ValueError, "cu_seqs_per_context", "1"),
    ("not to N", grouped(owned=(0, 1, 1)), ValueError, "cu_seqs_per_context", "1"),
    ("beyond N", grouped(owned=(0, 1, 3)), ValueError, "cu_seqs_per_context", "3"),
    ("decreasing", grouped(owned=(0, 3, 2)), ValueError, "cu_seqs_per_context", "2 after 3"),
]


TREE_VALUE_ROWS: list[Row] = [
    *value_rows("cu_seqlens", 6, lambda values: replace_by("cu_seqlens", offsets(*values))),
    ("first offset", replace_by("cu_seqlens", offsets(1, 2, 6)), ValueError, "cu_seqlens", "1"),
    ("below -1", replace_by("parents", offsets(-1, -2)), ValueError, "parents[1]", "-2"),
    ("itself", replace_by("parents", offsets(-1, 1)), ValueError, "parents[1]", "1"),
    ("a later one", replace_by("parents", offsets(1, -1)), ValueError, "parents[0]", "1"),
    (
        "no depth-first order",
        lambda _: {"cu_seqlens": offsets(0, 1, 2, 3, 4), "parents": offsets(-1, 0, 0, 1)},
        ValueError,
        "parents[3]",
        "1",
    ),
]


@parametrize([*VALUE_ROWS, *TREE_VALUE_ROWS])
def test_values(
    change: Change, error: type[Exception], name: str, got: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALKV_DEBUG", "1" if device == "cuda" else "0")  # on the CPU they are always checked
    function, make = flash_attn_dualkv_varlen_func, shared_arguments
    if name == "cu_seqlens" or name.startswith("parents"):
        function, make = flash_attn_tree_varlen_func, tree_arguments
    arguments = make(device, torch.bfloat16)
    changed = {key: value.to(device) for key, value in change(arguments).items()}
    check_raises(function, arguments | changed, error, name, got)


# What is wrong with a table that an operator gets: (row, column, value).
TABLE_ROWS: list[tuple[str, tuple[int, int, int], str, str]] = [
    ("row of q", (3, 1, 5), "cu_seqlens_q", "7"),
    ("negative row", (3, 0, -1), "cu_seqlens_q", "-1"),
    ("decoded row", (1, 4, 9), "cu_seqlens_k_decoded", "9"),
    ("decoded row among the contexts", (1, 3, 1), "nodes: expected each row of the keys", "row 1 twice"),
    ("context row", (2, 4, 4), "cu_seqlens_context", "6"),
    ("rows of q twice", (3, 0, 1), "nodes: expected each row of q", "row 1 twice"),
    ("decoded rows twice", (3, 3, 6), "nodes: expected each row of the keys", "row 6 twice"),
    ("unknown parent", (1, 6, 9), "nodes[1].parent", "9"),
    ("parent behind its child", (1, 6, 2), "nodes[1].parent", "2"),
    ("its own parent", (1, 6, 1), "nodes[1].parent", "1"),
    ("parent below -1", (3, 6, -2), "nodes[3].parent", "-2"),
    ("no depth-first order", (3, 6, 0), "nodes[3].parent", "0"),
    ("another parent", (3, 6, -1), "nodes[3].kv_pos0: expected 0", "3"),
    ("position of a child", (3, 5, 2), "nodes[3].kv_pos0: expected 3", "2"),
    ("position of a root", (0, 5, 1), "nodes[0].kv_pos0: expected 0", "1"),
    ("subtree that ends early", (0, 7, 1), "nodes[0].subtree_end: expected 2", "1"),
    ("subtree that ends late", (3, 7, 5), "nodes[3].subtree_end: expected 4", "5"),
]


@pytest.mark.parametrize(("change", "name", "got"), [pytest.param(*row[1:], id=row[0]) for row in TABLE_ROWS])
def test_tables_given_to_the_operators(change: tuple[int, int, int], name: str, got: str) -> None:
    arguments = shared_arguments()
    offsets_q = arguments["cu_seqlens_q"]
    nodes = ops.sequence_nodes(offsets_q, offsets_q, offsets(0, 2, 5), offsets(0, 1, 2), 5)
    tables.checked_nodes(nodes, 6, 5, 6)
    row, column, value = change
    nodes[row, column] = value
    inputs = [arguments[one] for one in SHARED_TENSORS]
    options = (0.5, True, -1, 0.0, False, 11, False)
    lse = torch.zeros(4, 6)
    for call in (
        lambda: ops.forward(*inputs, None, nodes, *options),
        lambda: ops.backward(inputs[0], None, *inputs, None, inputs[0], lse, nodes, *options),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(name)}") as caught:
            call()
        assert got in str(caught.value).partition(", got ")[2]


def test_tables_of_other_shapes_and_types() -> None:
    arguments = plain_arguments()
    inputs = (arguments["q"], arguments["k"], arguments["v"], None, None, None)
    for nodes, error in ((torch.zeros(2, 7, dtype=torch.int32), ValueError), (torch.zeros(2, 8), TypeError)):
        with pytest.raises(error, match="^nodes: expected"):
            ops.forward(*inputs, nodes, 0.5, True, -1, 0.0, False, 6, False)
