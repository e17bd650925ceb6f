# SPDX-License-Identifier: BSD-3-Clause
"""How the public functions live on a GPU, with each family of kernels: CUDA graphs, streams, devices, host time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import Call, packed, packed_with_sinks, separate, tree
from launches import DETERMINISTIC, captured, counted_launches, kernel_pattern, kernels, poison_free_memory  # noqa: F401
from shared_prompts import GROUPS, Groups
from torch import Tensor

from flash_attn_dualkv import SharedPromptLayout, flash_attn_varlen_func, shared_prompt_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
all_functions = pytest.mark.parametrize("make", [separate, packed, tree])
both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])

Make = Callable[..., Call]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], deterministic: bool = True) -> None:
    """Output and gradients; the additions to dQ come in any order by default."""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if deterministic or index != 1:
            assert torch.equal(one.cpu(), other.cpu())
        else:
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


# The same numbers of rows, prompts and responses; the second has other parents.
LENGTHS: list[Groups] = [[(41, [64, 16]), (25, [48])], [(9, [1]), (57, [100, 27])], [(65, [128, 0]), (1, [0])]]


@both_modes
@all_functions
def test_cuda_graph_follows_new_offsets(make: Make, deterministic: bool) -> None:
    """Captured once, forward and backward; replayed with other lengths, parents and data."""
    buffers = make(LENGTHS[0], "cuda")
    leaves = buffers.leaves()

    def step() -> tuple[Tensor, ...]:
        out = buffers(leaves, deterministic=deterministic)
        return (out.detach(), *torch.autograd.grad(out, leaves, buffers.dout))

    graph, results = captured(step)
    targets = [*leaves, *buffers.all_tensors[len(leaves) :]]
    for seed, lengths in enumerate((*LENGTHS[1:], LENGTHS[0])):
        source = make(lengths, "cuda", seed=seed)
        with torch.no_grad():
            for to, value in zip(targets, source.all_tensors, strict=True):
                to.copy_(value)
        graph.replay()
        assert_equal(results, source.results(deterministic), deterministic)


@pytest.mark.parametrize("make", [separate, packed, packed_with_sinks, tree])
def test_no_synchronisation_with_the_host(make: Make) -> None:
    call = make(device="cuda")
    call.results()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for deterministic in (False, True):
            call.results(deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@all_functions
def test_kernels_run_on_the_current_stream(make: Make) -> None:
    """They see what it wrote just before, however late that was."""
    call = make([(400, [200] * 8)], "cuda")
    expected = call.results()
    q, *keys = call.tensors
    late = call.replace(tensors=(torch.zeros_like(q), *keys))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.tensors[0].copy_(q)
        actual = late.results()
    stream.synchronize()
    assert_equal(actual, expected)


@all_functions
def test_streams_do_not_disturb_each_other(make: Make) -> None:
    """Calls on two streams at once; every tensor in between belongs to its own stream."""
    calls = [make(device="cuda", seed=seed) for seed in (1, 2)]
    expected = [call.results() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for call, stream in zip(calls, streams):
            with torch.cuda.stream(stream):
                found.append(call.results())
    torch.cuda.synchronize()
    for index, results in enumerate(found):
        assert_equal(results, expected[index % 2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@all_functions
def test_device_that_is_not_the_current_one(make: Make) -> None:
    call = make(device="cuda:0")
    if isinstance(call.rest, SharedPromptLayout):
        rest = call.rest.to("cuda:1")
    else:
        rest = {name: one.to("cuda:1") if isinstance(one, Tensor) else one for name, one in call.rest.items()}
    moved = call.replace(tensors=[one.to("cuda:1") for one in call.tensors], dout=call.dout.to("cuda:1"), rest=rest)
    with torch.cuda.device(0):
        actual = moved.results()
    assert all(one.device == torch.device("cuda:1") for one in actual)
    assert_equal(actual, call.results())


@all_functions
def test_values_are_not_read_back_during_capture(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKV_DEBUG", "1")
    call = make(device="cuda")
    expected = call(call.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(call.tensors)
    graph.replay()
    assert torch.equal(out, expected)


@both_modes
@all_functions
def test_one_launch_for_all_groups(make: Make, deterministic: bool) -> None:
    call = make(GROUPS["large"], "cuda")
    with counted_launches() as counts:
        call.results(deterministic)
    for direction in ("forward", "backward"):
        pattern = kernel_pattern(direction)
        assert sum(count for name, count in counts.items() if pattern.search(name)) == 1, counts
    assert counts.get("dualkv_nodes", 0) == (0 if make is packed else 1), "the layout carries the table"


@pytest.mark.parametrize("asked", ["argument", "setting", "environment"])
@all_functions
def test_what_makes_a_backward_deterministic(make: Make, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument of the forward; PyTorch's setting and the environment as they are at the time of the backward."""
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    call = make(device="cuda")

    def backward(deterministic: bool) -> list[Tensor]:
        leaves = call.leaves()
        out = call(leaves, deterministic=deterministic and asked == "argument")
        if deterministic and asked == "environment":
            monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(deterministic and asked == "setting")  # also fills new tensors with NaN
        try:
            gradients = torch.autograd.grad(out, leaves, call.dout)
        finally:
            torch.use_deterministic_algorithms(False)
        return [out.detach(), *gradients]

    expected = call.results()
    with counted_launches() as counts:
        backward(False)
    assert not any(one in name for name in counts for one in DETERMINISTIC)
    poison_free_memory()
    with counted_launches() as counts:
        results = backward(True)
    assert any(one in name for name in counts for one in DETERMINISTIC)
    assert_equal(results, expected)


