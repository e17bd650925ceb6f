# SPDX-License-Identifier: BSD-3-Clause
"""Timing of several implementations on one shape, interleaved in one process, and the peak memory of each.

Only one implementation's tensors exist at a time. Every round visits all of them in a different order, between two
readings of a plain matrix product: on a power-limited card its rate says what the card gave at that moment.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from packing import Prepared, prepare_attention
from peers import Implementation
from shapes import Shape
from torch import Tensor

from flash_attn_dualkv.cli.predict import DIRECTIONS, GIB

SAMPLED_ROWS = 2048
SLOW_MS = 1000.0  # a pass this long needs no warm-up: what is loaded once, and the card's rest, are small beside it
COMPILATION_S = 25.0  # that the first call of an implementation may take
LEFT_OUT = "left out: budget"
# Relative Frobenius differences above these mean that two implementations computed different
# things. Gradients of replicated rows are rounded to 16 bits before they are summed.
LARGEST_DIFFERENCE, LARGEST_GRADIENT_DIFFERENCE = 0.02, 0.05

Row = dict[str, Any]
Found = TypeVar("Found")


@dataclass
class Config:
    """How long to measure. Milliseconds aim at a steady clock."""

    device: torch.device
    rounds: int = 5
    warm_ms: float = 150.0  # of calls in front of those that are timed
    target_ms: float = 60.0  # of calls per implementation, direction and round
    max_calls: int = 10
    deadline: float = math.inf  # time.monotonic() at which everything must be over
    dtype: torch.dtype = torch.float32

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def fits(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self.deadline

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Give memory back: that of a failed call's traceback, too."""
        gc.collect()
        self.synchronize()
        if self.is_cuda:
            torch.cuda.empty_cache()


