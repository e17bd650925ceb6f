// The integer geometry of shared-prefix attention: which KV tiles a query tile sees, which queries see a KV tile, which
// tiles need a mask, and where the rows of a tile are stored. Plain C++: kernels and host tests call the same functions.
//
// Tokens are runs, called nodes, that continue one another: a prompt is a root and its responses are its children, and a
// tree of turns may be of any depth. The table of nodes is in depth-first order: a node, then its subtree.
//
//     node 0  |0 . . . . 9|                  root
//     node 1              |10 . . 15|        child of 0
//     node 2                       |16 . 19| child of 1      logical positions
//     node 3                       |16 . . 21| child of 1
//     node 4              |10 . . . 17|      child of 0
//
// A query sees the keys on its path, from the root to its own node, that do not stand behind it. Logical positions
// decide that (kv_pos <= q_pos is the whole causal rule); regions decide only where bytes live. KV tiles are anchored at
// the start of each node, so that the tiles a row meets, and their order, depend on its path and on nothing else in the
// batch.
#pragma once

#include <climits>

#include "core/platform.h"

namespace dualkv {

// `*_begin` are packed rows (storage), `*_pos0` the logical positions of the first query and the first key.
struct Node {
  int q_begin, q_len;
  int q_pos0;  // negative where there are more queries than keys, aligned at their ends
  int kv_begin, kv_len;
  int kv_pos0;  // also the number of keys above the node
  int parent;       // -1: a root
  int subtree_end;  // nodes [own index, subtree_end) are the subtree
};

// The tensors in which keys live: k, or k_decoded, whose rows are counted behind those of k.
enum class Region : int { keys, decoded };

struct KvTile {
  Region region;
  int row;     // packed row of the first key: storage
  int kv_pos;  // logical position of the first key: masking
  int valid;   // keys in the tile, at most the tile size
};

// Rows of the packed tensors: what offsets are clamped to.
struct Extents {
  int q_rows, key_rows, decoded_rows;

  DUALKV_HD int all_key_rows() const { return key_rows + decoded_rows; }
};

constexpr int kNodeColumns = 8;  // the fields of Node
constexpr int kMaxPosition = 1 << 30;  // differences of positions fit into 32 bits

DUALKV_HD void clamp_run(int& begin, int& length, int rows) {
  begin = clamp_int(begin, 0, rows);
  length = clamp_int(length, 0, rows - begin);
}

// Whether the queries of a node begin at or behind its first key, as in a tree: they then see all keys above the node.
DUALKV_HD bool sees_ancestors(const Node& n) { return n.q_pos0 >= n.kv_pos0; }

// A run: neighbouring nodes whose query rows follow one another, such as the responses of a prompt or a whole tree, and
// whose queries see all keys above them, or else begin at one position. If one of them sees all of an ancestor's tile, all
// of them do, and a walk takes the whole run at once. A block that asks 32 responses one by one begins 10 us later.
struct NodeRuns {
  const int* counts = nullptr;  // (num_nodes + 1): runs that begin before node i; null: runs were not looked for
  const int* begins = nullptr;  // (runs + 1): the first node of each run, and the end of the last
};

DUALKV_HD bool continues_run(const Node& before, const Node& n) {
  if (n.q_begin != before.q_begin + before.q_len || sees_ancestors(before) != sees_ancestors(n)) return false;
  return sees_ancestors(n) || n.q_pos0 == before.q_pos0;
}

// The table of nodes on the device, read through the only place that turns its values into offsets. Its contents cannot
// be checked without a host synchronisation, so every read is clamped: an inconsistent table gives wrong numbers, never
// an access outside a tensor or an endless loop.
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

// ---------------------------------------------------------------------------------------------------------------
// Query tile -> KV tiles (forward, and dQ in deterministic mode). Query tiles are anchored at their node.

struct QueryTile {
  int row;    // packed row of the first query
  int rows;   // queries in the tile
  int q_pos;  // logical position of the first query
};

DUALKV_HD QueryTile query_tile(const Node& n, int m_block, int block_m) {
  const int first = m_block * block_m;
  return QueryTile{n.q_begin + first, min_int(block_m, n.q_len - first), n.q_pos0 + first};
}

// A KV tile of a walk along a path.
struct alignas(16) KvStep {
  KvTile tile;
  int full_pos;  // queries from this position on see all columns of a tile: the others need a mask
  int last;      // whether the walk ends here
};

// The walk of a query tile along its path: in each node from the last tile of which the queries see something down to
// the first, then on with the parent. Parent pointers suffice for that, and tiles that need a mask come first.
//
//     path    root |  0  |  1  |  2 |   turn |  3  |4|   own node |  5  |  6  |
//     walk            8     7     6             5   4                3     2     1 (diagonal)
//
// There is always a tile: queries that see no key walk one without keys.
struct PathWalk {
  Node node;    // whose tiles are visited
  int n_block;  // the current one
  int q_end;    // logical position behind the last query

