// SPDX-License-Identifier: BSD-3-Clause
// KV tile -> queries (backward). Query tiles are on one grid from packed row 0 on, so that loops
// run across sequences and all KV tiles agree on the borders of dQ tiles.
#pragma once

#include "core/nodes.h"

namespace dualkv {

// Packed rows [row_begin, row_end) see at least one key of the tile, and rows [full_row, full_end)
// all of it; of the others, row r is at logical position r + pos_offset.
struct QueryRange {
  int row_begin, row_end;
  int full_row, full_end;
  int pos_offset;

  DUALKV_HD bool empty() const { return row_begin >= row_end; }
};

// Number of a node's leading queries whose window reaches the key.
DUALKV_HD int rows_reached(const Node& n, int kv_pos, Visibility sees) {
  if (!sees.has_window()) return n.q_len;
  const int64_t rows = int64_t{sees.last_query(kv_pos)} + 1 - n.q_pos0;
  return static_cast<int>(rows < 0 ? 0 : rows < n.q_len ? rows : n.q_len);
}

DUALKV_HD QueryRange query_range(const Node& n, const KvTile& tile, Visibility sees) {
  const int last_key = tile.kv_pos + tile.valid - 1;
  const int first = sees.causal ? clamp_int(tile.kv_pos - n.q_pos0, 0, n.q_len) : 0;
  const int full = sees.causal ? clamp_int(last_key - n.q_pos0, 0, n.q_len) : 0;
  return QueryRange{n.q_begin + first, n.q_begin + rows_reached(n, last_key, sees), n.q_begin + full,
                    n.q_begin + rows_reached(n, tile.kv_pos, sees), n.q_pos0 - n.q_begin};
}

// Nodes of a subtree that are still to be visited, from the front or, if `reversed`, from the back.
struct NodeCursor {
  int owner;  // root of the subtree, the only node that sees its own tiles causally
  int begin, end;
  bool reversed;

