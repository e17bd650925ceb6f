"""Contents of offsets, parents and node tables that break their rules are errors that name the place and the value."""

from __future__ import annotations

import re

import pytest
import torch
from legal_calls import (
    SHARED_TENSORS,
    Change,
    Row,
    grouped,
    parametrize,
    plain_arguments,
    replace_by,
    shared_arguments,
    tree_arguments,
)
from torch import Tensor

from flash_attn_dualkv import flash_attn_dualkv_varlen_func, flash_attn_tree_varlen_func, ops
from flash_attn_dualkv import nodes as tables


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


VALUE_ROWS: list[Row] = [
    ("negative", replace_by("cu_seqlens_q", offsets(-1, 2, 6)), ValueError, "cu_seqlens_q", "-1"),
    ("decreasing", replace_by("cu_seqlens_q", offsets(0, 4, 3)), ValueError, "cu_seqlens_q", "3 after 4 at index 2"),
    ("past the end", replace_by("cu_seqlens_q", offsets(0, 2, 7)), ValueError, "cu_seqlens_q", "7"),
    ("negative", replace_by("cu_seqlens_k_decoded", offsets(-2, 2, 6)), ValueError, "cu_seqlens_k_decoded", "-2"),
    (
        "decreasing",
        replace_by("cu_seqlens_k_decoded", offsets(0, 4, 3)),
        ValueError,
        "cu_seqlens_k_decoded",
        "3 after 4",
    ),
    ("past the end", replace_by("cu_seqlens_k_decoded", offsets(0, 2, 9)), ValueError, "cu_seqlens_k_decoded", "9"),
    ("negative", grouped((-1, 2, 5)), ValueError, "cu_seqlens_context", "-1"),
    ("decreasing", grouped((0, 4, 3)), ValueError, "cu_seqlens_context", "3 after 4"),
    ("past the end", grouped((0, 2, 6)), ValueError, "cu_seqlens_context", "6"),
    ("not from 0", grouped(owned=(1, 1, 2)), ValueError, "cu_seqs_per_context", "1"),
    ("not to N", grouped(owned=(0, 1, 1)), ValueError, "cu_seqs_per_context", "1"),
    ("beyond N", grouped(owned=(0, 1, 3)), ValueError, "cu_seqs_per_context", "3"),
    ("decreasing", grouped(owned=(0, 3, 2)), ValueError, "cu_seqs_per_context", "2 after 3"),
]


TREE_VALUE_ROWS: list[Row] = [
    ("too many rows", replace_by("cu_seqlens", offsets(0, 2, 7)), ValueError, "cu_seqlens", "7"),
    ("first offset", replace_by("cu_seqlens", offsets(1, 2, 6)), ValueError, "cu_seqlens", "1"),
    ("negative", replace_by("cu_seqlens", offsets(-1, 2, 6)), ValueError, "cu_seqlens", "-1"),
    ("decrease", replace_by("cu_seqlens", offsets(0, 4, 3)), ValueError, "cu_seqlens", "3 after 4 at index 2"),
    ("below -1", replace_by("parents", offsets(-1, -2)), ValueError, "parents[1]", "-2"),
    ("itself", replace_by("parents", offsets(-1, 1)), ValueError, "parents[1]", "1"),
    ("a later one", replace_by("parents", offsets(1, -1)), ValueError, "parents[0]", "1"),
    (
        "no depth-first order",
        lambda _: {"cu_seqlens": offsets(0, 1, 2, 3, 4), "parents": offsets(-1, 0, 0, 1)},
        ValueError,
        "parents[3]: expected a node on the path to node 2 (depth-first order)",
        "1",
    ),
]


@parametrize([*VALUE_ROWS, *TREE_VALUE_ROWS])
def test_values(
    change: Change, error: type[Exception], name: str, got: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALKV_DEBUG", "1" if device == "cuda" else "0")  # on the CPU they are always checked
    function, make = flash_attn_dualkv_varlen_func, shared_arguments
    if name == "cu_seqlens" or name.startswith("parents"):
        function, make = flash_attn_tree_varlen_func, tree_arguments
    arguments = make(device, torch.bfloat16)
    changed = {key: value.to(device) for key, value in change(arguments).items()}
    with pytest.raises(error) as caught:
        function(**arguments | changed)
    head, _, tail = str(caught.value).partition(", got ")
    assert head.startswith(name)
    assert got in tail


# What is wrong with a table that an operator gets: (row, column, value).
TABLE_ROWS: list[tuple[str, tuple[int, int, int], str, str]] = [
    ("row of q", (3, 1, 5), "cu_seqlens_q", "7"),
    ("negative row", (3, 0, -1), "cu_seqlens_q", "-1"),
    ("decoded row", (1, 4, 9), "cu_seqlens_k_decoded", "9"),
    ("decoded row among the contexts", (1, 3, 1), "nodes: expected each row of the keys", "row 1 twice"),
    ("context row", (2, 4, 4), "cu_seqlens_context", "6"),
    ("rows of q twice", (3, 0, 1), "nodes: expected each row of q", "row 1 twice"),
    ("decoded rows twice", (3, 3, 6), "nodes: expected each row of the keys", "row 6 twice"),
    ("unknown parent", (1, 6, 9), "nodes[1].parent", "9"),
    ("parent behind its child", (1, 6, 2), "nodes[1].parent", "2"),
    ("its own parent", (1, 6, 1), "nodes[1].parent", "1"),
    ("parent below -1", (3, 6, -2), "nodes[3].parent", "-2"),
    ("no depth-first order", (3, 6, 0), "nodes[3].parent", "0"),
    ("another parent", (3, 6, -1), "nodes[3].kv_pos0: expected 0", "3"),
    ("position of a child", (3, 5, 2), "nodes[3].kv_pos0: expected 3", "2"),
    ("position of a root", (0, 5, 1), "nodes[0].kv_pos0: expected 0", "1"),
    ("subtree that ends early", (0, 7, 1), "nodes[0].subtree_end: expected 2", "1"),
    ("subtree that ends late", (3, 7, 5), "nodes[3].subtree_end: expected 4", "5"),
]


@pytest.mark.parametrize(("change", "name", "got"), [pytest.param(*row[1:], id=row[0]) for row in TABLE_ROWS])
def test_tables_given_to_the_operators(change: tuple[int, int, int], name: str, got: str) -> None:
    arguments = shared_arguments()
    offsets_q = arguments["cu_seqlens_q"]
    nodes = ops.sequence_nodes(offsets_q, offsets_q, offsets(0, 2, 5), offsets(0, 1, 2), 5)
    tables.checked_nodes(nodes, 6, 5, 6)
    row, column, value = change
    nodes[row, column] = value
    inputs = [arguments[one] for one in SHARED_TENSORS]
    options = (0.5, True, -1, -1, 0.0, False, 11, False)
    lse = torch.zeros(4, 6)
    for call in (
        lambda: ops.forward(*inputs, None, nodes, *options),
        lambda: ops.backward(inputs[0], None, *inputs, inputs[0], lse, nodes, *options),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(name)}") as caught:
            call()
        assert got in str(caught.value).partition(", got ")[2]


def test_tables_of_other_shapes_and_types() -> None:
    arguments = plain_arguments()
    inputs = (arguments["q"], arguments["k"], arguments["v"], None, None, None)
    for nodes, error in ((torch.zeros(2, 7, dtype=torch.int32), ValueError), (torch.zeros(2, 8), TypeError)):
        with pytest.raises(error, match="^nodes: expected"):
            ops.forward(*inputs, nodes, 0.5, True, -1, -1, 0.0, False, 6, False)
