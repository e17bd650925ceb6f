# SPDX-License-Identifier: BSD-3-Clause
"""Tree attention under other frameworks' signatures; docs/trees.md says who calls what.

Ran: on tables that areal 1.0.4 and nemo-automodel 0.7.0 made, on a CPU, 2026-11-28; none of their trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .. import checks
from ..checks import check_are_tensors, explain
from ..integrations.trees import Forest, remembered


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
        ValueError: they are no forest whose nodes lie one after the other.
    """
    names = dict(node_start=node_start, node_len=node_len, node_parent=node_parent)

    def build() -> Forest:
        least = dict(node_parent=-1)
        return Forest(*(checks.lengths(name, values, least=least.get(name, 0)) for name, values in names.items()))

    tables = [table for table in names.values() if isinstance(table, Tensor)]
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
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(explain(name, "4 dimensions (1, heads, rows, head_dim)", f"shape {tuple(tensor.shape)}"))
    if packed_mask.dtype != torch.int64:
        raise TypeError(explain("packed_mask", "dtype torch.int64", packed_mask.dtype))
    rows = query.shape[2]
    is_mask = packed_mask.dim() == 3 and query.shape[:3:2] == packed_mask.shape[:2] == (1, rows)
    if not is_mask or 64 * packed_mask.shape[2] < rows:
        expected = f"shape (1, {rows}, words), of 64 rows each"
        raise ValueError(explain("packed_mask", expected, f"{tuple(packed_mask.shape)} for {tuple(query.shape)}"))
    forest = remembered([packed_mask], lambda: _forest_of_bits(packed_mask[0]))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
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
    inherited = mask[parents.clamp(0, len(mask) - 1)[:, 0]]  # bits after the last row stand for none
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
