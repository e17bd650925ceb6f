// SPDX-License-Identifier: BSD-3-Clause
// Query tiles that siblings share. The last tile of a node is mostly not full, and a tile with one
// slice of 64 rows takes about half of the time of three. Siblings, children of one parent, see the
// same ancestors, so that the last slices of up to three of them make one tile. A slice is of one
// node:
//
//     prompt |====|   response a |  tile 0  |  tile 1  | a |
//                     response b |  tile 0  | b  b |
//                     shared tile: a b b
//
//     walk of the shared tile    a's keys | b's keys | prompt
//     slice 0 sees                  x                    x
//     slices 1 and 2 see                       x         x
//
// So a row meets the tiles of keys that it meets in a query tile of its node alone, in that order.
#pragma once

#include "core/schedule.h"

namespace dualkv {

constexpr int kMostSiblings = 3;

// Which nodes may share tiles.
struct SiblingRule {
  int queries, slice_queries;  // of a query tile and of a slice; no slice_queries: none may
  Visibility sees;

  // The keys of its own node that the last query of a node sees.
  DUALKV_HD int own_keys(const Node& n) const {
    return sees.causal ? clamp_int(n.q_pos0 + n.q_len - n.kv_pos0, 0, n.kv_len) : n.kv_len;
  }

  // Slices of a node's last tile, three of which fill it; 0 where siblings may not join them. Its
  // queries see all keys of the ancestors, and no window ends before them: the tiles of a walk
  // begin where a window does. They see at most half as many keys of their own. Those are visited
  // for one or two warpgroups alone, and with more the shared tile would take longer than a full
  // one.
  DUALKV_HD int slices(const Node& n) const {
    const int rest = n.q_len % queries;
    if (rest == 0 || n.parent < 0 || !sees_ancestors(n)) return 0;
    if (sees.first_key(n.q_pos0 + n.q_len - 1) > 0 || own_keys(n) > n.kv_pos0 / 2) return 0;
    return ceil_div(rest, slice_queries);
  }
};

// Siblings of an item's node that share its tile are less than 32 places behind it in the table.
// Their distances, the second one or 0, stand for the number of the tile: ~(first | second << 5),
// which is negative.
constexpr int kTakenTile = INT_MIN;  // the tile of a sibling before has these rows too

DUALKV_HD int siblings_code(int first, int second) { return ~(first | second << 5); }

// How many nodes share the tile of an item, and where they are.
DUALKV_HD int siblings_of(const ForwardItem& item) { return item.m_block >= 0 ? 1 : (~item.m_block >> 5) > 0 ? 3 : 2; }
DUALKV_HD int sibling_node(const ForwardItem& item, int index) {
  return index == 0 ? item.node : item.node + (~item.m_block >> (index - 1) * 5 & 31);
}

// The tile of one of these nodes: the item's, or the node's last.
DUALKV_HD QueryTile sibling_tile(const ForwardItem& item, const Node& n, int queries) {
  return query_tile(n, item.m_block >= 0 ? item.m_block : n.q_len / queries, queries);
}

// As for a tile of one node, plus the own keys of the others, one after the other.
DUALKV_HD int forward_cost(const NodeTable& table, const ForwardItem& item, int block_m, int block_n, Visibility sees) {
  const Node n = table.node(item.node);
  int cost = forward_cost(n, item.m_block >= 0 ? item.m_block : n.q_len / block_m, block_m, block_n, sees);
  for (int i = 1; i < siblings_of(item); ++i) {
    cost += ceil_div(SiblingRule{block_m, 0, sees}.own_keys(table.node(sibling_node(item, i))), block_n);
  }
  return cost;
}

// What the slices of a tile are told of a step, by bits: its KvStep::last in a walk of siblings.
namespace slice_flags {
constexpr int kLast = 1 << 8;  // of the walk
// Slices that do not see the next step, or for which there is none.
DUALKV_HD int ends(int slices) { return slices; }
// Slices that do not see this step.
DUALKV_HD int hidden(int slices) { return slices << 4; }
}  // namespace slice_flags

// Queries of a slice and their first head. The tile is that of the slice's node, placed so that the
// queries of the slice have the numbers that they have in the shared tile.
struct QuerySlice {
  QueryTile q_tile;
  int head;
};

// A query tile of one node or of several siblings. A thread writes it to shared memory while a
// block waits for short walks, so that a tile of one node has one slice for all.
template <int kSlices>
struct SiblingTile {
  static constexpr int kAllSlices = (1 << kSlices) - 1;
  Node nodes[kSlices];
  int begins[kSlices];  // first slice of each node
  int siblings;
  QuerySlice slices[kSlices];

  DUALKV_HD const QuerySlice& of_slice(int slice) const { return slices[siblings > 1 ? slice : 0]; }

  DUALKV_HD void load(const ForwardItem& item, const NodeTable& table, QueryTiling tiling, int head) {
    siblings = siblings_of(item);
    if (siblings == 1) {
      nodes[0] = table.node(item.node), begins[0] = 0;
      slices[0] = {query_tile(nodes[0], item.m_block, tiling.queries), head};
      return;
    }
    int begin = 0;
#pragma unroll 1
    for (int i = 0; i < siblings; ++i) {
      const Node n = table.node(sibling_node(item, i));
      const QueryTile q = sibling_tile(item, n, tiling.queries);
      const int before = begin * tiling.slice_queries();
      nodes[i] = n, begins[i] = begin;
#pragma unroll 1
      for (int slice = begin; slice < kSlices; ++slice) {
        slices[slice] = {{q.row - before, q.rows + before, q.q_pos - before}, head};
      }
      begin += ceil_div(q.rows, tiling.slice_queries());
    }
  }

  // Slices of a node; a row of the last slices may be in none.
  DUALKV_HD int slices_of(int sibling) const {
    const int end = sibling + 1 < siblings ? begins[sibling + 1] : kSlices;
    return (1 << end) - (1 << begins[sibling]);
  }
};

// Publishes the steps of a tile, with flags: the own keys of all nodes, then the ancestors'.
template <int kSlices, class Walk, class Publish>
DUALKV_HD void walk_siblings(const SiblingTile<kSlices>& tile, Walk& walk, const NodeTable& table, int block_n,
                             int group, Visibility sees, Publish publish) {
  using namespace slice_flags;
  constexpr int kAll = SiblingTile<kSlices>::kAllSlices;
  const int final_node = tile.siblings - 1;
#pragma unroll 1
  for (int i = 0; i < final_node; ++i) {
    const int own_slices = tile.slices_of(i);
    walk.start_own(tile.nodes[i], tile.slices[tile.begins[i]].q_tile, block_n, sees);
#pragma unroll 1
    for (; walk.n_block >= 0; --walk.n_block) {
      KvStep step = walk.step(table, block_n, group, sees);
      step.last = hidden(kAll & ~own_slices) | (walk.n_block == 0 ? ends(own_slices) : 0);
      publish(step);
    }
  }
  const int others = kAll & ~tile.slices_of(final_node);
  walk.start_own(tile.nodes[final_node], tile.slices[tile.begins[final_node]].q_tile, block_n, sees);
  int own_steps = walk.n_block + 1;
  walk.climb(table, block_n, sees);
  while (true) {
    KvStep step = walk.step(table, block_n, group, sees);
    const bool is_last = step.last;
    step.last = (is_last ? kLast | ends(kAll) : 0) | (own_steps-- > 0 ? hidden(others) : 0);
    publish(step);
    if (is_last) return;
    walk.next(table, block_n, sees);
  }
}

}  // namespace dualkv
