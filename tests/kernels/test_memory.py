# SPDX-License-Identifier: BSD-3-Clause
"""Which bytes the kernels touch: NaN in all others, unusual strides, tensors past 2^31 elements, hostile offsets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import oracle
import pytest
import torch
from groups import Batch, Group, Results, build_groups, pack, run
from kernel_runs import MIXED, SMALL, Options, both_masks, check_both_modes, split_owner_batch
from launches import DEVICE, GPU_MARKS, configurations, needs_gpu
from torch import Tensor

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]
SANITIZE = Path(__file__).resolve().parents[1] / "helpers/sanitize.py"
NAN = float("nan")

INPUTS = ("q", "k_context", "v_context", "k_decoded", "v_decoded", "dout")


def unowned(batch: Batch) -> dict[str, Tensor]:
    """For q and the keys of both regions: which of their rows no sequence can use."""
    names = ("q", "k_context", "k_decoded")
    free = {name: torch.ones(getattr(batch, name).shape[0], dtype=torch.bool) for name in names}
    for row in batch.table:
        free["q"][row.q_begin : row.q_begin + row.q_len] = False
        if row.q_len:
            free["k_context"][row.context_begin : row.context_begin + row.context_len] = False
            free["k_decoded"][row.decoded_begin : row.decoded_begin + row.decoded_len] = False
    return {name: rows.to(DEVICE) for name, rows in free.items()}


@pytest.mark.parametrize("packed", [False, True])
@both_masks
@configurations
def test_nan_in_bytes_of_no_sequence(options: Options, causal: bool, packed: bool) -> None:
    """Rows before, after and between the sequences, keys without queries, and all else of strided parents hold NaN."""
    batch = build_groups(MIXED, causal=causal, slack=(3, 130), **options)
    free = unowned(batch)
    assert all(bool(rows.any()) for rows in free.values())
    for name in INPUTS:
        getattr(batch, name)[free["q" if name == "dout" else name.replace("v_", "k_")]] = NAN
    batch = pack(batch) if packed else batch
    for results in check_both_modes(batch):
        assert not bool(results.out[free["q"]].any()) and not bool(results.dq[free["q"]].any())
        assert bool(results.lse[:, free["q"]].isneginf().all())
        for name in ("dk_context", "dv_context", "dk_decoded", "dv_decoded"):
            assert not bool(getattr(results, name)[free[name[1:].replace("v_", "k_")]].any())


# --- strides ------------------------------------------------------------------------------------------------------


def off_by_one(x: Tensor) -> Tensor:
    """The same values, two bytes after an aligned address."""
    return x.new_full((x.numel() + 1,), NAN)[1:].view(x.shape).copy_(x)


def odd_rows(x: Tensor) -> Tensor:
    """The same values in a parent whose rows are no multiple of 16 bytes apart."""
    return x.new_full((len(x), x[0].numel() + 3), NAN)[:, :-3].view(x.shape).copy_(x)


def odd_heads(x: Tensor) -> Tensor:
    """The same for heads."""
    return x.new_full((*x.shape[:2], x.shape[2] + 3), NAN)[..., : x.shape[2]].copy_(x)


def heads_outermost(x: Tensor) -> Tensor:
    """The same values with all rows of a head beside each other."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_other_row(x: Tensor) -> Tensor:
    return x.new_full((2 * x.shape[0], *x.shape[1:]), NAN)[::2].copy_(x)


@pytest.mark.parametrize("strided", [off_by_one, odd_rows, odd_heads, heads_outermost, every_other_row])
@configurations
def test_strides_do_not_change_results(options: Options, strided: Callable[[Tensor], Tensor]) -> None:
    batch = build_groups(MIXED, **options)
    expected = run(batch, deterministic=True)
    for names in (INPUTS, ("q",), ("k_context",), ("v_decoded",), ("dout",)):
        other = batch.replace(**{name: strided(getattr(batch, name)) for name in names})
        oracle.assert_same_results(run(other, deterministic=True), expected)


