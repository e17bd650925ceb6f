"""How the functions live on a GPU: CUDA graphs, streams, devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import NAMES, ONE_GROUP, TWO_GROUPS, attend, batch_of, leaves_of, options_of
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
