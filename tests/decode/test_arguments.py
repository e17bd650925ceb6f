# SPDX-License-Identifier: BSD-3-Clause
"""Every violated precondition of decoding is an error that names the argument; what the library gets of a call."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from forests import ints
from legal_calls import Change, Library, Row, alter, check_raises, replace_by
from torch import Tensor

from flash_attn_dualkv import SharedPrefixPlan, append_kv, kernels, ops, shared_prefix_decode
from flash_attn_dualkv.decode import library as decode_library
from flash_attn_dualkv.decode import operators
from flash_attn_dualkv.decode.calls import DecodeCall
from flash_attn_dualkv.decode.plan import make_memory

NORMAL = {"page_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_pages": 5, "device": "cpu"}


def plan_arguments() -> dict[str, Any]:
    return {"max_requests": 3, "max_pages_per_request": 4, "max_queries": 6, **NORMAL}


def update_arguments() -> dict[str, Any]:
    table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    offsets, lengths = ints(0, 1, 3), ints(20, 32)
    tree = {"parents": ints(-1, 0), "shared_pages": ints(0, 1)}
    return {"block_table": table, "seqlens": lengths, "cu_seqlens_q": offsets, "boundaries": ints(16, 0), **tree}


def planned(**options: Any) -> SharedPrefixPlan:
    return SharedPrefixPlan(**plan_arguments()).update(**update_arguments(), num_queries=3, **options)


def decode_arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    caches = {name: torch.zeros(5, 16, 2, 16, dtype=dtype) for name in ("k_cache", "v_cache")}
    return {"q": torch.zeros(3, 4, 16, dtype=dtype), **caches, "plan": planned()}


LATENTS = {"num_kv_heads": 1, "head_dim": 72, "head_dim_v": 64}


def latent_arguments() -> dict[str, Any]:
    cache, q = torch.zeros(5, 16, 1, 72), torch.zeros(3, 4, 72)
    plan = SharedPrefixPlan(**plan_arguments() | LATENTS).update(**update_arguments(), num_queries=3)
    return {"q": q, "k_cache": cache, "v_cache": cache[..., :64], "plan": plan, "softmax_scale": 0.3}


def append_arguments() -> dict[str, Any]:
    caches = {name: torch.zeros(5, 16, 2, 16) for name in ("k_cache", "v_cache")}
    rest = {"block_table": update_arguments()["block_table"], "cache_seqlens": ints(3, 4)}
    return {"k": torch.ones(4, 2, 16), "v": torch.ones(4, 2, 16), **caches, **rest}


def size_rows(name: str) -> list[Row]:
    return [
        ("zero", replace_by(name, 0), ValueError, name, "0"),
        ("huge", replace_by(name, 2**31), ValueError, name, str(2**31)),
        ("float", replace_by(name, 4.0), TypeError, name, "4.0"),
        ("bool", replace_by(name, True), TypeError, name, "True"),
        ("tensor", replace_by(name, torch.tensor(4)), TypeError, name, "a tensor"),
    ]


SIZES = ("max_requests", "max_pages_per_request", "max_queries", "num_pages", "page_size", "num_heads", "num_kv_heads")
PLAN_ROWS: list[Row] = [
    *(row for name in (*SIZES, "head_dim", "head_dim_v") for row in size_rows(name)),
    ("no multiple of 16", replace_by("page_size", 24), ValueError, "page_size", "24"),
    ("no divisor", replace_by("num_kv_heads", 3), ValueError, "num_kv_heads", "3"),
    ("no multiple of 8", replace_by("head_dim", 20), ValueError, "head_dim", "20"),
    ("above the limit", replace_by("head_dim", 520), ValueError, "head_dim", "520"),
    ("wider than the keys", replace_by("head_dim_v", 24), ValueError, "head_dim_v", "24"),
    ("latents of two heads", replace_by("head_dim_v", 8), ValueError, "num_kv_heads", "2"),
    ("no multiple of 8", lambda _: LATENTS | {"head_dim_v": 60}, ValueError, "head_dim_v", "60"),
    ("latents above the limit", lambda _: LATENTS | {"head_dim": 584}, ValueError, "head_dim", "584"),
    ("latents", lambda _: LATENTS | {"exact": "trainer"}, NotImplementedError, "exact", "'trainer'"),
    ("too many for the kernels", replace_by("max_requests", 4097), ValueError, "max_requests", "4097"),
    ("too many keys", replace_by("max_pages_per_request", 2**21 + 1), ValueError, "max_pages_per_request", "2097153"),
    ("too many with the heads", replace_by("max_queries", 2**29), ValueError, "max_queries", str(2**29)),
    ("no device", replace_by("device", "gpu"), ValueError, "device", "'gpu'"),
    ("another device", replace_by("device", "meta"), ValueError, "device", "meta"),
    ("unknown", replace_by("exact", "fast"), ValueError, "exact", "'fast'"),
    ("bool", replace_by("exact", True), ValueError, "exact", "True"),
]


@pytest.mark.parametrize(("exact", "kv_heads", "expected"), [
    (None, 1, "split"), (None, 2, "split"), (None, 4, "trainer"), ("split", 4, "split"), ("trainer", 1, "trainer"),
])  # fmt: skip
def test_modes(exact: str | None, kv_heads: int, expected: str) -> None:
    """The default is by the model's shape; the library chooses the length of splits."""
    plan = SharedPrefixPlan(**plan_arguments() | {"num_kv_heads": kv_heads, "exact": exact})
    assert plan.exact == expected and plan.limits.split_keys == (-1 if expected == "split" else 0)


