"""Arguments that are unusual but legal: the call returns what it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from groups import cumulative
from legal_calls import (
    SHARED_TENSORS,
    Change,
    grouped,
    head_dim,
    heads,
    plain_arguments,
    replace_by,
    shared_arguments,
    tree_arguments,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_dualkv import checks, flash_attn_dualkv_varlen_func, flash_attn_tree_varlen_func, flash_attn_varlen_func

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
    for causal in (True, False):
        assert flash_attn_varlen_func(**arguments, causal=causal, window_size=(-1, 0)).equal(expected)


@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width(width: int) -> None:
    for function, make, names in (
        (flash_attn_dualkv_varlen_func, shared_arguments, ("v_context", "v_decoded")),
        (flash_attn_varlen_func, plain_arguments, ("v",)),
        (flash_attn_tree_varlen_func, tree_arguments, ("v",)),
    ):
        arguments = make()
        for name in names:
            arguments[name] = head_dim(arguments[name], width)
        assert function(**arguments).shape == (6, 4, width)


@pytest.mark.parametrize(("name", "value"), [("window_size", (3, 0)), ("softcap", 2.0)])
def test_windows_and_softcaps_of_cuda_tensors(name: str, value: Any) -> None:
    functions: list[tuple[Any, Any]] = [
        (flash_attn_dualkv_varlen_func, shared_arguments),
        (flash_attn_varlen_func, plain_arguments),
        (flash_attn_tree_varlen_func, tree_arguments),
    ]
    for function, make in functions:
        function(**make(), **{name: value})
        with FakeTensorMode():
            arguments = {
                key: one.bfloat16() if isinstance(one, Tensor) and one.is_floating_point() else one
                for key, one in make("cuda:0").items()
            }
            assert function(**arguments, **{name: value}).shape == (6, 4, 16)
