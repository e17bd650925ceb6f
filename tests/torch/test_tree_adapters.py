# SPDX-License-Identifier: BSD-3-Clause
"""Tree attention under other frameworks' signatures: exact for nodes in any order, and read once for all layers."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import check, inputs, offsets_and_parents, path_to, visible

from flash_attn_dualkv import flash_attn_tree_varlen_func, ops
from flash_attn_dualkv.integrations import trees

HYPOTHESIS = settings(deadline=None, max_examples=100)
Trees = tuple[list[int], list[int], list[int]]  # begins, lens, parents


@st.composite
def layouts(draw: st.DrawFn, shuffled: bool = True) -> Trees:
    """Forests whose nodes lie anywhere in the row, parents before and behind their children."""
    count = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    lens = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    names = draw(st.permutations(range(count))) if shuffled else [*range(count)]
    places = draw(st.permutations(range(count))) if shuffled else _depth_first(parents)
    rows = dict(zip(places, accumulate((lens[node] for node in places), initial=0)))
    found = {names[node]: (rows[node], lens[node], names[parent] if parent >= 0 else -1)
             for node, parent in enumerate(parents)}  # fmt: skip
    begins, sizes, above = zip(*(found[name] for name in range(count)))
    return [*begins], [*sizes], [*above]


def _depth_first(parents: list[int], top: int = -1) -> list[int]:
    children = [node for node, parent in enumerate(parents) if parent == top]
    return [one for child in children for one in (child, *_depth_first(parents, child))]


def mask_of(tree: Trees, rows: int) -> Tensor:
    """(rows, rows): which row sees which."""
    begins, *nodes = tree
    return visible((nodes[0], nodes[1]), rows, begins)[0]


@HYPOTHESIS
@given(layouts(), st.integers(0, 3), st.sampled_from([None, 0.7]))
def test_megatron(tree: Trees, pad: int, scale: float | None) -> None:
    rows = sum(tree[1]) + pad
    given_tensors = inputs(rows)
    mask = mask_of(tree, rows)
    for tables in (tree, [torch.tensor(one) for one in tree]):
        out = trees.flash_composed_forest_attention_fused(*(one[0] for one in given_tensors), *tables, scale)
        check(out[None], given_tensors, mask, scale)


@HYPOTHESIS
@given(layouts(shuffled=False), st.integers(0, 3))
def test_nodes_are_read_where_they_are(tree: Trees, pad: int) -> None:
    forest = trees.Forest(*tree)
    assert forest.num_rows == sum(tree[1])
    given_tensors = inputs(sum(tree[1]) + pad)
    check(forest.attend(*given_tensors), given_tensors, mask_of(tree, sum(tree[1]) + pad), None)


@pytest.mark.parametrize(
    "options", [dict(window_size=(4, 0)), dict(softcap=0.5), dict(sinks=torch.tensor([1.0, -0.5, 2.0, 0.0]).double())]
)
def test_windows_softcaps_and_sinks(options: dict[str, Any]) -> None:
    """The root lies behind its children: what the tree has with the rows in the order of the nodes."""
    given_tensors, rows = inputs(12), [*range(4, 9), *range(4), *range(9, 12)]
    leaves = [*given_tensors, *(one.requires_grad_() for name, one in options.items() if name == "sinks")]
    forest = trees.Forest([4, 0, 9], [5, 4, 3], [-1, 0, 0])
    got = forest.attend(*given_tensors, 0.7, **options)[0, rows]
    table = offsets_and_parents(([5, 4, 3], [-1, 0, 0]))
    expected = flash_attn_tree_varlen_func(*(one[0, rows] for one in given_tensors), *table, 0.7, **options)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert (got - forest.attend(*given_tensors, 0.7)[0, rows]).abs().max() > 0.01
    weights = torch.arange(got.numel(), dtype=torch.float64).view_as(got).cos()
    for one, other in zip(*(torch.autograd.grad((side * weights).sum(), leaves) for side in (got, expected))):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layers_take_the_forest_of_each_micro_batch() -> None:
    compiled = torch.compile(lambda forest, q, k, v: forest.attend(q, k, v), backend="aot_eager", fullgraph=True)
    tensors = inputs(12)
    for parents in ([-1, 0, 0], [-1, -1, 1], [-1, 0, 1]):
        forest = trees.Forest([4, 0, 9], [5, 4, 3], parents)
        assert compiled(forest, *tensors).equal(forest.attend(*tensors))


def bits(mask: Tensor) -> Tensor:
    """(1, N, words) int64, as AReaL packs what each row sees."""
    words = -(-mask.shape[1] // 64)
    padded = torch.nn.functional.pad(mask, (0, 64 * words - mask.shape[1])).view(len(mask), words, 64)
    return (padded.long() << torch.arange(64)).sum(-1)[None]


@pytest.mark.slow
@HYPOTHESIS
@given(layouts(shuffled=False), st.integers(0, 3), st.sampled_from([1, 40]))
def test_areal(tree: Trees, pad: int, factor: int) -> None:
    """Rows behind the nodes see nothing, as in AReaL's empty trees, or themselves, as its padding does."""
    tree = [factor * one for one in tree[0]], [factor * one for one in tree[1]], tree[2]
    rows = sum(tree[1]) + pad
    mask = mask_of(tree, rows)
    for padded in (mask, mask | torch.eye(rows, dtype=torch.bool)):
        given_tensors = inputs(rows)
        transposed = [one.transpose(1, 2) for one in given_tensors]
        out = trees.tree_attention(*transposed, bits(padded), *[torch.zeros(0)] * 4, sm_scale=0.3)
        check(out.transpose(1, 2), given_tensors, padded, 0.3)


