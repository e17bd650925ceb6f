// SPDX-License-Identifier: BSD-3-Clause
// Integer geometry of shared-prefix attention: the KV tiles that a query tile sees, the queries
// that see a KV tile, which tiles need a mask, and where the rows of a tile are stored. Plain C++:
// kernels and host tests call the same functions.
//
// A node is a run of tokens that continues its parent: a prompt is a root, its responses are its
// children. The node table is in depth-first order, to any depth: a node, then its subtree.
//
//     node 0  |0 . . . . 9|                  root
//     node 1              |10 . . 15|        child of 0
//     node 2                       |16 . 19| child of 1      logical positions
//     node 3                       |16 . . 21| child of 1
//     node 4              |10 . . . 17|      child of 0
//
// A query sees the keys on its path, from the root to its own node, that are neither after it nor
// before its window. Logical positions alone decide that (struct Visibility is the whole rule);
// storage regions only say where bytes are. KV tiles start at the first key of a node, or at the
// first key in the window of a query tile. The tails of several nodes on a path may share a tile
// (core/border_tiles.h). So the tiles that a row meets, and their order, depend on its path and on
// nothing else in the batch: results do not change with the batch.
#pragma once

#include <climits>

#include "core/platform.h"

namespace dualkv {

// `*_begin` are packed rows (storage); `*_pos0` are logical positions of the first query and key.
struct Node {
  int q_begin, q_len;
  int q_pos0;  // negative where there are more queries than keys, aligned at their ends
  int kv_begin, kv_len;
  int kv_pos0;  // also the number of keys above the node
  int parent;       // -1: a root
  int subtree_end;  // nodes [own index, subtree_end) are the subtree
};

// Tensors that hold keys: k, and k_decoded, whose rows are counted after those of k. A border tile
// takes rows from several nodes and from either tensor.
enum class Region : int { keys, decoded, borders };

struct KvTile {
  Region region;
  int row;     // packed row of the first key; for a border tile, the index of its first slab
  int kv_pos;  // logical position of the first key; unused by border tiles, which every query sees
  int valid;   // number of keys, stored in the first rows; or kScattered
};

// KvTile::valid of a border tile some of whose rows are not keys: its KeyBits say which are.
constexpr int kScattered = -1;

// Row counts of the packed tensors; the node table is clamped to them.
struct Extents {
  int q_rows, key_rows, decoded_rows;

  DUALKV_HD int all_key_rows() const { return key_rows + decoded_rows; }
  DUALKV_HD Region region_of(int row) const { return row < key_rows ? Region::keys : Region::decoded; }
  // Row within its own tensor.
  DUALKV_HD int row_in_region(int row) const { return row < key_rows ? row : row - key_rows; }
};

constexpr int kNodeColumns = 8;  // the fields of Node
constexpr int kMaxPosition = 1 << 30;  // differences of positions fit into 32 bits
constexpr int kNoWindow = kMaxPosition - 1;

// Which keys of its path a query sees, by logical positions.
//
//     keys      0  1  2  3  4  5  6  7  8
//     query 6         [-window-]  *        a window of 4: keys 2 to 6; not causal: 7 and 8 too
struct Visibility {
  bool causal;
  int window;  // positions before its own that a query sees

  DUALKV_HD bool has_window() const { return window < kNoWindow; }
  // Position of the first key in a query's window.
  DUALKV_HD int first_key(int q_pos) const { return max_int(q_pos - window, 0); }
  // Position of the last query whose window holds the key.
  DUALKV_HD int last_query(int kv_pos) const { return kv_pos + window; }
};

DUALKV_HD void clamp_run(int& begin, int& length, int rows) {
  begin = clamp_int(begin, 0, rows);
  length = clamp_int(length, 0, rows - begin);
}

// Whether all queries of a node see all keys of its ancestors, as in a tree.
DUALKV_HD bool sees_ancestors(const Node& n) { return n.q_pos0 >= n.kv_pos0; }

// A run is a sequence of neighbouring nodes with consecutive query rows, such as the responses of a
// prompt or a whole tree, whose queries see all ancestors' keys or else start at one position. If
// one of them sees all of an ancestor's tile, all do, so that a walk takes the run in one step. A
// block that reads 32 responses one by one starts 10 us later.
struct NodeRuns {
  const int* counts = nullptr;  // (num_nodes + 1): runs before node i; null: no runs were built
  const int* begins = nullptr;  // (runs + 1): first node of each run, then the end of the last
};

DUALKV_HD bool continues_run(const Node& before, const Node& n) {
  if (n.q_begin != before.q_begin + before.q_len || sees_ancestors(before) != sees_ancestors(n)) return false;
  return sees_ancestors(n) || n.q_pos0 == before.q_pos0;
}

// Node table on the device. Its contents cannot be checked without a host synchronisation, so every
// read is clamped here: an inconsistent table gives wrong numbers, never an access outside a tensor
// or an endless loop.
struct NodeTable {
  const int* rows;  // (num_nodes, kNodeColumns)
  int num_nodes;
  Extents extents;
  NodeRuns runs;

