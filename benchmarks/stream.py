"""Micro-batches of different lengths, one after another: what each costs beside its attention.

The columns of a row are explained in bench_stream.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from flex import flex_attend, packed_block_mask
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
    verdict,
)
from packing import Attention, contexts_first_rows, first_copy, leaf, make_source, packed_rows
from peers import Implementation, choose_family, samples
from shapes import STREAMS, Shape, Stream
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flash_attn_dualkv import pack_shared_prompts, shared_prompt_attention, unpack_logprobs
from flash_attn_dualkv.predict import DIRECTIONS

WARM_UP = 2  # micro-batches in front of those that are measured
REPEATS = 3  # of the attention alone
WAIT_CYCLES = 2_000_000  # of a GPU that waits for the host to launch an attention: 1 ms or more
ROOM_S = 1.0  # that a micro-batch must have left, beside what the slowest before took
RESERVE_S = 30.0  # of the time, for each implementation that is still to come on a GPU

Unpack = Callable[[Tensor], Tensor]  # values of response tokens, one after another, as (samples, longest response)


class Steps(NamedTuple):
    """What an implementation does with one micro-batch.

    ``rows``: the packed row of each row that attention is given; ``pack``: from tokens of samples to that attention.
    """

    rows: Tensor
    pack: Callable[[], tuple[Attention, Unpack]]


def steps_of_ours(shape: Shape, device: torch.device, family: str | None = None) -> Steps:
    tokens = samples(shape, device)

    def pack() -> tuple[Attention, Unpack]:
        choose_family(family)
        batch = pack_shared_prompts(*tokens, boundary="gather")
        return partial(shared_prompt_attention, layout=batch.layout), partial(unpack_logprobs, batch=batch)

    return Steps(contexts_first_rows(shape), pack)


def steps_of_flex(shape: Shape, device: torch.device, on_fa4: bool = False, is_dynamic: bool = True) -> Steps:
    prompts, responses = samples(shape, device)
    lengths = shape.responses
    groups = list(pairwise(accumulate((len(group.responses) for group in shape.groups), initial=0)))

    def pack() -> tuple[Attention, Unpack]:
        parts = [part for first, end in groups for part in (prompts[first], *responses[first:end])]
        torch.cat(parts)  # the row of tokens that a model would be given
        return flex_attend(packed_block_mask(shape, device), on_fa4, is_dynamic), unpack

    def unpack(values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(lengths)), batch_first=True)

    return Steps(packed_rows(shape), pack)


def parse(name: str) -> Stream:
    """The stream of that name."""
    if name not in STREAMS:
        raise ValueError(f"shape: expected one of {', '.join(STREAMS)}, got {name!r}")
    return STREAMS[name]


def implementations(families: list[str] | None) -> list[Implementation]:
    """Each with its `Steps`. The last are the slowest: time may end before them."""
    if families is None:
        ours = Implementation("dualkv_reference", steps_of_ours, is_ours=True)
        return [ours, Implementation("flex_packed", steps_of_flex, directions=("forward",))]
    found = [Implementation(f"dualkv_{one}", partial(steps_of_ours, family=one), is_ours=True) for one in families]
    for how in ("", "_static"):
        for name, package in (("flex_fa4", "fa4"), ("flex_packed", None)):
            steps = partial(steps_of_flex, on_fa4=package is not None, is_dynamic=not how)
            found.append(Implementation(name + how, steps, package=package))
    return found


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class StreamRun:
    """All measurements of one stream. ``rows`` holds one row per implementation and micro-batch."""

    def __init__(self, stream: Stream, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        self.name, self.chosen, self.config, self.matmul = stream.name, implementations, config, matmul
        self.shapes = stream.shapes()
        # Other lengths than any that is measured.
        self.warm_up = replace(stream, name=f"{stream.name}-warm-up", micro_batches=WARM_UP).shapes()
        self.measured: dict[str, list[Row]] = {impl.name: [] for impl in implementations}
        self.unmeasured: dict[str, Row] = {impl.name: {"skipped": LEFT_OUT} for impl in implementations}  # and why
        self.samples: dict[str, list[Tensor]] = {}  # of the first implementation

    def __len__(self) -> int:
        return len(self.chosen) * (WARM_UP + len(self.shapes))

    def run(self) -> Iterator[str]:
        """Measure; yields a word before each step."""
        for index, impl in enumerate(self.chosen, 1):
            deadline = self.config.deadline - RESERVE_S * self.config.is_cuda * (len(self.chosen) - index)
            if missing := impl.missing():
                self.unmeasured[impl.name] = {"skipped": missing}
                continue
            failure = None
            try:
                yield from self.visits(impl, deadline)
            except Exception as error:
                failure = self.unmeasured[impl.name] = explain(error)
            clear(self.config, after_failure=failure is not None)

    def visits(self, impl: Implementation, deadline: float) -> Iterator[str]:
        torch._dynamo.reset()
        # A static function is compiled for every length, far more often than the default limit; nothing warms it up.
        warm_up = [] if impl.name.endswith("_static") else self.warm_up
        rows, longest = self.measured[impl.name], 0.0
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
            for index, shape in enumerate([*warm_up, *self.shapes]):
                begin = time.monotonic()
                if begin + longest + ROOM_S > deadline:
                    break
                yield f"{impl.name} {index + 1}"
                row = self.visit(impl, shape)
                if index >= len(warm_up):
                    rows.append(row)
                if index or not warm_up:  # the first loads and compiles
                    longest = max(longest, time.monotonic() - begin)
            mean = self.device_ms(impl, self.shapes[: len(rows)]) if self.config.is_cuda and rows else None
            for row in rows:
                row["device_ms"] = mean

    def visit(self, impl: Implementation, shape: Shape) -> Row:
        """One micro-batch, as bench_stream.py describes it."""
        config, steps = self.config, impl.arrange(shape, self.config.device)
        rows = steps.rows.to(config.device)
        source = make_source(shape, DTYPES[config.dtype], config.device, config.seed)
        q, k, v, dout = (leaf(one[rows]) for one in source)
        values = torch.zeros(sum(shape.responses), device=config.device, requires_grad=True)
        graphs = graphs_compiled()

        def attend() -> list[Tensor]:
            out = attention(q, k, v)
            has_backward = "backward" in impl.directions
            return [out.detach(), *(torch.autograd.grad(out, (q, k, v), dout) if has_backward else ())]

        self.bring_under_load()
        marks = [time.perf_counter()]
        attention, unpack = steps.pack()
        marks.append(time.perf_counter())
        outcome = attend()
        marks.append(time.perf_counter())
        unpack_both_ways(unpack, values)
        marks.append(time.perf_counter())
        synchronize(config)
        wall = 1e3 * (time.perf_counter() - marks[0])
        graphs = graphs_compiled() - graphs

        which = first_copy(rows, len(rows))[:: len(rows) // 512 + 1]
        sample = [one[which] for one in outcome]
        found = verdict(ShapeRun, *compared(sample, self.samples.setdefault(shape.name, sample)))
        if found:
            raise RuntimeError(found["error"])
        del outcome
        alone = self.attention_ms(attend)
        flops = sum(shape.flops(one, shape.packed_tokens, shape.visible_pairs) for one in impl.directions)
        return {
            **self.row_without_times(impl, shape),
            "ms": significant(wall - alone),
            "tflops": significant(flops / alone / 1e9),
            "wall_ms": significant(wall),
            "attention_ms": significant(alone),
            "host_ms": significant(1e3 * (marks[1] - marks[0] + marks[3] - marks[2])),
            "graphs": graphs,
        }

    def bring_under_load(self) -> None:
        """Products, then an idle GPU with the clock of one at work: a rest would raise it, by 10 to 20% for 50 ms."""
        begin = time.monotonic()
        while self.config.is_cuda and time.monotonic() - begin < self.config.warm_ms / 1e3:
            self.matmul.run()
            synchronize(self.config)
        synchronize(self.config)

    def attention_ms(self, attend: Callable[[], object]) -> float:
        """Of the kernels alone: the GPU waits while the host launches them."""
        times = []
        for _ in range(REPEATS):
            self.bring_under_load()
            if self.config.is_cuda:
                torch.cuda._sleep(WAIT_CYCLES)
            times += Stopwatch(self.config).laps((attend,), 1)[0]
        return statistics.median(times)

    def device_ms(self, impl: Implementation, visited: list[Shape]) -> float | None:
        """Of what packing, mask and unpacking launch, a micro-batch; None where the profiler gives nothing."""
        from torch.profiler import ProfilerActivity, profile

        device = self.config.device
        visits = [(impl.arrange(shape, device), torch.zeros(sum(shape.responses), device=device)) for shape in visited]
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for steps, values in visits:
                    unpack_both_ways(steps.pack()[1], values.requires_grad_())
                synchronize(self.config)
            total = sum(one.self_device_time_total for one in profiled.key_averages())
        except RuntimeError:
            return None
        return significant(total / 1e3 / len(visited)) if total else None

    def row_without_times(self, impl: Implementation, shape: Shape) -> Row:
        direction = "both" if impl.directions == DIRECTIONS else impl.directions[0]
        nothing = dict.fromkeys(("ms", "tflops", "fraction", "matmul_tflops"))
        return {**identity(shape, impl, self.config), "direction": direction, **nothing}

    @property
    def rows(self) -> list[Row]:
        """What was measured, and rows with the reason for what was not."""
        rows: list[Row] = []
        for impl in self.chosen:
            found = self.measured[impl.name]
            rest = [self.row_without_times(impl, shape) | self.unmeasured[impl.name] for shape in self.shapes]
            rows += [*found, *rest[len(found) :]]
        return rows


def unpack_both_ways(unpack: Unpack, values: Tensor) -> None:
    torch.autograd.grad(unpack(values).sum(), values)
