# SPDX-License-Identifier: BSD-3-Clause
"""Node tables of trees and their layouts: columns, errors, and the time that they take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from samples import check_layout
from shared_prompts import layout_of
from tree_cases import DEEP, Tree, offsets_and_parents, paths_of, trees

from flash_attn_dualkv import SharedPromptLayout
from flash_attn_dualkv import nodes as tables
from flash_attn_dualkv.errors import SharedPromptError


@settings(deadline=None, max_examples=60)
@given(trees())
def test_columns_of_trees(tree: Tree) -> None:
    lens, parents = tree
    nodes = tables.tree_nodes(*offsets_and_parents(tree), sum(lens))
    layout = SharedPromptLayout.from_tree(lens, parents, pad=3)
    check_layout(layout)
    assert layout.nodes.equal(nodes) and layout.num_tokens == sum(lens) + 3
    paths = paths_of(tree)
    assert layout.max_sequence == max(map(len, paths), default=0)
    seen = [len(path) - at for path, length in zip(paths, lens) for at in range(length)]
    assert layout.mean_keys == math.ceil(sum(seen) / max(len(seen), 1))
    begins = [sum(lens[:index]) for index in range(len(lens))]
    positions = [len(path) - length for path, length in zip(paths, lens)]
    ancestors: list[set[int]] = []
    for index, parent in enumerate(parents):
        ancestors.append({index} | (ancestors[parent] if parent >= 0 else set()))
    assert layout.depth == max(map(len, ancestors), default=0) and layout.num_nodes == len(lens)
    ends = [max(below for below, own in enumerate(ancestors) if index in own) + 1 for index in range(len(lens))]
    columns = (begins, lens, positions, begins, lens, positions, parents, ends)
    assert nodes.tolist() == [list(row) for row in zip(*columns)]
    assert [list(node) for node in tables.checked_nodes(nodes, sum(lens), sum(lens), None)] == nodes.tolist()


# --- layouts of trees -------------------------------------------------------------------------------------------------


def test_a_layout_of_a_tree() -> None:
    layout = SharedPromptLayout.from_tree(*DEEP, pad=5)
    assert (layout.depth, layout.num_nodes, layout.max_sequence) == (4, 9, 19)
    assert SharedPromptLayout.from_tree(torch.tensor(DEEP[0]), torch.tensor(DEEP[1]), pad=5).is_like(layout)
    assert not SharedPromptLayout.from_tree(DEEP[0], [-1] * 9, pad=5).is_like(layout)
    check_layout(layout)
    assert layout.to("meta").nodes.shape == (9, 8)
    assert layout.num_groups == 3
    assert layout.context_index().tolist() == [*range(7), 29]
    assert layout.decoded_index().tolist() == [*range(7, 29), *range(30, 35)]
    # Prompts and responses are trees of depth two.
    prompts = layout_of([(3, [2, 1]), (2, [4])])
    tree = SharedPromptLayout.from_tree(prompts.node_lens, prompts.node_parents)
    assert tree.is_like(prompts) and tree.nodes.equal(prompts.nodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, -1], [-1, 0]), r"^node_lens\[1\]"),
        (([2, 1], [-1]), "^parents: expected 2"),
        (([2, 1], [-1, -2]), r"^parents\[1\]"),
        (([2, 1], [-1, 1]), r"^parents\[1\]: expected -1 or a node before 1, got 1"),
        (([2, 1, 1, 1], [-1, 0, 0, 1]), r"^parents\[3\]: .*depth-first"),
        (([2**29, 2**29], [-1, 0]), "^node_lens: expected fewer than"),
        (([2.5], [-1]), r"^node_lens\[0\]"),
    ],
)
def test_errors_of_layouts_of_trees(arguments: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(SharedPromptError, match=message):
        SharedPromptLayout.from_tree(*arguments)
