# SPDX-License-Identifier: BSD-3-Clause
"""How the public functions live with autograd: nodes, checkpoints, offloading, views and autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import Call, Operators, packed, separate, tree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAMES = ["flash_attn_dualkv::forward", "flash_attn_dualkv::backward"]


def assert_equal(actual: list[Tensor | None], expected: list[Tensor]) -> None:
    assert all(one is not None and torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def forwards(operators: Operators) -> int:
    return operators.names.count(NAMES[0])


def layer(call: Call) -> Callable[..., Tensor]:
    """The call on results of other operations, as a model has it."""
    return lambda *tensors: call([one * 1.0 for one in tensors], deterministic=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_operator_in_each_direction(deterministic: bool, call: Call) -> None:
    """An LSE that nobody uses has no gradient."""
    leaves = call.leaves()
    with Operators() as forward:
        out = call(leaves, deterministic=deterministic)
    with Operators() as backward:
        torch.autograd.grad(out, leaves, call.dout)
    assert [name for name in forward.of_ours() if not name.endswith("_nodes")] == ["forward"]
    assert list(backward.of_ours()) == ["backward"]
    _, dlse, *_, flag = backward.of_ours()["backward"]
    assert dlse is None and flag is deterministic


def test_one_node_on_the_packed_tensors(device: str) -> None:
    """q, k and v are its direct inputs; no slice, no concatenation and no copy of a table is called for them."""
    call = packed(device=device)
    leaves = call.leaves()
    out = call(leaves)
    assert out.grad_fn is not None and out.grad_fn.name() == "_AttentionBackward"
    with Operators() as forward:
        out = call(leaves)
    assert out.grad_fn is not None
    inputs = [None if node is None else getattr(node, "variable", None) for node, _ in out.grad_fn.next_functions]
    assert all(one is other for one, other in zip(inputs, leaves))
    assert [one for one in inputs[3:] if one is not None] == []
    with Operators() as backward:
        torch.autograd.grad(out, leaves, call.dout)
    assert forward.names + backward.names == NAMES


def test_the_profiler_sees_the_operators(call: Call) -> None:
    """Whoever watches sees operators, although calls that nobody watches go past the dispatcher."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call.results()
    assert set(NAMES) <= {event.key for event in profiler.key_averages()}


def test_only_some_inputs_require_grad(call: Call) -> None:
    _, *expected = call.results()
    count = len(expected)
    for chosen in (*({index} for index in range(count)), {0, 2}, set(range(count - 1))):
        leaves = [one.detach().clone().requires_grad_(index in chosen) for index, one in enumerate(call.tensors)]
        call(leaves, deterministic=True).backward(call.dout)
        assert [index for index, one in enumerate(leaves) if one.grad is not None] == sorted(chosen)
        assert_equal([leaves[index].grad for index in chosen], [expected[index] for index in chosen])


def test_nothing_is_saved_without_need(call: Call) -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        assert not call(call.tensors).requires_grad
        with torch.no_grad():
            assert not call(call.leaves()).requires_grad
        with torch.inference_mode():
            call(call.tensors)
        assert not saved
        call(call.leaves())
        assert saved


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["constant", "differentiable"])
def test_differentiable_once(loss: Callable[[Tensor], Tensor], call: Call) -> None:
    """Also where the upstream gradient is a constant, for which autograd's own decorator would stay silent."""
    leaves = call.leaves()
    gradient, *_ = torch.autograd.grad(loss(call(leaves)), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


def test_upstream_gradient_of_any_strides(call: Call) -> None:
    ones = torch.ones_like(call.dout)
    expected = call.replace(dout=ones).results()
    for dout in (ones[:1, :1, :1].expand_as(ones), ones.transpose(0, 2).contiguous().transpose(0, 2)):
        # Sums of other strides may take another order, and so do additions on a GPU.
        tolerance = 2e-2 if dout.is_cuda else 1e-12
        torch.testing.assert_close(call.replace(dout=dout).results(), expected, rtol=tolerance, atol=tolerance)


def test_default_device_is_not_used(call: Call) -> None:
    expected = call.results()
    with torch.device("meta"):
        assert_equal(call.results(), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool, call: Call) -> None:
    leaves = call.leaves()
    with Operators() as operators:
        checkpoint(layer(call), *leaves, use_reentrant=use_reentrant).backward(call.dout)
    assert forwards(operators) == 2
    assert_equal([one.grad for one in leaves], call.results()[1:])


def test_saved_tensors_can_be_offloaded(call: Call) -> None:
    expected = call.results()
    with torch.autograd.graph.save_on_cpu():
        assert_equal(call.results(), expected)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [separate, packed, tree])
def test_autocast_casts_as_for_sdpa(make: Callable[..., Call], kind: torch.dtype, device: str) -> None:
    call = make(device=device, dtype=torch.float32, head_dim=64)
    leaves = call.leaves()
    with torch.autocast(device, kind):
        out = call(leaves, deterministic=True)
        q = call.tensors[0][None].transpose(1, 2)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == kind
        out.backward(call.dout.to(kind))
    # Sinks stay as they are.
    tensors = [one.to(kind) if one.dim() == 3 else one for one in call.tensors]
    low = call.replace(tensors=tensors, dout=call.dout.to(kind))
    # In particular, no product of the reference was rounded to 16 bits.
    assert_equal([out, *(one.grad for one in leaves)], [low.results()[0], *(one.float() for one in low.results()[1:])])


def test_autocast_leaves_float64_alone() -> None:
    call = separate()
    with torch.autocast("cpu", torch.bfloat16):
        assert call(call.tensors).dtype == torch.float64
        with pytest.raises(TypeError, match="^k_context: expected dtype torch.float64"):
            call([call.tensors[0], *(one.float() for one in call.tensors[1:])])