  DUALKV_HD void start(const NodeTable& table, const Node& own, const QueryTile& q, int block_n, bool causal) {
    node = own;
    q_end = q.q_pos + q.rows;
    n_block = visible_tiles(block_n, causal) - 1;
    climb(table, block_n, causal);
  }

  // No key stands above position 0.
  DUALKV_HD KvStep step(const NodeTable& table, int block_n, bool causal) const {
    const KvTile tile = table.kv_tile(node, n_block, block_n);
    const int full_pos = causal ? tile.kv_pos + block_n - 1 : INT_MIN;
    return KvStep{tile, tile.valid < block_n ? INT_MAX : full_pos, n_block == 0 && node.kv_pos0 == 0};
  }

  // Moves on to the next tile, whose node may have to be read: long before anybody needs it.
  DUALKV_HD void next(const NodeTable& table, int block_n, bool causal) {
    --n_block;
    climb(table, block_n, causal);
  }

 private:
  DUALKV_HD int visible_tiles(int block_n, bool causal) const {
    return ceil_div(causal ? clamp_int(q_end - node.kv_pos0, 0, node.kv_len) : node.kv_len, block_n);
  }

  DUALKV_HD void climb(const NodeTable& table, int block_n, bool causal) {
    while (n_block < 0 && node.parent >= 0 && node.kv_pos0 > 0) {
      node = table.node(node.parent);
      n_block = visible_tiles(block_n, causal) - 1;
    }
    // At row 0, because a region may have no rows at all.
    if (n_block < 0) node.kv_begin = node.kv_len = node.kv_pos0 = n_block = 0;
  }
};

DUALKV_HD bool needs_mask(const KvStep& step, int q_pos) { return q_pos < step.full_pos; }

// Columns [0, result) of the tile are visible to the query at logical position q_pos.
DUALKV_HD int visible_columns(const KvTile& tile, int q_pos, bool causal) {
  return causal ? min_int(tile.valid, q_pos - tile.kv_pos + 1) : tile.valid;
}

// ---------------------------------------------------------------------------------------------------------------
// KV tile -> queries (backward). Query tiles lie on one grid anchored at packed row 0, so that loops run across the
// borders of sequences and every KV tile agrees on the borders of the dQ tiles.

// Packed rows [row_begin, row_end) see at least one key of the tile; from full_row on they see all of it; before
// that, row r is at logical position r + pos_offset.
struct QueryRange {
  int row_begin, row_end;
  int full_row;
  int pos_offset;

  DUALKV_HD bool empty() const { return row_begin >= row_end; }
};

DUALKV_HD QueryRange query_range(const Node& n, const KvTile& tile, bool causal) {
  const int first = causal ? clamp_int(tile.kv_pos - n.q_pos0, 0, n.q_len) : 0;
  const int full = causal ? clamp_int(tile.kv_pos + tile.valid - 1 - n.q_pos0, 0, n.q_len) : 0;
  return QueryRange{n.q_begin + first, n.q_begin + n.q_len, n.q_begin + full, n.q_pos0 - n.q_begin};
}

// Nodes whose queries are still to be visited, of the subtree of one: from the front or, `reversed`, from the back.
struct NodeCursor {
  int owner;  // the root of the subtree, which alone sees its tiles causally
  int begin, end;
  bool reversed;

