// SPDX-License-Identifier: BSD-3-Clause
// Shared parts of the forward and dQ kernels: the walk over the KV tiles of a block's queries, and
// their loads.
#pragma once

#include "kernels/query_block.h"
#include "sm80/config.h"
#include "tile/mask.h"

namespace dualkv::sm80 {

// Work of the block and its KV tiles, in shared memory: thread 0 walks, the others read. One tile
// of the ring is computed, the next is loading, and thread 0 finds the one after.
struct WalkedBlock {
  QueryBlock query;
  PathWalk<> path;
  KvStep ring[4];

  // The n-th tile. Read from shared memory at each use, for want of registers.
  __device__ __forceinline__ const KvStep& step(int n) const { return ring[n & 3]; }

  // Takes item blockIdx.x and finds its first two tiles. False if the grid is larger than the list.
  template <class Config, class Params>
  __device__ __forceinline__ bool take(const Params& p) {
    const int items = *p.work.count;
    if (!QueryBlock::exists(blockIdx.x, items, p.shape, 1)) return false;
    if (threadIdx.x == 0) {
      query.load(blockIdx.x, items, p.work, p.nodes, p.shape, QueryTiling{Config::kBlockM, 1});
      path.start(p.nodes, query.node, query.q_tile, Config::kBlockN, p.shape.sees);
      find<Config>(0, p);
      find<Config>(1, p);
    }
    __syncthreads();
    return true;
  }

  // After the last tile the result is meaningless.
  template <class Config, class Params>
  __device__ __forceinline__ void find(int n, const Params& p) {
    ring[n & 3] = path.step(p.nodes, Config::kBlockN, Config::kBlockM, p.shape.sees);
    path.next(p.nodes, Config::kBlockN, p.shape.sees);
  }
};

// Replaces the scores of invisible keys. The warp's queries start at row `warp_row` of the tile.
template <int kM16, int kN8>
__device__ __forceinline__ void mask_queries(float (&s)[kM16][kN8][4], int warp_row, int lane, float replacement,
                                             const KvTile& tile, const QueryBlock& work, Visibility sees) {
  const int q_pos = work.q_tile.q_pos, row0 = warp_row + lane / 4, col0 = lane % 4 * 2;
  const auto first = [&](int row) { return first_column(tile, q_pos + row, sees); };
  const auto end = [&](int row) { return end_column(tile, q_pos + row, sees); };
  // Both limits even without a window: a second copy of the loop for the end alone spills
  // registers.
  mask_fragment(s, row0, col0, replacement, first, end);
}

// Starts loading K or V of a tile.
template <class Config, typename T>
__device__ __forceinline__ void start_kv(uint32_t shared, const KvRegions<const T>& kv, const KvTile& tile, int kv_head,
                                         int head_dim, TensorView<const T> KvPair<const T>::* which) {
  const TensorView<const T>& view = kv.of(tile.region).*which;
  load_rows<typename Config::TileKv, Config::kBlockN, Config::kThreads>(shared, view.at(tile.row, kv_head),
                                                                        view.row_stride, 0, tile.valid, head_dim);
  ptx::cp_async_commit();
}

}  // namespace dualkv::sm80
