# SPDX-License-Identifier: BSD-3-Clause
"""Tree attention under other frameworks' signatures."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import Forest, check, forests, inputs, mask_of

from flash_attn_dualkv import ops
from flash_attn_dualkv.contrib import trees

pytestmark = pytest.mark.slow
HYPOTHESIS = settings(deadline=None, max_examples=100)


@HYPOTHESIS
@given(forests(), st.integers(0, 3), st.sampled_from([None, 0.7]))
def test_megatron(tree: Forest, pad: int, scale: float | None) -> None:
    rows = sum(tree[1]) + pad
    tensors = inputs(rows)
    mask = mask_of(tree, rows)
    for tables in (tree, [torch.tensor(one) for one in tree]):
        out = trees.flash_composed_forest_attention_fused(*(one[0] for one in tensors), *tables, scale)
        check(out[None], tensors, mask, scale)


def test_bits_tell_the_mean_of_keys() -> None:
    with patch.object(ops, "attend", side_effect=ops.attend) as told:
        attend_bits([[1], [3], [5]], 3)
    assert told.call_args.args[4].mean_keys == math.ceil(5 / 3)


def test_a_tree_is_read_once() -> None:
    tables = [torch.tensor(values) for values in ([0, 2], [2, 2], [-1, 0])]
    with patch.object(trees, "Forest", side_effect=trees.Forest) as built:
        for _ in range(2):
            trees.flash_composed_forest_attention_fused(*(tensor[0] for tensor in inputs(4)), *tables)
    built.assert_called_once_with([0, 2], [2, 2], [-1, 0])


def attend_bits(mask: list[list[int]], rows: int = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    tensors = [one.transpose(1, 2) for one in inputs(rows)]
    return trees.tree_attention(*tensors, torch.tensor([mask], dtype=dtype), *[torch.zeros(0)] * 4)


def test_tables_of_negative_lengths() -> None:
    with pytest.raises(ValueError, match=r"^node_len\[1\]: expected an int >= 0, got -1"):
        trees.flash_composed_forest_attention_fused(*(tensor[0] for tensor in inputs(4)), [0, 2], [2, -1], [-1, 0])


ERRORS: list[tuple[Any, str]] = [
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
