"""Results of the kernels: every pair of values of the test space against fp64, and against FlashAttention-2.

DUALKV_TEST_DEVICE=cpu runs the same code on the CPU implementation with small sizes: a check of the tests themselves.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import pytest
import torch
from groups import (
    AXES,
    Batch,
    Case,
    Results,
    build,
    covering_array,
    cumulative,
    full_product,
    one_large_advantage,
    run,
    shrink,
)
from launches import DEVICE, GPU_MARKS, kernel_families, kernels_ran, poison_free_memory, use_kernels
from torch import Tensor

pytestmark = GPU_MARKS

# The shapes of the main job, beside the covering array's: a long prompt, many responses and heads at once.
LARGE_CASES = (
    Case(4096, 1000, 64, 128, (32, 8), query="prompt", ragged=True),
    Case(4096, 1000, 16, 64, (40, 8), dtype="float16", query="prompt", ragged=True, groups="several", layout="packed"),
    Case(4096, 1000, 7, 256, (8, 1), query="longer"),
)
FULL_PRODUCT_FAILURES = 10  # reported for one (context, decoded) before the rest is given up


def sized(cases: tuple[Case, ...]) -> list[Case]:
    return list(cases) if DEVICE == "cuda" else list(dict.fromkeys(shrink(case) for case in cases))


def results_of_all_kernels(batch: Batch, dlse: Tensor | None = None) -> Iterator[Results]:
    """The batch by every family of kernels, in default and deterministic mode."""
    directions = ("forward", "backward") if batch.pairs else ()
    for family in kernel_families():
        with use_kernels(family):
            poison_free_memory()
            with kernels_ran(*directions):
                results = run(batch, dlse=dlse)
            yield results
            yield run(batch, dlse=dlse, deterministic=True)


def check_case(case: Case) -> None:
    """Forward and backward against fp64; a third of the cases with a gradient of the LSE."""
    batch = build(case, DEVICE)
    dlse = torch.randn(batch.q.shape[1], batch.q.shape[0], device=DEVICE) if case.seed % 3 == 0 else None
    oracle.check(batch, *results_of_all_kernels(batch, dlse), dlse=dlse)


@pytest.mark.parametrize("case", sized((*covering_array(), *LARGE_CASES)), ids=lambda case: case.id)
def test_every_pair_of_values(case: Case) -> None:
    check_case(case)


def shard() -> tuple[int, int]:
    """DUALKV_FULL_PRODUCT_SHARD=i/n leaves every n-th case to this process, beginning at i: for several GPUs."""
    index, _, count = os.environ.get("DUALKV_FULL_PRODUCT_SHARD", "0/1").partition("/")
    return int(index), int(count)


@pytest.mark.slow
@pytest.mark.parametrize("decoded", AXES["decoded"])
@pytest.mark.parametrize("context", AXES["context"])
def test_full_product(context: int, decoded: int) -> None:
    index, count = shard()
    failures: list[str] = []
    for case in itertools.islice(full_product(context=context, decoded=decoded), index, None, count):
        try:
            check_case(case)
        except AssertionError as error:
            failures.append(f"{case.id}: {error}")
        if len(failures) >= FULL_PRODUCT_FAILURES:
            break
    assert not failures, "\n".join(failures)


SHARED_GRADIENT_SHAPES = [
    (64, (4, 4)),
    (64, (12, 2)),
    (80, (8, 1)),
    (96, (8, 2)),
    (128, (32, 8)),
    (192, (4, 4)),
    (256, (8, 2)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "heads"), SHARED_GRADIENT_SHAPES)
@pytest.mark.parametrize("copies", [64] if DEVICE == "cuda" else [5])
def test_shared_context_gradient(copies: int, head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Data on which sums in 16 bits fail the rule (test_oracle.py shows that they do)."""
    options = dict(head_dim=head_dim, heads=heads, dtype=dtype, device=DEVICE)
    batch = one_large_advantage(copies, decoded=64, context=150, **options)
    oracle.check(batch, *results_of_all_kernels(batch))


# --- FlashAttention-2 with the prompt replicated ------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool, float], Tensor]


def pytorch_flash_attention() -> Attend:
    """The FlashAttention-2 kernels inside PyTorch; the causal mask is aligned to the bottom right."""
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    parameters = inspect.signature(varlen_attn).parameters

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale} if "scale" in parameters else {}
        if "window_size" in parameters:
            options["window_size"] = (-1, 0) if causal else (-1, -1)
        else:
            options["is_causal"] = causal
        if "scale" not in parameters:
            q = q * (scale * q.shape[-1] ** 0.5)
        out: Tensor = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, **options)
        return out

    return attend


