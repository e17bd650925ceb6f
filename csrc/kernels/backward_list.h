// Builds the list of KV tiles: which are split into how many parts (core/schedule.h), and their order
// (core/block_order.h).
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

// Finds the runs of nodes, which walks need: it comes first.
__device__ inline void find_runs(const BackwardListArgs& a, ListBlock& block) {
  const int nodes = a.nodes.num_nodes;
  const auto begins_run = [&](int i) { return i == 0 || !continues_run(a.nodes.node(i - 1), a.nodes.node(i)); };
  exclusive_offsets(block, nodes, nodes, a.run_counts, begins_run);
  for (int i = threadIdx.x; i < nodes; i += kListThreads) {
    if (a.run_counts[i + 1] > a.run_counts[i]) a.run_begins[a.run_counts[i]] = i;
  }
  if (threadIdx.x == 0) a.run_begins[a.run_counts[nodes]] = nodes;
  __syncthreads();
}

struct OwnedTile {
  int node, n_block, node_tiles;
  bool is_leaf;
};

// The tiles of all nodes. One block calls the stages, from clear_sums() to finish_order(), in their order.
struct BackwardTiles {
  const BackwardListArgs& a;
  ListBlock& block;
  int nodes, tiles;
  int limit;   // the most steps of a part
  bool alike;  // all tiles of a node with children are split as the first of them is

  __device__ OwnedTile at(int index) const {
    const int node = find_owner(a.tile_offsets, nodes, index), begin = a.tile_offsets[node];
    return OwnedTile{node, index - begin, a.tile_offsets[node + 1] - begin, !has_children(a.nodes.node(node), node)};
  }

  __device__ int leading_steps(const OwnedTile& t, int index) const {
    return a.tile_steps[t.is_leaf ? index : index - t.n_block];
  }

  __device__ TileSplit split_at(const OwnedTile& t, int index) const {
    const int steps = a.tile_steps[index];
    return split_of(steps, alike ? leading_steps(t, index) : steps, limit);
  }

  __device__ int bin_of(const OwnedTile& t, int cost, int index) const {
    const int tiles_a_bin = 32 * max(1, ceil_div(tiles, 32 * kTileBins));
    const int longest_here = t.is_leaf ? block.longest_leaf : block.longest;
    return cost_class_within(cost, longest_here, block.longest) * kTileBins + index / tiles_a_bin;
  }

  __device__ void clear_sums() const {
    for (int i = threadIdx.x; i < kCostClasses * kTileBins; i += kListThreads) block.bins[i] = 0;
    if (threadIdx.x < kCostClasses) block.class_steps[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      block.long_tiles = 0, block.longest_tile = 0, block.shortest_tile = kMaxSteps, block.long_steps = 0;
      block.longest = 0, block.longest_leaf = 0, block.shortest = kMaxSteps, block.alternating = 0;
      block.widest = 0, block.fewest_parts = kMaxSteps, block.most_parts = 1;
      block.used_slots = 0, block.shared_slots = 0, block.total_steps = 0;
    }
    __syncthreads();
  }

