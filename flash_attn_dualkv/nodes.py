# SPDX-License-Identifier: BSD-3-Clause
"""The node table: which rows of the packed tensors belong together, what they continue, and at which positions.

A node is a run of queries and a run of keys that continue another node, its parent. A path is a node's ancestors from
the root to itself. A query sees the keys on its node's path whose logical position is not beyond its own, or without
causality all of them. A context with its responses is a tree of depth 2, a single sequence one of depth 1.

The table is int32, contiguous, on the device of the tensors that it describes, one row of `Node` each. Nodes are in
depth-first order: a node, then its subtree. Their rows may lie anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import MAX_ROWS, explain
from .errors import SharedPromptLayoutError
from .host import ints


class Node(NamedTuple):
    """A row of the (n, 8) table.

    q_begin, q_len: its rows of q. q_pos0: logical position of the first of them; it may be negative, or below that of
    the node's own keys. kv_begin, kv_len: its keys, as rows of k and, counted on after them, of k_decoded; they lie in
    one of the two. kv_pos0: logical position of the first of them, which is the number of keys of all ancestors.
    parent: an index of the table, -1 for a root. subtree_end: the index after the last descendant.
    """

    q_begin: int
    q_len: int
    q_pos0: int
    kv_begin: int
    kv_len: int
    kv_pos0: int
    parent: int
    subtree_end: int


COLUMNS = len(Node._fields)


# --- tables ---


def sequence_nodes(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int | None,
) -> Tensor:
    """Table of sequences in packed order, aligned to the bottom right, from offsets whose values are checked here.

    Args:
        cu_seqlens_q: (N+1,) int32, where the sequences begin in q.
        cu_seqlens_context: (G+1,) int32, where the contexts begin; None for one or none.
        cu_seqs_per_context: (G+1,) int32, the first sequence of each context.
        cu_seqlens_k: (N+1,) int32, where the sequences' own keys begin in k, or with contexts in k_decoded.
        total_context: rows of all contexts, which are those of k; None for sequences without contexts.

    Returns:
        (N, 8) without contexts; else (N + G, 8), each context followed by its sequences.

    Raises:
        ValueError: offsets that are negative, decrease, or do not cover the sequences.
    """
    q_starts = _offsets("cu_seqlens_q", cu_seqlens_q)
    kv_starts = _offsets("cu_seqlens_k" if total_context is None else "cu_seqlens_k_decoded", cu_seqlens_k)
    sequences = len(q_starts) - 1
    context_starts, owned = [0, total_context or 0], [0, sequences]
    if total_context is not None and cu_seqlens_context is not None and cu_seqs_per_context is not None:
        context_starts = _offsets("cu_seqlens_context", cu_seqlens_context)
        owned = _offsets("cu_seqs_per_context", cu_seqs_per_context)
        _check_end("cu_seqlens_context", context_starts[-1], total_context, "rows of k_context")
        if owned[0] != 0:
            raise ValueError(explain("cu_seqs_per_context", "a first offset of 0", owned[0]))
        if owned[-1] != sequences:
            expected = f"a last offset of {sequences} (the number of sequences)"
            raise ValueError(explain("cu_seqs_per_context", expected, owned[-1]))
    rows: list[int] = []
    # `Node` by `Node`: an object for each of thousands would take a millisecond.
    for (begin, end), (first, last) in zip(pairwise(context_starts), pairwise(owned)):
        length, root = end - begin, -1
        if total_context is not None:
            root = len(rows) // COLUMNS
            rows += (q_starts[first], 0, 0, begin, length, 0, -1, root + 1 + last - first)
        for index in range(first, last):
            q, kv = q_starts[index], kv_starts[index]
            q_len, kv_len = q_starts[index + 1] - q, kv_starts[index + 1] - kv
            kv += total_context or 0
            rows += (q, q_len, length + kv_len - q_len, kv, kv_len, length, root, len(rows) // COLUMNS + 1)
    return ints(rows, torch.int32).view(-1, COLUMNS).to(cu_seqlens_q.device)


def split_nodes(q_offsets: Tensor, k_offsets: Tensor, cuts: Tensor) -> Tensor:
    """Table of sequences that are split in two, made on the device: prompt and response, or parts of them.

    Args:
        q_offsets: (N+1,) int32, rows of q of each sequence, which are its last tokens.
        k_offsets: (N+1,) int32, its keys.
        cuts: (N,) int32, how many of them belong to the prompt; all if there are fewer.

    Returns:
        (2 N, 8).
    """
    q_begin, k_begin = q_offsets[:-1], k_offsets[:-1]
    queries, keys = q_offsets.diff(), k_offsets.diff()
    cuts = torch.minimum(cuts, keys)
    first = keys - queries  # position of the first query
    above = torch.minimum((cuts - first).clamp(min=0), queries)  # queries in the prompt
    zero, index = torch.zeros_like(cuts), torch.arange(len(cuts), dtype=torch.int32, device=cuts.device)
    end = 2 * index + 2
    root = (q_begin, above, first, k_begin, cuts, zero, zero - 1, end)
    leaf = (q_begin + above, queries - above, first + above, k_begin + cuts, keys - cuts, cuts, 2 * index, end)
    return torch.stack((*root, *leaf), dim=1).view(-1, COLUMNS)


def tree_nodes(cu_seqlens: Tensor, parents: Tensor, total: int) -> Tensor:
    """Table of the nodes of trees whose rows are queries and keys alike, from tensors whose values are checked here.

    Args:
        cu_seqlens: (n+1,) int32, where the nodes begin.
        parents: (n,) int32, the node that each continues, -1 for roots.
        total: rows of the packed tensors; those after the last node are padding.

    Returns:
        (n, 8).

    Raises:
        ValueError: offsets that do not begin at 0, decrease or pass `total`; a parent below -1 or not before its child;
            an order that is not depth-first.
    """
    starts, above = _offsets("cu_seqlens", cu_seqlens), parents.tolist()
    if len(starts) != len(above) + 1:
        raise ValueError(explain("parents", f"{len(starts) - 1} nodes (as cu_seqlens)", len(above)))
    if starts[0] != 0:
        raise ValueError(explain("cu_seqlens", "a first offset of 0", starts[0]))
    _check_end("cu_seqlens", starts[-1], total, "rows of q")
    return tree_table([end - begin for begin, end in pairwise(starts)], above)[0].to(cu_seqlens.device)


@torch.inference_mode(False)  # autograd saves the table
def tree_table(
    lengths: Sequence[int], parents: Sequence[int], begins: Sequence[int] | None = None
) -> tuple[Tensor, int, int]:
    """The table of trees on the host, the most rows of a path, and how many of its path a row sees on average.

    The average is rounded up; errors are those of `tree_nodes`. `begins`: the first row of each node; None where they
    lie one after the other.
    """
    ends = _subtree_ends(parents, "parents[{}]")
    positions = path_begins(lengths, parents)
    begins = [*accumulate(lengths, initial=0)][:-1] if begins is None else begins
    rows = (begins, lengths, positions)
    table = ints(chain.from_iterable(zip(*rows, *rows, parents, ends)), torch.int32).view(-1, COLUMNS)
    pairs = sum(map(visible_pairs, positions, lengths))
    return table, max(map(add, positions, lengths), default=0), -(-pairs // max(sum(lengths), 1))


def path_begins(lengths: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The position of each node's first row on its path: how many rows the nodes above it have."""
    begins: list[int] = []
    for parent in parents:
        begins.append(begins[parent] + lengths[parent] if parent >= 0 else 0)
    return begins


