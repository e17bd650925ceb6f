"""torch.compile traces through the public functions, forward and backward, without a graph break."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import NO_ROWS, ONE_GROUP, OTHER_GROUPS, TWO_GROUPS, assert_close, attend, batch_of, leaves_of, options_of
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from groups import Batch, run
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from flash_attn_dualkv import flash_attn_dualkv_varlen_func, flash_attn_varlen_func, ops


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shared(inputs: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    return (flash_attn_dualkv_varlen_func(*inputs, **options),)


def shared_with_lse(inputs: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    more = {"softmax_scale": 0.3, "causal": False, "return_lse": True}
    out, lse = flash_attn_dualkv_varlen_func(*inputs, **options | more)
    return out, lse.nan_to_num(neginf=0.0)


def context_free(inputs: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
    q, _, _, k, v = inputs
    offsets = options["cu_seqlens_q"], options["cu_seqlens_k_decoded"]
    out, lse, _ = flash_attn_varlen_func(q, k, v, *offsets, 6, 6, causal=True, return_attn_probs=True)
    return out, lse.nan_to_num(neginf=0.0)


def outputs_and_gradients(function: Any, batch: Batch) -> list[Tensor | None]:
    leaves = leaves_of(batch)
    outputs = function(leaves, options_of(batch))
    total = sum((one * torch.arange(one.numel(), device=one.device).view_as(one).sin()).sum() for one in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)]


FUNCTIONS = pytest.mark.parametrize("function", [shared, shared_with_lse, context_free])


def check_compiled(function: Any, device: str, **options: Any) -> None:
    """Compiled once and called with several shapes, which make the compiler recompile with symbolic ones."""
    compiled = torch.compile(function, fullgraph=True, **options)
    for groups in (TWO_GROUPS, OTHER_GROUPS, NO_ROWS, ONE_GROUP):
        batch = batch_of(groups, device)
        actual, expected = (outputs_and_gradients(one, batch) for one in (compiled, function))
        for one, other in zip(actual, expected):
            assert_close(one, other)


@FUNCTIONS
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compile_without_a_graph_break(function: Any, dynamic: bool | None, device: str, dynamo: None) -> None:
    check_compiled(function, device, backend="aot_eager", dynamic=dynamic)


@FUNCTIONS
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_compile_with_inductor(function: Any, device: str, dynamo: None) -> None:
    check_compiled(function, device, backend="inductor")


def test_compile_under_autocast(device: str, dynamo: None) -> None:
    batch = batch_of(TWO_GROUPS, device, dtype=torch.float32)
    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        (actual,), (expected,) = (one(batch.inputs, options_of(batch)) for one in (compiled, shared))
    assert actual.dtype == torch.bfloat16
    assert_close(actual, expected)


def test_compile_keeps_value_checks(dynamo: None) -> None:
    batch = batch_of(ONE_GROUP, "cpu")
    compiled = torch.compile(shared, fullgraph=True, backend="aot_eager")
    compiled(batch.inputs, options_of(batch))
    with pytest.raises(ValueError, match="^cu_seqlens_q"):
        compiled(batch.inputs, options_of(batch) | {"cu_seqlens_q": batch.cu_seqlens_q.flip(0)})


def test_compile_keeps_the_deterministic_argument(dynamo: None) -> None:
    batch = batch_of(ONE_GROUP, "cpu")
    flags: list[Any] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        flags.extend(node.args[-1] for node in graph.graph.nodes if node.target is ops.backward)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(shared, fullgraph=True, backend=backend)
    compiled(leaves_of(batch), options_of(batch) | {"deterministic": True})[0].sum().backward()
    assert flags == [True]


def test_compiled_autograd(device: str, dynamo: None) -> None:
    batch = batch_of(TWO_GROUPS, device)
    leaves = leaves_of(batch)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        attend(batch, leaves).backward(batch.dout)
    for leaf, gradient in zip(leaves, run(batch)[2:]):
        assert_close(leaf.grad, gradient)
