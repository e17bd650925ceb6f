"""Micro-batches of different lengths, one after another: what each costs beside its attention.

The columns of a row are explained in bench_stream.py.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from flex import flex_attend, mask_function
from measure import (
    DTYPES,
    LEFT_OUT,
    Config,
    Matmul,
    Row,
    ShapeRun,
    Stopwatch,
    clear,
    compared,
    explain,
    identity,
    significant,
    synchronize,
)
from packing import Attention, contexts_first_rows, first_copy, leaf, make_source, packed_rows
from peers import Implementation, choose_family, own_implementations, samples
from shapes import STREAMS, Shape, Stream
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flash_attn_dualkv import SharedPromptBatch, pack_shared_prompts, shared_prompt_attention, unpack_logprobs
from flash_attn_dualkv.predict import DIRECTIONS

WARM_UP = 2  # micro-batches in front of those that are measured
REPEATS = 3  # of the attention alone
ROOM_S = 1.0  # that a micro-batch must have left, beside what the slowest before took
RESERVE_S = 30.0  # of the time, for each implementation that is still to come on a GPU


class Steps(Protocol):
    """What an implementation does with a micro-batch beside the attention."""

    def rows(self, shape: Shape) -> Tensor:
        """The packed row of each row that attention is given."""

    def pack(self, shape: Shape, prompts: list[Tensor], responses: list[Tensor]) -> Attention:
        """From tokens of samples to attention over their packed rows."""

    def unpack(self, values: Tensor) -> Tensor:
        """Values of response tokens, one after another, as (samples, longest response)."""


@dataclass
class Ours:
    family: str | None
    batch: SharedPromptBatch = field(init=False)

    def rows(self, shape: Shape) -> Tensor:
        return contexts_first_rows(shape)

    def pack(self, shape: Shape, prompts: list[Tensor], responses: list[Tensor]) -> Attention:
        choose_family(self.family)
        self.batch = pack_shared_prompts(prompts, responses, boundary="gather")
        layout = self.batch.layout
        return lambda q, k, v: shared_prompt_attention(q, k, v, layout)

    def unpack(self, values: Tensor) -> Tensor:
        return unpack_logprobs(values, self.batch)


@functools.cache
def block_mask_function(is_cuda: bool) -> Any:
    """create_block_mask, compiled on a GPU: uncompiled it makes tensors of all pairs of tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=True) if is_cuda else create_block_mask


@dataclass
class Flex:
    on_fa4: bool
    is_dynamic: bool
    lengths: list[int] = field(init=False)
    tokens: Tensor = field(init=False)

    def rows(self, shape: Shape) -> Tensor:
        return packed_rows(shape)

    def pack(self, shape: Shape, prompts: list[Tensor], responses: list[Tensor]) -> Attention:
        self.lengths = shape.responses
        parts: list[Tensor] = []
        of_samples = iter(zip(prompts, responses))
        for group in shape.groups:
            own = [next(of_samples) for _ in group.responses]
            parts += [own[0][0], *(response for _, response in own)]
        self.tokens = torch.cat(parts)
        device, total = self.tokens.device, len(self.tokens)
        make = block_mask_function(device.type == "cuda")
        mask = make(mask_function(shape, device), 1, 1, total, total, device.type)
        return flex_attend(mask, self.on_fa4, self.is_dynamic)

    def unpack(self, values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(self.lengths)), batch_first=True)


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def parse(name: str) -> Stream:
    """The stream of that name."""
    if name not in STREAMS:
        raise ValueError(f"shape: expected one of {', '.join(STREAMS)}, got {name!r}")
    return STREAMS[name]


def implementations(families: list[str] | None) -> list[Implementation]:
    """Names, and what they need; `steps_of` says what each does. The last are the slowest: time may end before them."""

    def of_steps(shape: Shape, device: torch.device) -> Any:
        raise NotImplementedError("a stream has steps of its own")

    named = partial(Implementation, arrange=of_steps)
    if families is None:
        return [named("dualkv_reference", is_ours=True), named("flex_packed", directions=("forward",))]
    flex = [
        named(f"{name}{how}", package=package)
        for how in ("", "_static")
        for name, package in (("flex_fa4", "fa4"), ("flex_packed", None))
    ]
    return [*own_implementations(families), *flex]


def steps_of(impl: Implementation) -> Steps:
    if impl.is_ours:
        family = impl.name.removeprefix("dualkv_")
        return Ours(None if family == "reference" else family)
    return Flex("fa4" in impl.name, not impl.name.endswith("_static"))


