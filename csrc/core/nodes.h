// SPDX-License-Identifier: BSD-3-Clause
// Integer geometry of shared-prefix attention: nodes, what their queries see, and where the rows of
// a tile are stored. The KV tiles that a query tile sees are in path_walk.h, the queries that see a
// KV tile in query_walk.h. Plain C++: kernels and host tests call the same functions.
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

}  // namespace dualkv
