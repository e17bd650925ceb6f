# SPDX-License-Identifier: BSD-3-Clause
"""Forests: exact for nodes in any order, and read once for all layers."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import Forest, check, forests, inputs, mask_of, offsets_and_parents

from flash_attn_dualkv import flash_attn_tree_varlen_func, ops
from flash_attn_dualkv.integrations import trees

HYPOTHESIS = settings(deadline=None, max_examples=100)


@HYPOTHESIS
@given(forests(), st.integers(0, 3), st.sampled_from([None, 0.7]))
def test_nodes_are_read_where_they_are(nodes: Forest, pad: int, scale: float | None) -> None:
    forest, rows = trees.Forest(*nodes), sum(nodes[1]) + pad
    assert forest.num_rows == sum(nodes[1])
    tensors = inputs(rows)
    check(forest.attend(*tensors, scale), tensors, mask_of(nodes, rows), scale)


@pytest.mark.parametrize(
    "options", [dict(window_size=(4, 0)), dict(softcap=0.5), dict(sinks=torch.tensor([1.0, -0.5, 2.0, 0.0]).double())]
)
def test_windows_softcaps_and_sinks(options: dict[str, Any]) -> None:
    """The root lies behind its children: what the tree has with the rows in the order of the nodes."""
    tensors, rows = inputs(12), [*range(4, 9), *range(4), *range(9, 12)]
    leaves = [*tensors, *(one.requires_grad_() for name, one in options.items() if name == "sinks")]
    forest = trees.Forest([4, 0, 9], [5, 4, 3], [-1, 0, 0])
    got = forest.attend(*tensors, 0.7, **options)[0, rows]
    table = offsets_and_parents(([5, 4, 3], [-1, 0, 0]))
    expected = flash_attn_tree_varlen_func(*(one[0, rows] for one in tensors), *table, 0.7, **options)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert (got - forest.attend(*tensors, 0.7)[0, rows]).abs().max() > 0.01
    weights = torch.arange(got.numel(), dtype=torch.float64).view_as(got).cos()
    gradients, wanted = (torch.autograd.grad((side * weights).sum(), leaves) for side in (got, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layers_take_the_forest_of_each_micro_batch() -> None:
    compiled = torch.compile(lambda forest, q, k, v: forest.attend(q, k, v), backend="aot_eager", fullgraph=True)
    tensors = inputs(12)
    for parents in ([-1, 0, 0], [-1, -1, 1], [-1, 0, 1]):
        forest = trees.Forest([4, 0, 9], [5, 4, 3], parents)
        assert compiled(forest, *tensors).equal(forest.attend(*tensors))


@HYPOTHESIS
@given(forests(shuffled=False), st.booleans())
def test_the_kernels_are_told_the_mean_of_keys(nodes: Forest, moved: bool) -> None:
    """Whatever order the nodes are given in; padding counts for nothing."""
    rows = sum(nodes[1])
    mask = mask_of(nodes, rows)
    if moved:  # children in front of what they continue
        nodes = [rows - begin - length for begin, length in zip(*nodes[:2])], *nodes[1:]
    tensors = [torch.nn.functional.pad(tensor.detach(), (0, 0, 0, 0, 0, 2)) for tensor in inputs(rows)]
    for options in ({}, dict(window_size=(2, 0))):
        with patch.object(ops, "attend", side_effect=ops.attend) as told:
            trees.Forest(*nodes).attend(*tensors, **options)
        assert told.call_args.args[4].mean_keys == math.ceil(mask.sum().item() / max(rows, 1))


def attend_remembered(tables: list[Tensor], built: list[Any]) -> Tensor:
    def build() -> trees.Forest:
        built.append(None)
        return trees.Forest(*(table.tolist() for table in tables))

    return trees.remembered(tables, build).attend(*inputs(5))


def test_a_tree_is_read_once_and_forgotten() -> None:
    """While its tables are the same; a table that was written to is read again."""
    built: list[Any] = []
    tables = [torch.tensor(values) for values in ([0, 2, 4], [2, 2, 1], [-1, 0, 0])]
    before = len(trees._forests)
    first = attend_remembered(tables, built)
    assert attend_remembered(tables, built).equal(first) and len(built) == 1
    tables[2][2] = 1
    assert not attend_remembered(tables, built).equal(first) and len(built) == 2
    assert len(trees._forests) == before + 1
    del tables[:]
    assert len(trees._forests) == before


def attend(begins: list[int], lens: list[int], parents: list[int], *, keys: int = 0, values: int = 0) -> Tensor:
    """Four rows, and as many keys and values if no others are given."""
    q, k, v = (inputs(rows)[at] for at, rows in enumerate((4, keys or 4, values or 4)))
    return trees.Forest(begins, lens, parents).attend(q, k, v)


ERRORS: list[tuple[Any, str]] = [
    (lambda: attend([0, 1], [2, 2], [-1, 0]), "^node 1: expected rows from 2 on, got 2 from 1 on"),
    (lambda: attend([0, 2], [2, 2], [-1, 2]), "^parent of node 1: expected -1 or a node, got 2"),
    (lambda: attend([0, 2], [2, 2], [1, 0]), "^parents: expected a root above every node, got a cycle"),
    (lambda: attend([0, 2], [2, 2], [-1]), "^parents: expected 2 nodes, got 1, and 2 lengths"),
    (lambda: attend([0, 2], [2, 4], [-1, 0]), "^q: expected at least 6 rows, those of the nodes, got 4"),
    (lambda: attend([4, 0], [2, 4], [1, -1]), "^q: expected at least 6 rows, those of the nodes, got 4"),
    (lambda: attend([2, 0], [2, 2], [-1, 0], keys=3), "^v: expected 3 rows"),
    (lambda: attend([2, 0], [2, 2], [-1, 0], values=7), "^v: expected 4 rows"),
    (lambda: attend([0, 0], [0, 2**31], [-1, 0]), f"^nodes: expected fewer than {2**30} rows, got {2**31}"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