def int_rows(name: str) -> list[Row]:
    return [
        ("list", replace_by(name, [1, 2]), TypeError, name, "list"),
        ("int64", alter(name, Tensor.long), TypeError, name, "torch.int64"),
        ("rank", alter(name, lambda t: t[None]), ValueError, name, "shape (1, "),
        ("length", alter(name, lambda t: t[:1]), ValueError, name, "shape (1,"),
        ("device", alter(name, lambda t: t.to("meta")), ValueError, name, "meta"),
        ("strides", alter(name, lambda t: t.repeat_interleave(2, 0)[::2]), ValueError, name, "strides (2,"),
    ]


def table_rows() -> list[Row]:
    name = "block_table"
    return [
        ("list", replace_by(name, [[1, 2]]), TypeError, name, "list"),
        ("int64", alter(name, Tensor.long), TypeError, name, "torch.int64"),
        ("rank", alter(name, lambda t: t[0]), ValueError, name, "shape (2,)"),
        ("no columns", alter(name, lambda t: t[:, :0]), ValueError, name, "0"),
        ("columns", alter(name, lambda t: t.t().contiguous().t()), ValueError, name, "stride 2"),
        ("device", alter(name, lambda t: t.to("meta")), ValueError, name, "meta"),
    ]


OFFSETS = ("seqlens", "cu_seqlens_q", "boundaries", "parents", "shared_pages")
UPDATE_ROWS: list[Row] = [
    *table_rows(),
    ("too many columns", alter("block_table", lambda t: t.repeat(1, 3)), ValueError, "block_table", "6"),
    ("too many requests", alter("block_table", lambda t: t.repeat(2, 1)), ValueError, "block_table", "4"),
    *(row for name in OFFSETS for row in int_rows(name)),
    ("alone", replace_by("shared_pages", None), ValueError, "parents", "parents alone"),
    ("missing", replace_by("seqlens", None), TypeError, "seqlens", "NoneType"),
    ("above max_queries", replace_by("num_queries", 7), ValueError, "num_queries", "7"),
    ("negative", replace_by("num_queries", -1), ValueError, "num_queries", "-1"),
    ("tensor", replace_by("num_queries", torch.tensor(3)), TypeError, "num_queries", "a tensor"),
    ("negative", replace_by("max_seqlen", -1), ValueError, "max_seqlen", "-1"),
    ("huge", replace_by("max_seqlen", 2**26), ValueError, "max_seqlen", str(2**26)),
    ("tensor", replace_by("max_seqlen", torch.tensor(3)), TypeError, "max_seqlen", "a tensor"),
    (
        "not one each",
        lambda _: {"cu_seqlens_q": None, "num_queries": 3},
        ValueError,
        "num_queries",
        "3",
    ),
]


