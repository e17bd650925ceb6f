# SPDX-License-Identifier: BSD-3-Clause
"""Results of the kernels: every pair of values of the test space against fp64, and against FlashAttention-2.

DUALKV_TEST_DEVICE=cpu runs the same code on the CPU implementation with small sizes: a check of the tests themselves.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import oracle
import peers
import pytest
import torch
from groups import (
    AXES,
    COST_CAP,
    Batch,
    Case,
    Results,
    build,
    cost,
    covering_array,
    cumulative,
    one_large_advantage,
    random_case,
    run,
    shrink,
)
from launches import DEVICE, GPU_MARKS, HAS_KERNELS, kernel_families, kernels_ran, poison_free_memory, use_kernels
from torch import Tensor

pytestmark = GPU_MARKS

# The shapes of the main job, beside the covering array's: a long prompt, many responses and heads at once.
LARGE_CASES = (
    Case(4096, 1000, 64, 128, (32, 8), query="prompt", ragged=True),
    Case(4096, 1000, 16, 64, (40, 8), dtype="float16", query="prompt", ragged=True, groups="several", layout="packed"),
    Case(4096, 1000, 7, 256, (8, 1), query="longer"),
)


def sized(cases: tuple[Case, ...]) -> list[Case]:
    return list(cases) if DEVICE == "cuda" else list(dict.fromkeys(shrink(case) for case in cases))


def results_of_all_kernels(batch: Batch, dlse: Tensor | None = None) -> Iterator[Results]:
    """The batch by every family of kernels, in default and deterministic mode."""
    directions = ("forward", "backward") if batch.pairs else ()
    families = kernel_families(max(batch.q.shape[2], batch.dout.shape[2]))
    if not families:
        pytest.skip("no kernels of this head dim here")
    for family in families:
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


def wide_cases() -> Iterator[Case]:
    """Every fifth case with heads wider than 256, where its cost allows."""
    for index, case in enumerate(covering_array()[::5]):
        wide = replace(case, head_dim=(512, 320)[index % 2])
        if cost(asdict(wide)) <= COST_CAP:
            yield wide


@pytest.mark.parametrize("case", sized(tuple(wide_cases())), ids=lambda case: case.id)
def test_wide_heads(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_cases(seed: int) -> None:
    """Three and more values that go wrong together only."""
    rng = random.Random(seed)
    for _ in range(25):
        check_case(Case(**random_case(rng)))


SHARED_GRADIENT_SHAPES = [
    (64, (4, 4)),
    (64, (12, 2)),
    (80, (8, 1)),
    (96, (8, 2)),
    (128, (32, 8)),
    (192, (4, 4)),
    (256, (8, 2)),
    (512, (8, 1)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "heads"), SHARED_GRADIENT_SHAPES)
@pytest.mark.parametrize("copies", [64] if HAS_KERNELS else [5])
def test_shared_context_gradient(copies: int, head_dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Data on which sums in 16 bits fail the rule (test_oracle.py shows that they do)."""
    options = dict(head_dim=head_dim, heads=heads, dtype=dtype, device=DEVICE)
    batch = one_large_advantage(copies, decoded=64, context=150, **options)
    oracle.check(batch, *results_of_all_kernels(batch))


# --- FlashAttention-2 with the prompt replicated ------------------------------------------------------------------


def key_rows(batch: Batch) -> tuple[Tensor, list[int]]:
    """Rows of cat([context, decoded]) in the order of the replicated keys, and the number of keys of each sequence."""
    first_decoded = batch.k_context.shape[0]
    runs = []
    for row in batch.table:
        runs.append(torch.arange(row.context_begin, row.context_begin + row.context_len))
        runs.append(torch.arange(row.decoded_begin, row.decoded_begin + row.decoded_len) + first_decoded)
    lengths = [row.context_len + row.decoded_len for row in batch.table]
    return torch.cat(runs).to(batch.q.device), lengths


def replicated(batch: Batch, attend: peers.VarlenKernel) -> Results:
    """The batch through a peer. Its gradients of the copies of a key are summed in fp64 and rounded once."""
    rows, lengths = key_rows(batch)
    ratio = batch.q.shape[1] // batch.k_context.shape[1]
    k, v = (torch.cat(pair)[rows].repeat_interleave(ratio, 1) for pair in (batch.inputs[1::2], batch.inputs[2::2]))
    leaves = [x.detach().contiguous().requires_grad_() for x in (batch.q, k, v)]
    cu_k = cumulative(lengths, batch.q.device)
    out = attend(*leaves, batch.cu_seqlens_q, cu_k, max(row.q_len for row in batch.table), max(lengths))
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
    for head_dim, dtype in itertools.product(AXES["head_dim"], AXES["dtype"]):
        yield Case(129, 65, 5, head_dim, (8, 2), dtype, groups="several")
    yield Case(1024, 256, 16, 128, (32, 8), query="prompt")
    yield Case(257, 128, 64, 64, (12, 4), "float16", query="shorter", layout="packed")
    yield Case(1000, 64, 64, 128, (40, 8), query="longer")


PEERS: dict[str, Callable[[], peers.VarlenKernel]] = {
    "PyTorch": peers.torch_varlen,
    "flash_attn": partial(peers.package_varlen, "flash_attn"),
}
if DEVICE != "cuda":
    PEERS = {"math": lambda: peers.math_varlen}


@pytest.mark.parametrize("case", sized(tuple(peer_cases())), ids=lambda case: case.id)
@pytest.mark.parametrize("peer", PEERS)
def test_as_accurate_as_flash_attention_2(peer: str, case: Case) -> None:
    """Errors against fp64 are at most twice the peer's; a peer that is far off computes something else."""
    if peer == "flash_attn" and not peers.is_importable(peer):
        pytest.skip("flash_attn is not installed")
    if peer == "PyTorch":
        pytest.importorskip("torch.nn.attention.varlen")
    batch = build(case, DEVICE)
    results = list(results_of_all_kernels(batch))
    theirs, expected = replicated(batch, PEERS[peer]()), oracle.reference(batch)
    for name in Results._fields:
        if name == "lse":
            continue
        reference, of_peer = getattr(expected, name), getattr(theirs, name)
        relative = (of_peer.double() - reference).norm() / reference.norm()
        assert relative < 3 * oracle.FROBENIUS_BOUND[batch.q.dtype], f"the peer's {name} is off by {relative:.3g}"
        for ours in results:
            problems = oracle.violations(name, getattr(ours, name), of_peer, reference, batch.q.dtype)
            assert not problems, "; ".join(problems)
