"""How the functions live with the rest of PyTorch: autograd, torch.compile, checkpointing, autocast."""

from __future__ import annotations

import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calls import (
    NAMES,
    NO_KEYS,
    NO_ROWS,
    NOTHING,
    ONE_GROUP,
    TWO_GROUPS,
    assert_close,
    attend,
    batch_of,
    leaves_of,
)
from groups import Batch, Group, cumulative, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


class Calls(TorchDispatchMode):
    """Records the calls of this library's operators, by name with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flash_attn_dualkv":
            self.made.append((func._schema.name.split("::")[1], args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]

    def arguments(self, name: str) -> tuple[Any, ...]:
        (arguments,) = [args for made, args in self.made if made == name]
        return arguments


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


@ALL_SHAPES
def test_outputs_share_no_memory(groups: Sequence[Group], device: str) -> None:
    batch = batch_of(groups, device)
    offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, batch.cu_seqlens_context, batch.cu_seqs_per_context)
    tables = tables_of(batch)
    out, lse = ops.forward(*batch.inputs, *tables, 0.25, True)
    gradients = ops.backward(batch.dout, None, *batch.inputs, out, lse, *tables, 0.25, True, False)
    given = [*batch.inputs, batch.dout, *(one for one in offsets if one is not None)]
    everything = [*given, *tables, out, lse, *gradients]
    assert len({one.untyped_storage()._cdata for one in everything}) == len(everything)
    assert all(one.is_contiguous() for one in (*tables, out, lse, *gradients))
    assert [one.shape for one in gradients] == [one.shape for one in batch.inputs]


@pytest.mark.parametrize("groups", [NOTHING, NO_ROWS, NO_KEYS], ids=["nothing", "no rows", "no keys"])
def test_without_rows_or_keys(groups: Sequence[Group], device: str) -> None:
    results = run(batch_of(groups, device))
    assert all(not one.any() for one in results._replace(lse=results.out))
    assert results.lse.isneginf().all()


def test_lse_dtype(device: str) -> None:
    _, lse = attend(batch := batch_of(ONE_GROUP, device), batch.inputs, return_lse=True)
    assert lse.dtype == (torch.float64 if device == "cpu" else torch.float32)
    if device == "cpu":
        _, lse = attend(batch := batch_of(ONE_GROUP, device, dtype=torch.bfloat16), batch.inputs, return_lse=True)
        assert lse.dtype == torch.float32


# Autograd


def test_lse_is_differentiable_and_free_when_unused(device: str) -> None:
    batch = batch_of(ONE_GROUP, device)
    leaves = leaves_of(batch)
    with Calls() as calls:
        attend(batch, leaves).sum().backward()
    assert calls.names == ["segment_tables", "forward", "backward"]
    assert calls.arguments("backward")[1] is None
    leaves = leaves_of(batch)
    out, lse = attend(batch, leaves, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    lse.sum().backward()
    assert leaves[0].grad is not None and leaves[0].grad.any()
    assert leaves[2].grad is not None and not leaves[2].grad.any()  # the LSE does not depend on values


@pytest.mark.parametrize("chosen", [(0,), (1,), (2, 4), (3,), (0, 1, 2)], ids=str)
def test_only_some_inputs_require_grad(chosen: tuple[int, ...], device: str) -> None:
    batch = batch_of(TWO_GROUPS, device)
    expected = run(batch)[2:]
    leaves = [one.detach().clone().requires_grad_(index in chosen) for index, one in enumerate(batch.inputs)]
    attend(batch, leaves).backward(batch.dout)
    for index, leaf in enumerate(leaves):
        assert_close(leaf.grad, expected[index] if index in chosen else None)


def test_nothing_is_saved_without_need(device: str) -> None:
    batch = batch_of(ONE_GROUP, device)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda one: one):
        assert not attend(batch, batch.inputs).requires_grad
        with torch.no_grad():
            assert not attend(batch, leaves_of(batch)).requires_grad
        with torch.inference_mode():
            attend(batch, batch.inputs)
        assert not saved
        attend(batch, leaves_of(batch))
        assert saved


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["constant", "differentiable"])
def test_differentiable_once(loss: Callable[[Tensor], Tensor], device: str) -> None:
    """Also where the upstream gradient is a constant, for which autograd's own decorator would stay silent."""
    batch = batch_of(ONE_GROUP, device)
    leaves = leaves_of(batch)
    gradient, *_ = torch.autograd.grad(loss(attend(batch, leaves)), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


def test_upstream_gradient_of_any_strides(device: str) -> None:
    batch = batch_of(TWO_GROUPS, device)
    ones = torch.ones_like(batch.dout)
    for dout in (ones[:1, :1, :1].expand_as(ones), ones.transpose(0, 2).contiguous().transpose(0, 2)):
        for actual, expected in zip(run(batch.replace(dout=dout)), run(batch.replace(dout=ones))):
            assert_close(actual, expected)


def test_views_of_one_packed_tensor(device: str) -> None:
    batch = batch_of(ONE_GROUP, device, head_dim=64)
    packed = torch.cat([batch.k_decoded, batch.v_decoded], dim=1)
    k, v = packed[:, :2], packed[:, 2:]
    assert not k.is_contiguous()
    for actual, expected in zip(run(batch.replace(k_decoded=k, v_decoded=v)), run(batch)):
        assert_close(actual, expected)


def test_default_device_is_not_used(device: str) -> None:
    batch = batch_of(TWO_GROUPS, device)
    expected = run(batch)
    with torch.device("meta"):
        actual = run(batch)
    for one, other in zip(actual, expected):
        assert_close(one, other)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool, device: str) -> None:
    batch = batch_of(TWO_GROUPS, device)
    expected = run(batch)
    leaves = leaves_of(batch)

    def layer(*inputs: Tensor) -> Tensor:
        out: Tensor = attend(batch, [one * 1.0 for one in inputs])
        return out

    with Calls() as calls:
        checkpoint(layer, *leaves, use_reentrant=use_reentrant).backward(batch.dout)
    assert calls.names.count("forward") == 2
    for leaf, gradient in zip(leaves, expected[2:]):
        assert_close(leaf.grad, gradient)


