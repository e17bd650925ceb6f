# SPDX-License-Identifier: BSD-3-Clause
"""Cases of the kernel tests: which shapes exist, how they lie in memory, and random data for them.

A `Case` names one point of the test space, `build` turns it into a `Batch` of tensors together with the table of its
sequences, and `covering_array` chooses few cases that hold every pair of values of every two axes.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

AXES: dict[str, tuple[Any, ...]] = {
    "context": (0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 79, 80, 81, 95, 96, 97, 127, 128, 129, 255, 256, 257, 1024, 4096),
    "decoded": (0, 1, 7, 8, 15, 16, 31, 32, 64, 80, 96, 128, 256, 1000),
    "sequences": (1, 2, 3, 7, 16, 64),
    "head_dim": (64, 96, 128, 192, 256, 80, 320, 512),
    "heads": ((4, 4), (8, 2), (12, 2), (12, 4), (16, 4), (32, 8), (8, 1), (28, 4), (40, 8)),
    "dtype": ("bfloat16", "float16"),
    "causal": (True, False),
    "query": ("equal", "shorter", "longer", "prompt"),
    "ragged": (False, True),
    "groups": ("one", "several"),
    "layout": ("contiguous", "packed"),
}

COST_CAP = 2.5e11  # pairs * heads * (head_dim + 64): about 0.1 s of fp64 reference on an H200


@dataclass(frozen=True)
class Case:
    """One point of the test space.

    `query` says how many query rows a sequence has: as many as decoded rows ("equal"), half ("shorter"), context and
    decoded rows together ("longer": the prompt's queries ride along in every sequence), or "equal" with the prompt
    itself as one more sequence of the group ("prompt").
    """

    context: int = 64
    decoded: int = 32
    sequences: int = 2
    head_dim: int = 64
    heads: tuple[int, int] = (4, 4)
    dtype: str = "bfloat16"
    causal: bool = True
    query: str = "equal"
    ragged: bool = False
    groups: str = "one"
    layout: str = "contiguous"

    @property
    def id(self) -> str:
        flags = [name for name, on in (("causal", self.causal), ("ragged", self.ragged)) if on]
        heads = f"H{self.heads[0]}-{self.heads[1]}"
        shape = f"P{self.context}-R{self.decoded}-N{self.sequences}-d{self.head_dim}-{heads}-{self.dtype}"
        return "-".join([shape, *flags, self.query, self.groups, self.layout])

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def seed(self) -> int:
        return zlib.crc32(self.id.encode())


class Group(NamedTuple):
    """One context and its sequences, each given as (query rows, decoded rows)."""

    context: int
    sequences: tuple[tuple[int, int], ...]


class SequenceRows(NamedTuple):
    """Where one sequence's rows lie in the packed tensors. `q_pos0` is the logical position of its first query row."""

    q_begin: int
    q_len: int
    context_begin: int
    context_len: int
    decoded_begin: int
    decoded_len: int

    @property
    def q_pos0(self) -> int:
        return self.context_len + self.decoded_len - self.q_len


@dataclass
class Batch:
    """Inputs of one call, their cumulative lengths on the device, and the table that the oracle reads."""

    q: Tensor
    k_context: Tensor
    v_context: Tensor
    k_decoded: Tensor
    v_decoded: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k_decoded: Tensor
    cu_seqlens_context: Tensor | None
    cu_seqs_per_context: Tensor | None
    table: list[SequenceRows]
    longest_context: int
    causal: bool = True
    softmax_scale: float | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k_context, self.v_context, self.k_decoded, self.v_decoded

    @property
    def scale(self) -> float:
        return self.softmax_scale if self.softmax_scale is not None else float(self.q.shape[-1]) ** -0.5

    @property
    def pairs(self) -> bool:
        """Whether any query row can see any key, so that kernels must run."""
        return any(row.q_len and row.context_len + row.decoded_len for row in self.table)

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)


class Results(NamedTuple):
    """Everything a call gives; also the form in which the oracle answers."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk_context: Tensor
    dv_context: Tensor
    dk_decoded: Tensor
    dv_decoded: Tensor


def _decoded_lengths(case: Case, rng: random.Random) -> list[int]:
    if not case.ragged:
        return [case.decoded] * case.sequences
    lengths = [case.decoded, 0, *(rng.randint(0, case.decoded) for _ in range(case.sequences))][: case.sequences]
    rng.shuffle(lengths)
    return lengths


def _query_rows(case: Case, context: int, decoded: int) -> int:
    if case.query == "shorter":
        return (decoded + 1) // 2
    return context + decoded if case.query == "longer" else decoded


def groups_of(case: Case) -> list[Group]:
    """The groups of a case: one, or three of different contexts and sizes with an ownerless context in between."""
    rng = random.Random(case.seed)
    lengths = _decoded_lengths(case, rng)
    owners = [(case.context, lengths)]
    if case.groups == "several":
        owners += [(case.context // 2 + 1, lengths[:1]), (3, []), (case.context, lengths[:2])]
    groups = []
    for context, decoded in owners:
        rows = [(_query_rows(case, context, length), length) for length in decoded]
        if case.query == "longer" and case.ragged and rows:
            rows[-1] = (rows[-1][0] + 2, rows[-1][1])  # two rows that see no key under a causal mask
        if case.query == "prompt" and decoded:
            rows.insert(rng.choice((0, len(rows))), (context, 0))
        groups.append(Group(context, tuple(rows)))
    return groups


def rows_of(groups: Sequence[Group], *, starts: tuple[int, int, int] = (0, 0, 0)) -> list[SequenceRows]:
    """Table of the groups' sequences, packed in order from the given first rows of (q, context, decoded)."""
    q_begin, context_begin, decoded_begin = starts
    table = []
    for group in groups:
        for q_len, decoded_len in group.sequences:
            table.append(SequenceRows(q_begin, q_len, context_begin, group.context, decoded_begin, decoded_len))
            q_begin += q_len
            decoded_begin += decoded_len
        context_begin += group.context
    return table


