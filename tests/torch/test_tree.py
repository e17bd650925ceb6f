# SPDX-License-Identifier: BSD-3-Clause
"""flash_attn_tree_varlen_func in float64: against the dense relation of ancestors, and against single sequences."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import DEEP, Tree, dense, offsets_and_parents, trees, visible

from flash_attn_dualkv import (
    SharedPromptLayout,
    flash_attn_tree_varlen_func,
    flash_attn_varlen_func,
    ops,
    reference,
)
from flash_attn_dualkv.checks import MAX_ROWS

FLOAT64 = dict(rtol=1e-10, atol=1e-10)
Options = dict[str, Any]


def check(
    tree: Tree, heads: tuple[int, int], pad: int = 0, sinks: bool = False, window: int = -1, softcap: float = 0.0
) -> None:
    """Values and gradients, those of the LSE and of sinks too."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(tree[0]) + pad

    def fresh(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    leaves = [fresh(rows, count, 8).requires_grad_() for count in (heads[0], heads[1], heads[1])]
    leaves += [fresh(heads[0]).requires_grad_()] if sinks else []
    options: Options = {"softcap": softcap, "sinks": leaves[3] if sinks else None}
    used = slice(0, rows - pad)
    table = offsets_and_parents(tree)
    got = flash_attn_tree_varlen_func(*leaves[:3], *table, 0.4, window_size=(window, 0), **options, return_lse=True)
    sees, positions = visible(tree, rows)
    if window >= 0:
        sees &= positions[:, None] - positions[None] <= window
    wanted = dense(*leaves[:3], sees, 0.4, **options)
    torch.testing.assert_close(got[1][:, used], wanted[1][:, used], **FLOAT64)
    assert got[1][:, rows - pad :].isneginf().all()
    dout, dlse = fresh(rows, heads[0], 8), fresh(heads[0], rows - pad)
    gradients = []
    for out, lse in (got, wanted):
        loss = (out * dout).sum() + (lse[:, used] * dlse).sum()
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=rows == 0))
    torch.testing.assert_close((got[0], *gradients[0]), (wanted[0], *gradients[1]), **FLOAT64)


@settings(deadline=None, max_examples=60)
@given(trees(), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.integers(0, 3))
def test_random_trees(tree: Tree, heads: tuple[int, int], pad: int) -> None:
    """Blocks of a few keys, so that their borders lie anywhere in nodes and paths."""
    with patch.multiple(reference, KEY_BLOCK=3, SCORE_ELEMENTS=12, ACCUMULATOR_ELEMENTS=100):
        check(tree, heads, pad)


@pytest.mark.parametrize(("window", "softcap", "sinks"), [*product([-1, 0, 5], [0.0, 0.7], [False, True])])
def test_variants(window: int, softcap: float, sinks: bool) -> None:
    check(DEEP, (4, 2), pad=2, sinks=sinks, window=window, softcap=softcap)


def test_the_mean_of_keys_reaches_the_operators() -> None:
    """Given, it is what the backward is told; without it, for all that is known a row sees every row."""
    tree = ([3, 2, 0, 3, 1], [-1, 0, 0, 2, -1])
    inputs = [torch.randn(12, heads, 8, requires_grad=True) for heads in (2, 1, 1)]
    mean = SharedPromptLayout.from_tree(*tree).mean_keys
    outs, told = [], []
    for options in ({}, dict(mean_keys=None), dict(mean_keys=mean), dict(mean_keys=0), dict(mean_keys=2**40)):
        with patch.object(ops, "attend", side_effect=ops.attend) as attend:
            outs.append(flash_attn_tree_varlen_func(*inputs, *offsets_and_parents(tree), **options))
        told.append(attend.call_args.args[4].mean_keys)
        torch.autograd.grad(outs[-1].sum(), inputs)
    assert told == [12, 12, mean, 0, MAX_ROWS]
    assert all(one.equal(outs[0]) for one in outs)


def test_windows_and_softcaps_of_the_other_functions() -> None:
    """A sequence alone is a tree of one node; as in FlashAttention, causality ends a window, and so ended it is one."""
    q, k, v = (torch.randn(20, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    table = offsets_and_parents(([13, 7], [-1, -1]))
    expected = flash_attn_tree_varlen_func(q, k, v, *table, window_size=(4, -1), softcap=1.5)
    assert flash_attn_tree_varlen_func(q, k, v, *table, window_size=(4, 9), softcap=1.5).equal(expected)
    for causal, right in ((True, -1), (True, 0), (False, 0), (True, 4)):  # the last as transformers gives it
        options = dict(causal=causal, window_size=(4, right), softcap=1.5)
        assert flash_attn_varlen_func(q, k, v, table[0], table[0], 13, 13, **options).equal(expected)
    # Without causality, 4 positions before a row and all behind it.
    out = flash_attn_varlen_func(q, k, v, table[0], table[0], 13, 13, window_size=(4, -1))
    near = torch.arange(13)[:, None] - torch.arange(13)[None] <= 4
    torch.testing.assert_close(out[:13], dense(q[:13], k[:13], v[:13], near, 8**-0.5)[0])
