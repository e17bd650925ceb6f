# SPDX-License-Identifier: BSD-3-Clause
"""The operators: what PyTorch and the compiled module get of them; and the function of FlashAttention-2."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from calls import (
    NO_KEYS,
    NO_ROWS,
    NOTHING,
    ONE_GROUP,
    TWO_GROUPS,
    Call,
    Operators,
    attend,
    batch_of,
    leaves_of,
    packed,
    packed_with_sinks,
    tree,
)
from groups import Batch, Group, cumulative
from torch import Tensor

import flash_attn_dualkv
from flash_attn_dualkv import (
    build_info,
    checks,
    flash_attn_dualkv_varlen_func,
    flash_attn_tree_varlen_func,
    flash_attn_varlen_func,
    ops,
)
from flash_attn_dualkv.calls import BackwardCall, ForwardCall, unpack


def offsets_of(batch: Batch) -> tuple[Tensor | None, ...]:
    return batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, batch.cu_seqlens_context, batch.cu_seqs_per_context


def nodes_of(batch: Batch) -> Tensor:
    nodes: Tensor = ops.sequence_nodes(*offsets_of(batch), len(batch.k_context))
    return nodes


# scale, causal, window_left, window_right, softcap, reference, mean_keys, deterministic
PLAIN = (0.25, True, 7, -1, 2.0, False, 30, True)
# What the compiled module gets, beside `deterministic`.
OF_KERNELS = dict(softmax_scale=0.25, causal=True, window_left=7, softcap=2.0, mean_keys=30)

# Operators

ALL_SHAPES = pytest.mark.parametrize(
    "groups", [ONE_GROUP, TWO_GROUPS, NOTHING, NO_ROWS, NO_KEYS], ids=["one", "two", "nothing", "no rows", "no keys"]
)


@ALL_SHAPES
def test_operators_of_tables_pass_opcheck(groups: Sequence[Group], device: str) -> None:
    batch = batch_of(groups, device)
    torch.library.opcheck(ops.sequence_nodes, (*offsets_of(batch), len(batch.k_context)))
    torch.library.opcheck(ops.sequence_nodes, (*offsets_of(batch)[:2], None, None, None))
    rest = tree(device=device).rest
    torch.library.opcheck(ops.tree_nodes, (rest["cu_seqlens"], rest["parents"], 1000))


def check_operators(inputs: Sequence[Tensor | None], nodes: Tensor, dout: Tensor) -> None:
    """forward, and backward with and without a gradient of the LSE, of q, k, v, k_decoded, v_decoded, sinks."""
    leaves = [None if one is None else one.detach().clone().requires_grad_() for one in inputs]
    torch.library.opcheck(ops.forward, (*leaves, nodes, *PLAIN))
    out, lse = ops.forward(*inputs, nodes, *PLAIN)
    keys = inputs[:5]
    for dlse in (None, torch.randn_like(lse)):
        arguments = (dout, dlse, *keys, out, lse, nodes, *PLAIN)
        torch.library.opcheck(ops.backward, arguments)
        gradients, given = ops.backward(*arguments), [one for one in keys if one is not None]
        assert [one.shape for one in gradients] == [one.shape for one in given]
        storages = {one.untyped_storage()._cdata for one in (*gradients, *given, out, lse)}
        assert len(storages) == len(gradients) + len(given) + 2


@ALL_SHAPES
def test_operators_with_two_tensors_of_keys_pass_opcheck(groups: Sequence[Group], device: str) -> None:
    batch = batch_of(groups, device, head_dim=16 if device == "cpu" else 64)
    check_operators([*batch.inputs, None], nodes_of(batch), batch.dout)


@pytest.mark.parametrize("make", [packed, packed_with_sinks, tree])
def test_operators_with_one_tensor_of_keys_pass_opcheck(make: Callable[..., Call], device: str) -> None:
    call = make(device=device)
    q, k, v, *sinks = call.tensors
    nodes = call.rest.nodes if make is not tree else ops.tree_nodes(*call.rest.values(), len(q))
    check_operators([q, k, v, None, None, sinks[0] if sinks else None], nodes, call.dout)


@pytest.mark.parametrize("variant", [(True, 3, -1, 2.0), (False, 2, 1, 0.0), (False, -1, -1, 1.5)], ids=str)
def test_gradcheck_of_everything_that_the_operators_offer(variant: tuple[Any, ...]) -> None:
    """Output and LSE: windows on either side, softcaps, sinks, values of another width, and a tree in two storages."""
    rows = [[0, 2, 0, 0, 2, 0, -1, 4], [2, 0, 2, 2, 1, 2, 0, 3], [2, 3, 2, 4, 2, 3, 1, 3], [5, 2, 2, 3, 1, 2, 0, 4]]
    nodes, heads = torch.tensor(rows, dtype=torch.int32), (2, 1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [normal(8, heads[0], 8)]
    inputs += [normal(count, heads[1], width) for count in (4, 2) for width in (8, 16)]
    causal, left, right, softcap = variant
    inputs += [normal(heads[0])] if right < 0 else []

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = (*tensors, *[None] * (6 - len(tensors)))
        out, lse = ops.forward(*given, nodes, 0.4, causal, left, right, softcap, False, 30, False)
        assert out.shape == (8, heads[0], 16)
        return out, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(outputs, [one.requires_grad_() for one in inputs])


def test_lse_dtype(device: str) -> None:
    _, lse = attend(batch := batch_of(ONE_GROUP, device), batch.inputs, return_lse=True)
    assert lse.dtype == (torch.float64 if device == "cpu" else torch.float32)
    if device == "cpu":
        _, lse = attend(batch := batch_of(ONE_GROUP, device, dtype=torch.bfloat16), batch.inputs, return_lse=True)
        assert lse.dtype == torch.float32


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 6), (3, 6), (9, 6), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_how_many_keys_the_functions_announce(causal: bool, queries: int, keys: int) -> None:
    """What a query sees on average if all sequences are as long as the longest, rounded up."""
    q, k = torch.randn(queries, 2, 8), torch.randn(keys, 2, 8)
    lengths = (torch.tensor([0, len(one)], dtype=torch.int32) for one in (q, k))
    with Operators() as operators:
        flash_attn_varlen_func(q, k, k, *lengths, queries, keys, causal=causal)
    seen = [min(keys, keys - at) if causal else keys for at in range(min(queries, keys))]
    announced = operators.of_ours()["forward"][-2]
    assert announced == (math.ceil(sum(seen) / len(seen)) if seen else 0)
    if keys == 6:
        offsets = cumulative([queries]), cumulative([2])
        with Operators() as operators:
            flash_attn_dualkv_varlen_func(q, k[:4], k[:4], k[4:], k[4:], *offsets, queries, 4, 2, causal=causal)
        assert operators.of_ours()["forward"][-2] == announced


# Determinism


@pytest.mark.parametrize("flag", [True, False])
def test_argument_of_the_context_free_function_reaches_the_operator(flag: bool, device: str) -> None:
    batch = batch_of(ONE_GROUP, device)
    q, _, _, k, v = leaves_of(batch)
    with Operators() as operators:
        offsets = batch.cu_seqlens_q, batch.cu_seqlens_k_decoded
        flash_attn_varlen_func(q, k, v, *offsets, 4, 6, deterministic=flag).sum().backward()
    assert operators.of_ours()["backward"][-1] is flag


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for the compiled module."""
    for name in ("DUALKV_DEBUG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ops, "_C", Mock(Options=dict))
    made: Mock = ops._C
    return made


def test_what_makes_the_kernels_deterministic(module: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(flag: bool) -> bool:
        ops._backward_cuda(unpack(BackwardCall, (*range(10), *PLAIN[:-1], flag)))
        *given, options = module.backward.call_args.args
        assert given == [*range(10)] and options == OF_KERNELS | {"deterministic": options["deterministic"]}
        return bool(options["deterministic"])

    assert asked(True) and not asked(False)
    torch.use_deterministic_algorithms(True)
    try:
        assert asked(False)
    finally:
        torch.use_deterministic_algorithms(False)
    for value, wanted in (("0", False), ("1", True)):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        assert asked(False) == wanted


@pytest.mark.parametrize("name", ["DUALKV_DEBUG", "FLASH_ATTENTION_DETERMINISTIC"])
def test_switches_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_on = ops.checks_values if name == "DUALKV_DEBUG" else lambda: ops.is_deterministic(False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv(name, raising=False)
    assert not is_on()
    for text in ("1", "true", "Yes", "ON", "0", "no", ""):
        monkeypatch.setenv(name, text)
        assert is_on() is (text not in ("0", "no", ""))
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"the environment's {name}: expected 1 or 0 .*, got 'maybe'"):
        is_on()


# The compiled module


def test_compiled_module_gets_the_operators_arguments(module: Mock) -> None:
    """Everything but what concerns Python alone."""
    ops._sequence_nodes_cuda("a", "b", "c", "d", 5)
    module.sequence_nodes.assert_called_once_with("a", "b", "c", "d", 5)
    ops._tree_nodes_cuda("a", "b", 5)  # type: ignore[arg-type]
    module.tree_nodes.assert_called_once_with("a", "b")
    ops._forward_cuda(unpack(ForwardCall, (*range(7), *PLAIN)))
    module.forward.assert_called_with(*range(7), OF_KERNELS | {"deterministic": True})


class OnGpu(Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


def test_compiled_node_gets_the_arguments_of_calls_that_nobody_watches(
    module: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "is_watched", lambda *_: False)
    for deterministic in (False, True):
        tensors: list[Any] = [torch.zeros(()).as_subclass(OnGpu), *range(1, 7)]
        call = unpack(ForwardCall, (*tensors, *PLAIN[:-1], deterministic))
        others = dict(k_decoded=call.k_decoded, v_decoded=call.v_decoded, sinks=call.sinks)
        out = ops.attend(call.q, call.k, call.v, call.nodes, call.options, **others)
        assert out is module.attention.return_value
        module.attention.assert_called_with(*tensors, OF_KERNELS | {"deterministic": deterministic})


@pytest.mark.parametrize(
    ("name", "options"), [("window_right", (-1, 0, 0.0)), ("softcap", (-1, -1, 1000.1)), ("softcap", (-1, -1, 0.009))]
)
def test_the_kernels_refuse_what_they_lack(name: str, options: tuple[Any, ...], module: Mock) -> None:
    """Unless the reference is asked for."""
    call = packed()
    q, k, v = call.tensors
    given, lse = (q, k, v, None, None), q.new_zeros(q.shape[1::-1])
    functions: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.unpacking(ForwardCall, ops._forward_cuda), (*given, None, call.rest.nodes)),
        (ops.unpacking(BackwardCall, ops._backward_cuda), (call.dout, None, *given, q, lse, call.rest.nodes)),
    ]
    for function, tensors in functions:
        with pytest.raises(NotImplementedError, match=f"^{name}: expected .* for the CUDA kernels"):
            function(*tensors, 0.25, True, *options, False, 9, False)
        assert all(isinstance(one, Tensor) for one in function(*tensors, 0.25, True, *options, True, 9, False))
    assert not module.forward.called and not module.backward.called


def test_softcaps_of_the_kernels_are_those_of_the_header() -> None:
    header = (Path(__file__).parents[2] / "csrc/core/softcap.h").read_text()
    least, largest = (re.search(rf"{name} = ([0-9.]+)", header) for name in ("kMinSoftcap", "kMaxSoftcap"))
    assert least and largest and (float(least[1]), float(largest[1])) == checks.KERNEL_SOFTCAPS


@pytest.mark.parametrize("reason", [None, "undefined symbol: _ZN2at4_ops"])
def test_cuda_call_without_the_compiled_module_names_the_fix(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_C", None)
    monkeypatch.setattr(ops, "_load_error", reason)
    functions: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.unpacking(ForwardCall, ops._forward_cuda), (*range(7), *PLAIN)),
        (ops.unpacking(BackwardCall, ops._backward_cuda), (*range(10), *PLAIN)),
        (ops._sequence_nodes_cuda, (*range(5),)), (ops._tree_nodes_cuda, (*range(3),)),
    ]  # fmt: skip
    for function, given in functions:
        with pytest.raises(RuntimeError, match="pip install --no-build-isolation") as caught:
            function(*given)
        assert "nvcc" in str(caught.value)
        assert (reason or "without its compiled module") in str(caught.value)