def cumulative(lengths: Sequence[int], device: str | torch.device = "cpu", start: int = 0) -> Tensor:
    """(len + 1,) int32 offsets of the lengths, beginning at `start`."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=start)), dtype=torch.int32, device=device)


def embed(tensors: Sequence[Tensor], *, rows: tuple[int, int] = (2, 3), columns: int = 8) -> list[Tensor]:
    """Views, side by side along the heads, of one parent whose every other byte is NaN.

    The parent has rows before and after, one head that nobody owns, and columns past the head dimension.
    """
    total, _, head_dim = tensors[0].shape
    heads = sum(t.shape[1] for t in tensors) + 1
    parent = tensors[0].new_full((rows[0] + total + rows[1], heads, head_dim + columns), float("nan"))
    views = []
    first = 0
    for tensor in tensors:
        view = parent[rows[0] : rows[0] + total, first : first + tensor.shape[1], :head_dim]
        view.copy_(tensor)
        views.append(view)
        first += tensor.shape[1]
    return views


def pack(batch: Batch) -> Batch:
    """The same values as strided views of packed parents; q, k_decoded and v_decoded share one where they can."""
    if batch.q.shape[0] == batch.k_decoded.shape[0]:
        q, k_decoded, v_decoded = embed([batch.q, batch.k_decoded, batch.v_decoded])
    else:
        (q,) = embed([batch.q])
        k_decoded, v_decoded = embed([batch.k_decoded, batch.v_decoded])
    k_context, v_context = embed([batch.k_context, batch.v_context])
    (dout,) = embed([batch.dout])
    return batch.replace(
        q=q, k_context=k_context, v_context=v_context, k_decoded=k_decoded, v_decoded=v_decoded, dout=dout
    )


def build_groups(
    groups: Sequence[Group],
    *,
    head_dim: int = 64,
    heads: tuple[int, int] = (4, 4),
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    device: str | torch.device = "cpu",
    seed: int = 0,
    grouped: bool | None = None,
    slack: tuple[int, int] = (0, 0),
) -> Batch:
    """Standard normal data for the groups.

    `grouped` chooses whether the call carries the group arguments (default: where there is more than one group);
    `slack` adds rows of NaN that no sequence owns before and after the packed rows of every tensor. They lead
    k_context only where the group arguments can say so.
    """
    grouped = len(groups) != 1 if grouped is None else grouped
    generator = torch.Generator(device=device).manual_seed(seed)

    def random_rows(total: int, num_heads: int, around: tuple[int, int]) -> Tensor:
        rows = torch.randn(total, num_heads, head_dim, generator=generator, device=device).to(dtype)
        if around == (0, 0):
            return rows
        ends = [rows.new_full((n, num_heads, head_dim), float("nan")) for n in around]
        return torch.cat([ends[0], rows, ends[1]])

    sequences = [row for group in groups for row in group.sequences]
    context_slack = slack if grouped else (0, 0)
    total_q, total_decoded = sum(q for q, _ in sequences), sum(r for _, r in sequences)
    total_context = sum(group.context for group in groups)
    q, dout = (random_rows(total_q, heads[0], slack) for _ in range(2))
    k_context, v_context = (random_rows(total_context, heads[1], context_slack) for _ in range(2))
    k_decoded, v_decoded = (random_rows(total_decoded, heads[1], slack) for _ in range(2))
    contexts, counts = [g.context for g in groups], [len(g.sequences) for g in groups]
    return Batch(
        q, k_context, v_context, k_decoded, v_decoded, dout,
        cu_seqlens_q=cumulative([n for n, _ in sequences], device, slack[0]),
        cu_seqlens_k_decoded=cumulative([n for _, n in sequences], device, slack[0]),
        cu_seqlens_context=cumulative(contexts, device, context_slack[0]) if grouped else None,
        cu_seqs_per_context=cumulative(counts, device) if grouped else None,
        table=rows_of(groups, starts=(slack[0], context_slack[0], slack[0])),
        longest_context=max(contexts, default=0),
        causal=causal,
    )  # fmt: skip


def build(case: Case, device: str | torch.device) -> Batch:
    """Random data for a case."""
    batch = build_groups(
        groups_of(case),
        head_dim=case.head_dim,
        heads=case.heads,
        dtype=case.torch_dtype,
        causal=case.causal,
        device=device,
        seed=case.seed,
        grouped=case.groups == "several",
    )
    return pack(batch) if case.layout == "packed" else batch


def one_large_advantage(copies: int, decoded: int = 16, context: int = 48, **options: Any) -> Batch:
    """Equal responses, of which the middle one has an upstream gradient 600 times the others'.

    A sum in 16 bits loses every contribution that follows the large one: each is below half a unit in the last place.
    """
    one = build_groups([Group(context, ((decoded, decoded),))], **options)
    batch = build_groups([Group(context, ((decoded, decoded),) * copies)], **options)
    for name in ("q", "k_decoded", "v_decoded", "dout"):
        setattr(batch, name, getattr(one, name).repeat(copies, 1, 1))
    batch.dout *= 1 / 32
    batch.dout[copies // 2 * decoded : (copies // 2 + 1) * decoded] *= 600
    return batch


def run(batch: Batch, *, dlse: Tensor | None = None, backward: bool = True, **options: Any) -> Results:
    """Call the library on the batch, forward and backward. Without `backward` the gradients are empty tensors."""
    from flash_attn_dualkv import flash_attn_dualkv_varlen_func

    leaves = [x.detach().requires_grad_(backward) for x in batch.inputs]
    arguments: dict[str, Any] = dict(
        max_seqlen_q=max((row.q_len for row in batch.table), default=0),
        context_seqlen=batch.longest_context,
        max_seqlen_k_decoded=max((row.decoded_len for row in batch.table), default=0),
        softmax_scale=batch.softmax_scale,
        causal=batch.causal,
        cu_seqlens_context=batch.cu_seqlens_context,
        cu_seqs_per_context=batch.cu_seqs_per_context,
        return_lse=True,
    )
    arguments |= options
    q, k_context, v_context, k_decoded, v_decoded = leaves
    out, lse = flash_attn_dualkv_varlen_func(
        q, k_context, v_context, k_decoded, v_decoded, batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, **arguments
    )
    if not backward:
        return Results(out, lse, *([out.new_empty(0)] * 5))
    outputs, upstream = ((out,), (batch.dout,)) if dlse is None else ((out, lse), (batch.dout, dlse))
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, upstream))


def cost(values: dict[str, Any]) -> float:
    """Work of a case in pairs * heads * (head_dim + 64); axes that are not given count as their cheapest value."""
    context, decoded = values.get("context", 0), values.get("decoded", 0)
    query = values.get("query", "shorter")
    rows = {"equal": decoded, "prompt": decoded, "shorter": (decoded + 1) // 2, "longer": context + decoded}[query]
    pairs = values.get("sequences", 1) * rows * (context + decoded) + (context * context if query == "prompt" else 0)
    several = 2 if values.get("groups", "one") == "several" else 1
    return float(pairs) * several * values.get("heads", (4, 4))[0] * (values.get("head_dim", 64) + 64)


Setting = tuple[str, Any]
Pair = tuple[Setting, Setting]


def pairs_of(values: dict[str, Any]) -> Iterator[Pair]:
    """Every pair of settings of a (partial) case, in the order of AXES."""
    return itertools.combinations([(name, values[name]) for name in AXES if name in values], 2)


def all_pairs() -> list[Pair]:
    """Every pair of settings of two different axes."""
    return [((a, x), (b, y)) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]]


def random_case(rng: random.Random, settings: Sequence[Setting] = ()) -> dict[str, Any]:
    """The settings, and each further axis (in random order) at a random value that keeps the cost below the cap."""
    values = dict(settings)
    for name in rng.sample(list(AXES), len(AXES)):
        if name not in values:
            costs = {value: cost(values | {name: value}) for value in AXES[name]}
            limit = max(COST_CAP, min(costs.values()))
            values[name] = rng.choice([value for value, price in costs.items() if price <= limit])
    return values


@lru_cache(maxsize=1)
def covering_array(seed: int = 0, candidates: int = 30) -> tuple[Case, ...]:
    """Cases that hold every pair of values of every two axes; the same ones in every process."""
    rng = random.Random(seed)
    order = all_pairs()
    rng.shuffle(order)
    uncovered = set(order)
    cases = []
    for pair in order:
        if pair in uncovered:
            tried = (random_case(rng, pair) for _ in range(candidates))
            best = max(tried, key=lambda values: len(uncovered.intersection(pairs_of(values))))
            uncovered.difference_update(pairs_of(best))
            cases.append(Case(**best))
    return tuple(cases)


def shrink(case: Case) -> Case:
    """The case with sizes that a CPU computes in a moment; everything else stays."""
    heads, kv_heads = case.heads
    fewer = min(kv_heads, 2)
    sizes: dict[str, Any] = dict(
        context=min(case.context, 66), decoded=min(case.decoded, 33), sequences=min(case.sequences, 3)
    )
    return replace(case, heads=(heads // kv_heads * fewer, fewer), **sizes)
