#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure decoding over shared prefixes against engines' kernels, on the same pages and in the same process.

    python benchmarks/bench_decode.py                       # all forests below
    python benchmarks/bench_decode.py --shape 16x16x8K 256x1x8K --rounds 5

A shape is G x N x P: G prompts of P tokens, stored once, each with N requests that have decoded 1 to 2048 tokens since.
A layer has 32 query heads and 8 KV heads of 128, bf16, pages of 16 rows in random places, and one query a request,
unless the name says otherwise (-Hk2: KV heads, -q4: queries, -page256, -own128: tokens decoded, -mla16: as many heads
over latents of 576, of which 512 are the values). `ragged` draws P from 2K to 16K, `half` lets every other request of a
group have ended, `levels` puts two turns of 2K and 1K between the prompt and its requests.

    dualkv           shared_prefix_decode with the trainer's bits, the plan made before
    dualkv_split     the same with walks that are divided (exact="split")
    dualkv_step      both of the plan's default, and the plan, as a model of one layer would run it
    fa3, fa3_splits  FlashAttention-3 as vLLM 0.26 or sglang-kernel has it, with one split and with as many as it likes
    fa3_shuffled     the same with one split, requests in random order
    flashinfer       FlashInfer's paged decode
    cascade          FlashInfer's cascade, which is told the groups; its plan (host) is not counted
    flashmla         FlashMLA's dense decode of latents as vLLM has it, pages of 64; its schedule is not counted

The floor is the bytes of the forest, every page of a prompt once, at the rate at which the same process copies 4 GB;
`each_us` those of every request. Peers are measured where they are installed: VLLM_FA3 names the library of
FlashAttention-3, vLLM's `_vllm_fa3_C` or sglang-kernel's `flash_ops`, FLASH_MLA vLLM's `_flashmla_C`.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command import RESULTS, Result, gpu_folder, parser_of
from measure import Config, laps_under_load
from torch import Tensor

from flash_attn_dualkv import SharedPrefixPlan, shared_prefix_decode

SHAPES = (
    "16x16x1K", "16x16x8K", "16x16x32K", "64x8x1K", "256x1x8K", "8x32x8K", "1x256x8K", "ragged-16x16", "half-16x16x8K",
    "levels-16x16x4K", "16x16x8K-Hk2", "16x16x8K-Hk1", "16x16x8K-q4", "16x16x8K-page256",
)  # fmt: skip
LATENT_SHAPES = (
    "16x16x8K-page64-own128-mla16", "16x16x8K-page64-mla16", "256x1x8K-page64-mla16", "16x16x8K-page64-q2-mla16",
)  # fmt: skip
LONGEST, LATENTS, VALUES = 2048, 576, 512
WARM_UP_MS, LAUNCHES = 100.0, 10