def test_build_info() -> None:
    info = build_info()
    assert info["version"] == flash_attn_dualkv.__version__
    assert info["torch"] == torch.__version__
    assert info["compiled"] == (ops._C is not None) == bool(info["archs"]) == bool(info["head_dims"])
    assert set(info) >= {"ptx", "dtypes", "cuda", "torch_cuda", "python", "platform", "compiled_error"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_raw_operators_refuse_tensors_of_the_wrong_rank(name: str) -> None:
    """Whatever reads sizes or strides comes after the check."""
    batch = batch_of(ONE_GROUP, "cuda")
    q, k, v, k_decoded, v_decoded = batch.inputs
    tensors = {"q": q, "k": k, "v": v, "k_decoded": k_decoded, "v_decoded": v_decoded}
    options = ("softmax_scale", "causal", "window_left", "window_right", "softcap", "reference")
    options += ("mean_keys", "deterministic")
    rest = {"nodes": nodes_of(batch), **dict(zip(options, PLAIN))}
    if name == "backward":
        tensors |= {"dout": q, "out": q}
        rest |= {"dlse": None, "lse": torch.zeros(q.shape[1::-1], device="cuda")}
    else:
        rest |= {"sinks": None}
    for wrong, one in tensors.items():
        for given in (one[0, 0, 0], one.flatten(), one[0], one[None]):
            with pytest.raises(ValueError, match=rf"^{wrong}: expected 3 dimensions .*, got {given.dim()}$"):
                getattr(ops, name)(**{**rest, **tensors, wrong: given})


# The FlashAttention-2 function


FLASH_ATTENTION_2 = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, "
    "block_table=None"
)
PUBLISHED = (
    "q, k_context, v_context, k_decoded, v_decoded, cu_seqlens_q, cu_seqlens_k_decoded, max_seqlen_q, context_seqlen, "
    "max_seqlen_k_decoded, softmax_scale=None, causal=True"
)
OF_TREES = "q, k, v, cu_seqlens, parents, softmax_scale=None"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (flash_attn_varlen_func, FLASH_ATTENTION_2),
        (flash_attn_dualkv_varlen_func, PUBLISHED),
        (flash_attn_tree_varlen_func, OF_TREES),
    ],
)
def test_signatures(function: Any, expected: str) -> None:
    """That of FlashAttention-2 entirely; of the others what may be given by its place."""
    parameters = inspect.signature(function).parameters.values()
    found = [
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in parameters
        if one.kind is one.POSITIONAL_OR_KEYWORD or function is flash_attn_varlen_func
    ]
    assert ", ".join(found) == expected