def strided_last(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


def cache_rows(name: str) -> list[Row]:
    return [
        ("list", replace_by(name, [1.0]), TypeError, name, "list"),
        ("integers", alter(name, Tensor.int), TypeError, name, "torch.int32"),
        ("FP8", alter(name, lambda t: t.to(torch.float8_e4m3fn)), NotImplementedError, name, "float8_e4m3fn"),
        ("rank", alter(name, lambda t: t[0]), ValueError, name, "shape (16, 2, 16)"),
        ("last dimension", alter(name, strided_last), ValueError, name, "stride 2"),
    ]


DECODE_ROWS: list[Row] = [
    *(row for name in ("k_cache", "v_cache") for row in cache_rows(name)),
    ("pages", alter("k_cache", lambda t: t[1:]), ValueError, "k_cache", "(4, 16, 2, 16)"),
    ("page size", alter("v_cache", lambda t: t[:, :8]), ValueError, "v_cache", "(5, 8, 2, 16)"),
    ("heads", alter("v_cache", lambda t: t[:, :, :1]), ValueError, "v_cache", "(5, 16, 1, 16)"),
    ("another dtype", alter("v_cache", Tensor.double), TypeError, "v_cache", "torch.float64"),
    ("narrow", alter("v_cache", lambda t: t[..., :8]), ValueError, "v_cache", "(5, 16, 2, 8)"),
    ("list", replace_by("q", [1.0]), TypeError, "q", "list"),
    ("another dtype", alter("q", Tensor.double), TypeError, "q", "torch.float64"),
    ("rank", alter("q", lambda t: t[0]), ValueError, "q", "shape (4, 16)"),
    ("rows", alter("q", lambda t: t[:2]), ValueError, "q", "shape (2, 4, 16)"),
    ("heads", alter("q", lambda t: t[:, :2]), ValueError, "q", "shape (3, 2, 16)"),
    ("head_dim", alter("q", lambda t: t[..., :8]), ValueError, "q", "shape (3, 4, 8)"),
    ("last dimension", alter("q", strided_last), ValueError, "q", "stride 2"),
    ("device", alter("q", lambda t: t.to("meta")), ValueError, "q", "meta"),
    ("list", replace_by("out", [1.0]), TypeError, "out", "list"),
    ("shape", replace_by("out", torch.zeros(3, 64)), ValueError, "out", "shape (3, 64)"),
    ("another dtype", replace_by("out", torch.zeros(3, 4, 16).half()), TypeError, "out", "torch.float16"),
    ("last dimension", replace_by("out", strided_last(torch.zeros(3, 4, 16))), ValueError, "out", "stride 2"),
    ("None", replace_by("plan", None), TypeError, "plan", "None"),
    ("a class", replace_by("plan", SharedPrefixPlan), TypeError, "plan", "the class SharedPrefixPlan"),
    ("zero", replace_by("softmax_scale", 0.0), ValueError, "softmax_scale", "0.0"),
    ("int", replace_by("window_size", 4), TypeError, "window_size", "int"),
    ("negative", replace_by("softcap", -1.0), ValueError, "softcap", "-1.0"),
    ("one for each KV head", replace_by("sinks", torch.zeros(2)), ValueError, "sinks", "(2,)"),
    ("str", replace_by("return_lse", "yes"), TypeError, "return_lse", "'yes'"),
]


# With values in the keys.
LATENT_ROWS: list[Row] = [
    ("not there", replace_by("softmax_scale", None), ValueError, "softmax_scale", "None"),
    ("a copy", alter("v_cache", Tensor.clone), ValueError, "v_cache", "another tensor"),
    ("as wide as the keys", lambda a: {"v_cache": a["k_cache"]}, ValueError, "v_cache", "(5, 16, 1, 72)"),
    ("other columns", lambda a: {"v_cache": a["k_cache"][..., 8:]}, ValueError, "v_cache", "another tensor"),
    ("other pages", lambda a: {"v_cache": a["k_cache"].flip(0)[..., :64]}, ValueError, "v_cache", "another tensor"),
    ("as wide as q", lambda a: {"out": torch.zeros_like(a["q"])}, ValueError, "out", "(3, 4, 72)"),
    ("as wide as the values", alter("q", lambda t: t[..., :64]), ValueError, "q", "(3, 4, 64)"),
]


APPEND_ROWS: list[Row] = [
    *(row for name in ("k_cache", "v_cache") for row in cache_rows(name)),
    ("narrow", alter("v_cache", lambda t: t[..., :8]), NotImplementedError, "v_cache", "8"),
    *table_rows(),
    *int_rows("cache_seqlens"),
    ("heads", alter("k", lambda t: t[:, :1]), ValueError, "k", "(4, 1, 16)"),
    ("rows", alter("v", lambda t: t[1:]), ValueError, "v", "(3, 2, 16)"),
    ("no shape", alter("k", lambda t: t[0, 0, 0]), ValueError, "k", "shape ()"),
    ("another dtype", alter("v", Tensor.half), TypeError, "v", "torch.float16"),
    ("not as many each", lambda a: {"k": a["k"][:3], "v": a["v"][:3]}, ValueError, "k", "3"),
    ("length", replace_by("cu_seqlens_q", ints(0, 4)), ValueError, "cu_seqlens_q", "shape (2,)"),
]


@pytest.mark.parametrize("name", ["q", "k_cache", "sinks", "out"])
def test_there_is_no_backward(name: str) -> None:
    arguments = decode_arguments() | {"sinks": torch.zeros(4), "out": torch.zeros(3, 4, 16)}
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="^decoding has no backward"):
        shared_prefix_decode(**arguments)
    with torch.no_grad():
        shared_prefix_decode(**arguments)
    appended = append_arguments() | {"k": torch.ones(4, 2, 16, requires_grad=True)}
    with pytest.raises(RuntimeError, match="^decoding has no backward"):
        append_kv(**appended)


