#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure SharedPrefixPlan.update by the width of the block table: what a step costs the GPU and the host.

    python benchmarks/bench_plan.py                # 30 s
    python benchmarks/bench_plan.py --most 1M --requests 256

A step has prompts of 8K tokens in pages of 16 rows, each with 16 requests that have decoded 1 to 2048 tokens since, in
a table for requests of up to `most` keys, as engines make it. With `bounded` the host knows the longest request
(`max_seqlen`), without it all columns are looked at. Times of the GPU are those of replays of a CUDA graph.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from bench_decode import median_of
from command import RESULTS, Result, gpu_folder, parser_of

from flash_attn_dualkv import SharedPrefixPlan

PAGE, PROMPT, RESPONSES, LONGEST = 16, 8192, 16, 2048
UNITS = {"K": 1 << 10, "M": 1 << 20}
HOST_UPDATES = 200


def make_table(requests: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Block table, keys of each request, and pages, which lie in random places."""
    rng = random.Random(0)
    own, shared = LONGEST // PAGE + 1, PROMPT // PAGE
    prompts = -(-requests // RESPONSES)
    pages = prompts * shared + requests * own
    places = torch.randperm(pages, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    table = torch.zeros(requests, columns, dtype=torch.int32)
    table[:, :shared] = places[: prompts * shared].view(prompts, shared).repeat_interleave(RESPONSES, 0)[:requests]
    table[:, shared : shared + own] = places[prompts * shared :].view(requests, own)
    keys = torch.tensor([PROMPT + rng.randint(1, LONGEST) for _ in range(requests)], dtype=torch.int32)
    return table.cuda(), keys.cuda(), pages


def measure(requests: int, most: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of a table, with and without a bound."""
    table, keys, pages = make_table(requests, most // PAGE)
    longest = int(keys.max())
    rows: list[dict[str, Any]] = []
    for bound in (longest, None):
        plan = SharedPrefixPlan(
            requests, most // PAGE, num_pages=pages, page_size=PAGE, num_heads=32, num_kv_heads=8, head_dim=128,
            device="cuda", exact="split",
        )  # fmt: skip

        def update(plan: SharedPrefixPlan = plan, bound: int | None = bound) -> None:
            plan.update(table, keys, max_seqlen=bound)

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
        rows.append({"requests": requests, "columns": most // PAGE, "bounded": bound is not None, "device_us": device,
                     "host_us": host})  # fmt: skip
        bounded = "bounded" if bound else "all columns"
        print(f"{requests} x {most // PAGE} columns, {bounded}: {device:.1f} us, host {host:.1f} us", flush=True)
    return rows


def keys_of(text: str) -> int:
    """128K as a number."""
    number = int(text.rstrip("KM")) * UNITS.get(text[-1], 1)
    if number < PROMPT + LONGEST + PAGE or number % PAGE:
        raise ValueError(text)
    return number


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--most", nargs="+", type=keys_of, default=[keys_of(one) for one in ("16K", "128K", "1M")])
    parser.add_argument("--requests", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("plans are measured on a GPU")
    gpu = torch.cuda.get_device_name()
    result = Result(options, RESULTS / "decode" / gpu_folder(gpu), "plan", gpu, benchmark="plan")
    rows = [row for count in options.requests for most in options.most for row in measure(count, most, options.rounds)]
    print(result.write(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
