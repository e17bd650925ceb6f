// SPDX-License-Identifier: BSD-3-Clause
// Work list of query tiles, longest first.
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

// Bin of a cost; bin 0 holds the longest.
__device__ inline int bin_of(int cost, int longest) {
  return kBins - 1 - static_cast<int>(static_cast<int64_t>(cost) * (kBins - 1) / max(longest, 1));
}

__device__ inline void build_forward_list(const ForwardListArgs& a) {
  __shared__ ListBlock block;
  const int nodes = a.nodes.num_nodes;
  exclusive_offsets(block, nodes, a.capacity, a.tile_offsets,
                    [&](int i) { return ceil_div(a.nodes.node(i).q_len, a.block_m); });
  const int tiles = a.tile_offsets[nodes];
  const auto item_at = [&](int index) {
    const int node = find_owner(a.tile_offsets, nodes, index);
    return ForwardItem{node, index - a.tile_offsets[node]};
  };
  const auto cost_of = [&](const ForwardItem& item) {
    return forward_cost(a.nodes.node(item.node), item.m_block, a.block_m, a.block_n, a.sees);
  };

  block.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) block.longest = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kListThreads) atomicMax(&block.longest, cost_of(item_at(i)));
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kListThreads) {
    atomicAdd(&block.bins[bin_of(cost_of(item_at(i)), block.longest)], 1);
  }
  __syncthreads();
  bins_to_places<kBins>(block);
  for (int i = threadIdx.x; i < tiles; i += kListThreads) {
    const ForwardItem item = item_at(i);
    a.items[atomicAdd(&block.bins[bin_of(cost_of(item), block.longest)], 1)] = item;
  }
  if (threadIdx.x == 0) *a.count = tiles, *a.next = 0;
}

}  // namespace dualkv