def part_table(lengths: Sequence[int], parents: Sequence[int], runs: Sequence[tuple[int, int]]) -> Tensor:
    """The table, on the host, of some of the queries of trees and all of their keys.

    Keys stay whole, so that tiles of keys begin where they do for all queries. A node has the first of its own runs of
    queries; each further one is a child without keys, whose queries stand among the keys of the node. Nodes below
    which there is no query are left out.

    Args:
        lengths: rows of each node, depth first; the keys of all nodes lie one after the other.
        parents: the node that each continues, -1 for roots.
        runs: [begin, end) of rows, in ascending order, of which the queries are here, one run after the other.
    """
    starts = [*accumulate(lengths, initial=0)]
    own: list[list[tuple[int, int]]] = [[] for _ in lengths]
    node = 0
    for begin, end in runs:
        while begin < end:
            while starts[node + 1] <= begin:
                node += 1
            stop = min(end, starts[node + 1])
            own[node].append((begin, stop))
            begin = stop
    is_seen = [bool(runs) for runs in own]
    for index in reversed(range(len(parents))):
        if is_seen[index] and parents[index] >= 0:
            is_seen[parents[index]] = True
    rows: list[tuple[int, ...]] = []  # `Node` without the end of its subtree
    places: dict[int, int] = {}
    row = 0
    for index, (start, length, position) in enumerate(zip(starts, lengths, path_begins(lengths, parents))):
        if not is_seen[index]:
            continue
        keys, above = (start, length, position), places.get(parents[index], -1)
        places[index] = len(rows)
        for begin, end in own[index] or [(start, start)]:
            rows.append((row, end - begin, position + begin - start, *keys, above))
            row += end - begin
            keys, above = (start + length, 0, position + length), places[index]
    ends = _subtree_ends([entry[-1] for entry in rows], "parents[{}]")
    numbers = chain.from_iterable((*entry, end) for entry, end in zip(rows, ends))
    return ints(numbers, torch.int32).view(-1, COLUMNS)


