// A block that owns a query tile of one head and streams KV tiles.
#pragma once

#include "params.h"

namespace dualkv {

// What a query tile holds: `queries` queries of a sequence, each for `heads` query heads.
struct QueryTiling {
  int queries, heads;
};

// The block's work. It lives in shared memory, because accumulators and fragments need every register.
struct QueryBlock {
  Segment segment;
  QueryTile q_tile;
  int head;  // the first of the tile
  int kv_head, kv_tiles;

  // Block `index` of a grid of all items of the first head (or pack of heads), then all of the next, and so on: blocks
  // that run at the same time read the same K and V. Whether there is one.
  static __device__ __forceinline__ bool exists(int index, int items, const ProblemShape& shape, int heads) {
    return items > 0 && index / items * heads < shape.num_heads;
  }

  __device__ __forceinline__ void load(int index, int items, const WorkList<ForwardItem>& work,
                                       const GroupLayout& layout, const ProblemShape& shape, QueryTiling tiling,
                                       int block_n) {
    const ForwardItem item = work.items[index % items];
    segment = layout.segment(item.segment);
    q_tile = query_tile(segment, item.m_block, tiling.queries);
    head = index / items * tiling.heads;
    kv_head = head / shape.heads_per_group();
    kv_tiles = visible_kv_tiles(segment, q_tile, block_n, shape.causal);
  }

  // For kernels with a thread block for each: takes number blockIdx.x. False where the grid is larger than the list.
  __device__ __forceinline__ bool take(const WorkList<ForwardItem>& work, const GroupLayout& layout,
                                       const ProblemShape& shape, int block_m, int block_n) {
    const int items = *work.count;
    if (!exists(blockIdx.x, items, shape, 1)) return false;
    if (threadIdx.x == 0) load(blockIdx.x, items, work, layout, shape, QueryTiling{block_m, 1}, block_n);
    __syncthreads();
    return true;
  }
};

}  // namespace dualkv
