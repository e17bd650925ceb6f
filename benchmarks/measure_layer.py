"""Measuring a decoder layer: time and memory as in training, the data side of a batch, the host's part of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from host_time import Nothing, host_times
from layer import make_layer_source, samples
from measure import DTYPES, SLOW_S, Config, Row, ShapeRun, backward, can_differentiate, seconds_per_pass, significant
from packing import Prepared
from peers import Implementation
from shapes import Group, LayerShape, Shape
from torch import Tensor

from flash_attn_dualkv import pack_shared_prompts, shared_prompt_attention, unpack_logprobs
from flash_attn_dualkv.predict import DIRECTIONS, ModelShape

# Small, so that the GPU is always done before the host: what is measured is the host's time alone.
HOST_SHAPE = Shape("host", (Group(200, (50, 60, 70, 80)),) * 4)
HOST_CALLS = 50
HOST_LAYERS = 16
WARM_UP_CALLS = 3
DATA_CALLS = 5


class LayerRun(ShapeRun):
    """All measurements of one layer over one micro-batch."""

    shape: LayerShape

    def prepare(self, impl: Implementation) -> Prepared:
        dtype = DTYPES[self.config.dtype]
        return impl.build(make_layer_source(self.shape, dtype, self.config.device, self.config.seed))

    def memory_pass(self, impl: Implementation) -> None:
        """As for a kernel; of this library also what lies beside the layer."""
        super().memory_pass(impl)
        if impl.is_ours:
            self.facts[impl.name].update(self.beside())

    def beside(self) -> Row:
        """What happens once per micro-batch, and the host's time of a call."""
        return {**data_side(self.shape, self.config), **host_side(self.shape.model, self.config)}

    def timed_pass(self, impl: Implementation) -> None:
        """A forward and its backward, which frees what the forward kept: there is memory for one of them only."""
        prepared = self.prepare(impl)
        held: list[Tensor] = []

        def run() -> None:
            held.clear()
            held.append(prepared.run())

        def run_backward() -> None:
            backward(prepared, held.pop(), retain_graph=False)

        steps: dict[str, Callable[[], None]] = {"forward": run}
        if can_differentiate(impl, self.config):
            steps["backward"] = run_backward
        if seconds_per_pass(impl, self.shape, self.config) >= SLOW_S:
            laps = self.stopwatch.laps(tuple(steps.values()), 1)
        else:
            laps = self.stopwatch.laps_under_load(tuple(steps.values()), self.config)
        for direction, times in zip(steps, laps, strict=True):
            self.times[impl.name, direction] += times

    def identity(self, impl: Implementation) -> Row:
        model = self.shape.model
        sizes = {"layers": model.layers, "hidden": model.hidden, "intermediate": model.intermediate}
        return {**super().identity(impl), **sizes}

    def counted_flops(self, impl: Implementation, direction: str) -> float:
        return impl.executed_flops(self.shape, direction)

    def more(self, impl: Implementation, direction: str) -> Row:
        return {
            "executed_tokens": impl.tokens(self.shape),
            "executed_pairs": impl.pairs(self.shape),
            "executed_flops": impl.executed_flops(self.shape, direction),
            "replicated_tokens": self.shape.replicated_tokens,
        }


class MemoryRun(LayerRun):
    """Peak memory alone. ``rows`` holds one row per implementation."""

    def __len__(self) -> int:
        return len(self.chosen)

    def memory_pass(self, impl: Implementation) -> None:
        ShapeRun.memory_pass(self, impl)

    def timed_rounds(self) -> Iterator[str]:
        if not self.config.is_over:
            self.matmul.measure()
        yield from ()

    @property
    def rows(self) -> list[Row]:
        return [self.peak_row(impl) for impl in self.chosen]

    def peak_row(self, impl: Implementation) -> Row:
        shape = self.shape
        responses = sum(shape.responses)
        facts: dict[str, Any] = {"peak_gib": None, "oom": False, **self.facts[impl.name]}
        if self.has_failed(impl):
            facts["peak_gib"] = None
        elif facts["peak_gib"] is None:
            facts["skipped"] = "no GPU memory is counted here" if not self.config.is_cuda else self.out_of_time
        return {
            **self.identity(impl),
            "prompt_tokens": impl.tokens(shape) - responses,
            "response_tokens": responses,
            **facts,
        }


def wall_ms(call: Callable[[], object], calls: int, config: Config) -> float:
    """Median milliseconds of a call until the GPU has done its part, after a first one."""
    readings = []
    for _ in range(1 + calls):
        synchronize(config)
        begin = time.perf_counter()
        call()
        synchronize(config)
        readings.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(readings[1:])


def synchronize(config: Config) -> None:
    if config.is_cuda:
        torch.cuda.synchronize()


def data_side(shape: Shape, config: Config) -> Row:
    """Milliseconds of packing token ids on the device, and of unpacking log-probabilities and their gradient."""
    prompts, responses = samples(shape, config.device)
    batch = pack_shared_prompts(prompts, responses)
    values = torch.zeros(sum(shape.responses), device=config.device, requires_grad=True)

    def unpack() -> None:
        torch.autograd.grad(unpack_logprobs(values, batch).sum(), values)

    return {
        "pack_ms": significant(wall_ms(lambda: pack_shared_prompts(prompts, responses), DATA_CALLS, config)),
        "unpack_ms": significant(wall_ms(unpack, DATA_CALLS, config)),
    }


def host_side(model: ModelShape, config: Config) -> Row:
    """Microseconds of a call of the attention, and of its backward, on the host: medians of calls with a pause before.

    By itself, where the way into the backward, which wakes a thread, is a part of it; as a layer of a stack, where that
    is paid once; and beside it the same of a node that computes nothing.
    """
    layout = pack_shared_prompts(*samples(HOST_SHAPE, config.device), boundary="gather").layout
    calls, stack = (HOST_CALLS, HOST_LAYERS) if config.is_cuda else (1, 2)
    q, k, v = (
        torch.randn(layout.num_tokens, heads, model.head_dim, dtype=DTYPES[config.dtype], device=config.device)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, layout)

    facts: Row = {}
    for name, call, layers in (("", attend, 1), ("stack_", attend, stack), ("empty_", Nothing.apply, 1)):
        times = host_times(call, q, k, v, layers=layers, readings=WARM_UP_CALLS + calls)
        for direction in DIRECTIONS:
            readings = getattr(times, direction)[WARM_UP_CALLS:]
            facts[f"host_{name}{direction}_us"] = significant(statistics.median(readings))
    return facts