@dataclass
class Step:
    """Requests over pages. trunks: of each prompt or turn its pages, and the requests that it is above of."""

    kv_heads: int
    queries: int
    page_size: int
    pages: int
    tables: list[list[int]]
    keys: list[int]
    cuts: list[int]
    trunks: list[tuple[list[int], list[int]]] = field(default_factory=list)
    heads: int = 32
    head_dim: int = 128
    head_dim_v: int = 128

    @property
    def has_latents(self) -> bool:
        return self.head_dim_v != self.head_dim

    @property
    def scale(self) -> float:
        """The scale of heads of 192 before absorption, or the usual one."""
        return 192**-0.5 if self.has_latents else self.head_dim**-0.5

    def tensors(self, columns: int = 0) -> None:
        """On the GPU: caches, queries, lengths, and the table, of that many columns if not as many as are used."""
        shape = (self.pages, self.page_size, self.kv_heads, self.head_dim)
        self.k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.v = self.k[..., : self.head_dim_v] if self.has_latents else v
        rows = len(self.keys) * self.queries
        self.q = torch.randn(rows, self.heads, self.head_dim, device="cuda", dtype=torch.bfloat16)
        columns = columns or max(map(len, self.tables))
        self.table = ints([row + [0] * (columns - len(row)) for row in self.tables])
        self.seqlens, self.boundaries = ints(self.keys), ints(self.cuts)
        self.cu_seqlens_q = ints([*range(0, len(self.q) + 1, self.queries)])

    def plan(self, exact: str | None) -> SharedPrefixPlan:
        """An empty plan for steps of this size."""
        return SharedPrefixPlan(
            *self.table.shape, num_pages=self.pages, max_queries=len(self.q), page_size=self.page_size,
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim, head_dim_v=self.head_dim_v,
            device="cuda", exact=exact,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Bytes of the forest's keys and values."""
        shared = {page for pages, _ in self.trunks for page in pages}
        rows = len(shared) * self.page_size
        rows += sum(keys - sum(page in shared for page in table) * self.page_size
                    for keys, table in zip(self.keys, self.tables))  # fmt: skip
        return rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and its value."""
        return self.kv_heads * (self.head_dim if self.has_latents else 2 * self.head_dim) * 2


def ints(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_step(name: str, seed: int = 0) -> Step:
    """The step of a name in SHAPES; ValueError for what is none."""
    found = re.fullmatch(r"(?:(ragged|half|levels)-)?(\d+)x(\d+)(?:x(\d+)K)?((?:-(?:Hk|q|page|own|mla)\d+)*)", name)
    if not found or (found[1] == "ragged") == bool(found[4]):
        raise ValueError(f"shape: expected a name such as {', '.join(SHAPES)}, got {name}")
    kind, groups, requests = found[1], int(found[2]), int(found[3])
    given = {word: int(number) for word, number in re.findall(r"-([A-Za-z]+)(\d+)", found[5])}
    rng, page_size = random.Random(seed), given.get("page", 16)
    step = Step(given.get("Hk", 8), given.get("q", 1), page_size, 0, [], [], [])
    if "mla" in given:
        step.kv_heads, step.heads, step.head_dim, step.head_dim_v = 1, given["mla"], LATENTS, VALUES

    def take(tokens: int) -> list[int]:
        first, step.pages = step.pages, step.pages + -(-tokens // page_size)
        return [*range(first, step.pages)]

    for _ in range(groups):
        prompt = rng.randint(2048, 16384) // page_size * page_size if kind == "ragged" else int(found[4]) * 1024
        trunk = take(prompt)
        first = len(step.keys)
        turns = [take(2048) for _ in range(4)] if kind == "levels" else [[]]
        branches = [take(1024) for _ in range(8)] if kind == "levels" else [[]]
        for index in range(requests // 2 if kind == "half" else requests):
            turn, branch = index % len(turns), index % len(branches)
            above = [*trunk, *turns[turn], *branches[branch]]
            keys = len(above) * page_size + given.get("own", rng.randint(step.queries, LONGEST))
            step.tables.append(above + take(keys - len(above) * page_size))
            step.keys.append(keys)
            step.cuts.append(len(above) * page_size)
        members = [*range(first, len(step.keys))]
        step.trunks.append((trunk, members))
        for lists in (turns, branches) if kind == "levels" else ():
            step.trunks += [(pages, [one for one in members if (one - first) % len(lists) == place])
                            for place, pages in enumerate(lists)]  # fmt: skip
    places = rng.sample(range(step.pages), step.pages)
    step.tables = [[places[page] for page in table] for table in step.tables]
    step.trunks = [([places[page] for page in pages], members) for pages, members in step.trunks]
    return step


# --- implementations --------------------------------------------------------------------------------------------------


Run = Callable[[], Any]  # of which the first result is O


def dualkv(step: Step) -> Iterator[tuple[str, Run]]:
    offsets = step.cu_seqlens_q if step.queries > 1 else None
    for name, exact in (("dualkv", "trainer"), ("dualkv_split", "split"), ("dualkv_step", None)):
        if exact == "trainer" and step.has_latents:
            continue
        plan = step.plan(exact)
        given = step.table, step.seqlens
        update = partial(plan.update, *given, cu_seqlens_q=offsets, boundaries=step.boundaries)
        update()
        out = step.q.new_empty(*step.q.shape[:2], step.head_dim_v)
        decode = partial(shared_prefix_decode, step.q, step.k, step.v, plan, softmax_scale=step.scale, out=out)
        yield name, decode if exact else partial(updated, update, decode)


def updated(update: Run, decode: Run) -> Any:
    update()
    return decode()


def fa3(step: Step) -> Iterator[tuple[str, Run]]:
    path = os.environ.get("VLLM_FA3")
    if not path:
        return
    torch.ops.load_library(path)
    operator = (torch.ops.sgl_kernel if "flash_ops" in path else torch.ops._vllm_fa3_C).fwd
    names = [argument.name for argument in operator.default._schema.arguments]

    def call(order: Tensor, splits: int) -> Run:
        q, k = step.q.unflatten(0, (len(step.keys), step.queries))[order].flatten(0, 1), step.k
        out, latent = q.new_empty(*q.shape[:2], step.head_dim_v), None
        if step.has_latents:  # the columns with positions are what it calls q and k
            latent, q, k = q[..., :VALUES], q[..., VALUES:], k[..., VALUES:]
        given = {
            "q": q, "k": k, "v": step.v, "q_v": latent, "out": out, "page_table": step.table[order],
            "seqused_k": step.seqlens[order], "max_seqlen_q": step.queries, "max_seqlen_k": max(step.keys),
            "cu_seqlens_q": step.cu_seqlens_q, "softmax_scale": step.scale, "is_causal": True, "num_splits": splits,
            "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
            "sm_margin": 0, "attention_chunk": 0, "cp_world_size": 1, "cp_rank": 0,
        }  # fmt: skip
        arguments = [given.get(name) for name in names]
        return lambda: operator(*arguments)[0]

    grouped = torch.arange(len(step.keys), device="cuda")
    yield "fa3", call(grouped, 1)
    yield "fa3_splits", call(grouped, 0)
    yield "fa3_shuffled", call(torch.randperm(len(step.keys), device="cuda"), 1)


def flashinfer(step: Step) -> Iterator[tuple[str, Run]]:
    try:
        import flashinfer as library  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    if step.queries > 1 or step.has_latents:
        return
    workspace = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # one KV head needs 277 MB
    model = (step.heads, step.kv_heads, step.head_dim, step.page_size)

    def runs(lists: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets, pages, rows of the last page."""
        ends = torch.tensor([len(pages) for pages, _ in lists]).cumsum(0).tolist()
        last = [(keys - 1) % step.page_size + 1 if keys else 0 for _, keys in lists]
        return ints([0, *ends]), ints([page for pages, _ in lists for page in pages]), ints(last)

    decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    decode.plan(*runs([*zip(step.tables, step.keys)]), *model, q_data_type=torch.bfloat16)
    yield "flashinfer", lambda: decode.run(step.q, (step.k, step.v))
    if sum(len(members) for _, members in step.trunks) != len(step.keys):  # more than two levels
        return
    cascade = library.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    above = [(pages, len(pages) * step.page_size) for pages, _ in step.trunks]
    own = [(table[cut // step.page_size :], keys - cut) for table, keys, cut in zip(step.tables, step.keys, step.cuts)]
    offsets = ints([0, *(members[-1] + 1 for _, members in step.trunks)])
    first, second = runs(above), runs(own)
    cascade.plan(
        [offsets, step.cu_seqlens_q], [first[0], second[0]], [first[1], second[1]], [first[2], second[2]], *model,
        q_data_type=torch.bfloat16,
    )  # fmt: skip
    yield "cascade", lambda: cascade.run(step.q, (step.k, step.v))


def flash_mla(step: Step) -> Iterator[tuple[str, Run]]:
    path = os.environ.get("FLASH_MLA")
    if not path or not step.has_latents:
        return
    torch.ops.load_library(path)
    operator = torch.ops._flashmla_C.dense_decode_fwd
    q = step.q.unflatten(0, (len(step.keys), step.queries))
    given = (q, step.k, VALUES, step.seqlens, step.table, step.scale, True)
    *_, schedule, splits = operator(*given, None, None, None)
    yield "flashmla", lambda: operator(*given, schedule, splits, None)[0].flatten(0, 1)


# --- measuring --------------------------------------------------------------------------------------------------------


def launches(run: Run) -> None:
    for _ in range(LAUNCHES):
        run()


def median_of(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Microseconds: medians over rounds in which every one runs once, after a warm-up under load."""
    config = Config(torch.device("cuda"), warm_ms=WARM_UP_MS, max_calls=1)
    found = [
        {name: laps_under_load(config, (partial(launches, run),))[0][0] for name, run in runs.items()}
        for _ in range(rounds)
    ]
    return {name: statistics.median(times[name] for times in found) * 1e3 / LAUNCHES for name in runs}


def copy_rate() -> float:
    """Bytes a microsecond, read and written."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 4 * source.numel() / median_of({"copy": lambda: target.copy_(source)}, 5)["copy"]


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of a shape; an error is told and ends one implementation alone."""
    step = make_step(name)
    step.tensors()
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    outs: dict[str, Tensor] = {}
    for make in (dualkv, fa3, flashinfer, flash_mla):
        try:
            made = dict(make(step))
            outs |= {impl: run().float() for impl, run in made.items()}
            runs |= made
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            failed[make.__name__] = str(error).split("\n")[0]
    expected = next(iter(outs.values()))
    differences = {impl: (out[: len(expected)] - expected).abs().max().item() for impl, out in outs.items()
                   if impl != "fa3_shuffled"}  # fmt: skip
    rate = copy_rate()
    floor, each = step.bytes / rate, sum(step.keys) * step.row_bytes / rate
    times = median_of(runs, rounds)
    bounds = {"floor_us": floor, "each_us": each, "bytes": step.bytes}
    rows: list[dict[str, Any]] = [
        {"shape": name, "impl": impl, "us": us, **bounds, "difference": differences.get(impl)}
        for impl, us in times.items()
    ]
    for impl, text in failed.items():
        print(name, impl, text, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="such as 16x16x8K (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("decoding is measured on a GPU")
    gpu = torch.cuda.get_device_name()
    folder: Path = RESULTS / "decode" / gpu_folder(gpu)
    result = Result(options, folder, "decode" if options.shape == SHAPES else "decode-shapes", gpu, benchmark="decode")
    for name in options.shape:
        result.add(*measure(name, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
