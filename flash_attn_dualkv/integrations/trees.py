# SPDX-License-Identifier: BSD-3-Clause
"""Tree attention under other frameworks' signatures; docs/trees.md says who calls what.

Each function reads its framework's description of a tree, once for a micro-batch, into a table of
nodes: every ancestor's keys and values are read where they are, and their gradients are summed in
float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import checks, ops
from ..calls import make_options
from ..checks import check_are_tensors, explain
from ..host import to_device
from ..nodes import tree_table
from ..packed_attention import checked_tensors

# Forests by the first table of a micro-batch, with all tables they were read from and their state.
_forests: Any = WeakTensorKeyDictionary()


class Forest:
    """Nodes of packed rows, in whatever order, as the kernels take them: depth first.

    Args:
        begins: (n,) the first row of each node.
        lens: (n,) rows of each node, no row in two of them. Rows of no node are padding.
        parents: (n,) the node that each continues, before or behind it; -1 for roots.

    Raises:
        ValueError: nodes that overlap or have too many rows; a parent that is no node, or not above its children.
    """

    def __init__(self, begins: Sequence[int], lens: Sequence[int], parents: Sequence[int]) -> None:
        if not len(begins) == len(lens) == len(parents):
            raise ValueError(explain("parents", f"{len(begins)} nodes", f"{len(parents)}, and {len(lens)} lengths"))
        end = 0
        for node in sorted(range(len(begins)), key=lambda one: (begins[one], lens[one])):
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
    for node, parent in sorted(enumerate(parents), key=lambda one: (begins[one[0]], one[0]), reverse=True):
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
    versions = [0 if one.is_inference() else one._version for one in tables]
    kept = _forests.get(tables[0])
    # Not by id(): that of a table which is no more may be another one's.
    if kept is None or kept[1] != versions or any(one() is not table for one, table in zip(kept[0], tables)):
        kept = _forests[tables[0]] = [*map(weakref.ref, tables)], versions, build()
    forest: Forest = kept[2]
    return forest


def flash_composed_forest_attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    node_start: Tensor | Sequence[int],
    node_len: Tensor | Sequence[int],
    node_parent: Tensor | Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """Megatron's composed forest attention.

    Args:
        q: (T, H, d). k: (T, H_k, d). v: (T, H_k, d_v).
        node_start, node_len, node_parent: (n,) first row, rows and parent (-1 for roots) of each
            node, integer tensors or lists.
        scale: of the scores; None for 1 / sqrt(d).

    Returns:
        (T, H, d_v).

    Raises:
        ValueError: they are no forest whose nodes lie one behind the other.
    """
    names = dict(node_start=node_start, node_len=node_len, node_parent=node_parent)

    def build() -> Forest:
        least = dict(node_parent=-1)
        return Forest(*(checks.lengths(name, one, least=least.get(name, 0)) for name, one in names.items()))

    tables = [one for one in names.values() if isinstance(one, Tensor)]
    forest = remembered(tables, build) if len(tables) == len(names) else build()
    return forest.attend(q, k, v, scale)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_mask: Tensor,
    kv_indices: Tensor,
    kv_offsets: Tensor,
    q_indices: Tensor,
    q_offsets: Tensor,
    sm_scale: float | None = None,
) -> Tensor:
    """AReaL's tree attention.

    Args:
        query: (1, H, N, d). key: (1, H_k, N, d). value: (1, H_k, N, d_v).
        packed_mask: (1, N, ceil(N / 64)) int64, bit j % 64 of [0, i, j // 64]: row i sees row j.
        kv_indices, kv_offsets, q_indices, q_offsets: blocks with bits set; not needed here.
        sm_scale: of the scores; None for 1 / sqrt(d).

    Returns:
        (1, H, N, d_v); 0 for rows that see nothing.

    Raises:
        TypeError: a mask that is not int64.
        ValueError: a mask that is not that of a tree, or of more than one row of a batch.
    """
    check_are_tensors(("query", "key", "value", "packed_mask"), (query, key, value, packed_mask))
    for name, one in (("query", query), ("key", key), ("value", value)):
        if one.dim() != 4:
            raise ValueError(explain(name, "4 dimensions (1, heads, rows, head_dim)", f"shape {tuple(one.shape)}"))
    if packed_mask.dtype != torch.int64:
        raise TypeError(explain("packed_mask", "dtype torch.int64", packed_mask.dtype))
    rows = query.shape[2]
    is_mask = packed_mask.dim() == 3 and query.shape[:3:2] == packed_mask.shape[:2] == (1, rows)
    if not is_mask or 64 * packed_mask.shape[2] < rows:
        expected = f"shape (1, {rows}, words), of 64 rows each"
        raise ValueError(explain("packed_mask", expected, f"{tuple(packed_mask.shape)} for {tuple(query.shape)}"))
    forest = remembered([packed_mask], lambda: _forest_of_bits(packed_mask[0]))
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    return forest.attend(q, k, v, sm_scale).transpose(1, 2)


def _forest_of_bits(mask: Tensor) -> Forest:
    """From (N, words) bits of what each row sees; one copy to the host."""
    if not len(mask):
        return Forest((), (), ())
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    bits = torch.arange(64, device=mask.device)
    itself = torch.zeros_like(mask).scatter_(1, rows >> 6, 1 << (rows & 63))
    above = mask & ~itself
    words = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    word = ((above != 0) * words).amax(1, keepdim=True) - 1  # the last that has a bit; -1 for none
    highest = (above.gather(1, word.clamp(min=0)) >> bits & 1).mul(bits + 1).amax(1, keepdim=True) - 1
    parents = torch.where(word >= 0, 64 * word + highest, -1)
    sees_itself = (mask & itself).any(1)
    # A row sees what its parent sees, and itself.
    inherited = mask[parents.clamp(0, len(mask) - 1)[:, 0]]  # bits behind the last row stand for none
    inherits = (above == torch.where(parents >= 0, inherited, 0)).all(1)
    is_valid = inherits & (parents < rows)[:, 0] & (sees_itself | (parents < 0)[:, 0])
    tokens, seeing, valid = torch.stack([parents[:, 0], sees_itself, is_valid]).tolist()
    count = sum(seeing)
    if not all(valid) or not all(seeing[:count]):
        expected = "rows that see their path and themselves, and behind them rows that see nothing"
        raise ValueError(explain("packed_mask", expected, "other bits"))
    return _forest_of_tokens(tokens[:count])


def _forest_of_tokens(parents: Sequence[int]) -> Forest:
    """From the row that each row continues: runs of rows that continue each other are nodes."""
    begins = {row for row, parent in enumerate(parents) if parent != row - 1}
    begins |= {parents[row] + 1 for row in begins if parents[row] >= 0}  # what is left of the node that is branched off
    starts = sorted({0, *begins} if parents else ())
    node_of = [0] * len(parents)
    lens = [end - begin for begin, end in pairwise([*starts, len(parents)])]
    for node, (begin, length) in enumerate(zip(starts, lens)):
        node_of[begin : begin + length] = [node] * length
    return Forest(starts, lens, [node_of[parents[begin]] if parents[begin] >= 0 else -1 for begin in starts])


def prefix_tree(
    node_lengths: Sequence[int], sample_paths: Sequence[Sequence[int]]
) -> tuple[Forest, list[list[list[int]]]]:
    """NeMo Automodel's description of a tree, whose attention is then `Forest.attend`.

    Args:
        node_lengths: (n,) rows of each node, in packed order; a list or an integer tensor.
        sample_paths: of each sample the nodes on its path, from the root; lists or integer tensors.

    Returns:
        The forest, and of each sample the [first, last + 1] rows of the nodes on its path.

    Raises:
        ValueError: a node with different paths, or in none although it has rows; as `Forest`.
    """
    lens = checks.lengths("node_lengths", node_lengths)
    given = checks.items("sample_paths", sample_paths, "lists of nodes")
    paths = [checks.lengths(f"sample_paths[{index}]", path) for index, path in enumerate(given)]
    ends = [*accumulate(lens, initial=0)]
    parents: dict[int, int] = {}
    for path in paths:
        for parent, node in zip([-1, *path], path):
            if node >= len(lens) or parents.setdefault(node, parent) != parent:
                expected = f"nodes below {len(lens)}, each behind one other"
                raise ValueError(explain("sample_paths", expected, f"node {node} behind {parent}"))
    for node, length in enumerate(lens):
        if length and node not in parents:
            raise ValueError(explain("sample_paths", "every node with rows", f"none with node {node}"))
    forest = Forest(ends[:-1], lens, [parents.get(node, -1) for node in range(len(lens))])
    return forest, [[[ends[node], ends[node + 1]] for node in path] for path in paths]