VALUE_ROWS: list[Row] = [
    ("negative", replace_by("seqlens", ints(20, -1)), ValueError, "seqlens[1]", "-1"),
    ("more than the table", replace_by("seqlens", ints(33, 32)), ValueError, "seqlens[0]", "33"),
    ("fewer than queries", replace_by("seqlens", ints(20, 1)), ValueError, "seqlens[1]", "1"),
    ("negative", replace_by("cu_seqlens_q", ints(-1, 1, 3)), ValueError, "cu_seqlens_q[0]", "-1"),
    ("descending", replace_by("cu_seqlens_q", ints(0, 3, 2)), ValueError, "cu_seqlens_q[2]", "2 after 3"),
    ("more than q", replace_by("cu_seqlens_q", ints(0, 3, 4)), ValueError, "cu_seqlens_q[2]", "4"),
    ("negative", replace_by("boundaries", ints(-1, 2)), ValueError, "boundaries[0]", "-1"),
    ("negative", replace_by("block_table", ints(0, 1, 0, -1).view(2, 2)), ValueError, "block_table[1, 1]", "-1"),
    ("no page", replace_by("block_table", ints(5, 1, 0, 2).view(2, 2)), ValueError, "block_table[0, 0]", "5"),
    ("a later request", replace_by("parents", ints(-1, 1)), ValueError, "parents[1]", "1"),
    ("none", replace_by("parents", ints(-2, 0)), ValueError, "parents[0]", "-2"),
    ("negative", replace_by("shared_pages", ints(0, -1)), ValueError, "shared_pages[1]", "-1"),
    ("more than the table", replace_by("shared_pages", ints(3, 1)), ValueError, "shared_pages[0]", "3"),
    ("other pages", replace_by("shared_pages", ints(0, 2)), ValueError, "shared_pages[1]", "2"),
]  # fmt: skip


