// A block that owns a query tile of one head and streams KV tiles.
#pragma once

#include "params.h"

namespace dualkv {

// Lives in shared memory: it changes only from block to block, and accumulators and fragments need every register.
struct QueryBlock {
  Segment segment;
  QueryTile q_tile;
  int head, kv_head, kv_tiles;

  // Takes this block's entry of the list: all items of one head, then of the next, so that blocks that run together
  // read the same K and V. False for a surplus block.
  __device__ __forceinline__ bool take(const WorkList<ForwardItem>& work, const GroupLayout& layout,
                                       const ProblemShape& shape, int block_m, int block_n) {
    const int items = *work.count;
    if (items == 0 || blockIdx.x / items >= shape.num_heads) return false;
    if (threadIdx.x == 0) {
      const ForwardItem item = work.items[blockIdx.x % items];
      segment = layout.segment(item.segment);
      q_tile = query_tile(segment, item.m_block, block_m);
      head = blockIdx.x / items;
      kv_head = head / shape.heads_per_group();
      kv_tiles = visible_kv_tiles(segment, q_tile, block_n, shape.causal);
    }
    __syncthreads();
    return true;
  }
};

}  // namespace dualkv