  DUALKV_HD bool done() const { return begin >= end; }
  DUALKV_HD int next() const { return reversed ? end - 1 : begin; }
  DUALKV_HD void advance() { reversed ? --end : ++begin; }
};

DUALKV_HD NodeCursor subtree_of(const NodeTable& table, int index, bool reversed) {
  return NodeCursor{index, index, table.node(index).subtree_end, reversed};
}

// The queries that see `tile`: of the next node or, where they see all of it, of the rest of its run. Moves the cursor.
DUALKV_HD QueryRange take_nodes(const NodeTable& table, NodeCursor& cursor, const KvTile& tile, bool causal) {
  const int index = cursor.next();
  const Node n = table.node(index);
  cursor.advance();
  const bool sees_all = !causal || tile.kv_pos + tile.valid - 1 <= n.q_pos0;
  if (!table.runs.counts || index == cursor.owner || !sees_all) return query_range(n, tile, causal);
  const int run = table.runs.counts[index + 1] - 1;
  const int begin = max_int(table.runs.begins[run], cursor.reversed ? cursor.owner + 1 : index);
  const int end = min_int(table.runs.begins[run + 1], cursor.reversed ? index + 1 : cursor.end);
  (cursor.reversed ? cursor.end : cursor.begin) = cursor.reversed ? begin : end;
  const Node first = table.node(begin), last = table.node(end - 1);
  return QueryRange{first.q_begin, last.q_begin + last.q_len, first.q_begin, first.q_pos0 - first.q_begin};
}

// The next range of queries that see `tile`, merged with the ranges behind it as long as these see all of it: in a packed
// tree the rows of the subtree become one range, whose first rows need a mask. Both directions give the same ranges.
// Moves the cursor; empty when there is none left.
DUALKV_HD QueryRange next_query_range(const NodeTable& table, NodeCursor& cursor, const KvTile& tile, bool causal) {
  QueryRange range{0, 0, 0, 0};
  while (!cursor.done()) {
    NodeCursor behind = cursor;
    const QueryRange next = take_nodes(table, behind, tile, causal);
    if (!next.empty() && range.empty()) {
      range = next;
    } else if (!next.empty() && cursor.reversed) {
      if (next.row_end != range.row_begin || range.full_row != range.row_begin) break;
      range = QueryRange{next.row_begin, range.row_end, next.full_row, next.pos_offset};
    } else if (!next.empty()) {
      if (next.row_begin != range.row_end || next.full_row != next.row_begin) break;
      range.row_end = next.row_end;
    }
    cursor = behind;
  }
  return range;
}

DUALKV_HD int first_m_block(const QueryRange& range, int block_m) { return range.row_begin / block_m; }
DUALKV_HD int end_m_block(const QueryRange& range, int block_m) { return ceil_div(range.row_end, block_m); }

// Query tiles (on the grid, once per range) that an owner of `tile` visits for one query head.
DUALKV_HD int64_t count_query_tiles(const NodeTable& table, int owner, const KvTile& tile, int block_m, bool causal) {
  int64_t count = 0;
  for (NodeCursor cursor = subtree_of(table, owner, false); !cursor.done();) {
    const QueryRange range = next_query_range(table, cursor, tile, causal);
    if (!range.empty()) count += end_m_block(range, block_m) - first_m_block(range, block_m);
  }
  return count;
}

// Columns [0, result) of the tile are visible to packed row `row`; 0 for a row outside the range.
DUALKV_HD int visible_columns(const KvTile& tile, const QueryRange& range, int row) {
  if (row < range.row_begin || row >= range.row_end) return 0;
  return row >= range.full_row ? tile.valid : row + range.pos_offset - tile.kv_pos + 1;
}

DUALKV_HD bool needs_mask(const KvTile& tile, const QueryRange& range, int m_block, int block_m, int block_n) {
  const int row = m_block * block_m;
  return tile.valid < block_n || row < range.row_begin || row < range.full_row || row + block_m > range.row_end;
}

// Of a query tile on the grid, rows [first_own_row, end_own_row) belong to the range; all others are foreign. Rows are
// counted from the first of the tile.
DUALKV_HD int first_own_row(const QueryRange& range, int m_block, int block_m) {
  return max_int(range.row_begin - m_block * block_m, 0);
}
DUALKV_HD int end_own_row(const QueryRange& range, int m_block, int block_m) {
  return min_int(range.row_end - m_block * block_m, block_m);
}
DUALKV_HD bool has_foreign_rows(const QueryRange& range, int m_block, int block_m) {
  return m_block * block_m < range.row_begin || (m_block + 1) * block_m > range.row_end;
}

// The walk of an owner over its steps: query tiles in packed order, or in reverse, and for each of them the query heads
// of the KV group. A step is one (query tile, head).
struct QueryWalk {
  NodeTable table;
  KvTile tile;
  QueryRange range;
  NodeCursor cursor;
  int block_m, heads;
  int m_block, head;
  int remaining;  // steps left, the current one included
  bool causal;

  // Puts the walk on step `first_step` of those over all queries of `nodes`; it ends after `num_steps` steps.
  DUALKV_HD void start(const NodeCursor& nodes, int first_step, int num_steps) {
    cursor = nodes;
    remaining = num_steps;
    head = first_step % heads;
    int skip = first_step / heads;
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
    if (++head < heads) return;
    head = 0;
    const bool last = tiles_left() == 1;
    m_block += cursor.reversed ? -1 : 1;
    if (last && remaining > 0) next_range();
  }

  // Query tiles of the range from the current one on.
  DUALKV_HD int tiles_left() const {
    return cursor.reversed ? m_block - first_m_block(range, block_m) + 1 : end_m_block(range, block_m) - m_block;
  }

  DUALKV_HD void next_range() {
    range = next_query_range(table, cursor, tile, causal);
    m_block = cursor.reversed ? end_m_block(range, block_m) - 1 : first_m_block(range, block_m);
    if (range.empty()) remaining = 0;
  }
};

}  // namespace dualkv