def test_the_reference_on_cuda_tensors() -> None:
    """When it is asked for, with all that the kernels lack and any floating point type."""
    options = {"sliding_window": 4, "softcap": 1.5, "backend": "reference"}
    call = packed_with_sinks(device="cuda", dtype=torch.float64, head_dim=16)
    on_cpu = call.replace(
        tensors=[one.cpu() for one in call.tensors], dout=call.dout.cpu(), rest=call.rest.to("cpu")
    )  # fmt: skip
    actual = [one.cpu() for one in call.results(**options)]
    torch.testing.assert_close(actual, on_cpu.results(**options), rtol=1e-10, atol=1e-10)
    with pytest.raises(TypeError, match="^q: expected dtype"):
        call(call.tensors)


class Nothing(torch.autograd.Function):
    """A node of the same tensors that computes nothing: what PyTorch itself takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors


def host_times(attend: Callable[..., Tensor], q: Tensor, *kv: Tensor, layers: int = 1) -> tuple[float, float]:
    """Microseconds a layer until the forward and the backward return, the least of ten readings.

    A reading is the mean of some stacks of layers, each on the output of the one before and keys of its own, with the
    GPU idle before.
    """
    q, *keys = [one.detach().clone().requires_grad_() for one in (q, *kv * layers)]
    dout = torch.zeros_like(q)  # other gradients might outgrow the type in a stack
    stacks = 50 if layers == 1 else 10
    readings: list[tuple[float, float]] = []
    for _ in range(10):
        outs, seconds = [q] * stacks, []
        torch.cuda.synchronize()
        began = time.perf_counter()
        for index in range(stacks):
            for layer in range(layers):
                outs[index] = attend(outs[index], *keys[2 * layer : 2 * layer + 2])
        seconds.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for out in outs:
            torch.autograd.grad(out, (q, *keys), dout)
        seconds.append(time.perf_counter() - began)
        readings.append(tuple(1e6 * one / stacks / layers for one in seconds))
    forward, backward = map(min, zip(*readings))
    return forward, backward


def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Eager calls of a few groups cost the host 100 microseconds forward and 110 backward, as a layer of sixteen.

    A lone backward wakes a thread. PyTorch takes 50 to 110 us for that alone, depending on the host, so what counts
    there is the time beside a node that computes nothing.
    """
    call = packed(device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, call.rest)

    forward, backward = host_times(attend, *call.tensors)
    _, layer = host_times(attend, *call.tensors, layers=16)
    _, nothing = host_times(Nothing.apply, *call.tensors)
    measured = f"{forward:.0f} us forward, {backward:.0f} us backward, {layer:.0f} us backward in a stack, "
    measured += f"{nothing:.0f} us an empty backward"
    with capsys.disabled():
        print(measured)
    assert forward < 100 and layer < 110 and backward - nothing < 75, measured


def test_wide_heads_have_kernels_on_hopper_alone(kernels: str) -> None:  # noqa: F811
    rows = torch.randn(70, 2, 264, device="cuda", dtype=torch.bfloat16)
    call = lambda: flash_attn_varlen_func(rows, rows, rows, *[torch.tensor([0, 70], device="cuda").int()] * 2, 70, 70)  # noqa: E731
    if kernels == "sm90":
        assert call().isfinite().all()
    else:
        with pytest.raises(
            ValueError, match="q: head dim 264 is larger .* above 256 there are kernels for Hopper alone"
        ):
            call()
