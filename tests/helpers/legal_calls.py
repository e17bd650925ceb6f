# SPDX-License-Identifier: BSD-3-Clause
"""Legal calls of the public functions on a few rows, and changes to their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from groups import cumulative
from torch import Tensor

from flash_attn_dualkv import SharedPromptLayout, kernels

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


def tree_arguments(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Arguments:
    """A legal call of flash_attn_tree_varlen_func: a root of 2 rows and its child."""
    shared = shared_arguments(device, dtype)
    names = {"q": "q", "k": "k_decoded", "v": "v_decoded", "cu_seqlens": "cu_seqlens_q"}
    parents = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    return {name: shared[source] for name, source in names.items()} | {"parents": parents}


def packed_arguments(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Arguments:
    """A legal call of shared_prompt_attention: a prompt of 2 rows and its response."""
    shared = shared_arguments(device, dtype)
    layout = SharedPromptLayout.from_tree([2, 4], [-1, 0], device=device)
    return {"q": shared["q"], "k": shared["k_decoded"], "v": shared["v_decoded"], "layout": layout}


def replace_by(name: str, value: Any) -> Change:
    return lambda arguments: {name: value}


def alter(name: str, function: Callable[[Tensor], Any]) -> Change:
    return lambda arguments: {name: function(arguments[name])}


def heads(tensor: Tensor, number: int) -> Tensor:
    return tensor.new_zeros(tensor.shape[0], number, tensor.shape[2])


def head_dim(tensor: Tensor, number: int) -> Tensor:
    return tensor.new_zeros(tensor.shape[0], tensor.shape[1], number)


def grouped(contexts: Any = (0, 2, 5), owned: Any = (0, 1, 2), dtype: torch.dtype = torch.int32) -> Change:
    """Give the group arguments, from lists or as they are."""

    def tensor(values: Any) -> Any:
        return torch.tensor(values, dtype=dtype) if isinstance(values, tuple) else values

    return lambda arguments: {"cu_seqlens_context": tensor(contexts), "cu_seqs_per_context": tensor(owned)}


SHARED_TENSORS = ("q", "k_context", "v_context", "k_decoded", "v_decoded")
PLAIN_TENSORS = ("q", "k", "v")

# What is wrong, the change, the error, the argument that it names, and what it says that it got.
Row = tuple[str, Change, type[Exception], str, str]


def parametrize(rows: list[Row]) -> pytest.MarkDecorator:
    parameters = [pytest.param(*row[1:], id=f"{row[3]}: {row[0]}") for row in rows]
    return pytest.mark.parametrize(("change", "error", "name", "got"), parameters)


def check_raises(function: Any, arguments: Arguments, error: type[Exception], name: str, got: str) -> None:
    with pytest.raises(error) as caught:
        function(**arguments)
    head, _, tail = str(caught.value).partition(", got ")
    assert head.startswith(f"{name}: expected ")
    assert got in tail


class Library:
    """Stands for the compiled module: notes what it is called with, and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return self.results.get(name)

        return call

    @classmethod
    def stand_in(cls, monkeypatch: pytest.MonkeyPatch) -> Library:
        """Installed in the place of the compiled module."""
        made = cls()
        for name in ("DUALKV_DEBUG", "FLASH_ATTENTION_DETERMINISTIC"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(kernels, "load", lambda: (made, None))
        monkeypatch.setattr(kernels, "current_device", lambda: -1)
        monkeypatch.setattr(kernels, "current_stream", lambda device: 77)
        monkeypatch.setattr(kernels, "prepare", lambda device: None)
        return made