  DUALKV_HD Node node(int index) const {
    const int* row = rows + static_cast<int64_t>(index) * kNodeColumns;
    Node n{row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7]};
    clamp_run(n.q_begin, n.q_len, extents.q_rows);
    n.q_pos0 = clamp_int(n.q_pos0, -kMaxPosition, kMaxPosition);
    n.kv_begin = clamp_int(n.kv_begin, 0, extents.all_key_rows());
    const int end = n.kv_begin < extents.key_rows ? extents.key_rows : extents.all_key_rows();
    n.kv_len = clamp_int(n.kv_len, 0, end - n.kv_begin);
    n.kv_pos0 = clamp_int(n.kv_pos0, 0, kMaxPosition - n.kv_len);
    n.parent = n.parent < index ? max_int(n.parent, -1) : -1;
    n.subtree_end = clamp_int(n.subtree_end, index + 1, num_nodes);
    return n;
  }

  DUALKV_HD KvTile kv_tile(const Node& n, int n_block, int block_n) const {
    const int first = n_block * block_n, row = n.kv_begin + first, valid = min_int(block_n, n.kv_len - first);
    if (n.kv_begin < extents.key_rows) return KvTile{Region::keys, row, n.kv_pos0 + first, valid};
    return KvTile{Region::decoded, row - extents.key_rows, n.kv_pos0 + first, valid};
  }
};

// ----------------------------------------------------------------------------------------------
// Query tile -> KV tiles (forward, and the separate dQ kernel). Query tiles start at their node.

struct QueryTile {
  int row;    // packed row of the first query
  int rows;   // queries in the tile
  int q_pos;  // logical position of the first query
};

DUALKV_HD QueryTile query_tile(const Node& n, int m_block, int block_m) {
  const int first = m_block * block_m;
  return QueryTile{n.q_begin + first, min_int(block_m, n.q_len - first), n.q_pos0 + first};
}

// One KV tile of a walk along a path.
struct alignas(16) KvStep {
  KvTile tile;
  // A group of queries needs no mask if its first position is in [full_pos, full_pos + full_span].
  // Stored as start and span, the test is one unsigned comparison per warp and tile.
  int full_pos;
  unsigned full_span;
  int last;  // whether this is the last tile of the walk; of siblings: bits (core/siblings.h)
};

// Border policy that gives each node's tail a tile of its own; BorderTiles is the other one.
struct NoBorders {
  DUALKV_HD void start(const Node&, int, Visibility) {}
  DUALKV_HD bool take_tail(const Node&, int, bool) { return false; }
  DUALKV_HD bool waiting() const { return false; }
  DUALKV_HD bool ready(int) const { return false; }
  DUALKV_HD void fill(int) {}
  DUALKV_HD KvStep step(int, bool) const { return {}; }
  DUALKV_HD void next(int) {}
};

// Walk of a query tile along its path: the tiles of each node from the last visible one to the
// first, then the parent, as far as the window of the first query reaches.
//
//     path    root |  0  |  1  |  2 |   turn |  3  |4|   own node |  5  |  6  |
//     walk            8     7     6             5   4                3     2     1 (diagonal)
//
// Keys before that window are dropped first, so that a tile starts at a visible key: with tiles
// aligned to the node a walk would mostly visit one tile more. A walk has at least one tile:
// queries that see no key get a tile without keys.
template <class Borders = NoBorders>
struct PathWalk {
  Borders borders;
  Node node;      // node whose tiles are visited
  int n_block;    // index of the current tile in the node
  int q_end;      // logical position after the last query
  int first_key;  // start of the first query's window; keys start at position 0

