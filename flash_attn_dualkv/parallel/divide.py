# SPDX-License-Identifier: BSD-3-Clause
"""Which rows of a packed row go onto which rank, so that all have equally many rows and equally many visible keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from .. import checks
from ..host import untraced
from ..nodes import path_begins, visible_pairs

# Chunks of a rank. A cut costs the kernels next to nothing. Visible keys of the fullest rank over
# the mean, groups and trees of 128K rows over 2 to 8 ranks: at most 1.04 with 8 chunks, up to 1.49
# with the 2 of a zigzag.
CHUNKS = 8
# Rows at whose multiples a node is cut: query tiles of all kernels of the forward divide it, so
# that each tile has the rows that it has in one process.
ROW_TILE = 384

Runs = list[tuple[int, int]]


@untraced
def divide_rows(
    node_lens: Sequence[int], parents: Sequence[int], ranks: int, *, chunks: int = CHUNKS, tile: int = ROW_TILE
) -> list[Runs]:
    """Runs of rows for each rank.

    The row is cut into `ranks * chunks` chunks of about equal rows, at borders of nodes and inside of them at multiples
    of `tile` rows. Each rank gets `chunks` of them: the one with most visible keys goes to the rank that has fewest so
    far, of those with room for it. Borders then move to places for cuts so that the rows of ranks stay equal.

    Args:
        node_lens, parents: of a layout: rows of each node, depth first, and the node that each continues or -1.
        ranks: how many share the row.
        chunks: of each rank; fewer where they would be shorter than two tiles, but no fewer than 2.
        tile: cuts inside of nodes are at multiples of so many rows; 1 to cut anywhere.

    Returns:
        For each rank runs [begin, end) of rows, in ascending order; together all rows of nodes, once.

    Raises:
        SharedPromptError: an argument is not as described.
    """
    lens = checks.lengths("node_lens", node_lens)
    above = checks.lengths("parents", parents, len(lens), "node_lens", least=-1)
    ranks = checks.integer("ranks", ranks, 1)
    tile = checks.integer("tile", tile, 1)
    starts = [*accumulate(lens, initial=0)]
    rows = starts[-1]
    # Short rows: as many as have two tiles, but no fewer than a zigzag's.
    each = max(2, min(checks.integer("chunks", chunks, 1), rows // (2 * tile * ranks)))
    borders = [rows * index // (ranks * each) for index in range(ranks * each + 1)]
    begins = path_begins(lens, above)
    before = [*accumulate(map(visible_pairs, begins, lens), initial=0)]

    def pairs(row: int) -> int:
        # Visible pairs of the rows before this one.
        node = bisect_right(starts, row) - 1
        return before[node] + (visible_pairs(begins[node], row - starts[node]) if node < len(lens) else 0)

    owners = _owners([pairs(end) - pairs(begin) for begin, end in pairwise(borders)], ranks, each)
    return _snapped(starts, borders, owners, ranks, tile)


def _owners(costs: Sequence[int], ranks: int, each: int) -> list[int]:
    """The rank of each chunk: most expensive ones first, to the rank with the least cost of those with room."""
    owners, loads, counts = [0] * len(costs), [0] * ranks, [0] * ranks
    for chunk in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        rank = min((rank for rank in range(ranks) if counts[rank] < each), key=loads.__getitem__)
        owners[chunk] = rank
        loads[rank] += costs[chunk]
        counts[rank] += 1
    return owners


def _snapped(starts: Sequence[int], ideal: Sequence[int], owners: Sequence[int], ranks: int, tile: int) -> list[Runs]:
    """The runs of ranks, with borders at places for cuts."""
    found: list[Runs] = [[] for _ in range(ranks)]
    surplus = [0] * ranks  # rows that a rank has got beyond its share
    begin = 0
    for rank, after, end in zip(owners, [*owners[1:], -1], ideal[1:]):
        if after == rank:
            continue
        if after >= 0:
            # The least sum of the squares of both surpluses, less what no cut changes.
            tilt = surplus[rank] - surplus[after]
            moves = [cut - end for cut in _cuts(starts, end, tile) if cut >= begin]
            moved = min(moves, key=lambda move: move * (tilt + move))
            surplus[rank] += moved
            surplus[after] -= moved
            end += moved
        own = found[rank]
        if end > begin:
            # The chunk between may have lost its rows.
            own.append((own.pop()[0] if own and own[-1][1] == begin else begin, end))
        begin = end
    return found


def _cuts(starts: Sequence[int], row: int, tile: int) -> tuple[int, int]:
    """The last place for a cut that is not after a row, and the first one after it."""
    node = bisect_right(starts, row) - 1
    if node + 1 >= len(starts):
        return row, row
    low = row - (row - starts[node]) % tile
    return low, min(low + tile, starts[node + 1])
