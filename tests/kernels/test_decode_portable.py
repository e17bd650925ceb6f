# SPDX-License-Identifier: BSD-3-Clause
"""The portable decode kernels through the C interface: how exact they are, and on what the bits of a row depend."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from launches import DEVICE, GPU_MARKS, counted_launches, use_kernels
from torch import Tensor

from flash_attn_dualkv import flash_attn_tree_varlen_func, kernels

FAMILY = "sm80"
pytestmark = GPU_MARKS


def struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """Mirror of a struct of csrc/api.h: names divided by spaces, and their type."""
    split = [(one, kind) for names, kind in fields for one in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": split})


POINTER, I64, I32, F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
TensorStruct = struct("TensorStruct", ("data", POINTER), ("rows heads head_dim row_stride head_stride", I64))
OptionsStruct = struct(
    "OptionsStruct", ("softmax_scale softcap", F64), ("window_left mean_keys", I64), ("causal deterministic", I32)
)
PlanStruct = struct(
    "PlanStruct",
    ("block_table", POINTER),
    ("table_stride requests columns queries", I64),
    ("seqlens cu_seqlens_q boundaries", POINTER),
    ("max_requests max_queries num_pages page_size num_heads num_kv_heads head_dim", I64),
    ("memory", POINTER),
)
PagesStruct = struct("PagesStruct", ("data", POINTER), ("page_stride row_stride head_stride", I64))
DecodeStruct = struct(
    "DecodeStruct",
    ("q out", TensorStruct),
    ("k v", PagesStruct),
    ("lse sinks", POINTER),
    ("is_half", I32),
    ("options", OptionsStruct),
)


@cache
def library() -> ctypes.CDLL:
    path = kernels.LIBRARY
    if DEVICE == "cpu":
        import host_kernels

        path = host_kernels.build() / path.name
    found = ctypes.CDLL(str(path))
    if not hasattr(found, "dualkv_decode_plan"):
        pytest.skip("this library makes no plans")
    found.dualkv_error.restype = ctypes.c_char_p
    return found


def check(status: int) -> None:
    if status:
        raise RuntimeError(library().dualkv_error().decode())


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def ints(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class Rollouts:
    """Responses in the middle of being written: their training batch, and the requests of a step."""

    q: Tensor  # (rows, heads, d) of the training batch
    k: Tensor
    v: Tensor
    cu_seqlens: list[int]
    parents: list[int]
    paths: list[list[int]]  # rows of each request's keys
    cuts: list[int]
    queries: list[int]  # of each request: the last of its keys
    table: list[list[int]]
    page_size: int
    sinks: Tensor | None = None
    softcap: float = 0.0
    window: int = -1

    @property
    def query_rows(self) -> list[int]:
        return [row for path, count in zip(self.paths, self.queries) for row in path[len(path) - count :]]

    def only(self, request: int) -> Rollouts:
        one = slice(request, request + 1)
        parts = {name: getattr(self, name)[one] for name in ("paths", "cuts", "queries", "table")}
        return replace(self, **parts)

    def train(self) -> tuple[Tensor, Tensor]:
        """Results of the step's queries in the training batch."""
        nodes = ints(self.cu_seqlens), ints(self.parents)
        out, lse = flash_attn_tree_varlen_func(
            self.q, self.k, self.v, *nodes, softcap=self.softcap, sinks=self.sinks, return_lse=True
        )
        return out[self.query_rows], lse[:, self.query_rows]

    def caches(self) -> tuple[Tensor, Tensor]:
        """What no key fills is NaN."""
        pages = 1 + max(map(max, self.table))
        shape = (pages, self.page_size, *self.k.shape[1:])
        made = [torch.full(shape, float("nan"), dtype=self.k.dtype, device=DEVICE) for _ in range(2)]
        for path, columns in zip(self.paths, self.table):
            slots = [columns[at // self.page_size] * self.page_size + at % self.page_size for at in range(len(path))]
            for cache_, rows in zip(made, (self.k, self.v)):
                cache_.view(-1, *shape[2:])[slots] = rows[path]
        return made[0], made[1]

    def exact(self) -> tuple[Tensor, Tensor]:
        """In fp64."""
        heads, scale = self.q.shape[1], self.q.shape[2] ** -0.5
        outs, lses = [], []
        for path, count in zip(self.paths, self.queries):
            q = self.q[path[len(path) - count :]].double()
            k, v = (one[path].double().repeat_interleave(heads // one.shape[1], 1) for one in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            at = torch.arange(len(path), device=DEVICE)
            before = at[len(path) - count :, None] - at
            hidden = (before < 0) | (before > self.window) if self.window >= 0 else before < 0
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(heads, count, 1)
                scores, v = torch.cat([scores, sinks], -1), torch.cat([v, torch.zeros_like(v[:1])])
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses, 1)


class Decoder:
    """A plan of the rollouts' step, and decoding with it."""

    def __init__(self, rollouts: Rollouts, head_dim: int | None = None) -> None:
        self.rollouts, requests = rollouts, len(rollouts.paths)
        q, k = rollouts.q, rollouts.k
        columns = max(map(len, rollouts.table)) + 1
        self.table = ints([pages + [-7] * (columns - len(pages)) for pages in rollouts.table])
        self.seqlens, self.cuts = ints([len(path) for path in rollouts.paths]), ints(rollouts.cuts)
        self.offsets = ints([sum(rollouts.queries[:i]) for i in range(requests + 1)])
        rows, self.caches = sum(rollouts.queries), rollouts.caches()
        sizes = (requests, rows, self.caches[0].shape[0], rollouts.page_size, q.shape[1], k.shape[1])
        step = (self.table.data_ptr(), columns, requests, columns, rows)
        lists = (self.seqlens.data_ptr(), self.offsets.data_ptr(), self.cuts.data_ptr())
        self.plan = PlanStruct(*step, *lists, *sizes, head_dim or q.shape[2], None)
        size = I64()
        check(library().dualkv_decode_plan_bytes(ctypes.byref(self.plan), ctypes.byref(size)))
        self.memory = torch.zeros(size.value, dtype=torch.uint8, device=DEVICE)
        self.plan.memory = self.memory.data_ptr()
        check(library().dualkv_decode_plan(*self.place, ctypes.byref(self.plan)))

    @property
    def place(self) -> tuple[int, ctypes.c_void_p]:
        return self.memory.get_device(), POINTER(kernels.current_stream(self.memory.get_device()))

    def run(self) -> tuple[Tensor, Tensor]:
        step = self.rollouts
        q = step.q[step.query_rows].contiguous()
        out = torch.full_like(q, float("nan"))
        lse = torch.full((q.shape[1], q.shape[0]), float("nan"), device=DEVICE)
        tensors = [TensorStruct(one.data_ptr(), *one.shape, *one.stride()[:2]) for one in (q, out)]
        pages = [PagesStruct(one.data_ptr(), *one.stride()[:3]) for one in self.caches]
        options = OptionsStruct(q.shape[2] ** -0.5, step.softcap, step.window, 0, 1, 0)
        is_half = q.dtype == torch.float16
        call = DecodeStruct(*tensors, *pages, lse.data_ptr(), pointer(step.sinks), is_half, options)
        with counted_launches() as counts:
            check(library().dualkv_decode(*self.place, ctypes.byref(self.plan), ctypes.byref(call)))
        assert counts == {f"dualkv_{FAMILY}_decode": 1}
        return out, lse


def make(
    seed: int, head_dim: int, heads: tuple[int, int], page_size: int, dtype: torch.dtype, prompts: tuple[int, ...],
    responses: int, most: int, queries: int = 1, **variant: Any,
) -> Rollouts:  # fmt: skip
    """Prompts with responses of up to `most` tokens, cut anywhere; whole pages of prompts are shared."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    offsets, used = [0], 0
    parents: list[int] = []
    paths: list[list[int]] = []
    cuts: list[int] = []
    counts: list[int] = []
    pages: list[list[int]] = []
    for prompt in prompts:
        begin, parent = offsets[-1], len(parents)
        offsets.append(begin + prompt)
        parents.append(-1)
        shared = list(range(used, used + prompt // page_size))
        used += len(shared)
        for _ in range(responses):
            length, first = draw(1, most), offsets[-1]
            written = draw(1, length)
            offsets.append(first + length)
            parents.append(parent)
            paths.append([*range(begin, begin + prompt), *range(first, first + written)])
            cuts.append(prompt)
            counts.append(min(queries, written))
            own = -(-len(paths[-1]) // page_size) - len(shared)
            pages.append(shared + list(range(used, used + own)))
            used += own
    places = torch.randperm(used, generator=generator).tolist()
    table = [[places[page] for page in one] for one in pages]

    def normal(count: int) -> Tensor:
        return torch.randn(offsets[-1], count, head_dim, generator=generator).to(DEVICE, dtype)

    tensors = 2 * normal(heads[0]), normal(heads[1]), normal(heads[1])
    made = Rollouts(*tensors, offsets, parents, paths, cuts, counts, table, page_size)
    return replace(made, **variant)


CASES: dict[str, dict[str, Any]] = {
    "one query, one prompt": dict(head_dim=128, heads=(4, 1), page_size=16, prompts=(200,), responses=3, most=90),
    "rows of several items": dict(
        head_dim=64, heads=(8, 1), page_size=48, prompts=(300,), responses=5, most=60, queries=3
    ),
    "a tile of keys, and less": dict(head_dim=128, heads=(2, 2), page_size=32, prompts=(64, 9), responses=2, most=140),
    "wide heads": dict(head_dim=256, heads=(2, 1), page_size=16, prompts=(170,), responses=2, most=80, queries=2),
}
cases = pytest.mark.parametrize("name", list(CASES))
types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@cases
@types
def test_bits_of_the_training_forward(name: str, dtype: torch.dtype) -> None:
    """With softcap and sinks, too."""
    plain = make(1, dtype=dtype, **CASES[name])
    sinks = torch.randn(plain.q.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for rollouts in (plain, replace(plain, softcap=15.0, sinks=sinks)):
        with use_kernels(FAMILY):
            expected, decoder = rollouts.train(), Decoder(rollouts)
            for _ in range(2):  # a launch leaves its counters as it found them
                found = decoder.run()
                assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@cases
@pytest.mark.parametrize("window", [-1, 0, 40, 150])
def test_accuracy(name: str, window: int) -> None:
    """A row's bits are the same where its request is alone in the step."""
    rollouts = make(2, dtype=torch.bfloat16, window=window, **CASES[name])
    with use_kernels(FAMILY):
        out, lse = Decoder(rollouts).run()
        alone = [Decoder(rollouts.only(i)).run() for i in range(len(rollouts.paths))]
    assert torch.equal(out, torch.cat([one for one, _ in alone]))
    assert torch.equal(lse, torch.cat([one for _, one in alone], 1))
    expected_out, expected_lse = rollouts.exact()
    assert oracle.lse_violations(lse, expected_lse) == []
    error = (out.double() - expected_out).norm() / expected_out.norm()
    assert error <= oracle.FROBENIUS_BOUND[out.dtype]


def test_head_dims_without_a_kernel() -> None:
    rollouts = make(3, dtype=torch.bfloat16, **CASES["one query, one prompt"])
    with use_kernels(FAMILY), pytest.raises(RuntimeError, match=r"^head_dim: expected one of .*\b128\b.*, got 96$"):
        Decoder(rollouts, head_dim=96)
