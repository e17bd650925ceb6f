# SPDX-License-Identifier: BSD-3-Clause
"""What must hold of results whatever the numbers: invariances, determinism, borders, and which kernels run."""

from __future__ import annotations

import math
import os

import oracle
import pytest
import torch
from groups import Batch, Group, build_groups, one_large_advantage, pack, run
from kernel_runs import MIXED, SMALL, Options, both_masks, check_both_modes, split_owner_batch
from launches import (
    CHOICE,
    DEVICE,
    DIRECTIONS,
    GPU_MARKS,
    REPEATS,
    configurations,
    kernel_families,
    kernel_pattern,
    kernels_ran,
    needs_gpu,
    only_kernels_of,
    poison_free_memory,
    profiled,
)

from flash_attn_dualkv import ops
from flash_attn_dualkv.calls import make_options

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]


@both_masks
@configurations
def test_mixed_groups_in_one_launch(options: Options, causal: bool) -> None:
    """Rows that see no key, an empty context, an ownerless one: 0, -inf and zero gradients where nothing is seen."""
    batch = build_groups(MIXED, causal=causal, **options)
    check_both_modes(batch)
    results = run(batch)
    blind = batch.table[7]  # 9 queries, 4 keys
    assert blind.q_len == 9
    assert bool(results.lse[:, blind.q_begin : blind.q_begin + 5].isneginf().all()) == causal
    assert bool(results.dk_context[150:187].any()) is False


@both_masks
@configurations
def test_split_owners(options: Options, causal: bool) -> None:
    check_both_modes(split_owner_batch(options, causal))


@needs_gpu
def test_heads_of_a_long_batch_have_the_gradients_of_heads_alone() -> None:
    """28 x 4K x 2K: with 2 KV heads a head has more blocks than there are multiprocessors, and others between them.

    The oracle would take minutes; a KV head by itself is split and ordered differently.
    """
    group = Group(4096, ((4096, 0), *(((2048, 2048),) * 28)))
    batch = build_groups([group], **SMALL | {"head_dim": 128})
    together = run(batch)
    for kv_head in range(2):
        own = {"q": slice(4 * kv_head, 4 * kv_head + 4), "dout": slice(4 * kv_head, 4 * kv_head + 4)}
        names = ("q", "k_context", "v_context", "k_decoded", "v_decoded", "dout")
        heads = {name: own.get(name, slice(kv_head, kv_head + 1)) for name in names}
        alone = run(batch.replace(**{name: getattr(batch, name)[:, heads[name]].contiguous() for name in names}))
        for name in ("dq", "dk_context", "dv_context", "dk_decoded", "dv_decoded"):
            expected = getattr(alone, name).float()
            found = getattr(together, name)[:, heads[name[1:]]].float()
            error = (found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2)).clamp_min(expected.norm() * 1e-4)
            assert error.max() < 0.02, f"{name} of row {error.argmax()}: off by {error.max():.3f}"


# Long walks, in which every buffer is used again many times.
LONG = (Group(900, ((900, 0), (300, 300), (515, 515))), Group(130, ((250, 250), (130, 130))))


def check_repeats(batch: Batch, runs: int) -> None:
    """Raises AssertionError if any of `runs` calls in either mode differs from the first, or from fp64."""
    deterministic, default = run(batch, deterministic=True), run(batch)
    oracle.check(batch, deterministic, default)
    expected, plain = oracle.reference(batch).dq, oracle.plain(batch).dq
    for _ in range(1, runs):
        poison_free_memory()  # scratch memory of the run before would hold the right values
        oracle.assert_same_results(run(batch, deterministic=True), deterministic)
        poison_free_memory()
        again = run(batch)
        oracle.assert_same_results(again, default, but="dq")  # its additions come in any order
        problems = oracle.violations("dq", again.dq, plain, expected, batch.q.dtype)
        assert not problems, "; ".join(problems)


@configurations
def test_results_repeat_bit_for_bit(options: Options, kernels: str) -> None:
    mixed, full = (build_groups(MIXED, causal=causal, **options) for causal in (True, False))
    long = build_groups(LONG, **options | {"heads": (8, 2)})
    for batch in (mixed, pack(full), long, split_owner_batch(options)):
        with only_kernels_of(kernels):
            check_repeats(batch, REPEATS)


@both_masks
def test_results_do_not_depend_on_the_longest_lengths(causal: bool) -> None:
    batch = build_groups(MIXED, causal=causal, **SMALL)
    expected = run(batch, deterministic=True)
    for length in (0, 1, 2**31 - 1):
        lengths: Options = dict(max_seqlen_q=length, max_seqlen_k_decoded=length, context_seqlen=length)
        results = run(batch, deterministic=True, **lengths)
        oracle.assert_same_results(results, expected)


@configurations
def test_gradient_of_the_lse(options: Options) -> None:
    batch = build_groups(MIXED, **options)
    dlse = torch.randn(batch.q.shape[1], batch.q.shape[0], device=DEVICE)
    oracle.check(batch, run(batch, dlse=dlse), run(batch, dlse=dlse, deterministic=True), dlse=dlse)
    strided = torch.stack([dlse, dlse], -1)[..., 0]
    silent = batch.replace(dout=torch.zeros_like(batch.dout))
    oracle.check(silent, run(silent, dlse=strided), dlse=dlse)