@HYPOTHESIS
@given(layouts(), st.randoms(use_true_random=False))
def test_automodel(tree: Trees, shuffler: Any) -> None:
    order = sorted(range(len(tree[0])), key=lambda node: (tree[0][node], tree[1][node]))  # of the packed row
    place = {node: at for at, node in enumerate(order)}
    lens = [tree[1][node] for node in order]
    sample_paths = [[place[one] for one in path_to(node, tree[2])] for node in range(len(order))]
    shuffler.shuffle(sample_paths)
    forest, ranges = trees.prefix_tree(lens, sample_paths)
    ends = [0, *accumulate(lens)]
    assert ranges == [[[ends[one], ends[one + 1]] for one in path] for path in sample_paths]
    given_tensors = inputs(sum(lens))
    check(forest.attend(*given_tensors, 0.5), given_tensors, mask_of(tree, sum(lens)), 0.5)


@HYPOTHESIS
@given(layouts(shuffled=False), st.booleans())
def test_the_kernels_are_told_the_mean_of_keys(tree: Trees, moved: bool) -> None:
    """By every function, whatever order the nodes are given in; padding counts for nothing."""
    rows = sum(tree[1])
    mask = mask_of(tree, rows)
    if moved:  # children in front of what they continue
        tree = [rows - begin - length for begin, length in zip(*tree[:2])], *tree[1:]
    given_tensors = [torch.nn.functional.pad(one.detach(), (0, 0, 0, 0, 0, 2)) for one in inputs(rows)]
    q, k, v = (one[0] for one in given_tensors)
    calls: list[Any] = [
        lambda: trees.flash_composed_forest_attention_fused(q, k, v, *tree),
        lambda: trees.Forest(*tree).attend(q, k, v, window_size=(2, 0)),
    ]
    if not moved:
        seen = bits(torch.nn.functional.pad(mask, (0, 2, 0, 2)))
        empty = [torch.zeros(0)] * 4
        calls.append(lambda: trees.tree_attention(*(one.transpose(1, 2) for one in given_tensors), seen, *empty))
    attend = ops.attend
    for call in calls:
        with patch.object(ops, "attend", side_effect=attend) as told:
            call()
        assert told.call_args.args[4].mean_keys == math.ceil(mask.sum().item() / max(rows, 1))