def test_selective_checkpointing_can_keep_the_output(device: str) -> None:
    batch = batch_of(TWO_GROUPS, device)
    leaves = leaves_of(batch)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is ops.forward else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(*inputs: Tensor) -> Tensor:
        out: Tensor = attend(batch, [one * 1.0 for one in inputs])
        return out

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    with Calls() as calls:
        checkpoint(layer, *leaves, use_reentrant=False, context_fn=contexts).backward(batch.dout)
    assert calls.names.count("forward") == 1
    for leaf, gradient in zip(leaves, run(batch)[2:]):
        assert_close(leaf.grad, gradient)


def test_saved_tensors_can_be_offloaded(device: str) -> None:
    batch = batch_of(TWO_GROUPS, device)
    leaves = leaves_of(batch)
    with torch.autograd.graph.save_on_cpu():
        out = attend(batch, leaves)
    out.backward(batch.dout)
    for leaf, gradient in zip(leaves, run(batch)[2:]):
        assert_close(leaf.grad, gradient)


# Autocast


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_for_sdpa(kind: torch.dtype, device: str) -> None:
    batch = batch_of(TWO_GROUPS, device, dtype=torch.float32)
    leaves = leaves_of(batch)
    with torch.autocast(device, kind):
        out = attend(batch, leaves)
        q = batch.q[None].transpose(1, 2)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == kind
        out.backward(batch.dout.to(kind))
    low = batch.replace(**{name: getattr(batch, name).to(kind) for name in (*NAMES, "dout")})
    expected = run(low)
    assert_close(out, expected.out)  # in particular, no product of the reference was rounded to 16 bits
    for leaf, gradient in zip(leaves, expected[2:]):
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        assert_close(leaf.grad.to(kind), gradient)


def test_autocast_leaves_float64_alone() -> None:
    batch = batch_of(ONE_GROUP, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(batch, batch.inputs).dtype == torch.float64
        with pytest.raises(TypeError, match="^k_context: expected dtype torch.float64"):
            attend(batch, [batch.q, *(one.float() for one in batch.inputs[1:])])


# Determinism


class RecordingModule:
    """Stands for the compiled module: remembers its last arguments."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Callable[..., str]:
        def function(*arguments: Any) -> str:
            self.calls[name] = arguments
            return name

        return function


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flag", [True, False])
def test_argument_reaches_the_backward_operator(flag: bool, device: str) -> None:
    batch = batch_of(ONE_GROUP, device)
    with Calls() as calls:
        attend(batch, leaves_of(batch), deterministic=flag).sum().backward()
        q, _, _, k, v = leaves_of(batch)
        offsets = batch.cu_seqlens_q, batch.cu_seqlens_k_decoded
        flash_attn_varlen_func(q, k, v, *offsets, 4, 6, deterministic=flag).sum().backward()
    assert [args[-1] for name, args in calls.made if name == "backward"] == [flag, flag]


def test_what_makes_the_kernels_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    module = RecordingModule()
    monkeypatch.setattr(ops, "_C", module)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    inputs = tuple(range(13))

    def asked(flag: bool) -> bool:
        ops._backward_cuda(*inputs, flag)
        *given, deterministic = module.calls["backward"]
        assert tuple(given) == inputs
        return bool(deterministic)

    assert asked(True) and not asked(False)
    with deterministic_algorithms():
        assert asked(False)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    assert not asked(False)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    assert asked(False)


@pytest.mark.gpu
def test_deterministic_gradients_are_equal_bit_for_bit() -> None:
    batch = batch_of([Group(300, tuple((n, n) for n in range(1, 200, 3)))], "cuda")
    first = run(batch, deterministic=True)
    with deterministic_algorithms():
        assert all(all(map(torch.equal, run(batch), first)) for _ in range(5))


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


def test_compiled_module_gets_the_operators_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = RecordingModule()
    monkeypatch.setattr(ops, "_C", module)
    monkeypatch.delenv("DUALKV_DEBUG", raising=False)
    tables: tuple[Any, ...] = ("a", "b", "c", "d", 5)
    ops._segment_tables_cuda(*tables)
    ops._forward_cuda(*range(9))
    assert module.calls["segment_tables"] == tables
    assert module.calls["forward"] == tuple(range(9))
    ops._forward_cuda(*range(9), True)  # `deterministic` is no business of the forward kernel's
    assert module.calls["forward"] == tuple(range(9))


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


def test_version_is_that_of_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("flash-attn-dualkv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("running from the source directory")
    assert installed == flash_attn_dualkv.__version__


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


def test_unit_context_equals_plain_attention(device: str) -> None:
    """A context shared by one sequence is the beginning of that sequence's keys."""
    batch = batch_of([Group(6, ((9, 5),))], device)
    offsets = cumulative([9], device), cumulative([11], device)
    k, v = torch.cat([batch.k_context, batch.k_decoded]), torch.cat([batch.v_context, batch.v_decoded])
    assert_close(run(batch).out, flash_attn_varlen_func(batch.q, k, v, *offsets, 9, 11, causal=True))
    assert_close(run(batch, softmax_scale=1 / math.sqrt(64)).out, run(batch).out)