@pytest.mark.parametrize("rise", [2.0, 7.0, 60.0, -60.0])
@configurations
def test_a_maximum_that_moves_with_every_tile(options: Options, rise: float) -> None:
    """Scores rise by `rise` powers of 2 every 64 keys: by less, and by more, than the forward lets the maximum lag."""
    batch = build_groups(MIXED, **options)
    batch.q *= 0.1
    batch.q[..., 0] = 1
    for keys, first in ((batch.k_context, 0), (batch.k_decoded, 150)):
        keys[..., 0] = (torch.arange(len(keys), device=DEVICE) + first)[:, None].to(keys.dtype) * (rise / 64)
    batch = batch.replace(softmax_scale=math.log(2))
    with kernels_ran("forward"):
        results = run(batch, backward=False)
    # Of the forward alone: dQ would be a difference of such keys, and as good as the rounding of
    # dS.
    expected, plain = oracle.reference(batch, None), oracle.plain(batch, None)
    problems = oracle.lse_violations(results.lse, expected.lse)
    assert not problems + oracle.violations("out", results.out, plain.out, expected.out, batch.q.dtype)


EMPTY = {
    "no sequences": (),
    "no sequences in a group": (Group(0, ()),),
    "a context alone": (Group(20, ()),),
    "empty sequences": (Group(0, ((0, 0), (0, 0))),),
    "empty sequences of a context": (Group(20, ((0, 0), (0, 0))), Group(0, ((0, 0),))),
    "queries without keys": (Group(0, ((5, 0), (3, 0))),),
    "keys without queries": (Group(20, ((0, 7), (0, 1))),),
    "queries and keys that do not meet": (Group(0, ((5, 0), (0, 7))),),
    "a context for one row": (Group(20, ((1, 0),)),),
    "one key for one row": (Group(0, ((1, 1),)),),
}


@both_masks
@pytest.mark.parametrize("name", EMPTY)
def test_empty_inputs(name: str, causal: bool) -> None:
    for grouped in {len(EMPTY[name]) != 1, True}:
        batch = build_groups(EMPTY[name], causal=causal, grouped=grouped, **SMALL)
        check_both_modes(batch)
        results = run(batch)
        if not batch.pairs:
            assert not any(bool(x.any()) for x in (results.out, *results[2:])) and bool(results.lse.isneginf().all())
        outputs = [x.untyped_storage().data_ptr() for x in results if x.numel()]
        inputs = [x.untyped_storage().data_ptr() for x in batch.inputs if x.numel()]
        assert not set(outputs) & set(inputs)


@pytest.mark.parametrize("keys", [0, 3])
def test_sinks_of_rows_without_keys(keys: int) -> None:
    """The LSE of a sequence's rows is their sink, of other rows -inf: also where no sequence has a key."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(rows, 2, 64, generator=generator).to(DEVICE, torch.bfloat16) for rows in (7, keys))
    sinks = torch.tensor([0.5, -2.0], device=DEVICE, requires_grad=True)
    offsets = [torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in ([0, 2, 5], [0, 0, keys])]
    nodes = ops.sequence_nodes(*offsets, None, None, None)
    out, lse = ops.attend(q, k, k, nodes, make_options(head_dim=64, causal=True, mean_keys=keys), sinks=sinks)
    first = 2 if keys else 5
    assert torch.equal(lse[:, :first], sinks.detach()[:, None].expand(2, first)) and not out[:first].any()
    assert lse[:, 5:].isneginf().all() and not out[5:].any()
    (gradient,) = torch.autograd.grad(lse[:, :2].sum(), sinks)
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))


# --- what runs on the device --------------------------------------------------------------------------------------


@needs_gpu
@configurations
def test_profiler_sees_our_kernels_and_no_copies(options: Options) -> None:
    batch = pack(build_groups(MIXED, **options))
    for deterministic in (False, True):
        with profiled() as names:
            run(batch, deterministic=deterministic)
        seen = {one for one in DIRECTIONS if any(kernel_pattern(one).search(name) for name in names)}
        # On Hopper dQ of wide heads is always computed by a kernel of its own, and that of others
        # never.
        family = os.environ.get(CHOICE, kernel_families(options["head_dim"])[-1])
        separate_dq = options["head_dim"] > 128 if family == "sm90" else deterministic
        assert seen == {"forward", "backward"} | ({"backward_dq"} if separate_dq else set()), names
        foreign = [name for name in names if any(word in name.lower() for word in ("copy", "index", "gather", "gemm"))]
        assert not foreign, "strided views are read in place"


@configurations
def test_kernels_for_small_shared_memory(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configurations of GPUs that grant a block 99 KB, run on this one."""
    if os.environ.get(CHOICE) != "sm80":
        pytest.skip("such GPUs run the portable kernels")
    monkeypatch.setenv("DUALKV_MAX_SHARED_BYTES", str(99 * 1024))
    for batch in (build_groups(MIXED, **options), split_owner_batch(options), one_large_advantage(64, **options)):
        check_both_modes(batch)