def laps(config: Config, steps: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Milliseconds of every step, when all are called in order, ``rounds`` times: CUDA events, or the wall clock."""

    def mark() -> Any:
        if not config.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = [mark()]
    for _ in range(rounds):
        for step in steps:
            step()
            marks.append(mark())
    config.synchronize()
    times = [begin.elapsed_time(end) if config.is_cuda else 1e3 * (end - begin) for begin, end in pairwise(marks)]
    return [times[index :: len(steps)] for index in range(len(steps))]


def laps_under_load(config: Config, steps: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Laps that take ``target_ms`` behind others that take ``warm_ms``, without a pause between them.

    After a rest the card holds its highest clock for 50 to 100 ms, then its limit of power tells: an H200's product
    falls from 785 to 670 TFLOP/s. Without a warm-up of that length a short call is measured in one state, a long one in
    the other, and what ran before decides. A pause would show in the first timed call: what the host takes to launch
    it.
    """
    first = laps(config, steps, 1)
    one = max(sum(times[0] for times in first), 1e-3)
    if one >= SLOW_MS:
        return first
    warm_up = math.ceil(max(0.0, config.warm_ms - one) / one)
    calls = max(1, min(config.max_calls, math.ceil(config.target_ms / one)))
    return [times[warm_up:] for times in laps(config, steps, warm_up + calls)]


def largest(value: float, device: torch.device) -> float:
    """The largest value of all ranks, if there are several."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def timed(run: Callable[[], Found], device: torch.device) -> tuple[Found, float, float]:
    """What a step gives, seconds of the slowest rank, and the peak of the fullest, in bytes; ranks begin together."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    found = run()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return found, largest(seconds, device), largest(torch.cuda.max_memory_allocated() if is_cuda else 0.0, device)


class Matmul:
    """The yardstick: a square bf16 product on random data, in TFLOP/s."""

    def __init__(self, config: Config) -> None:
        self.config, self.size = config, 8192 if config.is_cuda else 64
        a, b = (torch.randn(self.size, self.size, device=config.device).bfloat16() for _ in range(2))
        self.run: Callable[[], Tensor] = lambda: torch.mm(a, b)
        self.run()  # loads the library
        self.readings: list[float] = []

    def measure(self) -> None:
        (times,) = laps_under_load(self.config, (self.run,))
        self.readings.append(2 * self.size**3 / statistics.median(times) / 1e9)


def explain(error: BaseException) -> Row:
    """What a row says of a failure."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return {"oom": True}
    first_line = (str(error).strip().splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first_line}"}


class ShapeRun:
    """All measurements of one shape. ``rows`` afterwards holds one row per implementation and direction."""

    largest_difference = LARGEST_DIFFERENCE
    is_centred = False  # outputs, one of each response token, are compared less their mean
    counts_flops = True
    prepare = staticmethod(prepare_attention)

    def __init__(self, shape: Shape, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        self.shape, self.config, self.matmul = shape, config, matmul
        self.chosen = [impl for impl in implementations if not impl.refuses(shape)]
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.facts: dict[str, Row] = {impl.name: {} for impl in self.chosen}
        self.seconds: dict[str, float] = {}  # of a pass
        self.sample: list[Tensor] = []
        self.readings_before = len(matmul.readings)

    def run(self) -> None:
        """A pass of each implementation for its memory and its outcome, then the timed rounds."""
        self.baseline = torch.cuda.memory_allocated() if self.config.is_cuda else 0
        for impl in self.chosen:
            facts = self.facts[impl.name]
            if missing := impl.missing():
                facts["skipped"] = missing
            elif not self.config.fits(COMPILATION_S if self.config.is_cuda else 1.0):
                facts["skipped"] = LEFT_OUT
            else:
                self.guarded(impl, self.memory_pass)
        for index in range(self.config.rounds):
            if self.config.fits(0.5):
                self.matmul.measure()
            first = index % max(len(self.chosen), 1)
            for impl in self.chosen[first:] + self.chosen[:first]:
                # A round makes the tensors again, and warms up in both directions.
                if not self.has_failed(impl) and self.config.fits(0.5 + 2 * self.seconds[impl.name]):
                    self.guarded(impl, self.timed_pass)

    def has_failed(self, impl: Implementation) -> bool:
        return bool(self.facts[impl.name].keys() & {"oom", "error", "skipped"})

    def guarded(self, impl: Implementation, measure: Callable[[Implementation], None]) -> None:
        """One implementation's failure is its own row, not the end of the run."""
        try:
            with patch.dict(os.environ, impl.environment):
                measure(impl)
        except Exception as error:
            self.facts[impl.name].update(explain(error))
        self.config.clear()

    def prepared(self, impl: Implementation) -> Iterator[Prepared]:
        """Its micro-batches, of which one at a time takes memory."""
        for one in impl.arrange(self.shape, self.config.device):
            yield self.prepare(self.shape, self.config.dtype, self.config.device, one)

    def memory_pass(self, impl: Implementation) -> None:
        """Peak of a forward and backward with all its tensors, behind one that compiles and loads.

        Sampled rows of the output and of its gradients are compared with the first implementation's: one that computes
        something else is no peer.
        """
        config, facts = self.config, self.facts[impl.name]
        total, peak, sampled = 0.0, 0, list[Tensor]()
        for prepared in self.prepared(impl):
            which = torch.randperm(len(prepared.copies), generator=torch.Generator().manual_seed(0))
            which = which[:SAMPLED_ROWS].to(config.device)
            for _ in range(2):
                if config.is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                begin = time.perf_counter()
                out = prepared.run()
                gradients = prepared.backward(out, retain_graph=False)
                config.synchronize()
                seconds = time.perf_counter() - begin
                peak = max(peak, torch.cuda.max_memory_allocated() - self.baseline) if config.is_cuda else 0
                share = prepared.sampled(out, gradients, which)
                del out, gradients
            total += seconds
            sampled = [one + other for one, other in zip(sampled, share)] if sampled else share
            del prepared, share
        if config.is_cuda:
            facts["peak_gib"] = round(peak / GIB, 3)
        self.seconds[impl.name] = total
        sampled[0] -= sampled[0].mean() if self.is_centred else 0.0
        self.sample = self.sample or sampled
        facts |= compared(sampled, self.sample, self.largest_difference)

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
        """Forward and backward times of one micro-batch; none of a direction that is not measured."""
        forward = [] if impl.is_deterministic else laps_under_load(self.config, (prepared.run,))[0]
        out = prepared.run()
        return forward, laps_under_load(self.config, (lambda: prepared.backward(out),))[0]

    @property
    def rows(self) -> list[Row]:
        return [self.row(impl, direction) for impl in self.chosen for direction in impl.directions]

    def row(self, impl: Implementation, direction: str) -> Row:
        readings = self.matmul.readings[self.readings_before :]
        matmul = statistics.median(readings) if readings else None
        times, facts = self.times[impl.name, direction], dict(self.facts[impl.name])
        if not self.has_failed(impl) and not times:
            facts["skipped"] = LEFT_OUT
        ms = statistics.median(times) if times and not self.has_failed(impl) else None
        tflops = self.shape.flops(direction) / ms / 1e9 if ms and self.counts_flops else None
        return {
            **identity(self.shape, impl, self.config),
            "direction": direction,
            "ms": significant(ms),
            "tflops": significant(tflops),
            "fraction": significant(tflops / matmul) if tflops and matmul else None,
            "matmul_tflops": significant(matmul),
            "peak_gib": None,
            "samples": len(times),
            "ms_min": significant(min(times, default=None)),
            "ms_max": significant(max(times, default=None)),
            **facts,
        }


def identity(shape: Shape, impl: Implementation, config: Config) -> Row:
    """What a row is about."""
    return {
        "shape": shape.name,
        "impl": impl.name,
        "n": len(shape.leaves),
        "p": shape.mean_prompt,
        "r": round(sum(shape.responses) / len(shape.responses)),
        "dtype": {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(config.dtype, str(config.dtype)),
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


def compared(sample: list[Tensor], expected: list[Tensor], largest: float = LARGEST_DIFFERENCE) -> Row:
    """Differences of an output, and the largest of its gradients, from those expected; an error if too large."""
    output, *gradients = map(relative_difference, sample, expected)
    gradient = max(gradients, default=None)
    found: Row = {"rel_diff": output, "gradient_rel_diff": gradient}
    for what, one, most in (("output", output, largest), ("gradient", gradient or 0.0, LARGEST_GRADIENT_DIFFERENCE)):
        if not one <= most:
            return {**found, "error": f"{what} differs by {one:.3g} from the first implementation's"}
    return found


def significant(value: float | None) -> float | None:
    """Five digits: more than any timing has."""
    return None if value is None else float(f"{value:.5g}")
