// The list of query tiles, longest first.
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

// Longest first: bin 0 holds the longest.
__device__ inline int bin_of(int cost, int longest) {
  return kBins - 1 - static_cast<int>(static_cast<int64_t>(cost) * (kBins - 1) / max(longest, 1));
}

__device__ inline void build_forward_list(const ForwardListArgs& a) {
  __shared__ ListBlock block;
  const int segments = a.layout.num_segments;
  exclusive_offsets(block, segments, a.capacity, a.tile_offsets,
                    [&](int i) { return ceil_div(a.layout.segment(i).q_len, a.block_m); });
  const int tiles = a.tile_offsets[segments];
  const auto item_at = [&](int index) {
    const int segment = find_owner(a.tile_offsets, segments, index);
    return ForwardItem{segment, index - a.tile_offsets[segment]};
  };
  const auto cost_of = [&](const ForwardItem& item) {
    return forward_cost(a.layout.segment(item.segment), item.m_block, a.block_m, a.block_n, a.causal);
  };

  block.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) block.longest = 0, block.emitted = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kListThreads) atomicMax(&block.longest, cost_of(item_at(i)));
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kListThreads) {
    const int cost = cost_of(item_at(i));
    if (cost > 0) {
      atomicAdd(&block.bins[bin_of(cost, block.longest)], 1);
      atomicAdd(&block.emitted, 1);
    }
  }
  __syncthreads();
  bins_to_places<kBins>(block);
  for (int i = threadIdx.x; i < tiles; i += kListThreads) {
    const ForwardItem item = item_at(i);
    const int cost = cost_of(item);
    if (cost > 0) a.items[atomicAdd(&block.bins[bin_of(cost, block.longest)], 1)] = item;
  }
  if (threadIdx.x == 0) *a.count = block.emitted, *a.next = 0;
}

}  // namespace dualkv