  __device__ void count_steps() const {
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const KvTile tile = a.nodes.kv_tile(a.nodes.node(t.node), t.n_block, a.block_n);
      const int steps = dualkv::tile_steps(a.nodes, t.node, tile, a.block_m, a.packs_per_group, a.sees);
      a.tile_steps[i] = steps;
      atomicAdd(&block.total_steps, static_cast<unsigned long long>(steps) * a.num_kv_heads);
    }
    __syncthreads();
  }

  __device__ void choose_parts() {
    const int first_limit = part_limit(static_cast<int64_t>(block.total_steps), a.num_sms);
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const int steps = a.tile_steps[i], most = max(steps, leading_steps(at(i), i));
      if (most > first_limit) {
        atomicAdd(&block.long_tiles, 1);
        atomicAdd(&block.long_steps, static_cast<unsigned long long>(steps));
        atomicMax(&block.longest_tile, most);
        atomicMin(&block.shortest_tile, steps);
      }
    }
    __syncthreads();
    const int64_t heads = a.num_kv_heads, long_steps = static_cast<int64_t>(block.long_steps);
    const LongTiles long_tiles{block.long_tiles * heads, long_steps * heads, block.longest_tile, block.shortest_tile};
    limit = final_part_limit(first_limit, long_tiles, a.num_sms);
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const int parts = split_of(a.tile_steps[i], leading_steps(at(i), i), limit).parts;
      if (parts > 1) atomicAdd(&block.shared_slots, static_cast<unsigned long long>(parts) * a.num_kv_heads);
    }
    __syncthreads();
    // Where few queries see most tiles of a node, splitting all of them like the first may need more slots than
    // there are. Then each tile is split by its own steps.
    alike = block.shared_slots <= static_cast<unsigned long long>(a.slot_capacity);
  }

  // Counts the parts in each bin of each class, and finds where each bin begins.
  __device__ void sort() const {
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const int cost = split_at(t, i).cost;
      atomicMax(&block.longest, cost);
      if (t.is_leaf) atomicMax(&block.longest_leaf, cost);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const int steps = a.tile_steps[i];
      const OwnedTile t = at(i);
      const TileSplit split = split_at(t, i);
      const int bin = bin_of(t, split.cost, i), index = bin / kTileBins;
      atomicAdd(&block.bins[bin], split.parts);
      atomicAdd(&block.class_steps[index], static_cast<unsigned long long>(steps));
      if (index == 0) {
        atomicMin(&block.shortest, steps / split.parts);
        atomicMax(&block.widest, t.node_tiles);
        atomicMin(&block.fewest_parts, split.parts);
        atomicMax(&block.most_parts, split.parts);
      } else if (begins_in_waves(t.node_tiles * split.parts, a.num_sms)) {
        atomicOr(&block.alternating, 1 << index);
      }
    }
    __syncthreads();
    bins_to_places<kCostClasses * kTileBins>(block);
    if (threadIdx.x < kCostClasses) a.order->begin[threadIdx.x] = block.bins[threadIdx.x * kTileBins];
    if (threadIdx.x == 0) *a.split_count = 0;
    __syncthreads();
  }

  // Where the parts of each tile come in the order of the table.
  __device__ void count_parts() const {
    exclusive_offsets(block, tiles, kMaxSteps, a.part_offsets, [&](int i) { return split_at(at(i), i).parts; });
  }

  // Each warp writes 32 neighbouring tiles, those of one bin in order, with one place in the list from a shared
  // counter.
  __device__ void write_items() const {
    for (int first = 0; first < tiles; first += kListThreads) {
      const int i = first + threadIdx.x, lane = threadIdx.x % 32;
      const bool exists = i < tiles;
      const int steps = exists ? a.tile_steps[i] : 0;
      const OwnedTile t = at(min(i, tiles - 1));
      const TileSplit split = exists ? split_at(t, i) : TileSplit{0, 0};
      const int bin = exists ? bin_of(t, split.cost, i) : -1;
      const unsigned peers = __match_any_sync(0xffffffffu, bin);
      int before = 0, together = 0;
      for (unsigned rest = peers; rest; rest &= rest - 1) {
        const int peer = __ffs(rest) - 1, parts = __shfl_sync(peers, split.parts, peer);
        if (peer < lane) before += parts;
        together += parts;
      }
      int place = 0;
      if (exists && before == 0) place = atomicAdd(&block.bins[bin], together);
      place = __shfl_sync(peers, place, __ffs(peers) - 1) + before;
      if (!exists) continue;
      int slot = -1;
      if (split.parts > 1) {
        slot = atomicAdd(&block.used_slots, split.parts * a.num_kv_heads);
        a.splits[atomicAdd(a.split_count, 1)] = SplitTile{t.node, t.n_block, slot, split.parts};
      }
      for (int part = 0; part < split.parts; ++part) {
        const int begin = part_begin(steps, split.parts, part), end = part_begin(steps, split.parts, part + 1);
        a.items[place + part] = BackwardItem{t.node, t.n_block, begin, end - begin,
                                             slot < 0 ? -1 : slot + part * a.num_kv_heads};
        a.in_table_order[a.part_offsets[i] + part] = place + part;
      }
    }
    __syncthreads();
  }

  __device__ void finish_order() const {
    if (threadIdx.x > 0) return;
    BackwardOrder& order = *a.order;
    // write_items() has moved the begin of every bin to its end: that of the last bin is the end of the list.
    const int items = block.bins[kCostClasses * kTileBins - 1];
    order.begin[kCostClasses] = items;
    int64_t head_steps = 0;
    for (const unsigned long long steps : block.class_steps) head_steps += static_cast<int64_t>(steps);
    const int parts = block.most_parts;
    order.local_heads = local_heads_of(head_steps, static_cast<int64_t>(block.class_steps[0]), block.longest, parts > 1,
                                       a.num_kv_heads, a.num_sms);
    const int heads = a.num_kv_heads - order.local_heads;
    const bool by_parts = block.fewest_parts == parts &&
                          rounds_fit(order.begin[1] / parts, heads * parts, block.longest, head_steps * heads, a.num_sms);
    order.parts = by_parts ? parts : 1;
    const int tiles_of_first = order.begin[1] / order.parts, walks = heads * order.parts;
    const bool alternates = first_class_alternates(tiles_of_first, block.widest, parts > 1, walks, a.num_sms);
    // The heads behind local ones start whenever a block ends, not in waves.
    order.alternating = order.local_heads > 0 ? 0 : block.alternating | alternates;
    int second = 1;  // the class that the fillers come from
    while (second < kCostClasses - 1 && block.class_steps[second] == 0) ++second;
    const int second_end = second + 1 < kCostClasses ? order.begin[second + 1] : items;
    const int mean = static_cast<int>(block.class_steps[second] / max(1, second_end - order.begin[second]));
    const int64_t supply = static_cast<int64_t>(items - order.begin[1]) * heads;
    order.fillers = fillers_of(tiles_of_first, block.shortest, mean, supply, walks, a.num_sms);
  }
};

__device__ inline void build_backward_list(const BackwardListArgs& a) {
  __shared__ ListBlock block;
  const int nodes = a.nodes.num_nodes;
  find_runs(a, block);
  exclusive_offsets(block, nodes, a.tile_capacity, a.tile_offsets,
                    [&](int i) { return owned_tiles(a.nodes.node(i), a.block_n); });
  BackwardTiles list{a, block, nodes, a.tile_offsets[nodes]};
  list.clear_sums();
  list.count_steps();
  list.choose_parts();
  list.sort();
  list.count_parts();
  list.write_items();
  list.finish_order();
}

}  // namespace dualkv
