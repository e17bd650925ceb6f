"""Timing of several implementations on one shape, interleaved in one process, and the peak memory of each.

Only one implementation's tensors exist at a time. Every round visits all of them in a different order, between two
readings of a plain matrix product: on a power-limited card its rate says what the card gave at that moment.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from packing import Prepared, make_source
from peers import Implementation
from shapes import Shape
from torch import Tensor

from flash_attn_dualkv.predict import DIRECTIONS

GIB = 1 << 30
SAMPLED_ROWS = 2048
SLOW_S = 1.0  # a pass of this length needs no warm-up: what is loaded once, and the card's rest, are small beside it
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# A relative Frobenius difference above this means that two implementations did not compute the same thing.
LARGEST_DIFFERENCE = 0.02

Row = dict[str, Any]


@dataclass
class Config:
    """How long to measure. Milliseconds aim at a steady clock; the limits keep slow peers from using up the time."""

    dtype: str = "bf16"
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    directions: tuple[str, ...] = DIRECTIONS
    rounds: int = 5
    warm_ms: float = 150.0  # of calls in front of those that are timed
    target_ms: float = 60.0  # of calls per implementation, direction and round
    max_calls: int = 10
    limit_s: float = (
        20.0  # per implementation and shape, estimated: fewer rounds where they do not fit, none if one does not
    )
    assumed_tflops: float = 250.0  # for the estimates
    deadline: float = math.inf  # time.monotonic() after which nothing new is started
    seed: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def seconds_per_pass(implementation: Implementation, shape: Shape, config: Config) -> float:
    """Estimate of one forward and backward, from the work that the implementation really does."""
    flops = sum(implementation.executed_flops(shape, direction) for direction in DIRECTIONS)
    return flops / (config.assumed_tflops * 1e12)


def planned_rounds(implementation: Implementation, shape: Shape, config: Config) -> int:
    """Rounds that fit ``limit_s`` after the memory pass, up to ``rounds``; 0 leaves the implementation out."""
    seconds = seconds_per_pass(implementation, shape, config)
    passes_a_round = 1 if seconds >= SLOW_S else 2
    return max(0, min(config.rounds, math.floor((config.limit_s / seconds - 1) / passes_a_round)))


class Stopwatch:
    """Milliseconds of calls: CUDA events on a GPU, the wall clock elsewhere."""

    def __init__(self, config: Config) -> None:
        self.is_cuda = config.is_cuda

    def time(self, call: Callable[[], object], calls: int) -> list[float]:
        return self.laps((call,), calls)[0]

    def time_under_load(self, call: Callable[[], object], config: Config) -> list[float]:
        return self.laps_under_load((call,), config)[0]

    def laps_under_load(self, steps: Sequence[Callable[[], object]], config: Config) -> list[list[float]]:
        """Laps that take ``target_ms`` behind others that take ``warm_ms``, without a pause between them.

        After a rest the card holds its highest clock for 50 to 100 ms, then its limit of power tells: an H200's product
        falls from 785 to 670 TFLOP/s. Without a warm-up of that length a short call is measured in one state, a long
        one in the other, and what ran before decides. A pause would show in the first timed call: what the host takes
        to launch it.
        """
        one = max(sum(times[0] for times in self.laps(steps, 1)), 1e-3)
        warm_up = math.ceil(max(0.0, config.warm_ms - one) / one)
        calls = max(1, min(config.max_calls, math.ceil(config.target_ms / one)))
        return [times[warm_up:] for times in self.laps(steps, warm_up + calls)]

    def laps(self, steps: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
        """Of every step its times, when all steps are called in order, ``rounds`` times."""
        rounds_of_marks = []
        for _ in range(rounds):
            marks = [self._mark()]
            for step in steps:
                step()
                marks.append(self._mark())
            rounds_of_marks.append(marks)
        if self.is_cuda:
            torch.cuda.synchronize()
        return [[self._between(marks[i], marks[i + 1]) for marks in rounds_of_marks] for i in range(len(steps))]

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.is_cuda else (end - begin) * 1e3)


class Matmul:
    """The yardstick: a square bf16 product on random data, in TFLOP/s."""

    def __init__(self, config: Config) -> None:
        self.size = 8192 if config.is_cuda else 64
        generator = torch.Generator(config.device).manual_seed(config.seed)
        self.a, self.b = (
            torch.randn(self.size, self.size, device=config.device, generator=generator).bfloat16() for _ in range(2)
        )
        self.stopwatch, self.config = Stopwatch(config), config
        self.readings: list[float] = []
        torch.mm(self.a, self.b)  # loads the library

    def measure(self) -> None:
        times = self.stopwatch.time_under_load(lambda: torch.mm(self.a, self.b), self.config)
        self.readings.append(2 * self.size**3 / statistics.median(times) / 1e9)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def clear(config: Config, after_failure: bool) -> None:
    """Give memory back. What a failed call leaves in its traceback needs the slow garbage collector."""
    if after_failure:
        gc.collect()
    if config.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def backward(prepared: Prepared, out: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
    """Gradients of the leaves. Only to be called again does it need ``retain_graph``, which training does without."""
    return torch.autograd.grad(out, prepared.leaves, prepared.dout, retain_graph=retain_graph)


def can_differentiate(implementation: Implementation, config: Config) -> bool:
    return "backward" in implementation.directions and "backward" in config.directions


class ShapeRun:
    """All measurements of one shape. ``rows`` afterwards holds one row per implementation and direction."""

    out_of_time = "the time given was used up"
    largest_difference = LARGEST_DIFFERENCE

    def __init__(self, shape: Shape, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        self.shape, self.config, self.matmul = shape, config, matmul
        self.chosen = [impl for impl in implementations if impl.refuses(shape) is None]
        self.stopwatch = Stopwatch(config)
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.facts: dict[str, Row] = {impl.name: {} for impl in self.chosen}
        self.rounds = {impl.name: planned_rounds(impl, shape, config) for impl in self.chosen}
        self.sample: Tensor | None = None
        self.readings_before = 0

    def __len__(self) -> int:
        """Steps of ``run``, for a progress bar."""
        return sum(1 + count for count in self.rounds.values() if count)

    def run(self) -> Iterator[str]:
        """Measure; yields a word before each step."""
        self.readings_before = len(self.matmul.readings)
        yield from self.memory_passes()
        yield from self.timed_rounds()

    def memory_passes(self) -> Iterator[str]:
        for impl in self.chosen:
            if self.rounds[impl.name] == 0:
                estimate = seconds_per_pass(impl, self.shape, self.config)
                self.facts[impl.name]["skipped"] = f"about {estimate:.0f} s a pass at the assumed rate"
            elif self.config.is_over:
                self.facts[impl.name]["skipped"] = self.out_of_time
            else:
                yield f"{impl.name} memory"
                self.guarded(impl, self.memory_pass)

    def timed_rounds(self) -> Iterator[str]:
        for index in range(self.config.rounds):
            if not self.config.is_over:
                self.matmul.measure()
            first = index % max(len(self.chosen), 1)
            for impl in self.chosen[first:] + self.chosen[:first]:
                if self.config.is_over:
                    return
                if index < self.rounds[impl.name] and not self.has_failed(impl):
                    yield f"{impl.name} round {index + 1}"
                    self.guarded(impl, self.timed_pass)

    def has_failed(self, impl: Implementation) -> bool:
        return bool(self.facts[impl.name].keys() & {"oom", "error", "skipped"})

    def guarded(self, impl: Implementation, measure: Callable[[Implementation], None]) -> None:
        """One implementation's failure is its own row, not the end of the run."""
        try:
            measure(impl)
        except Exception as error:
            if is_out_of_memory(error):
                self.facts[impl.name]["oom"] = True
            else:
                first_line = (str(error).strip().splitlines() or [""])[0]
                self.facts[impl.name]["error"] = f"{type(error).__name__}: {first_line}"
        clear(self.config, after_failure=self.has_failed(impl))

    def prepare(self, impl: Implementation) -> Prepared:
        dtype = DTYPES[self.config.dtype]
        return impl.build(make_source(self.shape, dtype, self.config.device, self.config.seed))

    def memory_pass(self, impl: Implementation) -> None:
        """Peak of one forward and backward with all its tensors, after a first one that compiles and loads.

        Sampled rows of the output are compared with the first implementation's: one that computes something else
        is no peer.
        """
        cuda = torch.cuda if self.config.is_cuda else None
        baseline = cuda.memory_allocated() if cuda else 0
        prepared = self.prepare(impl)
        differentiable = can_differentiate(impl, self.config)
        for _ in range(1 if seconds_per_pass(impl, self.shape, self.config) >= SLOW_S else 2):
            if cuda:
                cuda.reset_peak_memory_stats()
            out = prepared.run()
            gradients = backward(prepared, out, retain_graph=False) if differentiable else ()
            if cuda:
                cuda.synchronize()
                self.facts[impl.name]["peak_gib"] = round((cuda.max_memory_allocated() - baseline) / GIB, 3)
            sampled = self.take_sample(prepared, out)
            del out, gradients
        if self.sample is None:
            self.sample = sampled
        difference = ((sampled - self.sample).norm() / self.sample.norm()).item()
        self.facts[impl.name]["rel_diff"] = round(difference, 6)
        if not difference <= self.largest_difference:
            self.facts[impl.name]["error"] = f"output differs by {difference:.3g} from the first implementation's"

    def take_sample(self, prepared: Prepared, out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed)
        total = self.shape.packed_tokens
        which = torch.randint(total, (min(SAMPLED_ROWS, total),), generator=generator).to(self.config.device)
        return prepared.take(out.detach(), which).float()

    def timed_pass(self, impl: Implementation) -> None:
        prepared = self.prepare(impl)
        is_slow = seconds_per_pass(impl, self.shape, self.config) >= SLOW_S

        def timed(call: Callable[[], object]) -> list[float]:
            return self.stopwatch.time(call, 1) if is_slow else self.stopwatch.time_under_load(call, self.config)

        if "forward" in impl.directions and "forward" in self.config.directions:
            self.times[impl.name, "forward"] += timed(prepared.run)
        if can_differentiate(impl, self.config):
            out = prepared.run()
            self.times[impl.name, "backward"] += timed(lambda: backward(prepared, out))

    @property
    def rows(self) -> list[Row]:
        readings = self.matmul.readings[self.readings_before :]
        matmul = statistics.median(readings) if readings else None
        return [
            self.row(impl, direction, matmul)
            for impl in self.chosen
            for direction in self.config.directions
            if direction in impl.directions
        ]

    def row(self, impl: Implementation, direction: str, matmul: float | None) -> Row:
        shape, times = self.shape, self.times[impl.name, direction]
        facts, failed = dict(self.facts[impl.name]), self.has_failed(impl)
        if not failed and not times:
            facts["skipped"] = self.out_of_time
        ms = statistics.median(times) if times and not failed else None
        tflops = self.counted_flops(impl, direction) / ms / 1e9 if ms else None
        return {
            **self.identity(impl),
            "direction": direction,
            "ms": significant(ms),
            "tflops": significant(tflops),
            "peak_gib": None,
            "oom": False,
            "matmul_tflops": significant(matmul),
            "fraction": significant(tflops / matmul) if tflops and matmul else None,
            "groups": len(shape.groups),
            "packed_tokens": shape.packed_tokens,
            "visible_pairs": shape.visible_pairs(),
            "samples": len(times),
            "ms_min": significant(min(times)) if ms else None,
            "ms_max": significant(max(times)) if ms else None,
            **self.more(impl, direction),
            **facts,
        }

    def identity(self, impl: Implementation) -> Row:
        """What a row is about."""
        shape = self.shape
        return {
            "shape": shape.name,
            "n": shape.num_responses,
            "p": shape.mean_prompt,
            "r": shape.mean_response,
            "impl": impl.name,
            "dtype": self.config.dtype,
            "h": shape.heads,
            "h_k": shape.kv_heads,
            "d": shape.head_dim,
        }

    def counted_flops(self, impl: Implementation, direction: str) -> float:
        """The work that a row's TFLOP/s count: the same for all implementations."""
        return self.shape.flops(direction)

    def more(self, impl: Implementation, direction: str) -> Row:
        """Further fields of a row."""
        return {}


def significant(value: float | None) -> float | None:
    """Five digits: more than any timing has."""
    return None if value is None else float(f"{value:.5g}")
