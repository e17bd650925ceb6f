// SPDX-License-Identifier: BSD-3-Clause
// Work of a block that owns a query tile of one head, or of a pack of heads, and streams KV tiles.
#pragma once

#include "core/siblings.h"
#include "params.h"

namespace dualkv {

// Kept in shared memory: accumulators and fragments need every register.
struct QueryBlock {
  Node node;
  QueryTile q_tile;
  int head;  // first head of the tile
  int kv_head;

  // Whether block `index` has work.
  static __device__ __forceinline__ bool exists(int index, int items, const ProblemShape& shape, int heads) {
    return items > 0 && index / items * heads < shape.num_heads;
  }

  __device__ __forceinline__ void load(int index, int items, const WorkList<ForwardItem>& work, const NodeTable& nodes,
                                       const ProblemShape& shape, QueryTiling tiling) {
    const QueryPlace place = query_place(index, items, shape.num_heads / tiling.heads, shape.num_sms);
    const ForwardItem item = work.items[place.item];
    node = nodes.node(item.node);
    q_tile = query_tile(node, item.m_block, tiling.queries);
    head = place.group * tiling.heads;
    kv_head = head / shape.heads_per_group();
  }

  __device__ __forceinline__ const QueryBlock& of_slice(int) const { return *this; }
};

// The same for a tile that may be of several siblings.
template <int kSlices>
struct SiblingBlock {
  SiblingTile<kSlices> tile;
  int kv_head;

  static __device__ __forceinline__ bool exists(int index, int items, const ProblemShape& shape, int heads) {
    return QueryBlock::exists(index, items, shape, heads);
  }

  __device__ __forceinline__ void load(int index, int items, const WorkList<ForwardItem>& work, const NodeTable& nodes,
                                       const ProblemShape& shape, QueryTiling tiling) {
    const QueryPlace place = query_place(index, items, shape.num_heads / tiling.heads, shape.num_sms);
    const int head = place.group * tiling.heads;
    tile.load(work.items[place.item], nodes, tiling, head);
    kv_head = head / shape.heads_per_group();
  }

  __device__ __forceinline__ const QuerySlice& of_slice(int slice) const { return tile.of_slice(slice); }
};

}  // namespace dualkv
