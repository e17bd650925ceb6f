"""Segment tables: which rows of the packed tensors belong to which sequence, and at which logical position they stand.

Two int32 tables describe a packed batch to the operators. Their columns are the fields of `Segment` and `Group`; both
are contiguous and lie on the device of the tensors they describe. A segment's query row r stands at logical position
q_pos0 + r, its context's row i at position i, and its decoded row j at position context_len + j. A causal query sees
the keys of its own segment that do not stand beyond it.

The order of the table is free: a segment may lie anywhere in the packed tensors. A prompt that attends to itself is the
segment of its group with decoded_len = 0 and q_len = context_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import explain


class Segment(NamedTuple):
    """One sequence: a row of the (S, 8) table. The `*_begin` are rows of the packed tensors."""

    q_begin: int
    q_len: int
    q_pos0: int
    context_begin: int
    context_len: int
    decoded_begin: int
    decoded_len: int
    group: int


class Group(NamedTuple):
    """One context with the segments [segment_begin, segment_end) that share it: a row of the (G, 4) table."""

    context_begin: int
    context_len: int
    segment_begin: int
    segment_end: int


SEGMENT_COLUMNS = len(Segment._fields)
GROUP_COLUMNS = len(Group._fields)


def read_tables(segments: Tensor, groups: Tensor) -> tuple[list[Segment], list[Group]]:
    """The rows of both tables as Python values; synchronises when they lie on a GPU."""
    return [Segment(*row) for row in segments.tolist()], [Group(*row) for row in groups.tolist()]


def build_segment_tables(
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    cu_seqlens_context: Tensor | None,
    cu_seqs_per_context: Tensor | None,
    total_context: int,
) -> tuple[Tensor, Tensor]:
    """Tables of a batch in packed order, from offsets whose values are checked here.

    Args:
        cu_seqlens_q: (N+1,) int32, rows of q at which the sequences begin.
        cu_seqlens_k_decoded: (N+1,) int32, the same for their decoded rows.
        cu_seqlens_context: (G+1,) int32, the same for the contexts; None for one context of all rows.
        cu_seqs_per_context: (G+1,) int32, group g owns sequences [g] .. [g+1] - 1; None for one group.
        total_context: rows of k_context.

    Returns:
        segments (N, 8) and groups (G, 4), int32.

    Raises:
        ValueError: offsets that are negative, decrease, or do not cover the sequences.
    """
    q_starts = _offsets("cu_seqlens_q", cu_seqlens_q)
    decoded_starts = _offsets("cu_seqlens_k_decoded (cu_seqlens_k)", cu_seqlens_k_decoded)
    sequences = len(q_starts) - 1
    if cu_seqlens_context is None or cu_seqs_per_context is None:
        context_starts, owned = [0, total_context], [0, sequences]
    else:
        context_starts = _offsets("cu_seqlens_context", cu_seqlens_context)
        owned = _offsets("cu_seqs_per_context", cu_seqs_per_context)
        _check_end("cu_seqlens_context", context_starts[-1], total_context, "rows of k_context")
        _check_covers("cu_seqs_per_context", owned, sequences)

    group_rows: list[Group] = []
    segment_rows: list[Segment] = []
    for index, (context_begin, context_end) in enumerate(pairwise(context_starts)):
        context_len = context_end - context_begin
        group_rows.append(Group(context_begin, context_len, owned[index], owned[index + 1]))
        for i in range(owned[index], owned[index + 1]):
            q_len = q_starts[i + 1] - q_starts[i]
            decoded_len = decoded_starts[i + 1] - decoded_starts[i]
            q_pos0 = context_len + decoded_len - q_len
            region = (context_begin, context_len, decoded_starts[i], decoded_len)
            segment_rows.append(Segment(q_starts[i], q_len, q_pos0, *region, index))

    device = cu_seqlens_q.device
    return _table(segment_rows, SEGMENT_COLUMNS, device), _table(group_rows, GROUP_COLUMNS, device)


def check_tables(segments: Tensor, groups: Tensor, q_rows: int, context_rows: int, decoded_rows: int) -> None:
    """ValueError unless every row that the tables name exists and has one owner, and segments and groups agree."""
    segment_rows, group_rows = read_tables(segments, groups)
    for group in group_rows:
        if not 0 <= group.segment_begin <= group.segment_end <= len(segment_rows):
            got = f"[{group.segment_begin}, {group.segment_end})"
            raise ValueError(explain("groups", f"segments within [0, {len(segment_rows)})", got))
        _check_rows("cu_seqlens_context", group.context_begin, group.context_len, context_rows, "k_context")
    for index, segment in enumerate(segment_rows):
        decoded_name = "cu_seqlens_k_decoded (cu_seqlens_k)"
        _check_rows("cu_seqlens_q", segment.q_begin, segment.q_len, q_rows, "q")
        _check_rows(decoded_name, segment.decoded_begin, segment.decoded_len, decoded_rows, "k_decoded")
        if not 0 <= segment.group < len(group_rows):
            raise ValueError(explain("segments", f"groups below {len(group_rows)}", f"{segment.group} in row {index}"))
        group = group_rows[segment.group]
        if not group.segment_begin <= index < group.segment_end:
            expected = f"segment {index} among the segments of its group {segment.group}"
            raise ValueError(explain("groups", expected, f"[{group.segment_begin}, {group.segment_end})"))
        if segment[3:5] != group[0:2]:
            raise ValueError(explain("segments", f"the context {group[0:2]} of its group", f"{segment[3:5]}"))
    _check_disjoint("q", [(one.q_begin, one.q_len) for one in segment_rows])
    _check_disjoint("k_decoded", [(one.decoded_begin, one.decoded_len) for one in segment_rows])
    _check_disjoint("k_context", [(one.context_begin, one.context_len) for one in group_rows])


def _offsets(name: str, tensor: Tensor) -> list[int]:
    values: list[int] = tensor.tolist()
    if values[0] < 0:
        raise ValueError(explain(name, "a first offset >= 0", values[0]))
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            got = f"{values[index]} after {values[index - 1]} at index {index}"
            raise ValueError(explain(name, "offsets that do not decrease", got))
    return values


def _check_end(name: str, end: int, rows: int, of: str) -> None:
    if end > rows:
        raise ValueError(explain(name, f"offsets of at most {rows} ({of})", end))


def _check_covers(name: str, owned: Sequence[int], sequences: int) -> None:
    if owned[0] != 0:
        raise ValueError(explain(name, "a first offset of 0", owned[0]))
    if owned[-1] != sequences:
        raise ValueError(explain(name, f"a last offset of {sequences} (the number of sequences)", owned[-1]))


def _check_rows(name: str, begin: int, length: int, rows: int, of: str) -> None:
    if begin < 0 or length < 0:
        raise ValueError(explain(name, "a first row and a length >= 0", f"{begin} and {length}"))
    _check_end(name, begin + length, rows, f"rows of {of}")


def _check_disjoint(of: str, runs: Sequence[tuple[int, int]]) -> None:
    end = 0
    for begin, length in sorted(run for run in runs if run[1] > 0):
        if begin < end:
            raise ValueError(explain("segments", f"each row of {of} at most once", f"row {begin} twice"))
        end = begin + length


def _table(rows: Sequence[tuple[int, ...]], columns: int, device: torch.device) -> Tensor:
    table = torch.empty((len(rows), columns), dtype=torch.int32, device=device)
    if rows:
        table.copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"))
    return table
