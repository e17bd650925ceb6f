"""How shared_prompt_attention lives on a GPU; its accuracy there is tested in test_shared_prompt_kernels.py."""

from __future__ import annotations

import host_time
import pytest
import torch
from launches import captured, kernel_pattern, launch_counts
from shared_prompts import GROUPS, Inputs, attend, inputs_of, layout_of, run, small
from torch import Tensor

from flash_attn_dualkv import (
    SharedPromptLayout,
    pack_shared_prompts,
    shared_prompt_attention,
)


@pytest.mark.gpu
def test_one_launch_for_all_groups() -> None:
    layout = layout_of(GROUPS["large"], device="cuda")
    inputs = inputs_of(layout, **small("cuda"))

    def launches(deterministic: bool) -> dict[str, int]:
        before = launch_counts()
        run(inputs, lambda leaves: attend(leaves, layout, deterministic=deterministic))
        counts = {name: count - before.get(name, 0) for name, count in launch_counts().items()}
        return {name: count for name, count in counts.items() if count}

    for deterministic in (False, True):
        counts = launches(deterministic)
        assert "dualkv_segment_tables" not in counts, "the layout carries the tables"
        for direction in ("forward", "backward"):
            pattern = kernel_pattern(direction)
            assert sum(count for name, count in counts.items() if pattern.search(name)) == 1, counts


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    layout = layout_of(GROUPS["several"], device="cuda")
    inputs = inputs_of(layout, sinks=True, **small("cuda"))
    run(inputs, lambda leaves: attend(leaves, layout))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs, lambda leaves: attend(leaves, layout))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_reference_on_cuda_tensors() -> None:
    """When it is asked for, with all that the kernels lack and any floating point type."""
    layout = layout_of(GROUPS["several"], device="cuda")
    options = {"sliding_window": 4, "softcap": 1.5, "backend": "reference"}
    inputs = inputs_of(layout, sinks=True, dtype=torch.float64, head_dim=16)
    out, gradients = run(inputs, lambda leaves: attend(leaves, layout, **options))
    on_cpu = Inputs(*(one.cpu() for one in inputs if one is not None))
    expected, right = run(on_cpu, lambda leaves: attend(leaves, layout.to("cpu"), **options))
    for actual, wanted in zip((out, *gradients), (expected, *right)):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(TypeError, match="^q: expected dtype"):
        attend(inputs, layout)


def copy_layout(target: SharedPromptLayout, source: SharedPromptLayout) -> None:
    for name in ("cu_seqlens_context", "cu_seqlens_decoded", "segments", "groups"):
        getattr(target, name).copy_(getattr(source, name))


@pytest.mark.gpu
def test_cuda_graph_follows_another_layout() -> None:
    """Captured once, forward and backward; replayed with other lengths of the same totals and other data."""
    first = layout_of([(41, [64, 16]), (25, [48])], device="cuda")
    second = layout_of([(9, [1, 100]), (57, [27])], device="cuda")
    assert (first.num_context_tokens, first.num_tokens) == (second.num_context_tokens, second.num_tokens)
    buffers = inputs_of(first, **small("cuda"))
    leaves = buffers.leaves()
    layout = layout_of([(41, [64, 16]), (25, [48])], device="cuda")

    def step() -> tuple[Tensor, ...]:
        out = attend(leaves, layout, deterministic=True)
        return (out.detach(), *torch.autograd.grad(out, leaves.tensors, buffers.dout))

    graph, results = captured(step)
    for seed, source in ((1, second), (2, first)):
        inputs = inputs_of(source, seed=seed, **small("cuda"))
        with torch.no_grad():
            for to, value in zip((*leaves.tensors, buffers.dout), (*inputs.tensors, inputs.dout)):
                to.copy_(value)
        copy_layout(layout, source)
        graph.replay()
        out, gradients = run(inputs, lambda leaves, source=source: attend(leaves, source, deterministic=True))
        assert all(map(torch.equal, results, (out, *gradients)))


@pytest.mark.gpu
def test_gradients_of_some_inputs() -> None:
    layout = layout_of(GROUPS["several"], device="cuda")
    inputs = inputs_of(layout, **small("cuda"))
    _, all_gradients = run(inputs, lambda leaves: attend(leaves, layout, deterministic=True))
    for which in range(3):
        q, k, v = tensors = [one.detach().requires_grad_(index == which) for index, one in enumerate(inputs.tensors)]
        shared_prompt_attention(q, k, v, layout, deterministic=True).backward(inputs.dout)
        assert [one.grad is not None for one in tensors] == [index == which for index in range(3)]
        assert torch.equal(tensors[which].grad, all_gradients[which])


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["argument", "setting", "environment"])
def test_what_makes_a_backward_deterministic(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument of the forward; PyTorch's setting and the environment as they are at the time of the backward."""
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    layout = layout_of(GROUPS["several"], device="cuda")
    inputs = inputs_of(layout, **small("cuda"))

    def separate_dq(deterministic: bool = False) -> bool:
        out = attend(inputs.leaves(), layout, deterministic=asked == "argument" and deterministic)
        if deterministic and asked == "environment":
            monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(asked == "setting" and deterministic)
        before = launch_counts()
        try:
            out.backward(inputs.dout)
        finally:
            torch.use_deterministic_algorithms(False)
        return any("backward_dq" in name and count > before.get(name, 0) for name, count in launch_counts().items())

    assert not separate_dq()
    assert separate_dq(deterministic=True)


@pytest.mark.gpu
def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Eager calls of a few groups cost the host less than 100 microseconds in each direction.

    That is the time of a call by itself and of a layer of sixteen, where the way into the backward, which wakes a
    thread, is gone once. Beside it is what PyTorch takes for the backward of a node that computes nothing: 50 to 110
    us, depending on the host.
    """
    layout = layout_of(GROUPS["several"], device="cuda")
    inputs = inputs_of(layout, **small("cuda"))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, layout)

    qkv = inputs.q, inputs.k, inputs.v
    alone = host_time.host_times(call, *qkv, calls=50, readings=10)
    stack = host_time.host_times(call, *qkv, layers=16, calls=10, readings=10)
    empty = host_time.host_times(host_time.Nothing.apply, *qkv, calls=50, readings=10)
    forward, backward, nothing = map(min, (alone.forward, alone.backward, empty.backward))
    layer = min(stack.backward)
    measured = f"{forward:.0f} us forward, {backward:.0f} us backward, {layer:.0f} us backward in a stack, "
    measured += f"{nothing:.0f} us an empty backward"
    with capsys.disabled():
        print(measured)
    assert max(forward, backward, layer) < 100, measured


def test_pack_and_attend_as_documented() -> None:
    """From lists of tokens to attention in three lines."""
    batch = pack_shared_prompts([[1, 2, 3], [1, 2, 3]], [[4], [5, 6]])
    q = torch.randn(batch.layout.num_tokens, 4, 16)
    k = v = torch.randn(batch.layout.num_tokens, 2, 16)
    assert shared_prompt_attention(q, k, v, batch.layout).shape == q.shape
