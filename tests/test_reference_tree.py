"""The specification of attention over a tree, against the dense relation of ancestors in PyTorch operations."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_dualkv import reference, reference_tree

FLOAT64 = dict(rtol=1e-10, atol=1e-10)
Tree = tuple[list[int], list[int]]  # lengths and parents of nodes


def tables(tree: Tree) -> tuple[Tensor, Tensor]:
    lengths, parents = tree
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    return offsets, torch.tensor(parents, dtype=torch.int32)


def visible(tree: Tree, rows: int) -> tuple[Tensor, Tensor]:
    """(rows, rows) bool: which rows see which; and (rows,) logical positions."""
    lengths, parents = tree
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    sees = torch.zeros(rows, rows, dtype=torch.bool)
    positions = torch.zeros(rows, dtype=torch.int64)
    for node in range(len(lengths)):
        path = [*range(begins[node], begins[node + 1])]
        above: list[int] = []
        parent = parents[node]
        while parent >= 0:
            above = [*range(begins[parent], begins[parent + 1]), *above]
            parent = parents[parent]
        for at, row in enumerate(path):
            sees[row, [*above, *path[: at + 1]]] = True
            positions[row] = len(above) + at
    return sees, positions


def dense(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, scale: float, variant: reference.Variant
) -> tuple[Tensor, Tensor]:
    """out and lse by autograd's operations on the whole matrix of scores."""
    sees, positions = visible(tree, len(q))
    if variant.window is not None:
        sees &= positions[:, None] - positions[None] < variant.window
    ratio = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(ratio, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~sees, float("-inf"))
    extra = q.new_full((q.shape[1], len(q), 1), float("-inf"))
    if variant.sinks is not None:
        extra = variant.sinks[:, None, None].expand_as(extra).masked_fill(~sees.any(1)[None, :, None], float("-inf"))
    lse = torch.cat([scores, extra], -1).logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def check(tree: Tree, heads: tuple[int, int], variant: reference.Variant = reference.PLAIN, pad: int = 0) -> None:
    """Values and gradients, those of the LSE too, in float64."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(tree[0]) + pad

    def fresh(count: int) -> Tensor:
        return torch.randn(rows, count, 8, dtype=torch.float64, generator=generator)

    leaves = [fresh(count).requires_grad_() for count in (heads[0], heads[1], heads[1])]
    q, k, v = (one.detach() for one in leaves)
    args = (*tables(tree), 0.4, variant)
    out, lse = reference_tree.forward(q, k, v, *args)
    wanted_out, wanted_lse = dense(*leaves, tree, 0.4, variant)
    dout = fresh(heads[0])
    dlse = torch.randn(lse.shape, dtype=torch.float64, generator=generator)
    dlse[:, rows - pad :] = 0.0
    loss = (wanted_out * dout).sum() + (wanted_lse * dlse)[:, : rows - pad].sum()
    wanted = torch.autograd.grad(loss, leaves)
    got = reference_tree.backward(dout, dlse, q, k, v, out, lse, *args)
    sees_any = slice(0, rows - pad)
    torch.testing.assert_close(lse[:, sees_any], wanted_lse.detach()[:, sees_any], **FLOAT64)
    for one, other in zip((out, *got), (wanted_out.detach(), *wanted), strict=True):
        torch.testing.assert_close(one, other, **FLOAT64)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Depth-first tables, with nodes of no rows and chains."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(draw(st.integers(0, 9))):
        kept = draw(st.integers(0, len(path)))
        path = path[:kept]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return [draw(st.integers(0, 5)) for _ in parents], parents


@settings(deadline=None, max_examples=60)
@given(trees(), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.integers(0, 3))
def test_random_trees(tree: Tree, heads: tuple[int, int], pad: int) -> None:
    """Blocks of a few keys, so that their borders lie anywhere in nodes and paths."""
    with patch.multiple(reference, KEY_BLOCK=3, SCORE_ELEMENTS=12):
        check(tree, heads, pad=pad)


DEEP: Tree = ([7, 3, 0, 9, 4, 6, 1, 5], [-1, 0, 1, 2, 2, 0, -1, 6])


@pytest.mark.parametrize(("window", "softcap", "sinks"), [*product([None, 1, 6], [None, 0.7], [False, True])])
def test_variants(window: int | None, softcap: float | None, sinks: bool) -> None:
    values = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) if sinks else None
    check(DEEP, (4, 2), reference.Variant(window, softcap, values))


def test_a_deep_comb() -> None:
    depth = 40
    check(([2, 3] * depth, [-1 if i == 0 else i - 1 if i % 2 else i - 2 for i in range(2 * depth)]), (2, 1))


def test_a_tree_of_depth_2_is_a_shared_prompt() -> None:
    """The same bits as the two regions have: a context with two responses."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(12, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    segments = [[0, 5, 0, 0, 5, 0, 0, 0], [5, 3, 5, 0, 5, 0, 3, 0], [8, 4, 5, 0, 5, 3, 4, 0]]
    two = [torch.tensor(rows, dtype=torch.int32) for rows in (segments, [[0, 5, 0, 3]])]
    arguments = (q, k[:5], v[:5], k[5:], v[5:])
    expected = reference.forward(*arguments, *two, 0.4, True)
    out, lse = reference_tree.forward(q, k, v, *tables(([5, 3, 4], [-1, 0, 0])), 0.4)
    assert out.equal(expected[0]) and lse.equal(expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_are_rounded_once(dtype: torch.dtype) -> None:
    """200 children: sums in 16 bits would be far off."""
    generator = torch.Generator().manual_seed(3)
    tree = ([4] * 201, [-1, *[0] * 200])
    q, k, v, dout = (torch.randn(804, 2, 8, generator=generator).to(dtype) for _ in range(4))
    results = []
    for kind in (dtype, torch.float64):
        inputs = [one.to(kind) for one in (q, k, v)]
        out, lse = reference_tree.forward(*inputs, *tables(tree), 0.4)
        gradients = reference_tree.backward(dout.to(kind), None, *inputs, out, lse, *tables(tree), 0.4)
        assert {one.dtype for one in (out, *gradients)} == {kind}
        assert lse.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
        results.append([out, *gradients])
    for one, other in zip(*results):
        # A third of this is seen; 16-bit sums have twice as much.
        assert (one.double() - other).norm() / other.norm() < torch.finfo(dtype).eps


def test_gradients_of_autograd() -> None:
    inputs = [torch.randn(9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    tree = tables(([3, 2, 0, 3], [-1, 0, 0, 2]))
    assert torch.autograd.gradcheck(
        lambda *qkv: [one[..., :8] for one in reference_tree.attention(*qkv, *tree)], inputs
    )


ERRORS: list[tuple[str, Any, str]] = [
    ("counts", ([0, 2, 4], [-1]), r"^parents: expected 2 nodes \(as cu_seqlens\), got 1"),
    (
        "too many rows",
        ([0, 2, 5], [-1, 0]),
        r"^cu_seqlens: expected offsets from 0 to at most 4 \(rows of q\), got 0 to 5",
    ),
    ("first offset", ([1, 2, 4], [-1, 0]), "^cu_seqlens: expected offsets from 0 .* got 1 to 4"),
    ("decrease", ([0, 3, 2, 4], [-1, 0, 0]), "^cu_seqlens: expected offsets that do not decrease, got 2 after 3"),
    ("below -1", ([0, 2, 4], [-1, -2]), r"^parents\[1\]: expected -1 or a node before 1, got -2"),
    ("itself", ([0, 2, 4], [-1, 1]), r"^parents\[1\]: expected -1 or a node before 1, got 1"),
    ("a later one", ([0, 1, 2, 4], [-1, 2, 0]), r"^parents\[1\]: expected -1 or a node before 1, got 2"),
    (
        "no depth-first order",
        ([0, 1, 2, 3, 4], [-1, 0, 0, 1]),
        r"^parents\[3\]: expected a node on the path to node 2 \(depth-first order\), got 1",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(one[1:], id=one[0]) for one in ERRORS])
def test_errors(case: Any) -> None:
    (cu_seqlens, parents), message = case
    with pytest.raises(ValueError, match=message):
        reference_tree.read_nodes(torch.tensor(cu_seqlens), torch.tensor(parents), 4)