class StreamRun:
    """All measurements of one stream. ``rows`` holds one row per implementation and micro-batch."""

    def __init__(self, stream: Stream, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        self.name, self.chosen, self.config, self.matmul = stream.name, implementations, config, matmul
        self.shapes = stream.shapes()
        # Other lengths than any that is measured.
        self.warm_up = replace(stream, name=f"{stream.name}-warm-up", micro_batches=WARM_UP).shapes()
        self.measured: dict[str, list[Row]] = {impl.name: [] for impl in implementations}
        self.facts: dict[str, Row] = {impl.name: {} for impl in implementations}
        self.samples: dict[str, list[Tensor]] = {}  # of the first implementation

    def __len__(self) -> int:
        return len(self.chosen) * (WARM_UP + len(self.shapes))

    def run(self) -> Iterator[str]:
        """Measure; yields a word before each step."""
        for index, impl in enumerate(self.chosen, 1):
            deadline = self.config.deadline - RESERVE_S * self.config.is_cuda * (len(self.chosen) - index)
            if missing := impl.missing():
                self.facts[impl.name]["skipped"] = missing
                continue
            try:
                yield from self.visits(impl, deadline)
            except Exception as error:
                self.facts[impl.name].update(explain(error))
            clear(self.config, after_failure=bool(self.facts[impl.name]))

    def visits(self, impl: Implementation, deadline: float) -> Iterator[str]:
        torch._dynamo.reset()
        # A static function is compiled for every length, far more often than the default limit; nothing warms it up.
        warm_up = [] if impl.name.endswith("_static") else self.warm_up
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
            steps, longest = steps_of(impl), 0.0
            for index, shape in enumerate([*warm_up, *self.shapes]):
                begin = time.monotonic()
                if begin + longest + ROOM_S > deadline:
                    break
                yield f"{impl.name} {index + 1}"
                row = self.visit(steps, impl, shape)
                if index >= len(warm_up):
                    self.measured[impl.name].append(row)
                if index or not warm_up:  # the first loads and compiles
                    longest = max(longest, time.monotonic() - begin)
            visited = self.shapes[: len(self.measured[impl.name])]
            mean = self.device_ms(steps, visited) if self.config.is_cuda and visited else None
            for row in self.measured[impl.name]:
                row["device_ms"] = mean

    def visit(self, steps: Steps, impl: Implementation, shape: Shape) -> Row:
        """One micro-batch, as bench_stream.py describes it."""
        config = self.config
        rows = steps.rows(shape).to(config.device)
        source = make_source(shape, DTYPES[config.dtype], config.device, config.seed)
        q, k, v, dout = (leaf(one[rows]) for one in source)
        prompts, responses = samples(shape, config.device)
        values = torch.zeros(sum(shape.responses), device=config.device, requires_grad=True)
        graphs = graphs_compiled()

        def attend() -> list[Tensor]:
            out = attention(q, k, v)
            has_backward = "backward" in impl.directions
            return [out.detach(), *(torch.autograd.grad(out, (q, k, v), dout) if has_backward else ())]

        synchronize(config)
        marks = [time.perf_counter()]
        attention = steps.pack(shape, prompts, responses)
        marks.append(time.perf_counter())
        outcome = attend()
        marks.append(time.perf_counter())
        unpack_both_ways(steps, values)
        marks.append(time.perf_counter())
        synchronize(config)
        wall = 1e3 * (time.perf_counter() - marks[0])
        graphs = graphs_compiled() - graphs

        which = first_copy(rows, len(rows))[:: len(rows) // 512 + 1]
        sample = [one[which] for one in outcome]
        verdict = ShapeRun.verdict(*compared(sample, self.samples.setdefault(shape.name, sample)))
        if verdict:
            raise RuntimeError(verdict["error"])
        del outcome
        alone = self.attention_ms(attend)
        flops = sum(shape.flops(one, shape.packed_tokens, shape.visible_pairs) for one in impl.directions)
        return {
            **self.unmeasured(impl, shape),
            "ms": significant(wall - alone),
            "tflops": significant(flops / alone / 1e9),
            "wall_ms": significant(wall),
            "attention_ms": significant(alone),
            "host_ms": significant(1e3 * (marks[1] - marks[0] + marks[3] - marks[2])),
            "graphs": graphs,
        }

    def attention_ms(self, attend: Callable[[], object]) -> float:
        """Of the kernels alone: products in front keep the GPU busy while the host launches them."""
        times = []
        for _ in range(REPEATS):
            for _ in range(4):
                self.matmul.run()
            times += Stopwatch(self.config).laps((attend,), 1)[0]
        return statistics.median(times)

    def device_ms(self, steps: Steps, visited: list[Shape]) -> float | None:
        """Of what packing, mask and unpacking launch, a micro-batch; None where the profiler gives nothing."""
        from torch.profiler import ProfilerActivity, profile

        batches = [(shape, *samples(shape, self.config.device)) for shape in visited]
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for shape, prompts, responses in batches:
                    steps.pack(shape, prompts, responses)
                    values = torch.zeros(sum(shape.responses), device=self.config.device, requires_grad=True)
                    unpack_both_ways(steps, values)
                synchronize(self.config)
            total = sum(one.self_device_time_total for one in profiled.key_averages())
        except RuntimeError:
            return None
        return significant(total / 1e3 / len(visited)) if total else None

    def unmeasured(self, impl: Implementation, shape: Shape) -> Row:
        direction = "both" if impl.directions == DIRECTIONS else impl.directions[0]
        nothing = dict.fromkeys(("ms", "tflops", "fraction", "matmul_tflops"))
        return {**identity(shape, impl, self.config), "direction": direction, **nothing}

    @property
    def rows(self) -> list[Row]:
        """What was measured, and rows with the reason for what was not."""
        rows: list[Row] = []
        for impl in self.chosen:
            found = self.measured[impl.name]
            why = self.facts[impl.name] or {"skipped": LEFT_OUT}
            rows += [*found, *({**self.unmeasured(impl, one), **why} for one in self.shapes[len(found) :])]
        return rows


def unpack_both_ways(steps: Steps, values: Tensor) -> None:
    torch.autograd.grad(steps.unpack(values).sum(), values)
