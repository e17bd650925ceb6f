// SPDX-License-Identifier: BSD-3-Clause
// Work list of query tiles, longest first.
#pragma once

#include "core/siblings.h"
#include "kernels/list_block.h"

namespace dualkv {

// Place of one of the bits that are set, counted from 0.
__device__ inline int place_of_bit(unsigned bits, int index) {
#pragma unroll 1
  for (; index > 0; --index) bits &= bits - 1;
  return __ffs(bits) - 1;
}

// What becomes of the last tile of a lane's node. 0: it stays alone; kTakenTile; or the code of the
// siblings that join it. `ones` and `twos`: siblings whose last tiles have one slice, or two. A two
// joins a one, in the order of the table, and ones that are left over join by threes. Two twos stay
// alone: one and a third of a tile are no less work.
__device__ inline int join_siblings(int lane, unsigned ones, unsigned twos) {
  const unsigned own = 1u << lane;
  if (!((ones | twos) & own)) return 0;
  const int pairs = min(__popc(ones), __popc(twos));
  const int index = __popc((ones & own ? ones : twos) & (own - 1));
  if (index < pairs) {
    const int other = place_of_bit(ones & own ? twos : ones, index);
    return other < lane ? kTakenTile : siblings_code(other - lane, 0);
  }
  if (twos & own) return 0;
  if ((index - pairs) % kMostSiblings > 0) return kTakenTile;
  const int behind = __popc(ones & ~own & ~(own - 1));
  if (behind == 0) return 0;
  return siblings_code(place_of_bit(ones, index + 1) - lane, behind > 1 ? place_of_bit(ones, index + 2) - lane : 0);
}

// Finds siblings in reach of a warp, which reads 32 nodes of the table at once: nobody searches.
__device__ inline void find_siblings(const ForwardListArgs& a) {
  const SiblingRule rule{a.block_m, a.slice_queries, a.sees};
  const int nodes = a.nodes.num_nodes, lane = threadIdx.x % 32;
  for (int first = threadIdx.x - lane; first < nodes; first += kListThreads) {
    const int index = first + lane;
    int slices = 0, parent = -1;
    if (index < nodes) {
      const Node n = a.nodes.node(index);
      slices = rule.slices(n), parent = n.parent;
    }
    const unsigned family = __match_any_sync(0xffffffffu, parent);
    const unsigned ones = __ballot_sync(0xffffffffu, slices == 1) & family;
    const unsigned twos = __ballot_sync(0xffffffffu, slices == 2) & family;
    if (index < nodes) a.last_tiles[index] = join_siblings(lane, ones, twos);
  }
  __syncthreads();
}

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
  const bool joins = a.slice_queries > 0 && tiles >= a.least_tiles;
  if (joins) find_siblings(a);
  const auto item_at = [&](int index) {
    const int node = find_owner(a.tile_offsets, nodes, index);
    const int code = joins && index + 1 == a.tile_offsets[node + 1] ? a.last_tiles[node] : 0;
    return ForwardItem{node, code < 0 ? code : index - a.tile_offsets[node]};
  };
  struct Costed {
    ForwardItem item;
    int cost;
  };
  const auto costed_at = [&](int index) {
    const ForwardItem item = item_at(index);
    const bool is_taken = item.m_block == kTakenTile;
    return Costed{item, is_taken ? 0 : forward_cost(a.nodes, item, a.block_m, a.block_n, a.sees)};
  };
  // A thread keeps its first item: to find one is a search in memory, and there are three passes.
  const Costed first = threadIdx.x < tiles ? costed_at(threadIdx.x) : Costed{{0, kTakenTile}, 0};
  // Calls body(item, its cost) for every item.
  const auto for_each_item = [&](auto body) {
    const auto call = [&](const Costed& one) {
      if (one.item.m_block != kTakenTile) body(one.item, one.cost);
    };
    call(first);
    for (int i = threadIdx.x + kListThreads; i < tiles; i += kListThreads) call(costed_at(i));
  };

  block.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) block.longest = 0;
  __syncthreads();
  for_each_item([&](const ForwardItem&, int cost) { atomicMax(&block.longest, cost); });
  __syncthreads();
  for_each_item([&](const ForwardItem&, int cost) { atomicAdd(&block.bins[bin_of(cost, block.longest)], 1); });
  __syncthreads();
  bins_to_places<kBins>(block);
  for_each_item([&](const ForwardItem& item, int cost) {
    a.items[atomicAdd(&block.bins[bin_of(cost, block.longest)], 1)] = item;
  });
  __syncthreads();
  if (threadIdx.x == 0) *a.count = block.bins[kBins - 1], *a.next = 0;  // where the last bin ends
}

}  // namespace dualkv
