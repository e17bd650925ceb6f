#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure what micro-batches cost beside their attention when no two have the same lengths.

    python benchmarks/bench_stream.py                      # 40 micro-batches of about 64K tokens in 64 samples
    python benchmarks/bench_stream.py --budget-s 300 --impls cudnn_flex flex_fa4

From the tokens of every sample, which are on the GPU, to the gradients of one attention layer's q, k and v, and the
values of response tokens by sample:

    this library    pack_shared_prompts (which finds the prompts that are the same, and makes positions and the layout),
                    attention, unpack_logprobs and its gradient
    peers           the tokens joined, the mask (tables and create_block_mask, or endpoints and create_mask_plan),
                    attention, values padded and their gradient; which samples share a prompt is known

create_block_mask and flex_attention are compiled with dynamic=True. A row is a micro-batch; two others come first,
which load and compile:

    wall_ms         of all of that, the GPU idle before and done after
    attention_ms    of the attention's kernels, forward and backward: the same call again, several times, while the GPU
                    waits, so that no time of the host is in it; products in front give both times one clock
    ms              their difference: packing, mask, compilation, launches, unpacking
    host_ms         of the calls for packing, mask and unpacking alone, on the host
    graphs          that torch.compile made for this micro-batch
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import command
import torch
from measure import LEFT_OUT, Config, Matmul, Row, compared, explain, identity, laps, significant
from packing import Attention, first_copy, leaf, make_source, node_rows, packed_rows
from peers import Implementation, cudnn_flex, flex, ours
from shapes import K, Shape, nodes_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WARM_UP = 2  # micro-batches in front of those that are measured
REPEATS = 3  # of the attention alone
WAIT_CYCLES = 2_000_000  # of a GPU that waits for the host to launch an attention: 1 ms or more

Unpack = Callable[[Tensor], Tensor]  # values of response tokens, one after another, as (samples, longest response)
Pack = Callable[[], tuple[Attention, Unpack]]  # from tokens of samples


