#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure SharedPrefixPlan.update by the width of the block table: what a step costs the GPU and the host.

    python benchmarks/bench_plan.py                # 30 s
    python benchmarks/bench_plan.py --most 1024K --requests 256

A step has prompts of 8K tokens in pages of 16 rows, each with 16 requests that have decoded 1 to 2048 tokens since, in
a table for requests of up to `most` keys, as engines make it. With `bounded` the host knows the longest request
(`max_seqlen`), without it all columns are looked at. Times of the GPU are those of replays of a CUDA graph.
"""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from typing import Any

import torch
from bench_decode import LONGEST, make_step, median_of
from command import RESULTS, Result, gpu_folder, parser_of
from shapes import number

PAGE, PROMPT, RESPONSES = 16, 8192, 16
HOST_UPDATES = 200


def measure(requests: int, most: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of a table for requests of at most `most` keys, with and without a bound."""
    step = make_step(f"{requests // RESPONSES}x{RESPONSES}x{PROMPT >> 10}K")
    step.tensors(most // PAGE)
    rows: list[dict[str, Any]] = []
    for bound in (max(step.keys), None):
        update = partial(step.plan("split").update, step.table, step.seqlens, max_seqlen=bound)
        update()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            update()
        device = median_of({"update": graph.replay}, rounds)["update"]
        begin = time.perf_counter()
        for _ in range(HOST_UPDATES):
            update()
        host = (time.perf_counter() - begin) / HOST_UPDATES * 1e6
        torch.cuda.synchronize()
        rows.append({"requests": requests, "columns": most // PAGE, "bounded": bound is not None})
        rows[-1] |= {"device_us": device, "host_us": host}
    return rows


def keys_of(text: str) -> int:
    """128K as a number, which has room for the longest request, in whole pages."""
    keys = number(text)
    if keys < PROMPT + LONGEST + PAGE or keys % PAGE:
        raise ValueError(text)
    return keys


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--most", nargs="+", type=keys_of, default=[*map(keys_of, ("16K", "128K", "1024K"))])
    parser.add_argument("--requests", nargs="+", type=int, default=[256, 1024], help="multiples of 16")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("plans are measured on a GPU")
    gpu = torch.cuda.get_device_name()
    result = Result(options, RESULTS / "decode" / gpu_folder(gpu), "plan", gpu, benchmark="plan")
    for count, most in itertools.product(options.requests, options.most):
        result.add(*measure(count, most, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
