"""How the functions live on a GPU: CUDA graphs, streams, devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import ONE_GROUP, TWO_GROUPS, attend, batch_of, leaves_of, options_of
from groups import Group, run
from launches import captured
from torch import Tensor

from flash_attn_dualkv import flash_attn_dualkv_varlen_func


@pytest.mark.gpu
def test_cuda_graph_follows_new_offsets() -> None:
    """Captured once, forward and backward; replayed with other lengths of the same totals and other data."""
    first = batch_of([Group(40, ((64, 64), (16, 16))), Group(24, ((48, 48),))], "cuda")
    second = batch_of([Group(8, ((1, 1), (100, 100))), Group(56, ((27, 27),))], "cuda", seed=1)
    assert [one.shape for one in first.inputs] == [one.shape for one in second.inputs]
    leaves: Any = leaves_of(first)
    options, dout = options_of(first), first.dout.clone()

    def step() -> tuple[Tensor, ...]:
        out = flash_attn_dualkv_varlen_func(*leaves, **options, deterministic=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    graph, results = captured(step)
    for batch in (second, first):
        with torch.no_grad():
            for to, source in zip((*leaves, dout), (*batch.inputs, batch.dout)):
                to.copy_(source)
        for name, value in options_of(batch).items():
            if isinstance(value, Tensor):
                options[name].copy_(value)
        graph.replay()
        expected = run(batch, deterministic=True)
        assert torch.equal(results[0], expected.out)
        assert all(map(torch.equal, results[1:], expected[2:]))


@pytest.mark.gpu
def test_other_stream() -> None:
    """The kernels run on the current stream: they see what it wrote just before, however late that was."""
    batch = batch_of([Group(400, ((200, 200),) * 8)], "cuda")
    expected = run(batch, deterministic=True)
    late = batch.replace(q=torch.zeros_like(batch.q))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.q.copy_(batch.q)
        actual = run(late, deterministic=True)
    stream.synchronize()
    assert all(map(torch.equal, actual, expected))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_the_current_one() -> None:
    expected = run(batch_of(TWO_GROUPS, "cuda:0"), deterministic=True)
    first = batch_of(TWO_GROUPS, "cuda:0")
    moved = {name: value.to("cuda:1") for name, value in vars(first).items() if isinstance(value, Tensor)}
    with torch.cuda.device(0):
        actual = run(first.replace(**moved), deterministic=True)
    assert all(one.device == torch.device("cuda:1") for one in actual)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(actual, expected))


@pytest.mark.gpu
def test_values_are_not_read_back_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKV_DEBUG", "1")
    batch = batch_of(ONE_GROUP, "cuda")
    expected = attend(batch, batch.inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(batch, batch.inputs)
    graph.replay()
    assert torch.equal(out, expected)