class Stream(NamedTuple):
    """Micro-batches one after another, no two of the same lengths, as sampling makes them.

    Each has ``samples`` responses in groups of one of ``group_sizes``; lengths are drawn from ``prompt`` and
    ``response``.
    """

    name: str
    micro_batches: int
    samples: int
    group_sizes: tuple[int, ...]
    prompt: tuple[int, int]
    response: tuple[int, int]
    heads: tuple[int, int, int] = (32, 8, 128)

    def shapes(self) -> list[Shape]:
        draw = random.Random(self.name)
        found = []
        for index in range(self.micro_batches):
            n = draw.choice(self.group_sizes)
            groups = [
                (draw.randint(*self.prompt), [draw.randint(*self.response) for _ in range(n)])
                for _ in range(self.samples // n)
            ]
            found.append(Shape(f"{self.name}-{index:02d}", nodes_of(groups), *self.heads))
        return found


STREAMS = {
    # About 64K packed tokens each.
    "rl": Stream("stream-64K", 40, 64, (4, 8, 16), (256, 2 * K), (131, 3 * K // 2)),
    "tiny": Stream("stream-tiny", 4, 8, (2, 4), (16, 48), (4, 32), (4, 2, 16)),
}


def parse(name: str) -> Stream:
    """The stream of that name."""
    if name not in STREAMS:
        raise ValueError(f"shape: expected one of {', '.join(STREAMS)}, got {name!r}")
    return STREAMS[name]


def pack_of_ours(shape: Shape, device: torch.device) -> tuple[Tensor, Pack]:
    """The packed row of each row that attention is given, and what is measured in front of the attention."""
    from flash_attn_dualkv import pack_shared_prompts, shared_prompt_attention, unpack_logprobs

    nodes = [one.to(device) for one in node_rows(shape)]  # a token's id is its packed row
    # As a sampler gives them, a prompt and a response a sample. "gather" keeps a prompt whole, so
    # that the tokens are those of every other implementation.
    samples = [nodes[shape.nodes[leaf][1]] for leaf in shape.leaves], [nodes[leaf] for leaf in shape.leaves]
    packed = partial(pack_shared_prompts, *samples, boundary="gather")

    def pack() -> tuple[Attention, Unpack]:
        batch = packed()
        return partial(shared_prompt_attention, layout=batch.layout), partial(unpack_logprobs, batch=batch)

    return packed().input_ids, pack


def pack_of_peer(shape: Shape, device: torch.device, peer: Implementation) -> tuple[Tensor, Pack]:
    nodes = [one.to(device) for one in node_rows(shape)]

    def pack() -> tuple[Attention, Unpack]:
        torch.cat(nodes)  # the row of tokens that a model would be given
        return peer.arrange(shape, device)[0].attention, unpack

    def unpack(values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(shape.responses)), batch_first=True)

    return packed_rows(shape), pack


def implementations(kernels: str | None) -> list[Implementation]:
    """The last is the slowest: time may end before it."""
    peers = [cudnn_flex(), *(flex(dynamic=True) if kernels else [])]
    packed = [replace(one, arrange=partial(pack_of_peer, peer=one)) for one in peers]
    return [replace(ours(kernels), arrange=pack_of_ours), *packed]


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class StreamRun:
    """All measurements of one stream. ``rows`` holds one row per implementation and micro-batch."""

    def __init__(self, stream: Stream, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        self.chosen, self.config, self.matmul = implementations, config, matmul
        # In front are others, of other lengths than any that is measured.
        warm_up = stream._replace(name=f"{stream.name}-warm-up", micro_batches=WARM_UP).shapes()
        self.shapes = [*warm_up, *stream.shapes()]
        self.rows: list[Row] = []
        self.samples: dict[str, list[Tensor]] = {}  # of the first implementation

    def run(self) -> None:
        """An implementation has as much of the time that is left as each that comes behind it."""
        for index, impl in enumerate(self.chosen):
            begin = time.monotonic()
            deadline = begin + (self.config.deadline - begin) / (len(self.chosen) - index)
            torch._dynamo.reset()
            failure: Row = {"skipped": impl.missing()} if impl.missing() else {}
            for shape in self.shapes:
                row: Row = {**identity(shape, impl, self.config), "direction": "both", "ms": None}
                if not failure and time.monotonic() > deadline:
                    failure = {"skipped": LEFT_OUT}
                try:
                    # Lengths are all different: more compilations than PyTorch's limits for one
                    # function.
                    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
                        row |= failure or self.visit(impl, shape)
                except Exception as error:
                    failure = explain(error)
                    row |= failure
                self.rows += [row] if shape in self.shapes[WARM_UP:] else []
            self.config.clear()

    def visit(self, impl: Implementation, shape: Shape) -> Row:
        """One micro-batch, as the module's docstring describes it."""
        config = self.config
        rows, pack = impl.arrange(shape, config.device)
        rows = rows.to(config.device)
        q, k, v, dout = (leaf(one[rows]) for one in make_source(shape, config.dtype, config.device))
        values = torch.zeros(sum(shape.responses), device=config.device, requires_grad=True)
        graphs = graphs_compiled()

        def attend() -> list[Tensor]:
            out = attention(q, k, v)
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

        self.bring_under_load()
        marks = [time.perf_counter()]
        attention, unpack = pack()
        marks.append(time.perf_counter())
        outcome = attend()
        marks.append(time.perf_counter())
        torch.autograd.grad(unpack(values).sum(), values)
        marks.append(time.perf_counter())
        config.synchronize()
        wall = 1e3 * (time.perf_counter() - marks[0])
        graphs = graphs_compiled() - graphs

        which = first_copy(rows, len(rows))[:: len(rows) // 512 + 1]
        sample = [one[which] for one in outcome]
        found = compared(sample, self.samples.setdefault(shape.name, sample))
        if "error" in found:
            raise RuntimeError(found["error"])
        del outcome
        alone = self.attention_ms(attend)
        return {
            "ms": significant(wall - alone),
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
            self.config.synchronize()
        self.config.synchronize()

    def attention_ms(self, attend: Callable[[], object]) -> float:
        """Milliseconds of the kernels alone: the GPU waits while the host launches them."""
        times = []
        for _ in range(REPEATS):
            self.bring_under_load()
            if self.config.is_cuda:
                torch.cuda._sleep(WAIT_CYCLES)
            times += laps(self.config, (attend,), 1)[0]
        return statistics.median(times)


BENCHMARK = command.Benchmark("stream", __doc__ or "", implementations, parse, StreamRun)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