# Rows, the function, its arguments, and those of its first call, which is legal.
CALLS: dict[str, tuple[list[Row], Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "plan": (PLAN_ROWS, SharedPrefixPlan, plan_arguments),
    "update": (UPDATE_ROWS, SharedPrefixPlan.update, update_arguments),
    # On the CPU without DUALKV_DEBUG=1: nothing waits there.
    "values": (VALUE_ROWS, SharedPrefixPlan.update, lambda: update_arguments() | {"num_queries": 3}),
    "decode": (DECODE_ROWS, shared_prefix_decode, decode_arguments),
    "latents": (LATENT_ROWS, shared_prefix_decode, lambda: latent_arguments()),
    "append": (APPEND_ROWS, append_kv, append_arguments),
}


@pytest.mark.parametrize(
    ("call", "change", "error", "name", "got"),
    [
        pytest.param(call, *row[1:], id=f"{call}, {row[3]}: {row[0]}")
        for call, (rows, *_) in CALLS.items()
        for row in rows
    ],
)
def test_errors(
    call: str, change: Change, error: type[Exception], name: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong call launches nothing, appends nothing, and leaves no plan of an earlier step."""
    _, function, make = CALLS[call]
    arguments, plan = make(), planned()
    if function is SharedPrefixPlan.update:
        function = partial(function, plan)
    if call != "append":
        function(**arguments)
    monkeypatch.setattr(operators, "decode", None)
    check_raises(function, arguments | change(arguments), error, name, got)
    if call == "append":
        assert not arguments["k_cache"].any() and not arguments["v_cache"].any()
    if call in ("update", "values"):
        with pytest.raises(RuntimeError, match="^plan: expected one that has planned a step"):
            plan.step  # noqa: B018


def test_padding_passes() -> None:
    """Requests without keys, cuts behind the keys, and entries behind those that are read."""
    table = torch.tensor([[1, -1], [-1, 77]], dtype=torch.int32)
    planned().update(table, ints(16, 0), boundaries=ints(3, 40))
    planned().update(ints(1, 2).view(2, 1), ints(16, 9), boundaries=ints(17, 2**31 - 1))
    planned().update(table[:0], ints(), cu_seqlens_q=ints(0), num_queries=0)


# The kernels


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library.stand_in(monkeypatch)
    made.results["decode_plan_bytes"] = 4096
    return made


def call_of(ragged: bool = True, **changes: Any) -> DecodeCall:
    arguments = decode_arguments(torch.bfloat16)
    plan = arguments.pop("plan")
    if not ragged:
        given = update_arguments() | dict.fromkeys(("cu_seqlens_q", "boundaries", "parents", "shared_pages"))
        arguments["q"], plan = arguments["q"][:2], plan.update(**given)
    step = plan.step._replace(memory=torch.zeros(64, dtype=torch.uint8))
    out = torch.full(arguments["q"].shape, 7.0, dtype=torch.bfloat16)
    return DecodeCall(**arguments | {"sinks": None, "out": out, "step": step} | changes, **OPTIONS)


OPTIONS: dict[str, Any] = {"softmax_scale": 0.5, "window_left": 9, "softcap": 2.0}


def test_library_gets_the_step(library: Library) -> None:
    """The fields of DualkvDecodePlan in their order."""
    for ragged in (True, False):
        library.calls.clear()
        step = call_of(ragged).step._replace(block_table=torch.zeros(2, 3, dtype=torch.int32)[:, :2])
        operators._plan_cuda(step)
        ((name, (device, stream, plan)),) = library.calls
        assert (name, device, stream) == ("decode_plan", -1, 77)
        assert plan[:5] == (step.block_table.data_ptr(), 3, 2, 2, 3 if ragged else 2)
        optional = [0 if one is None else one.data_ptr() for one in step[2:6]]
        assert plan[5:10] == (step.seqlens.data_ptr(), *optional) and all(optional) == ragged
        assert plan[10:] == (*step.limits, step.memory.data_ptr())  # type: ignore[union-attr]


def test_library_gets_the_layer(library: Library) -> None:
    hnd = torch.zeros(5, 2, 16, 32, dtype=torch.bfloat16).transpose(1, 2)
    k, v, sinks = hnd[..., :16], hnd[..., 16:], torch.zeros(4, dtype=torch.bfloat16)
    for ragged in (True, False):
        library.calls.clear()
        call = call_of(ragged, k_cache=k, v_cache=v, sinks=sinks)
        lse = operators._decode_cuda(call)
        ((name, (device, stream, plan, copy, *tensors, lse_given, sinks_given, is_half, options)),) = library.calls
        assert (name, device, stream, is_half, options) == ("decode", -1, 77, False, call.options)
        assert plan == decode_library._library_plan(call.step) and copy is kernels.copied
        assert all(one is other for one, other in zip(tensors, (call.q, call.out, k, v), strict=True))
        assert lse_given is lse and sinks_given is not sinks and sinks_given.dtype == torch.float32
        assert lse.shape == (4, len(call.q)) and lse.dtype == torch.float32


def test_what_kernels_cannot_read(library: Library) -> None:
    """A query is copied; a cache or a result never."""
    wide = torch.zeros(5, 16, 2, 24, dtype=torch.bfloat16)
    for name in ("k_cache", "v_cache"):
        expanded, odd = wide[:1, ..., :16].expand(5, 16, 2, 16), torch.zeros(5, 16, 2, 20).bfloat16()[..., :16]
        for wrong in (wide[..., 4:20], odd, expanded):
            with pytest.raises(ValueError, match=f"^{name}: expected a first byte on 16 bytes, and strides"):
                operators._decode_cuda(call_of(**{name: wrong}))
    odd = torch.zeros(3, 4, 20, dtype=torch.bfloat16)[..., :16]
    with pytest.raises(ValueError, match="^out: expected a first byte on 16 bytes"):
        operators._decode_cuda(call_of(out=odd))
    assert library.calls == []
    operators._decode_cuda(call_of(q=odd))
    assert library.calls[0][1][4] is odd  # the module copies it


def test_what_kernels_lack(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="^softcap: expected .* for the CUDA kernels, got 2000.0"):
        operators._decode_cuda(call_of()._replace(softcap=2000.0))
    limits = call_of().step.limits
    for dims in ((16, 16), (96, 96), (512, 512), (576, 576), (576, 448), (512, 448)):
        given = limits._replace(head_dim=dims[0], head_dim_v=dims[1])
        with pytest.raises(NotImplementedError, match=f"^head_dim: expected .*, got {dims[0]}"):
            decode_library.decode_plan_bytes(given, torch.device("cpu"))
    assert library.calls == []
    limits = limits._replace(head_dim=64, head_dim_v=64)
    assert decode_library.decode_plan_bytes(limits, torch.device("cpu")) == 4096
    assert library.calls == [("decode_plan_bytes", (-1, (*[0] * 10, *limits, 0)))]


@pytest.mark.parametrize(("exact", "less"), [("split", ", and with exact='trainer' 7 MiB"), ("trainer", "")])
def test_memory_that_does_not_fit(library: Library, exact: str, less: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the plan, its size, and what makes it smaller."""
    limits = SharedPrefixPlan(**plan_arguments() | {"exact": exact}).limits._replace(head_dim=64, head_dim_v=64)

    def none_left(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(library, "decode_plan_bytes", lambda _, plan: (9 if plan[-2] else 7) << 20, raising=False)
    monkeypatch.setattr(torch, "zeros", none_left)
    monkeypatch.setattr(kernels.torch.cuda, "device", lambda _: contextlib.nullcontext())
    size = 9 if exact == "split" else 7
    expected = f"a SharedPrefixPlan for max_queries=6 takes {size} MiB: fewer take less{less}. CUDA out of memory."
    with pytest.raises(torch.OutOfMemoryError, match=f"^{re.escape(expected)}$"):
        make_memory(limits, torch.device("cuda"))


def test_nothing_is_launched_without_rows(library: Library) -> None:
    for offsets in (None, ints(0)):
        plan = planned().update(torch.zeros(0, 2, dtype=torch.int32), ints(), cu_seqlens_q=offsets, num_queries=0)
        q = torch.zeros(0, 4, 16).bfloat16()
        assert operators._decode_cuda(call_of(q=q, out=q, step=plan.step)).shape == (4, 0)
    assert library.calls == []


def test_the_reference_can_be_forced(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKV_FORCE_REFERENCE", "1")
    ops.forces_reference.cache_clear()
    call = call_of()
    with pytest.warns(UserWarning, match="DUALKV_FORCE_REFERENCE is set"):
        operators._plan_cuda(call.step)
    assert operators._decode_cuda(call).shape == (4, 3) and not call.out.any()
    ops.forces_reference.cache_clear()
    assert library.calls == []


def test_the_struct_of_the_library() -> None:
    """A plan's tuple has its fields in the order of csrc/api.h."""
    header = (kernels.LIBRARY.parents[1] / "csrc/api.h").read_text()
    body = header[: header.index("} DualkvDecodePlan;")].rpartition("typedef struct {")[2]
    declarations = re.sub(r"//.*", "", body).split(";")
    names = [re.sub(r".*[ *]", "", one.strip()) for line in declarations for one in line.split(",") if one.strip()]
    sizes = ["max_requests", "max_keys", "max_queries", "num_pages", "page_size", "num_heads", "num_kv_heads"]
    sizes += ["head_dim", "head_dim_v", "split_keys"]
    step = ["block_table", "table_stride", "requests", "columns", "queries", "seqlens", "cu_seqlens_q", "boundaries"]
    step += ["parents", "shared_pages"]
    assert names == [*step, *sizes, "memory"] and list(call_of().step.limits._fields) == sizes
