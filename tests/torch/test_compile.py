# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile traces through the public functions, forward and backward, without a graph break."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from calls import Call, attend_packed, attend_separate, attend_tree, packed, packed_with_sinks, separate, tree
from shared_prompts import GROUPS
from torch import Tensor

from flash_attn_dualkv import flash_attn_dualkv_varlen_func, flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def with_lse(tensors: Sequence[Tensor], rest: dict[str, Any]) -> tuple[Tensor, ...]:
    more = {"softmax_scale": 0.3, "causal": False, "return_lse": True, "deterministic": True}
    out, lse = flash_attn_dualkv_varlen_func(*tensors, **rest | more)
    return out, lse.nan_to_num(neginf=0.0)


def context_free(tensors: Sequence[Tensor], rest: dict[str, Any]) -> tuple[Tensor, ...]:
    q, _, _, k, v = tensors
    offsets = rest["cu_seqlens_q"], rest["cu_seqlens_k_decoded"]
    options = {"causal": True, "deterministic": True, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_func(q, k, v, *offsets, 6, 6, **options)
    return out, lse.nan_to_num(neginf=0.0)


def repeatable(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda tensors, rest: (attend(tensors, rest, deterministic=True),)


def outputs_and_gradients(function: Any, call: Call) -> list[Tensor | None]:
    leaves = call.leaves()
    outputs = function(leaves, call.rest)
    total = sum((one * torch.arange(one.numel(), device=one.device).view_as(one).sin()).sum() for one in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)]


def check_compiled(compiled: Any, function: Any, call: Call) -> None:
    actual, expected = (outputs_and_gradients(one, call) for one in (compiled, function))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


# (function, how its arguments are made, options of the compiler)
FUNCTIONS: dict[str, tuple[Any, Callable[..., Call], dict[str, Any]]] = {
    "separate": (repeatable(attend_separate), separate, {}),
    "LSE": (with_lse, separate, {}),
    "context free": (context_free, separate, {}),
    "packed, dynamic": (repeatable(attend_packed), packed, {"dynamic": True}),
    "sinks": (repeatable(attend_packed), packed_with_sinks, {}),
    "tree": (repeatable(attend_tree), tree, {}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_without_a_graph_break(name: str, device: str) -> None:
    """Compiled once and called with several shapes, which make the compiler recompile with symbolic ones."""
    function, make, options = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    for groups in ("several", "one", "short prompts", "one"):
        check_compiled(compiled, function, make(GROUPS[groups], device))


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_inductor(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of its own around the operators, which chooses strides as it likes; with one tensor of keys and with two.

    What earlier runs have left in the compiler's cache calls the operators with the arguments that they had then.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    calls = [make(device=device) for make in (separate, tree)]
    whole = calls[0].replace(
        tensors=[tensor for call in calls for tensor in call.tensors], rest=[call.rest for call in calls]
    )

    def layer(tensors: Sequence[Tensor], rest: Any) -> tuple[Tensor, ...]:
        outs, begin = [], 0
        for call, own_rest in zip(calls, rest):
            end = begin + len(call.tensors)
            own = [one * 2 for one in tensors[begin:end]]
            outs.append(call.function(own, own_rest, deterministic=True) * 0.5)  # exact in any type
            begin = end
        return tuple(outs)

    # Whether a processor has vectors, each kind asked in a process of its own, and a precompiled
    # header cost more than all else here.
    options: dict[str, Any] = {"cpp.vec_isa_ok": False}
    if hasattr(torch._inductor.config, once := "cpp_cache_precompile_headers"):
        options[once] = False
    check_compiled(torch.compile(layer, fullgraph=True, options=options), layer, whole)


def test_compile_keeps_value_checks() -> None:
    call = separate()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    compiled(call.tensors, call.rest)
    with pytest.raises(ValueError, match="^cu_seqlens_q"):
        compiled(call.tensors, call.rest | {"cu_seqlens_q": call.rest["cu_seqlens_q"].flip(0)})


@pytest.mark.slow
@pytest.mark.parametrize("make", [separate, tree])
def test_compiled_autograd(make: Callable[..., Call], device: str) -> None:
    """A compiler for the backward alone meets the node of an eager forward, with one tensor of keys and with two."""
    call = make([(2, [1])], device)  # on the CPU it traces into the reference, tile by tile
    leaves = call.leaves()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        call(leaves, deterministic=True).backward(call.dout)
    torch.testing.assert_close([one.grad for one in leaves], call.results()[1:], rtol=1e-6, atol=1e-6)