def test_a_tree_is_read_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its tables are the same; a table that was written to is read again."""
    built: list[Any] = []
    monkeypatch.setattr(trees, "Forest", lambda *args, real=trees.Forest: built.append(args) or real(*args))
    tables = [torch.tensor(one) for one in ([0, 2, 4], [2, 2, 1], [-1, 0, 0])]
    before = len(trees._forests)

    def call() -> Tensor:
        return trees.flash_composed_forest_attention_fused(*(one[0] for one in inputs(5)), *tables)

    first = call()
    assert call().equal(first) and len(built) == 1
    tables[2][2] = 1
    assert not call().equal(first) and len(built) == 2
    assert len(trees._forests) == before + 1
    del tables[:]
    assert len(trees._forests) == before


def test_tables_beside_an_old_one() -> None:
    """Only the first table stays, and those that were with it are freed: their ids may be those of new ones."""
    begins, lens = (torch.tensor(one) for one in ([0, 2, 4], [2, 2, 1]))
    q, k, v = (one[0] for one in inputs(5))
    for _ in range(10):
        for parents in ([-1, 0, 0], [-1, 0, 1], [-1, -1, -1]):
            got = trees.flash_composed_forest_attention_fused(q, k, v, begins, lens, torch.tensor(parents))
            assert got.equal(trees.Forest([0, 2, 4], [2, 2, 1], parents).attend(q, k, v))


def attend(*tables: Any) -> Tensor:
    return trees.flash_composed_forest_attention_fused(*(one[0] for one in inputs(4)), *tables)


def attend_moved(keys: int = 5, values: int = 5) -> Tensor:
    """With nodes that do not lie in depth-first order."""
    q, k, v = (inputs(rows)[at][0] for at, rows in enumerate((5, keys, values)))
    return trees.Forest([2, 0], [2, 2], [-1, 0]).attend(q, k, v)


def attend_bits(mask: list[list[int]], rows: int = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    given_tensors = [one.transpose(1, 2) for one in inputs(rows)]
    return trees.tree_attention(*given_tensors, torch.tensor([mask], dtype=dtype), *[torch.zeros(0)] * 4)


ERRORS: list[tuple[Any, str]] = [
    (lambda: attend([0, 1], [2, 2], [-1, 0]), "^node 1: expected rows from 2 on, got 2 from 1 on"),
    (lambda: attend([0, 2], [2, 2], [-1, 2]), "^parent of node 1: expected -1 or a node, got 2"),
    (lambda: attend([0, 2], [2, 2], [1, 0]), "^parents: expected a root above every node, got a cycle"),
    (lambda: attend([0, 2], [2, 2], [-1]), "^parents: expected 2 nodes, got 1, and 2 lengths"),
    (lambda: attend([0, 2], [2, -1], [-1, 0]), r"^node_len\[1\]: expected an int >= 0, got -1"),
    (lambda: attend([0, 2], [2, 4], [-1, 0]), "^q: expected at least 6 rows, those of the nodes, got 4"),
    (lambda: attend([4, 0], [2, 4], [1, -1]), "^q: expected at least 6 rows, those of the nodes, got 4"),
    (lambda: attend_moved(keys=3), "^v: expected 3 rows"),
    (lambda: attend_moved(values=7), "^v: expected 5 rows"),
    (lambda: attend_bits([[1], [3]], 3), r"^packed_mask: expected shape \(1, 3, words\), of 64 rows each"),
    (lambda: attend_bits([[]] * 65, 65), r"^packed_mask: expected shape \(1, 65, words\), of 64 rows each"),
    (lambda: attend_bits([[1]] * 65, 65), r"^packed_mask: expected shape \(1, 65, words\), of 64 rows each"),
    (lambda: attend_bits([[1], [-1]]), "^packed_mask: expected rows that see their path"),  # rows that are not there
    (lambda: attend_bits([[3], [2]]), "^packed_mask: expected rows that see their path"),  # the first sees the second
    (lambda: attend_bits([[1], [1]]), "^packed_mask: expected rows that see their path"),  # the second not itself
    (lambda: attend_bits([[0], [2]]), "^packed_mask: expected rows that see their path"),  # padding before a row
    (lambda: attend_bits([[1], [2], [7]], 3), "^packed_mask: expected rows that see their path"),  # two parents
    (lambda: trees.prefix_tree([1, 2, 3], [[0, 2], [1, 2]]), "^sample_paths: .* got node 2 behind 1"),
    (lambda: trees.prefix_tree([1, 2], [[0, 2]]), "^sample_paths: expected nodes below 2, .* got node 2 behind 0"),
    (lambda: trees.prefix_tree([0, 2**31], [[0, 1]]), f"^nodes: expected fewer than {2**30} rows, got {2**31}"),
    (lambda: trees.prefix_tree([1, 2], [[0]]), "^sample_paths: expected every node with rows, got none with node 1"),
    (lambda: trees.prefix_tree([1, 2], [[0, 1, 0]]), "^sample_paths: .* got node 0 behind 1"),
    (lambda: trees.prefix_tree([1, 2], [[0, -1]]), r"^sample_paths\[0\]\[1\]: expected an int >= 0, got -1"),
    (lambda: trees.prefix_tree([1.0, 2], [[0, 1]]), r"^node_lengths\[0\]: expected an int >= 0, got 1.0"),
    (lambda: trees.prefix_tree([1, 2], [0, 1]), r"^sample_paths\[0\]: expected a list of ints, got 0"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_masks_of_other_types() -> None:
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(TypeError, match=f"^packed_mask: expected dtype torch.int64, got {dtype}"):
            attend_bits([[1], [3]], dtype=dtype)


def test_paths_may_be_tensors() -> None:
    lens, path = torch.tensor([2, 1]), torch.tensor([0, 1], dtype=torch.int32)
    assert trees.prefix_tree(lens, [path])[1] == trees.prefix_tree([2, 1], [[0, 1]])[1] == [[[0, 2], [2, 3]]]  # type: ignore[arg-type]
