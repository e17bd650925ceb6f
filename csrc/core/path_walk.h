// SPDX-License-Identifier: BSD-3-Clause
// Query tile -> KV tiles (forward, and the separate dQ kernel). Query tiles start at their node.
#pragma once

#include <climits>

#include "core/nodes.h"

namespace dualkv {

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

}  // namespace dualkv
