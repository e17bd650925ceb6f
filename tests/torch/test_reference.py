# SPDX-License-Identifier: BSD-3-Clause
"""The specification: the CPU implementation against dense attention, by finite differences, and in bounded memory."""

from __future__ import annotations

import random
from functools import partial
from itertools import accumulate
from typing import Any

import oracle
import pytest
import torch
from groups import Batch, Group, build_groups, run
from torch import Tensor

from flash_attn_dualkv import nodes as tables
from flash_attn_dualkv import reference

FLOAT64: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def random_groups(rng: random.Random) -> list[Group]:
    """One to three contexts with up to four sequences each; any length may be 0, queries of every kind."""
    groups = []
    for _ in range(rng.randint(1, 3)):
        context = rng.choice((0, 1, 2, 7, 16, 33))
        sequences = []
        for _ in range(rng.randint(0, 4)):
            decoded = rng.choice((0, 1, 3, 8, 17))
            queries = rng.choice((decoded, decoded // 2, context + decoded, context + decoded + 2, 0, 5))
            sequences.append((queries, decoded))
        groups.append(Group(context, tuple(sequences)))
    return groups


def random_batch(seed: int) -> tuple[Batch, Tensor]:
    """Float64 data for random groups, with rows of NaN around those in use, and a gradient for the LSE."""
    rng = random.Random(seed)
    batch = build_groups(
        random_groups(rng),
        head_dim=rng.choice((8, 16, 40)),
        heads=rng.choice(((1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (5, 1), (7, 7))),
        dtype=torch.float64,
        causal=rng.random() < 0.5,
        seed=seed,
        slack=rng.choice(((0, 0), (1, 2), (3, 0))),
    )
    return batch, torch.randn(batch.q.shape[1], batch.q.shape[0], dtype=torch.float64)


def check_against_dense(batch: Batch, dlse: Tensor | None) -> None:
    actual, expected = run(batch, dlse=dlse), oracle.plain(batch, dlse)
    for name, value in actual._asdict().items():
        torch.testing.assert_close(value, getattr(expected, name), **FLOAT64, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 200, 50)], ids=str)
def test_random_groups_against_dense_attention(seeds: range) -> None:
    for seed in seeds:
        check_against_dense(*random_batch(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_accuracy_rule(dtype: torch.dtype) -> None:
    """Gradients of a context sum in float32 over its sequences and heads: the rule that the kernels have to meet."""
    sequences = tuple((length, length) for length in (20, 0, 7, 33) * 16)
    batch = build_groups([Group(40, ((40, 0), *sequences))], head_dim=16, heads=(4, 2), dtype=dtype)
    dlse = torch.randn(batch.q.shape[1], batch.q.shape[0])
    expected, plain, ours = (one(batch, dlse) for one in (oracle.reference, oracle.plain, lambda b, g: run(b, dlse=g)))
    assert not oracle.compare(ours, plain, expected, dtype)


def test_inputs_are_not_changed() -> None:
    """For float64 and one query head a KV head, blocks are views of the inputs."""
    batch = build_groups([Group(6, ((4, 4), (1, 5)))], head_dim=16, heads=(1, 1), dtype=torch.float64)
    before = [one.clone() for one in batch.inputs]
    run(batch)
    assert all(one.equal(copy) for one, copy in zip(batch.inputs, before))


@pytest.mark.parametrize("causal", [True, False])
def test_only_visible_blocks_are_computed(causal: bool) -> None:
    """Query blocks ask for no block of keys that they do not see anything of."""
    visibility = reference.Visibility(causal=causal)
    assert visibility.key_range(512, 512 + 99, 1024) == ((0, 612) if causal else (0, 1024))
    assert visibility.key_range(-7, -3, 1024) == ((0, 0) if causal else (0, 1024))
    assert reference.Visibility(3, causal).key_range(10, 12, 1024) == (7, 13 if causal else 1024)
    rows = torch.zeros(1024, 1, 8)
    nodes = [tables.Node(0, 0, 0, 0, 700, 0, -1, 2), tables.Node(0, 512, 512, 700, 324, 700, 0, 2)]
    path = [reference.Keys(node, rows, rows, dtype=rows.dtype) for node in nodes]
    problem = reference.Problem(rows, [], nodes, 1.0, visibility, 0.0, rows.dtype)
    blocks = list(problem.visible_blocks(reference.QueryBlock(path, slice(100, 200), slice(0, 1))))
    assert sum(len(block.positions) for block in blocks) == (712 if causal else 1024)
    assert [path.index(block.source) for block in blocks] == [0, 0, 1]


def peak_mib(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> float:
    """MiB beyond inputs, outputs and gradients at 8K context rows and 4 x 512 decoded rows, by PyTorch's profiler."""
    batch = build_groups([Group(8192, ((512, 512),) * 4)], head_dim=head_dim, heads=heads, dtype=dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = run(batch)
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]  # of what is freed: negative
    return (max(accumulate(sizes)) - sum(one.nbytes for one in results)) / 2**20


def test_memory_is_bounded() -> None:
    """Heads are computed one after the other, so that one takes as much as eight do."""
    assert 0 < peak_mib(torch.bfloat16, (1, 1), 128) < 24