  DUALKV_HD bool done() const { return begin >= end; }
  DUALKV_HD int next() const { return reversed ? end - 1 : begin; }
  DUALKV_HD void advance() { reversed ? --end : ++begin; }
};

DUALKV_HD NodeCursor subtree_of(const NodeTable& table, int index, bool reversed) {
  return NodeCursor{index, index, table.node(index).subtree_end, reversed};
}

// Skips descendants that no window reaches. If the last key of `n` is outside the window of the
// tile, no descendant of `n` can see the tile: skip the rest of the run.
DUALKV_HD void skip_hidden(const NodeTable& table, NodeCursor& cursor, const Node& n, const KvTile& tile,
                           Visibility sees) {
  const int last_key = tile.kv_pos + tile.valid - 1;
  if (cursor.reversed || cursor.done() || n.kv_pos0 + n.kv_len <= sees.last_query(last_key)) return;
  const int end = min_int(cursor.end, n.subtree_end);
  if (!sees_ancestors(table.node(cursor.begin))) return;
  cursor.begin = clamp_int(table.runs.begins[table.runs.counts[cursor.begin + 1]], cursor.begin, end);
}

// Queries of the next node, or of the rest of its run, that see `tile`. Advances the cursor.
DUALKV_HD QueryRange take_nodes(const NodeTable& table, NodeCursor& cursor, const KvTile& tile, Visibility sees) {
  const int index = cursor.next();
  const Node n = table.node(index);
  cursor.advance();
  if (!table.runs.counts) return query_range(n, tile, sees);
  if (sees.has_window()) {
    const QueryRange range = query_range(n, tile, sees);
    skip_hidden(table, cursor, n, tile, sees);
    return range;
  }
  const bool sees_all = !sees.causal || tile.kv_pos + tile.valid - 1 <= n.q_pos0;
  if (index == cursor.owner || !sees_all) return query_range(n, tile, sees);
  const int run = table.runs.counts[index + 1] - 1;
  const int begin = max_int(table.runs.begins[run], cursor.reversed ? cursor.owner + 1 : index);
  const int end = min_int(table.runs.begins[run + 1], cursor.reversed ? index + 1 : cursor.end);
  (cursor.reversed ? cursor.end : cursor.begin) = cursor.reversed ? begin : end;
  const Node first = table.node(begin), last = table.node(end - 1);
  const int row_end = last.q_begin + last.q_len;
  return QueryRange{first.q_begin, row_end, first.q_begin, row_end, first.q_pos0 - first.q_begin};
}

DUALKV_HD bool joins(const QueryRange& front, const QueryRange& back) {
  return front.full_end == back.row_begin && front.row_end == back.row_begin && back.full_row == back.row_begin &&
         back.full_end == back.row_end;
}

// Next range of queries that see `tile`, merged with the following ranges as long as these see all
// of it: the rows of a packed subtree become one range, of which only the first rows need a mask.
// Both directions give the same ranges. Advances the cursor; empty at the end.
DUALKV_HD QueryRange next_query_range(const NodeTable& table, NodeCursor& cursor, const KvTile& tile,
                                      Visibility sees) {
  QueryRange range{0, 0, 0, 0, 0};
  while (!cursor.done()) {
    NodeCursor behind = cursor;
    const QueryRange next = take_nodes(table, behind, tile, sees);
    if (!next.empty() && range.empty()) {
      range = next;
    } else if (!next.empty() && cursor.reversed) {
      if (!joins(next, range)) break;
      range = QueryRange{next.row_begin, range.row_end, next.full_row, range.row_end, next.pos_offset};
    } else if (!next.empty()) {
      if (!joins(range, next)) break;
      range.row_end = range.full_end = next.row_end;
    }
    cursor = behind;
  }
  return range;
}

DUALKV_HD int first_m_block(const QueryRange& range, int block_m) { return range.row_begin / block_m; }
DUALKV_HD int end_m_block(const QueryRange& range, int block_m) { return ceil_div(range.row_end, block_m); }

// Query tiles (on the grid, once per range) that the owner of `tile` visits for one query head.
DUALKV_HD int64_t count_query_tiles(const NodeTable& table, int owner, const KvTile& tile, int block_m,
                                    Visibility sees) {
  int64_t count = 0;
  for (NodeCursor cursor = subtree_of(table, owner, false); !cursor.done();) {
    const QueryRange range = next_query_range(table, cursor, tile, sees);
    if (!range.empty()) count += end_m_block(range, block_m) - first_m_block(range, block_m);
  }
  return count;
}

// The same for packed row `row`; rows outside the range see no columns.
DUALKV_HD int first_column(const KvTile& tile, const QueryRange& range, int row, Visibility sees) {
  return row < range.full_end ? 0 : sees.first_key(row + range.pos_offset) - tile.kv_pos;
}
DUALKV_HD int end_column(const KvTile& tile, const QueryRange& range, int row) {
  if (row < range.row_begin || row >= range.row_end) return 0;
  return row >= range.full_row ? tile.valid : row + range.pos_offset - tile.kv_pos + 1;
}

// `row` is an unsigned sum: with an inconsistent table it may exceed 32 bits.
DUALKV_HD int clamp_row(unsigned row, const QueryRange& range) {
  return clamp_int(static_cast<int>(row), range.row_begin, range.row_end);
}

// Packed rows [begin, end) of a range that see one key.
struct RowsOfKey {
  int begin, end;
};
DUALKV_HD RowsOfKey rows_of_key(const KvTile& tile, const QueryRange& range, int key, Visibility sees) {
  if (key >= tile.valid) return RowsOfKey{0, 0};
  const unsigned row = static_cast<unsigned>(tile.kv_pos + key) - static_cast<unsigned>(range.pos_offset);
  const int begin = min_int(clamp_row(row, range), range.full_row);
  if (!sees.has_window()) return RowsOfKey{begin, range.row_end};
  return RowsOfKey{begin, max_int(clamp_row(row + sees.window + 1, range), range.full_end)};
}

// Whether no query of the tile on the grid sees any of the keys [key, key + keys).
DUALKV_HD bool is_hidden(const KvTile& tile, const QueryRange& range, int m_block, int block_m, int key, int keys,
                         Visibility sees) {
  if (key >= tile.valid) return true;
  const int first = rows_of_key(tile, range, key, sees).begin;
  const int end = rows_of_key(tile, range, min_int(key + keys, tile.valid) - 1, sees).end;
  return first >= end || (m_block + 1) * block_m <= first || m_block * block_m >= end;
}

DUALKV_HD bool needs_mask(const KvTile& tile, const QueryRange& range, int m_block, int block_m, int block_n) {
  const int row = m_block * block_m;
  return tile.valid < block_n || row < range.row_begin || row < range.full_row || row + block_m > range.full_end;
}

// Rows [first_own_row, end_own_row) of a query tile belong to the range; all others are foreign.
DUALKV_HD int first_own_row(const QueryRange& range, int m_block, int block_m) {
  return max_int(range.row_begin - m_block * block_m, 0);
}
DUALKV_HD int end_own_row(const QueryRange& range, int m_block, int block_m) {
  return min_int(range.row_end - m_block * block_m, block_m);
}
DUALKV_HD bool has_foreign_rows(const QueryRange& range, int m_block, int block_m) {
  return m_block * block_m < range.row_begin || (m_block + 1) * block_m > range.row_end;
}

// Walk of a KV tile's owner. A step is one (query tile, head), where `heads` counts packs if tiles
// hold packs of heads. Query tiles come in packed order or reversed, each with all heads of the KV
// group; or, `head_major`, all query tiles of one head and then the next head's.
struct QueryWalk {
  // State that changes with every step. Kept in 16 bytes, read in one access: the walk is in shared
  // memory, whose bandwidth the products need.
  alignas(16) QueryRange range;
  int m_block, head;
  int remaining;  // steps left, including the current one
  int block_m, heads;
  int first_tile, end_tile;  // of the range, cached: each costs a division by block_m