def test_single_rows_and_heads_may_have_any_stride() -> None:
    """The stride of a dimension of size one is arbitrary."""
    batch = build_groups([Group(1, ((1, 1),))], **SMALL | {"heads": (1, 1)})
    expected = run(batch, deterministic=True)
    other = batch.replace(**{name: getattr(batch, name).as_strided(batch.q.shape, (3, 5, 1)) for name in INPUTS})
    oracle.assert_same_results(run(other, deterministic=True), expected)


def test_an_expanded_gradient() -> None:
    """As a sum hands them over: all rows at one address."""
    batch = build_groups(MIXED, **SMALL)
    dout = batch.dout[:1].expand_as(batch.dout)
    expected = run(batch.replace(dout=dout.contiguous()), deterministic=True)
    oracle.assert_same_results(run(batch.replace(dout=dout), deterministic=True), expected)


# --- large tensors ------------------------------------------------------------------------------------------------

FAR_ELEMENTS = 2**31 if DEVICE == "cuda" else 2**16
FAR_GROUPS = [Group(100, ((150, 50), (65, 65))), Group(70, ((70, 0), (33, 33)))]


def at_far_end(x: Tensor) -> Tensor:
    """The values as the last rows of a tensor with more than FAR_ELEMENTS elements; the others are NaN."""
    row = x.shape[1] * x.shape[2]
    parent = x.new_full((FAR_ELEMENTS // row + x.shape[0], *x.shape[1:]), NAN)
    parent[-x.shape[0] :] = x
    return parent


def far_batch(batch: Batch, names: tuple[str, ...]) -> Batch:
    """The batch with the named tensors at the far end of large ones, and the offsets that say so."""
    large = {name: at_far_end(getattr(batch, name)) for name in names}
    moved = {name: large[name].shape[0] - getattr(batch, name).shape[0] if name in large else 0 for name in INPUTS}
    assert batch.cu_seqlens_context is not None
    return batch.replace(
        **large,
        cu_seqlens_q=batch.cu_seqlens_q + moved["q"],
        cu_seqlens_k_decoded=batch.cu_seqlens_k_decoded + moved["k_decoded"],
        cu_seqlens_context=batch.cu_seqlens_context + moved["k_context"],
    )


@pytest.fixture
def much_memory() -> Iterator[None]:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < 40 << 30:
            pytest.skip("needs 40 GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("names", [("q", "dout"), ("k_context", "v_context"), ("k_decoded", "v_decoded")], ids="+".join)
def test_tensors_past_2_31_elements(names: tuple[str, ...], deterministic: bool) -> None:
    """Active rows equal those of the small tensors; every other row of every result is 0 or -inf."""
    batch = build_groups(FAR_GROUPS, **SMALL | {"heads": (16, 16)})
    expected = run(batch)
    far = run(far_batch(batch, names), deterministic=deterministic)
    sizes = {name: getattr(expected, name).shape[0] for name in Results._fields}
    sizes["lse"] = batch.q.shape[0]
    ends = {name: x[..., -sizes[name] :] if name == "lse" else x[-sizes[name] :] for name, x in far._asdict().items()}
    oracle.assert_bits_equal("out", ends["out"], expected.out)
    oracle.assert_bits_equal("lse", ends["lse"], expected.lse)
    oracle.check(batch, Results(**ends))
    for name, x in far._asdict().items():
        if name == "lse":
            assert bool(x[:, : -sizes[name]].isneginf().all())
        else:
            assert not bool(x[: -sizes[name]].any()), f"{name}: values in rows of no sequence"


# --- hostile offsets ----------------------------------------------------------------------------------------------


@needs_gpu
def test_hostile_offsets_neither_crash_nor_hang() -> None:
    """In another process, because an access outside a tensor would spoil this one. sanitize.py looks closer."""
    command = [sys.executable, str(SANITIZE), "hostile", "--head-dim", "64", "--head-dim", "256"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def test_results_after_hostile_offsets() -> None:
    """Overlapping and reversed offsets within one process: numbers are wrong, the next call is right."""
    batch = split_owner_batch(SMALL)
    expected = run(batch, deterministic=True)
    run(batch.replace(cu_seqlens_q=batch.cu_seqlens_q.flip(0), cu_seqlens_k_decoded=batch.cu_seqlens_k_decoded.flip(0)))
    oracle.assert_same_results(run(batch, deterministic=True), expected)