@torch.inference_mode(False)  # autograd saves the table
def piece_table(
    lengths: Sequence[int], parents: Sequence[int], own: Sequence[int], kept_begins: Mapping[int, int], kept_rows: int
) -> tuple[Tensor, int, int]:
    """The table, on the host, of some nodes of trees and of those that they continue; then as `tree_table`.

    Own nodes have their queries, one node after the other, and their keys after the `kept_rows` of `k`: as rows of
    `k_decoded`, or of `k` itself where nothing is kept. The nodes above them have no queries, and keys in `k`.

    Args:
        lengths, parents: of all nodes, depth first.
        own: rising.
        kept_begins: where in `k` the keys of other nodes begin; of those above own ones all that have rows.
        kept_rows: rows of `k`.
    """
    begins, own_nodes = path_begins(lengths, parents), {*own}
    places: dict[int, int] = {}
    rows: list[tuple[int, ...]] = []  # `Node` without the end of its subtree
    row = 0
    for node in with_ancestors(parents, own):
        begin, length, above = begins[node], lengths[node], places.get(parents[node], -1)
        places[node] = len(rows)
        if node in own_nodes:
            rows.append((row, length, begin, kept_rows + row, length, begin, above))
            row += length
        else:
            rows.append((row, 0, begin, kept_begins[node] if length else 0, length, begin, above))
    ends = _subtree_ends([entry[-1] for entry in rows], "parents[{}]")
    numbers = chain.from_iterable((*entry, end) for entry, end in zip(rows, ends))
    table = ints(numbers, torch.int32).view(-1, COLUMNS)
    pairs = sum(visible_pairs(begins[node], lengths[node]) for node in own)
    return table, max((begins[node] + lengths[node] for node in own), default=0), -(-pairs // max(row, 1))


def with_ancestors(parents: Sequence[int], own: Sequence[int]) -> list[int]:
    """Nodes and all above them, rising."""
    chosen = {*own}
    for node in own:
        while (node := parents[node]) >= 0 and node not in chosen:
            chosen.add(node)
    return sorted(chosen)


def _subtree_ends(parents: Sequence[int], name: str) -> list[int]:
    """The index after the last descendant of each node; an error, for the node's `name`, unless depth-first."""
    ends = [len(parents)] * len(parents)
    path: list[int] = []
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise SharedPromptLayoutError(name.format(index), f"-1 or a node before {index}", parent)
        while path and path[-1] != parent:
            ends[path.pop()] = index
        if parent >= 0 and not path:
            expected = f"a node on the path to node {index - 1} (depth-first order)"
            raise SharedPromptLayoutError(name.format(index), expected, parent)
        path.append(index)
    return ends


def visible_pairs(begin: int, length: int) -> int:
    """Pairs of a query and a key that it sees, of `length` rows of a path after its first `begin`."""
    return length * (2 * begin + length + 1) // 2


# --- checks ---


def checked_nodes(nodes: Tensor, q_rows: int, k_rows: int, decoded_rows: int | None) -> list[Node]:
    """The rows of a table as Python values; synchronises when it lies on a GPU.

    Args:
        nodes: of a call.
        q_rows, k_rows, decoded_rows: rows of q, k and k_decoded; None where there is no k_decoded.

    Raises:
        TypeError, ValueError: it is no table; a row does not exist or has two owners; a parent, a position or the end
            of a subtree is not what the other rows say.
    """
    if nodes.dtype != torch.int32:
        raise TypeError(explain("nodes", "dtype torch.int32", nodes.dtype))
    if nodes.dim() != 2 or nodes.shape[1] != COLUMNS:
        raise ValueError(explain("nodes", f"shape (nodes, {COLUMNS})", f"shape {tuple(nodes.shape)}"))
    table = [Node(*row) for row in nodes.tolist()]
    parents = [node.parent for node in table]
    ends, positions = _subtree_ends(parents, "nodes[{}].parent"), path_begins([node.kv_len for node in table], parents)
    for index, (node, position) in enumerate(zip(table, positions)):
        _check_rows("cu_seqlens_q", node.q_begin, node.q_len, q_rows, "q")
        if decoded_rows is None:
            _check_rows("cu_seqlens_k", node.kv_begin, node.kv_len, k_rows, "k")
        elif node.kv_begin < k_rows or (node.kv_begin == k_rows and node.parent < 0 and node.kv_len == 0):
            _check_rows("cu_seqlens_context", node.kv_begin, node.kv_len, k_rows, "k_context")
        else:
            _check_rows("cu_seqlens_k_decoded", node.kv_begin - k_rows, node.kv_len, decoded_rows, "k_decoded")
        if node.kv_pos0 != position:
            raise ValueError(explain(f"nodes[{index}].kv_pos0", f"{position} (the keys above)", node.kv_pos0))
    for index, (node, end) in enumerate(zip(table, ends)):
        if node.subtree_end != end:
            raise ValueError(explain(f"nodes[{index}].subtree_end", f"{end} (as the parents say)", node.subtree_end))
    _check_disjoint("q", [(node.q_begin, node.q_len) for node in table])
    _check_disjoint("the keys", [(node.kv_begin, node.kv_len) for node in table])
    return table


def _offsets(name: str, tensor: Tensor) -> list[int]:
    values: list[int] = tensor.tolist()
    if values[0] < 0:
        raise ValueError(explain(name, "a first offset >= 0", values[0]))
    for index, (value, following) in enumerate(pairwise(values)):
        if following < value:
            got = f"{following} after {value} at index {index + 1}"
            raise ValueError(explain(name, "offsets that do not decrease", got))
    _check_end(name, values[-1], MAX_ROWS, "no tensor has more rows")
    return values


def _check_end(name: str, end: int, rows: int, of: str) -> None:
    if end > rows:
        raise ValueError(explain(name, f"offsets of at most {rows} ({of})", end))


def _check_rows(name: str, begin: int, length: int, rows: int, of: str) -> None:
    if begin < 0 or length < 0:
        raise ValueError(explain(name, "a first row and a length >= 0", f"{begin} and {length}"))
    _check_end(name, begin + length, rows, f"rows of {of}")


def _check_disjoint(of: str, runs: Iterable[tuple[int, int]]) -> None:
    end = 0
    for begin, length in sorted(run for run in runs if run[1] > 0):
        if begin < end:
            raise ValueError(explain("nodes", f"each row of {of} at most once", f"row {begin} twice"))
        end = begin + length