  DUALKV_HD void start(const NodeTable& table, const Node& own, const QueryTile& q, int block_n, Visibility sees) {
    start_own(own, q, block_n, sees);
    climb(table, block_n, sees);
  }

  // Enters the own node, whose tiles n_block to 0 come first; -1: none do.
  DUALKV_HD void start_own(const Node& own, const QueryTile& q, int block_n, Visibility sees) {
    q_end = q.q_pos + q.rows;
    first_key = sees.first_key(q.q_pos);
    enter(own);
    borders.start(own, q_end - 1, sees);
    n_block = visible_tiles(block_n, sees) - 1;
  }

  // Goes on to the tiles of ancestors where those of the node are over.
  DUALKV_HD void climb(const NodeTable& table, int block_n, Visibility sees) {
    while (n_block < 0 && !borders.ready(block_n) && has_more()) {
      enter(table.node(node.parent));
      n_block = visible_tiles(block_n, sees) - 1;
      if (borders.take_tail(node, block_n, has_more())) n_block = node.kv_len / block_n - 1;
    }
    if (n_block >= 0 || borders.ready(block_n)) return;
    if (borders.waiting()) {
      borders.fill(block_n);
    } else {
      take_no_keys();
    }
  }

  // `group`: the most queries for which one mask decision is made.
  DUALKV_HD KvStep step(const NodeTable& table, int block_n, int group, Visibility sees) const {
    if (borders.ready(block_n)) return borders.step(block_n, n_block < 0 && !has_more());
    const KvTile tile = table.kv_tile(node, n_block, block_n);
    const int full_pos = sees.causal ? tile.kv_pos + block_n - 1 : INT_MIN;
    const int full_end = sees.last_query(tile.kv_pos) - (group - 1);
    const bool may_be_full = tile.valid == block_n && full_pos <= full_end;
    return KvStep{tile, may_be_full ? full_pos : INT_MAX,
                  may_be_full ? static_cast<unsigned>(full_end) - static_cast<unsigned>(full_pos) : 0,
                  tile.kv_pos <= first_key && !borders.waiting()};
  }

  // Advances to the next tile, well before it is needed: its node may have to be read.
  DUALKV_HD void next(const NodeTable& table, int block_n, Visibility sees) {
    if (borders.ready(block_n)) {
      borders.next(block_n);
    } else {
      --n_block;
    }
    climb(table, block_n, sees);
  }

 private:
  // Enters a node, without the keys before the window of the first query.
  DUALKV_HD void enter(const Node& n) {
    node = n;
    const int hidden = clamp_int(first_key - n.kv_pos0, 0, n.kv_len);
    node.kv_begin += hidden, node.kv_pos0 += hidden, node.kv_len -= hidden;
  }

  DUALKV_HD int visible_tiles(int block_n, Visibility sees) const {
    return ceil_div(sees.causal ? clamp_int(q_end - node.kv_pos0, 0, node.kv_len) : node.kv_len, block_n);
  }

  // Whether an ancestor has visible keys.
  DUALKV_HD bool has_more() const { return node.parent >= 0 && node.kv_pos0 > first_key; }

  // Row 0, because a region may have no rows at all.
  DUALKV_HD void take_no_keys() { node.kv_begin = node.kv_len = node.kv_pos0 = n_block = 0; }
};

// Whether a group of queries whose first position is q_pos needs a mask.
DUALKV_HD bool needs_mask(const KvStep& step, int q_pos) {
  return static_cast<unsigned>(q_pos) - static_cast<unsigned>(step.full_pos) > step.full_span;
}

// Columns [first_column, end_column) are visible to the query at q_pos; the first may be negative.
DUALKV_HD int first_column(const KvTile& tile, int q_pos, Visibility sees) {
  return sees.first_key(q_pos) - tile.kv_pos;
}
DUALKV_HD int end_column(const KvTile& tile, int q_pos, Visibility sees) {
  return sees.causal ? min_int(tile.valid, q_pos - tile.kv_pos + 1) : tile.valid;
}
// Whether the query sees any key of the tile.
DUALKV_HD bool sees_keys(const KvTile& tile, int q_pos, Visibility sees) {
  return tile.valid == kScattered || end_column(tile, q_pos, sees) > 0;
}

// ----------------------------------------------------------------------------------------------
// KV tile -> queries (backward). Query tiles are on one grid from packed row 0 on, so that loops
// run across sequences and all KV tiles agree on the borders of dQ tiles.

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
