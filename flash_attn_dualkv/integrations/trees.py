# SPDX-License-Identifier: BSD-3-Clause
"""Attention of trees as other frameworks describe them, whose nodes may lie anywhere in the row.

A framework's description is read once for a micro-batch into a table of nodes: every ancestor's keys
and values are read where they are, and their gradients are summed in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import checks, ops
from ..calls import make_options
from ..checks import check_are_tensors, explain
from ..host import to_device
from ..moved import names_of
from ..nodes import tree_table
from ..packed_attention import checked_tensors

# Forests by the first table of a micro-batch, with all tables they were read from and their state.
_forests: Any = WeakTensorKeyDictionary()


class Forest:
    """Nodes of packed rows, in whatever order, as the kernels take them: depth first.

    Args:
        begins: (n,) the first row of each node.
        lens: (n,) rows of each node, no row in two of them. Rows of no node are padding.
        parents: (n,) the node that each continues, before or after it; -1 for roots.

    Raises:
        ValueError: nodes that overlap or have too many rows; a parent that is no node, or not above its children.
    """

    def __init__(self, begins: Sequence[int], lens: Sequence[int], parents: Sequence[int]) -> None:
        if not len(begins) == len(lens) == len(parents):
            raise ValueError(explain("parents", f"{len(begins)} nodes", f"{len(parents)}, and {len(lens)} lengths"))
        end = 0
        for node in sorted(range(len(begins)), key=lambda node: (begins[node], lens[node])):
            if lens[node] < 0 or (lens[node] and begins[node] < end):
                raise ValueError(explain(f"node {node}", f"rows from {end} on", f"{lens[node]} from {begins[node]} on"))
            end = max(end, begins[node] + lens[node])
        if end >= checks.MAX_ROWS:
            raise ValueError(explain("nodes", f"fewer than {checks.MAX_ROWS} rows", end))
        order = _depth_first(begins, parents)
        places = {node: place for place, node in enumerate(order)}
        first, sizes = [begins[node] for node in order], tuple(lens[node] for node in order)
        above = tuple(places.get(parents[node], -1) for node in order)
        nodes, _, self.mean_keys = tree_table(sizes, above, begins=first)
        self.num_rows = end
        self._tables = {nodes.device: nodes}  # one on each device that attention was called on

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        *,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of every row to its path.

        Args:
            q: (T, H, d), rows in the order in which they are packed, or (1, T, H, d).
            k, v: (T, H_k, d) and (T, H_k, d_v), or (1, T, H_k, d) and (1, T, H_k, d_v).
            softmax_scale: None for 1 / sqrt(d).
            window_size: (left, right): a row sees `left` positions of its path before its own, or all with -1.
            softcap: c > 0 replaces every scaled score s by c * tanh(s / c).
            sinks: (H,), one score of each head that joins the softmax of every row without a value.

        Returns:
            As q, with d_v in the place of d; 0 for padding.

        Raises:
            TypeError, ValueError, NotImplementedError: fewer rows than the nodes have, or not as many in each; what
                `flash_attn_tree_varlen_func` refuses.
        """
        check_are_tensors(("q", "k", "v"), (q, k, v))
        if q.dim() == k.dim() == v.dim() == 4 and len(q) == len(k) == len(v) == 1:
            options: dict[str, Any] = dict(window_size=window_size, softcap=softcap, sinks=sinks)
            return self.attend(q[0], k[0], v[0], softmax_scale, **options)[None]
        q, k, v = checked_tensors(q, k, v, sinks, "auto")
        if len(q) < self.num_rows:
            raise ValueError(explain("q", f"at least {self.num_rows} rows, those of the nodes", len(q)))
        if len(k) != len(q):
            raise ValueError(explain("k", f"{len(q)} rows (as q)", len(k)))
        _, left = checks.resolve_window(True, window_size)
        call = make_options(
            head_dim=q.shape[2], softmax_scale=softmax_scale, causal=True, window_left=left, softcap=softcap,
            reference=not q.is_cuda, mean_keys=self.mean_keys,
        )  # fmt: skip
        return ops.attend(q, k, v, self._nodes(q.device), call, sinks=sinks)[0]

    def _nodes(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = to_device([next(iter(self._tables.values()))], device)[0]
        return self._tables[device]


def _depth_first(begins: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The nodes, each before its subtree; children in the order of their rows."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in sorted(enumerate(parents), key=lambda pair: (begins[pair[0]], pair[0]), reverse=True):
        if not -1 <= parent < len(parents):
            raise ValueError(explain(f"parent of node {node}", "-1 or a node", parent))
        children[parent].append(node)
    order: list[int] = []
    stack = children[-1]
    while stack:
        order.append(stack.pop())
        stack += children[order[-1]]
    if len(order) != len(parents):
        raise ValueError(explain("parents", "a root above every node", "a cycle"))
    return order


def remembered(tables: Sequence[Tensor], build: Callable[[], Forest]) -> Forest:
    """A forest built once for a micro-batch: its layers are given the same tensors.

    It is built again for other tables, and for tables that were written to: which only tensors of
    inference mode do not tell.
    """
    versions = [0 if table.is_inference() else table._version for table in tables]
    kept = _forests.get(tables[0])
    # Not by id(): that of a table which is no more may be another one's.
    if kept is None or kept[1] != versions or any(ref() is not table for ref, table in zip(kept[0], tables)):
        kept = _forests[tables[0]] = [*map(weakref.ref, tables)], versions, build()
    return kept[2]


# What has moved: signatures of other frameworks.
__getattr__ = names_of("flash_attn_dualkv.contrib.trees", "flash_attn_dualkv.integrations.trees")
