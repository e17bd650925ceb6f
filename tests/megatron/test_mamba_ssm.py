# SPDX-License-Identifier: BSD-3-Clause
"""Mamba-2 by the parts of mamba-ssm's kernels, 16-bit, against its fused kernel on each sequence alone, and float64."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from typing import Any

import megatron_cpu
import pytest
import torch
from torch import Tensor

from flash_attn_dualkv import pack_prefix_tree
from flash_attn_dualkv.integrations.recurrences.mixers import mamba2_by_parts

if any(importlib.util.find_spec(name) is None for name in ("mamba_ssm", "causal_conv1d")):  # importing needs a GPU
    pytest.skip("needs mamba-ssm and causal-conv1d", allow_module_level=True)
pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEADS, HEAD_DIM, GROUPS, STATES = 16, 64, 8, 128  # Nemotron's, of fewer heads
CHANNELS = HEADS * HEAD_DIM + 2 * GROUPS * STATES
OPTIONS: dict[str, Any] = dict(chunk_size=128, headdim=HEAD_DIM, ngroups=GROUPS, norm_before_gate=False)
NAMES = ("output", "projections", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D")


def sequences(seed: int) -> list[list[int]]:
    """A tree, with nodes on both sides of a convolution's inputs and of a chunk."""
    drawn = random.Random(seed)
    paths: list[list[int]] = [drawn.choices(range(64), k=300)]
    for _ in range(12):
        above = drawn.choice(paths)
        paths.append(
            above[: drawn.randint(1, len(above))] + drawn.choices(range(64), k=drawn.choice([0, 1, 2, 90, 200]))
        )
    return paths


def run(compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """An output and all gradients. What is in float32 beside 16 bits in Megatron's call is so here."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.bfloat16().to(DEVICE, to).requires_grad_()

    single = torch.promote_types(dtype, torch.float32)
    given = [draw(64, 2 * HEADS * HEAD_DIM + 2 * GROUPS * STATES + HEADS), draw(CHANNELS, 4, scale=0.5), draw(CHANNELS)]
    given += [draw(HEADS, to=single), draw(HEADS, scale=0.5, to=single), draw(HEADS)]
    table, weight, bias, dt_bias, log, D = given
    out = compute(table, weight, bias, dt_bias, -log.exp(), D=D, **OPTIONS)
    out.backward(torch.randn(out.shape, generator=generator).bfloat16().to(out))
    return [out.detach(), *(one.grad for one in given if one.grad is not None)]


@pytest.mark.parametrize("seed", range(3))
def test_trees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are at most 1.5 times those of each sequence alone on the same kernels."""
    ssd, conv1d = (importlib.import_module(name) for name in ("mamba_ssm.ops.triton.ssd_combined", "causal_conv1d"))
    paths = sequences(seed)
    batch = pack_prefix_tree(paths, loss_mask=[[0] + [1] * (len(one) - 1) for one in paths], min_shared=1).to(DEVICE)
    by_parts = mamba2_by_parts(conv1d.causal_conv1d_fn, ssd.mamba_chunk_scan_combined)

    def shared(table: Tensor, *parameters: Tensor, **options: Any) -> Tensor:
        out = by_parts(None, batch.layout, table[batch.input_ids][None], *parameters, **options)
        return out[0].index_select(0, batch.row_index)

    def alone(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(table: Tensor, *parameters: Tensor, **options: Any) -> Tensor:
            ids = [torch.tensor(one, device=DEVICE) for one in paths]
            return torch.cat([kernel(table[one][None], *parameters, **options)[0] for one in ids])

        return compute

    got = run(shared, torch.bfloat16)
    stock = run(alone(ssd.mamba_split_conv1d_scan_combined), torch.bfloat16)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    exact = run(alone(megatron_cpu.mamba_split_conv1d_scan_combined), torch.float64)
    for name, *of_all in zip(NAMES, got, stock, exact, strict=True):
        ours, theirs = ((one.double() - of_all[2]).norm() for one in of_all[:2])
        assert theirs <= 0.1 * of_all[2].norm(), name
        assert ours <= 1.5 * theirs + 1e-3 * of_all[2].norm(), (name, ours, theirs)
