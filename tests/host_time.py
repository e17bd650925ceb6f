"""What a call of the attention takes on the host: the time until it, or its backward, returns to Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Nothing(torch.autograd.Function):
    """A node of the same tensors that computes nothing: what PyTorch itself takes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors


class HostTimes(NamedTuple):
    """Microseconds of a layer, reading by reading."""

    forward: list[float]
    backward: list[float]


def host_times(
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layers: int = 1,
    calls: int = 1,
    readings: int,
) -> HostTimes:
    """Times of stacks of ``layers`` calls, each on the output of the one before and keys of its own.

    A reading is the mean of ``calls`` stacks, one after another; before it the GPU has done all work. With one call a
    reading, the thread of the backward has gone to sleep before every one of them.
    """
    q, *keys = [one.detach().clone().requires_grad_() for one in (q, *[k, v] * layers)]
    dout = torch.zeros_like(q)  # other gradients might outgrow the type in a stack
    times = HostTimes([], [])

    def stack() -> Tensor:
        x = q
        for index in range(0, 2 * layers, 2):
            x = call(x, keys[index], keys[index + 1])
        return x

    def begin() -> float:
        if q.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(readings):
        began = begin()
        outs = [stack() for _ in range(calls)]
        times.forward.append(1e6 * (time.perf_counter() - began) / calls / layers)
        began = begin()
        for out in outs:
            torch.autograd.grad(out, (q, *keys), dout)
        times.backward.append(1e6 * (time.perf_counter() - began) / calls / layers)
    return times
