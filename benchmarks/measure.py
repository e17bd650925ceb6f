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
from layer import prepare_layer
from packing import Arrangement, Prepared, arrangements, prepare_attention
from peers import Implementation
from shapes import LayerShape, Shape
from torch import Tensor

from flash_attn_dualkv.predict import DIRECTIONS

GIB = 1 << 30
SAMPLED_ROWS = 2048
SLOW_S = 1.0  # a pass of this length needs no warm-up: what is loaded once, and the card's rest, are small beside it
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEFT_OUT = "left out: budget"
ROUND_S = 1.0  # about what a round of one implementation takes on a GPU

Row = dict[str, Any]


@dataclass
class Config:
    """How long to measure. Milliseconds aim at a steady clock; the limits keep slow peers from using up the time."""

    dtype: str = "bf16"
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    rounds: int = 5
    warm_ms: float = 150.0  # of calls in front of those that are timed
    target_ms: float = 60.0  # of calls per implementation, direction and round
    max_calls: int = 10
    limit_s: float = 20.0  # per implementation and shape, estimated: fewer rounds where they do not fit, or none
    assumed_tflops: float = 250.0  # for the estimates
    deadline: float = math.inf  # time.monotonic() at which everything must be over
    seed: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def fits(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.deadline


class Stopwatch:
    """Milliseconds of calls: CUDA events on a GPU, the wall clock elsewhere."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def laps_under_load(self, steps: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Laps that take ``target_ms`` behind others that take ``warm_ms``, without a pause between them.

        After a rest the card holds its highest clock for 50 to 100 ms, then its limit of power tells: an H200's product
        falls from 785 to 670 TFLOP/s. Without a warm-up of that length a short call is measured in one state, a long
        one in the other, and what ran before decides. A pause would show in the first timed call: what the host takes
        to launch it.
        """
        config = self.config
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
        synchronize(self.config)
        return [[self._between(marks[i], marks[i + 1]) for marks in rounds_of_marks] for i in range(len(steps))]

    def _mark(self) -> Any:
        if not self.config.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.config.is_cuda else (end - begin) * 1e3)


class Matmul:
    """The yardstick: a square bf16 product on random data, in TFLOP/s."""

    def __init__(self, config: Config) -> None:
        self.size = 8192 if config.is_cuda else 64
        generator = torch.Generator(config.device).manual_seed(config.seed)
        self.a, self.b = (
            torch.randn(self.size, self.size, device=config.device, generator=generator).bfloat16() for _ in range(2)
        )
        self.stopwatch = Stopwatch(config)
        self.readings: list[float] = []
        self.run()  # loads the library

    def run(self) -> Tensor:
        return torch.mm(self.a, self.b)

    def measure(self) -> None:
        (times,) = self.stopwatch.laps_under_load((self.run,))
        self.readings.append(2 * self.size**3 / statistics.median(times) / 1e9)


def synchronize(config: Config) -> None:
    if config.is_cuda:
        torch.cuda.synchronize()