  NodeTable table;
  KvTile tile;
  NodeCursor nodes, cursor;
  bool head_major;
  Visibility sees;

  // Starts at step `first_step` of those over all queries of `nodes` and ends after `num_steps`.
  DUALKV_HD void start(const NodeCursor& all, int first_step, int num_steps) {
    nodes = cursor = all;
    remaining = num_steps;
    head = head_major ? 0 : first_step % heads;
    int skip = head_major ? first_step : first_step / heads;
    next_range();
    while (remaining > 0 && skip >= tiles_left()) {
      skip -= tiles_left();
      next_range();
    }
    m_block += cursor.reversed ? -skip : skip;
  }

  DUALKV_HD bool done() const { return remaining <= 0; }

  DUALKV_HD void next() {
    --remaining;
    if (!head_major) {
      if (++head < heads) return;
      head = 0;
    }
    const bool last = tiles_left() == 1;
    m_block += cursor.reversed ? -1 : 1;
    if (last && remaining > 0) next_range();
  }

  // Query tiles of the range that are left, including the current one.
  DUALKV_HD int tiles_left() const {
    return cursor.reversed ? m_block - first_tile + 1 : end_tile - m_block;
  }

  DUALKV_HD void next_range() {
    range = next_query_range(table, cursor, tile, sees);
    if (range.empty() && head_major && ++head < heads) {
      cursor = nodes;
      range = next_query_range(table, cursor, tile, sees);
    }
    first_tile = first_m_block(range, block_m), end_tile = end_m_block(range, block_m);
    m_block = cursor.reversed ? end_tile - 1 : first_tile;
    if (range.empty()) remaining = 0;
  }
};

}  // namespace dualkv