def flash_attn_package() -> Attend:
    """The flash_attn package, where it is installed."""
    function = pytest.importorskip("flash_attn").flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float
    ) -> Tensor:
        out: Tensor = function(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal)
        return out

    return attend


def dense_attention() -> Attend:
    """Stands in for a peer where there is no GPU."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float
    ) -> Tensor:
        outs = []
        for i in range(len(cu_q) - 1):
            qi, ki, vi = (x[cu[i] : cu[i + 1]].transpose(0, 1) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
            mask = torch.ones(qi.shape[1], ki.shape[1], dtype=torch.bool)
            if causal:
                mask = mask.tril(ki.shape[1] - qi.shape[1])
            scores = (qi @ ki.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
            outs.append((scores.softmax(-1) @ vi).transpose(0, 1))
        return torch.cat(outs)

    return attend


def key_rows(batch: Batch) -> tuple[Tensor, list[int]]:
    """Rows of cat([context, decoded]) in the order of the replicated keys, and the number of keys of each sequence."""
    first_decoded = batch.k_context.shape[0]
    runs = []
    for row in batch.table:
        runs.append(torch.arange(row.context_begin, row.context_begin + row.context_len))
        runs.append(torch.arange(row.decoded_begin, row.decoded_begin + row.decoded_len) + first_decoded)
    lengths = [row.context_len + row.decoded_len for row in batch.table]
    return torch.cat(runs).to(batch.q.device), lengths


def replicated(batch: Batch, attend: Attend) -> Results:
    """The batch through a peer. Its gradients of the copies of a key are summed in fp64 and rounded once."""
    rows, lengths = key_rows(batch)
    ratio = batch.q.shape[1] // batch.k_context.shape[1]
    k, v = (torch.cat(pair)[rows].repeat_interleave(ratio, 1) for pair in (batch.inputs[1::2], batch.inputs[2::2]))
    leaves = [x.detach().contiguous().requires_grad_() for x in (batch.q, k, v)]
    cu_k = cumulative(lengths, batch.q.device)
    max_q = max(row.q_len for row in batch.table)
    q, k, v = leaves
    out = attend(q, k, v, batch.cu_seqlens_q, cu_k, max_q, max(lengths), batch.causal, batch.scale)
    dq, dk, dv = torch.autograd.grad(out, leaves, batch.dout)
    sums = []
    for grad in (dk, dv):
        heads = grad.double().unflatten(1, (-1, ratio)).sum(2)
        total = heads.new_zeros(batch.k_context.shape[0] + batch.k_decoded.shape[0], *heads.shape[1:])
        total.index_add_(0, rows, heads)
        sums.append(total.to(batch.q.dtype).split([batch.k_context.shape[0], batch.k_decoded.shape[0]]))
    (dk_context, dk_decoded), (dv_context, dv_decoded) = sums
    return Results(out.detach(), torch.empty(0), dq, dk_context, dv_context, dk_decoded, dv_decoded)


def peer_cases() -> Iterator[Case]:
    """Every sequence has keys for each of its rows: what a peer does with the others is not our subject."""
    for head_dim, dtype, causal in itertools.product(AXES["head_dim"], AXES["dtype"], (True, False)):
        yield Case(129, 65, 5, head_dim, (8, 2), dtype, causal, groups="several")
    yield Case(1024, 256, 16, 128, (32, 8), query="prompt")
    yield Case(257, 128, 64, 64, (12, 4), "float16", query="shorter", layout="packed")
    yield Case(1000, 64, 64, 128, (40, 8), query="longer")


def check_against_peer(case: Case, attend: Attend) -> None:
    """Errors against fp64 are at most twice the peer's; a peer that is far off computes something else."""
    batch = build(case, DEVICE)
    results = list(results_of_all_kernels(batch))
    peer, expected = replicated(batch, attend), oracle.reference(batch)
    for name in Results._fields:
        if name == "lse":
            continue
        reference = getattr(expected, name)
        relative = (getattr(peer, name).double() - reference).norm() / reference.norm()
        assert relative < 3 * oracle.FROBENIUS_BOUND[batch.q.dtype], f"the peer's {name} is off by {relative:.3g}"
        for ours in results:
            problems = oracle.violations(name, getattr(ours, name), getattr(peer, name), reference, batch.q.dtype)
            assert not problems, "; ".join(problems)


PEERS = [pytorch_flash_attention, flash_attn_package] if DEVICE == "cuda" else [dense_attention]


@pytest.mark.parametrize("case", sized(tuple(peer_cases())), ids=lambda case: case.id)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.__name__)
def test_as_accurate_as_flash_attention_2(peer: Callable[[], Attend], case: Case) -> None:
    check_against_peer(case, peer())