def explain(error: BaseException) -> Row:
    """What a row says of a failure."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return {"oom": True}
    first_line = (str(error).strip().splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first_line}"}


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


class ShapeRun:
    """All measurements of one shape. ``rows`` afterwards holds one row per implementation and direction."""

    # Relative Frobenius differences above these mean that two implementations did not compute the same thing.
    # Gradients of replicated rows are rounded to 16 bits before they are summed.
    largest_difference = 0.02
    largest_gradient_difference = 0.05
    is_centred = False  # outputs are compared less their mean

    def __init__(self, shape: Shape, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        self.shape, self.config, self.matmul = shape, config, matmul
        self.name = shape.name
        self.chosen = [impl for impl in implementations if impl.refuses(shape) is None]
        self.stopwatch = Stopwatch(config)
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.facts: dict[str, Row] = {impl.name: {} for impl in self.chosen}
        self.seconds = {impl.name: self.estimate(impl) for impl in self.chosen}  # of a pass; measured after the first
        self.rounds = {impl.name: self.planned_rounds(impl) for impl in self.chosen}
        self.sample: list[Tensor] = []
        self.readings_before = 0

    def estimate(self, impl: Implementation) -> float:
        """Seconds of a forward and backward, from the work that the implementation really does."""
        flops = sum(self.shape.flops(direction, *impl.executed(self.shape)) for direction in DIRECTIONS)
        return flops / (self.config.assumed_tflops * 1e12)

    def planned_rounds(self, impl: Implementation) -> int | None:
        """Rounds that fit ``limit_s`` after the memory pass, up to ``rounds``; None leaves the implementation out."""
        seconds = self.seconds[impl.name]
        passes_a_round = 1 if seconds >= SLOW_S else 2
        rounds = math.floor((self.config.limit_s / seconds - 1) / passes_a_round)
        return None if rounds < min(1, self.config.rounds) else min(self.config.rounds, rounds)

    def __len__(self) -> int:
        """Steps of ``run``, for a progress bar."""
        return sum(1 + count for count in self.rounds.values() if count is not None)

    def run(self) -> Iterator[str]:
        """Measure; yields a word before each step."""
        self.readings_before = len(self.matmul.readings)
        yield from self.memory_passes()
        yield from self.timed_rounds()

    def memory_passes(self) -> Iterator[str]:
        room = ROUND_S * len(self.chosen) if self.config.is_cuda else 0.0  # for what has compiled to be timed
        for impl in self.chosen:
            facts, seconds = self.facts[impl.name], self.seconds[impl.name]
            if missing := impl.missing():
                facts["skipped"] = missing
            elif self.rounds[impl.name] is None:
                facts["skipped"] = f"left out: about {seconds:.0f} s a pass at the assumed rate"
            elif not self.config.fits(seconds * (1 if seconds >= SLOW_S else 2) + impl.compile_s + room):
                facts["skipped"] = LEFT_OUT
            else:
                yield f"{impl.name} memory"
                self.guarded(impl, self.memory_pass)

    def timed_rounds(self) -> Iterator[str]:
        for index in range(self.config.rounds):
            if self.config.fits(0.5):
                self.matmul.measure()
            first = index % max(len(self.chosen), 1)
            for impl in self.chosen[first:] + self.chosen[:first]:
                is_due = index < (self.rounds[impl.name] or 0) and not self.has_failed(impl)
                # A round makes the tensors again, and warms up in both directions.
                if is_due and self.config.fits(0.5 + 4 * self.seconds[impl.name]):
                    yield f"{impl.name} round {index + 1}"
                    self.guarded(impl, self.timed_pass)

    def has_failed(self, impl: Implementation) -> bool:
        return bool(self.facts[impl.name].keys() & {"oom", "error", "skipped"})

    def guarded(self, impl: Implementation, measure: Callable[[Implementation], None]) -> None:
        """One implementation's failure is its own row, not the end of the run."""
        try:
            measure(impl)
        except Exception as error:
            self.facts[impl.name].update(explain(error))
        clear(self.config, after_failure=self.has_failed(impl))

    def prepared(self, impl: Implementation) -> Iterator[Prepared]:
        """Its micro-batches, of which one at a time takes memory."""
        for how in arrangements(impl.arrange(self.shape, self.config.device)):
            yield self.prepare(how)

    def prepare(self, how: Arrangement) -> Prepared:
        config = self.config
        return prepare_attention(self.shape, DTYPES[config.dtype], config.device, config.seed, how)

    def memory_pass(self, impl: Implementation) -> None:
        """Peak of one forward and backward with all its tensors, after a first one that compiles and loads.

        Sampled rows of the output and of its gradients are compared with the first implementation's: one that computes
        something else is no peer.
        """
        cuda, facts = (torch.cuda if self.config.is_cuda else None), self.facts[impl.name]
        baseline = cuda.memory_allocated() if cuda else 0
        is_slow = self.seconds[impl.name] >= SLOW_S
        which = torch.randperm(self.shape.packed_tokens, generator=torch.Generator().manual_seed(self.config.seed))
        which = which[:SAMPLED_ROWS].to(self.config.device)
        total, peak, sampled = 0.0, 0, list[Tensor]()
        for prepared in self.prepared(impl):
            for _ in range(1 if is_slow else 2):
                if cuda:
                    cuda.reset_peak_memory_stats()
                begin = time.perf_counter()
                out = prepared.run()
                gradients = backward(prepared, out, retain_graph=False) if "backward" in impl.directions else ()
                synchronize(self.config)
                seconds = time.perf_counter() - begin
                peak = max(peak, cuda.max_memory_allocated() - baseline) if cuda else 0
                share = [prepared.take(out.detach(), which), *(prepared.fold(gradients, which) if gradients else ())]
                del out, gradients
            total += seconds
            sampled = [one + other for one, other in zip(sampled, share)] if sampled else share
            del prepared, share
        if cuda:
            facts["peak_gib"] = round(peak / GIB, 3)
        if not (is_slow and impl.compile_s):
            self.seconds[impl.name] = total
        if self.is_centred:
            sampled[0] = sampled[0] - sampled[0].mean()
        self.sample = self.sample or sampled
        facts["rel_diff"], facts["gradient_rel_diff"] = compared(sampled, self.sample)
        facts.update(verdict(self, facts["rel_diff"], facts["gradient_rel_diff"]))

    def laps(self, impl: Implementation, *steps: Callable[[], object]) -> list[list[float]]:
        is_slow = self.seconds[impl.name] >= SLOW_S
        return self.stopwatch.laps(steps, 1) if is_slow else self.stopwatch.laps_under_load(steps)

    def timed_pass(self, impl: Implementation) -> None:
        """Times of several micro-batches are added: the median of each."""
        micro_batches = []
        for prepared in self.prepared(impl):
            micro_batches.append(self.timed(impl, prepared))
            del prepared
        for direction, *times in zip(DIRECTIONS, *micro_batches):
            sums = times[0] if len(times) == 1 else [sum(map(statistics.median, times))] if all(times) else []
            self.times[impl.name, direction] += sums

    def timed(self, impl: Implementation, prepared: Prepared) -> tuple[list[float], list[float]]:
        """Forward and backward times of one micro-batch; none of a direction that there is not."""
        forward = self.laps(impl, prepared.run)[0] if "forward" in impl.directions else []
        if "backward" not in impl.directions:
            return forward, []
        out = prepared.run()
        return forward, self.laps(impl, lambda: backward(prepared, out))[0]

    @property
    def rows(self) -> list[Row]:
        readings = self.matmul.readings[self.readings_before :]
        matmul = statistics.median(readings) if readings else None
        return [self.row(impl, one, matmul) for impl in self.chosen for one in DIRECTIONS if one in impl.directions]

    def row(self, impl: Implementation, direction: str, matmul: float | None) -> Row:
        shape, times = self.shape, self.times[impl.name, direction]
        facts, failed = dict(self.facts[impl.name]), self.has_failed(impl)
        if not failed and not times:
            facts["skipped"] = LEFT_OUT if self.config.rounds else "peak memory alone was measured"
        tokens, pairs = impl.executed(shape)
        ms = statistics.median(times) if times and not failed else None
        tflops = shape.flops(direction, *self.counted(impl)) / ms / 1e9 if ms else None
        return {
            **identity(shape, impl, self.config),
            "direction": direction,
            "ms": significant(ms),
            "tflops": significant(tflops),
            "fraction": significant(tflops / matmul) if tflops and matmul else None,
            "matmul_tflops": significant(matmul),
            "peak_gib": None,
            "oom": False,
            "executed_tokens": tokens,
            "executed_pairs": pairs,
            "samples": len(times),
            "ms_min": significant(min(times)) if ms else None,
            "ms_max": significant(max(times)) if ms else None,
            **facts,
        }

    def counted(self, impl: Implementation) -> tuple[int, int]:
        """Tokens and pairs that a row's TFLOP/s count: the useful ones, the same for all implementations."""
        return self.shape.packed_tokens, self.shape.visible_pairs


