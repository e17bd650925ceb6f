// A block that owns a query tile of one head and streams KV tiles.
#pragma once

#include "params.h"

namespace dualkv {

// The block's work. It lives in shared memory, because accumulators and fragments need every register.
struct QueryBlock {
  Node node;
  QueryTile q_tile;
  int head;  // the first of the tile
  int kv_head;

  // Block `index` of a grid of all items of the first head (or pack of heads), then all of the next, and so on: blocks
  // that run at the same time read the same K and V. Whether there is one.
  static __device__ __forceinline__ bool exists(int index, int items, const ProblemShape& shape, int heads) {
    return items > 0 && index / items * heads < shape.num_heads;
  }

  __device__ __forceinline__ void load(int index, int items, const WorkList<ForwardItem>& work, const NodeTable& nodes,
                                       const ProblemShape& shape, QueryTiling tiling) {
    const ForwardItem item = work.items[index % items];
    node = nodes.node(item.node);
    q_tile = query_tile(node, item.m_block, tiling.queries);
    head = index / items * tiling.heads;
    kv_head = head / shape.heads_per_group();
  }
};

}  // namespace dualkv
