"""The operators of separate keys: what PyTorch and the compiled module get; and the function of FlashAttention-2."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from calls import (
    NAMES,
    NO_KEYS,
    NO_ROWS,
    NOTHING,
    ONE_GROUP,
    TWO_GROUPS,
    Operators,
    assert_close,
    attend,
    batch_of,
    leaves_of,
)
from groups import Batch, Group, cumulative
from torch import Tensor

import flash_attn_dualkv
from flash_attn_dualkv import build_info, flash_attn_dualkv_varlen_func, flash_attn_varlen_func, ops


def tables_of(batch: Batch) -> tuple[Tensor, Tensor]:
    tables: tuple[Tensor, Tensor] = ops.segment_tables(
        batch.cu_seqlens_q,
        batch.cu_seqlens_k_decoded,
        batch.cu_seqlens_context,
        batch.cu_seqs_per_context,
        batch.k_context.shape[0],
    )
    return tables


# Operators

ALL_SHAPES = pytest.mark.parametrize(
    "groups", [ONE_GROUP, TWO_GROUPS, NOTHING, NO_ROWS, NO_KEYS], ids=["one", "two", "nothing", "no rows", "no keys"]
)


@ALL_SHAPES
def test_operators_pass_opcheck(groups: Sequence[Group], device: str) -> None:
    batch = batch_of(groups, device, head_dim=16 if device == "cpu" else 64)
    offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, batch.cu_seqlens_context, batch.cu_seqs_per_context)
    torch.library.opcheck(ops.segment_tables, (*offsets, batch.k_context.shape[0]))
    tables = tables_of(batch)
    torch.library.opcheck(ops.forward, (*leaves_of(batch), *tables, 0.25, True, True))
    out, lse = ops.forward(*batch.inputs, *tables, 0.25, True)
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(ops.backward, (batch.dout, dlse, *batch.inputs, out, lse, *tables, 0.25, True, True))


def test_lse_dtype(device: str) -> None:
    _, lse = attend(batch := batch_of(ONE_GROUP, device), batch.inputs, return_lse=True)
    assert lse.dtype == (torch.float64 if device == "cpu" else torch.float32)
    if device == "cpu":
        _, lse = attend(batch := batch_of(ONE_GROUP, device, dtype=torch.bfloat16), batch.inputs, return_lse=True)
        assert lse.dtype == torch.float32


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
    monkeypatch.setattr(ops, "_C", Mock())
    made: Mock = ops._C
    return made


def test_what_makes_the_kernels_deterministic(module: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(flag: bool) -> bool:
        ops._backward_cuda(*range(13), flag)
        *given, deterministic = module.backward.call_args.args
        assert given == list(range(13))
        return bool(deterministic)

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
    for text, wanted in (
        ("1", True),
        ("true", True),
        ("Yes", True),
        ("ON", True),
        ("0", False),
        ("no", False),
        ("", False),
    ):
        monkeypatch.setenv(name, text)
        assert is_on() is wanted
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"the environment's {name}: expected 1 or 0 .*, got 'maybe'"):
        is_on()


# The compiled module


def test_compiled_module_gets_the_operators_arguments(module: Mock) -> None:
    ops._segment_tables_cuda("a", "b", "c", "d", 5)
    module.segment_tables.assert_called_once_with("a", "b", "c", "d", 5)
    for deterministic in ((), (True,)):  # no business of the forward kernel's
        ops._forward_cuda(*range(9), *deterministic)
        module.forward.assert_called_with(*range(9))


@pytest.mark.parametrize("reason", [None, "undefined symbol: _ZN2at4_ops"])
def test_cuda_call_without_the_compiled_module_names_the_fix(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_C", None)
    monkeypatch.setattr(ops, "_load_error", reason)
    for function, count in ((ops._forward_cuda, 9), (ops._backward_cuda, 14), (ops._segment_tables_cuda, 5)):
        with pytest.raises(RuntimeError, match="pip install --no-build-isolation") as caught:
            function(*range(count))
        assert "nvcc" in str(caught.value)
        assert (reason or "without its compiled module") in str(caught.value)


def test_build_info() -> None:
    info = build_info()
    assert info["version"] == flash_attn_dualkv.__version__
    assert info["torch"] == torch.__version__
    assert info["compiled"] == (ops._C is not None) == bool(info["archs"]) == bool(info["head_dims"])
    assert set(info) >= {"ptx", "dtypes", "cuda", "torch_cuda", "python", "platform", "compiled_error"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["forward", "backward", "packed_forward", "packed_backward"])
def test_raw_operators_refuse_tensors_of_the_wrong_rank(name: str) -> None:
    """Whatever reads sizes or strides comes after the check."""
    batch, operators = batch_of(ONE_GROUP, "cuda"), torch.ops.flash_attn_dualkv
    offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, batch.cu_seqlens_context, batch.cu_seqs_per_context)
    segments, groups = operators.segment_tables(*offsets, len(batch.k_context))
    rest = {"segments": segments, "groups": groups, "softmax_scale": 0.25, "deterministic": False}
    if name.startswith("packed"):
        tensors = {"q": batch.q, "k": batch.k_decoded, "v": batch.v_decoded}
        rest |= {"context_rows": 0, "window": None, "softcap": None, "reference": False}
    else:
        tensors = dict(zip(NAMES, batch.inputs))
        rest |= {"causal": True}
    if name.endswith("backward"):
        tensors |= {"dout": batch.q, "out": batch.q}
        rest |= {"dlse": None, "lse": torch.zeros(batch.q.shape[1::-1], device="cuda")}
    elif name.startswith("packed"):
        rest |= {"sinks": None}
    for wrong, one in tensors.items():
        for given in (one[0, 0, 0], one.flatten(), one[0], one[None]):
            with pytest.raises(ValueError, match=rf"^{wrong}: expected 3 dimensions .*, got {given.dim()}$"):
                getattr(operators, name)(**{**rest, **tensors, wrong: given})


# The FlashAttention-2 function


def test_signature_is_that_of_flash_attention_2() -> None:
    parameters = inspect.signature(flash_attn_varlen_func).parameters.values()
    required = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert [one.name for one in parameters if one.default is inspect.Parameter.empty] == required
    assert {one.name: one.default for one in parameters if one.name not in required} == {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "block_table": None,
    }


def test_signature_is_that_of_the_published_function() -> None:
    parameters = inspect.signature(flash_attn_dualkv_varlen_func).parameters
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *NAMES, "cu_seqlens_q", "cu_seqlens_k_decoded",
        "max_seqlen_q", "context_seqlen", "max_seqlen_k_decoded", "softmax_scale", "causal",
    ]  # fmt: skip
    assert parameters["causal"].default is True


@pytest.mark.parametrize("causal", [True, False])
def test_context_free_against_sdpa(causal: bool, device: str) -> None:
    """Sequence by sequence, with as many queries as keys, where PyTorch's causal mask has the same meaning."""
    lengths = (7, 1, 0, 33)
    batch = batch_of([Group(0, tuple((n, n) for n in lengths))], device)
    q, _, _, k, v = leaves_of(batch)
    offsets = cumulative(lengths, device)
    out, lse, nothing = flash_attn_varlen_func(q, k, v, offsets, offsets, 33, 33, causal=causal, return_attn_probs=True)
    assert nothing is None and lse.shape == (4, sum(lengths))
    gradients = torch.autograd.grad(out, (q, k, v), batch.dout)

    leaves = [one.detach().double().requires_grad_() for one in (q, k, v)]
    parts = []
    for q_part, k_part, v_part in zip(*(one.split(lengths) for one in leaves)):
        q_part, k_part, v_part = (one.transpose(0, 1)[None] for one in (q_part, k_part, v_part))
        part = torch.nn.functional.scaled_dot_product_attention(
            q_part, k_part, v_part, is_causal=causal, enable_gqa=True
        )
        parts.append(part[0].transpose(0, 1))
    expected = torch.cat(parts)
    expected_gradients = torch.autograd.grad(expected, leaves, batch.dout.double())
    for one, other in zip((out, *gradients), (expected, *expected_gradients)):
        assert_close(one, other.to(one.dtype))
    assert flash_attn_varlen_func(q, k, v, offsets, offsets, 33, 33, causal=causal).equal(out)