def verdict(run: ShapeRun | type[ShapeRun], output: float, gradient: float | None) -> Row:
    """An error where differences are larger than those that the run allows."""
    for what, difference, largest in (
        ("output", output, run.largest_difference),
        ("gradient", gradient or 0.0, run.largest_gradient_difference),
    ):
        if not difference <= largest:
            return {"error": f"{what} differs by {difference:.3g} from the first implementation's"}
    return {}


class LayerRun(ShapeRun):
    """All measurements of one layer, or of a whole model, over one micro-batch."""

    shape: LayerShape

    def prepare(self, how: Arrangement) -> Prepared:
        config = self.config
        return prepare_layer(self.shape, DTYPES[config.dtype], config.device, config.seed, how)

    def timed(self, impl: Implementation, prepared: Prepared) -> tuple[list[float], list[float]]:
        """A forward and its backward, which frees what the forward kept: there is memory for one of them only."""
        held: list[Tensor] = []

        def run() -> None:
            held.clear()
            held.append(prepared.run())

        def run_backward() -> None:
            backward(prepared, held.pop(), retain_graph=False)

        if "backward" not in impl.directions:
            return self.laps(impl, run)[0], []
        forward, after = self.laps(impl, run, run_backward)
        return forward, after

    def counted(self, impl: Implementation) -> tuple[int, int]:
        return impl.executed(self.shape)


def identity(shape: Shape, impl: Implementation, config: Config) -> Row:
    """What a row is about."""
    return {
        "shape": shape.name,
        "n": len(shape.responses),
        "p": shape.mean_prompt,
        "r": shape.mean_response,
        "groups": len(shape.roots),
        "impl": impl.name,
        "dtype": config.dtype,
        "h": shape.heads,
        "h_k": shape.kv_heads,
        "d": shape.head_dim,
        "packed_tokens": shape.packed_tokens,
        "replicated_tokens": shape.replicated_tokens,
        "visible_pairs": shape.visible_pairs,
    }


def relative_difference(one: Tensor, other: Tensor) -> float:
    difference = ((one.float() - other.float()).norm() / other.float().norm()).item()
    return math.inf if math.isnan(difference) else round(difference, 6)


def compared(sample: list[Tensor], expected: list[Tensor]) -> tuple[float, float | None]:
    """Differences of an output, and the largest of its gradients, from those expected; None without gradients."""
    output, *gradients = map(relative_difference, sample, expected)
    return output, max(gradients, default=None)


def significant(value: float | None) -> float | None:
    """Five digits: more than any timing has."""
    return None if value is None else float(f"{value:.5g}")
