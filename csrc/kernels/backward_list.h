// SPDX-License-Identifier: BSD-3-Clause
// Builds the list of KV tiles: which are split into how many parts (core/schedule.h), and their
// order (core/block_order.h). Tiles are numbered in raster order. docs/notes/work_lists.md has the
// list of a call with three nodes, phase by phase.
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

// Numbers the tiles: behind those of the nodes to the right of a subtree, and of the nodes above
// it, come those of its root. Offsets that contradict each other may give a number twice, or never:
// then a tile is visited twice, or not at all.
__device__ inline int number_tiles(const BackwardListArgs& a, ListBlock& block) {
  const int nodes = a.nodes.num_nodes;
  if (threadIdx.x == 0) block.longest_path = 0;
  const auto tiles_of = [&](int i) { return owned_tiles(a.nodes.node(i), a.block_n); };
  exclusive_offsets(block, nodes, a.tile_capacity, a.tile_offsets, tiles_of);
  const int tiles = a.tile_offsets[nodes];
  // How many more tiles are above a node than above the one before it in the table.
  int* change = a.tile_begins;
  for (int i = threadIdx.x; i <= nodes; i += kListThreads) change[i] = 0;
  // Tiles without a number, too.
  for (int i = threadIdx.x; i < tiles; i += kListThreads) a.tile_nodes[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < nodes; i += kListThreads) {
    const Node node = a.nodes.node(i);
    if (!has_children(node, i)) continue;
    atomicAdd(&change[i + 1], tiles_of(i));
    atomicAdd(&change[node.subtree_end], -tiles_of(i));
  }
  __syncthreads();
  const int* above = a.node_sums + 1;
  exclusive_offsets(block, nodes, kMaxSteps, a.node_sums, [&](int i) { return change[i]; });
  for (int i = threadIdx.x; i < nodes; i += kListThreads) {
    const Node node = a.nodes.node(i);
    const int to_the_right = tiles - a.tile_offsets[node.subtree_end];
    a.tile_begins[i] = to_the_right + above[i];
    atomicMax(&block.longest_path, node.kv_pos0 + node.kv_len);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kListThreads) {
    const int node = find_owner(a.tile_offsets, nodes, i);
    const int number = a.tile_begins[node] + i - a.tile_offsets[node];
    if (number >= 0 && number < tiles) a.tile_nodes[number] = node;
  }
  __syncthreads();
  return tiles;
}

struct OwnedTile {
  int node, n_block;
  int end;  // of the node's subtree
  bool is_leaf;
};

// The tiles of all nodes. One block calls the stages, from clear_sums() to finish_order(), in their
// order.
struct BackwardListBuilder {
  const BackwardListArgs& a;
  ListBlock& block;
  int tiles;
  bool are_mixed;  // no node has most of the long tiles: those that run together belong to many
  Slices slices;
  int items;

  __device__ OwnedTile at(int index) const {
    const int owner = a.tile_nodes[index];
    const Node node = a.nodes.node(owner);
    const int n_block = clamp_int(index - a.tile_begins[owner], 0, max(owned_tiles(node, a.block_n) - 1, 0));
    return OwnedTile{owner, n_block, node.subtree_end, !has_children(node, owner)};
  }

  __device__ bool is_split() const { return slices.width > 0; }

  // Queries up to the end of a tile's walk, in the order of the table.
  __device__ int end_row(const OwnedTile& t) const { return a.query_offsets[t.end]; }

  __device__ TileCuts cuts_at(const OwnedTile& t, int index) const {
    // With a window a walk begins with its first queries, and its steps are not all rows of the
    // subtree.
    int first = slices.width;
    if (is_split() && !a.sees.has_window()) {
      const int rows = (max(end_row(t), 1) - 1) % slices.rows + 1;
      first = (a.orders_dq ? ceil_div(rows, a.block_m) : rows / a.block_m) * a.packs_per_group;
    }
    return cuts_of(a.tile_steps[index], first, slices);
  }

  // The border of slices at which a tile's second part begins; the next ones begin at those before
  // it. Borders are counted from the first row. Where nodes do not lie one behind the other, a walk
  // has more steps than their rows have tiles, and its parts need as many borders all the same.
  __device__ int second_begin(const OwnedTile& t, const TileCuts& cuts) const {
    if (a.orders_dq) return first_slice(t);
    const int rows = cuts.begin(1) / a.packs_per_group * a.block_m;
    return clamp_int((end_row(t) - rows + slices.rows / 2) / slices.rows, cuts.parts - 2, border_count() - 1);
  }
  __device__ int border_count() const {
    return max(a.query_offsets[a.nodes.num_nodes] / slices.rows + 1, block.most_parts);
  }

  // In which a tile's walk begins.
  __device__ int first_slice(const OwnedTile& t) const { return (max(end_row(t), 1) - 1) / slices.rows; }

  // Whether a part walks the queries of one slice, the same for all tiles, so that a block waits
  // for one other alone: where all rows lie one behind the other, and a walk passes each once.
  __device__ bool can_order_parts() const {
    const Node first = a.nodes.node(0);
    return a.run_counts[a.nodes.num_nodes] == 1 && first.q_begin == 0 && sees_ancestors(first);
  }

  // Whole tiles of a node with children run together (core/block_order.h): all of them cost what
  // the first does, which the most queries see. With a window the last of them may be seen by more.
  __device__ int whole_cost(const OwnedTile& t, int index) const {
    const int steps = a.tile_steps[index];
    return t.is_leaf || steps == 0 ? steps : max(steps, a.tile_steps[max(index - t.n_block, 0)]);
  }

  // The cost with deterministic sums of dQ: never more than that of the tile before on the path.
  __device__ int rows_below(const OwnedTile& t) const {
    const int rows = end_row(t) - a.query_offsets[t.node];
    return t.is_leaf ? max(rows - t.n_block * a.block_n, 0) : rows;
  }

  __device__ int cost_at(const OwnedTile& t, int index, const TileCuts& cuts, int part) const {
    if (a.orders_dq) return rows_below(t);
    return is_split() ? cuts.begin(part + 1) - cuts.begin(part) : whole_cost(t, index);
  }

  __device__ int bin_of(const OwnedTile& t, int cost, int place) const {
    const int items_a_bin = 32 * max(1, ceil_div(items, 32 * kTileBins));
    const int longest_here = t.is_leaf && !a.orders_dq ? block.longest_leaf : block.longest;
    return cost_class_within(cost, longest_here, block.longest) * kTileBins + place / items_a_bin;
  }

  __device__ void clear_sums() const {
    for (int i = threadIdx.x; i < kCostClasses * kTileBins; i += kListThreads) block.bins[i] = 0;
    if (threadIdx.x < kCostClasses) block.class_steps[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      block.long_tiles = 0, block.longest_tile = 0, block.shortest_tile = kMaxSteps, block.long_steps = 0;
      block.longest = 0, block.longest_leaf = 0, block.alternating = 0;
      block.widest = 0, block.heaviest = 0;
      block.used_slots = 0, block.total_steps = 0;
    }
    __syncthreads();
  }

  __device__ void count_steps() const {
    for (int i = threadIdx.x; i <= a.nodes.num_nodes; i += kListThreads) a.node_sums[i] = 0;
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const KvTile tile = a.nodes.kv_tile(a.nodes.node(t.node), t.n_block, a.block_n);
      const int steps = dualkv::tile_steps(a.nodes, t.node, tile, a.block_m, a.packs_per_group, a.sees);
      a.tile_steps[i] = steps;
      atomicAdd(&block.total_steps, static_cast<unsigned long long>(steps) * a.num_kv_heads);
      atomicMax(&block.longest_tile, steps);
    }
    __syncthreads();
  }

  __device__ void choose_slices() {
    const int64_t total = static_cast<int64_t>(block.total_steps), heads = a.num_kv_heads;
    const int limit = part_limit(total, a.num_sms), longest = block.longest_tile;
    slices = {};
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const int steps = a.tile_steps[i];
      if (2 * int64_t{steps} > longest) atomicMax(&block.heaviest, atomicAdd(&a.node_sums[t.node], steps) + steps);
      if (whole_cost(t, i) > limit) {
        atomicAdd(&block.long_tiles, 1);
        atomicAdd(&block.long_steps, static_cast<unsigned long long>(steps));
        atomicMin(&block.shortest_tile, steps);
      }
    }
    __syncthreads();
    const int64_t long_steps = static_cast<int64_t>(block.long_steps);
    const LongTiles long_tiles{block.long_tiles * heads, long_steps * heads, longest, block.shortest_tile};
    const bool whole = stay_whole(long_tiles, limit, a.num_sms);
    are_mixed = 100 * int64_t{block.heaviest} * heads <= 55 * total;
    const int64_t head_time = ceil_div<int64_t>(total, heads * a.num_sms);
    const bool may_be_local = are_mixed && !a.sees.has_window() && !a.orders_dq;
    const int local_limit = may_be_local ? local_part_limit(longest, head_time, a.num_kv_heads) : 0;
    if (whole && local_limit == 0 && !a.orders_dq) return;
    exclusive_offsets(block, a.nodes.num_nodes, a.query_capacity, a.query_offsets,
                      [&](int i) { return max(a.nodes.node(i).q_len, 0); });
    if (a.orders_dq && (whole || !can_order_parts())) return;
    const auto equal = [&](int most) { return ceil_div(longest, ceil_div(longest, most)); };
    if (local_limit > 0) try_slices(equal(whole ? local_limit : min(limit, local_limit)), 8);
    if (whole || is_split()) return;
    try_slices(equal(limit), 8);
    if (a.orders_dq) {
      for (int more = 2; !is_split() && more <= 4; ++more) try_slices(equal(more * limit), 8);
      return;
    }
    if (!is_split()) try_slices(limit, 2);  // for these there are slots (slot_capacity)
  }

  // Takes slices of so many steps if there are slots for all parts.
  __device__ void try_slices(int steps, int share) {
    slices = slices_of(steps, share, a.block_m, a.packs_per_group);
    if (a.orders_dq) slices.least = 1;
    if (threadIdx.x == 0) block.used_slots = 0, block.most_parts = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const int parts = cuts_at(at(i), i).parts;
      atomicMax(&block.most_parts, parts);
      if (parts > 1) atomicAdd(&block.used_slots, static_cast<unsigned long long>(parts) * a.num_kv_heads);
    }
    __syncthreads();
    const bool fits = block.used_slots <= static_cast<unsigned long long>(a.slot_capacity);
    __syncthreads();
    if (threadIdx.x == 0) block.used_slots = 0;
    if (!fits) slices = {};
  }

  // Finds the places of parts behind the first of their tile: behind all tiles whose walks begin
  // before their border, and behind the parts that begin before them.
  __device__ void place_parts() {
    items = tiles;
    if (!is_split()) return;
    exclusive_offsets(block, tiles, kMaxSteps, a.part_offsets, [&](int i) { return cuts_at(at(i), i).parts - 1; });
    items += a.part_offsets[tiles];
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const TileCuts cuts = cuts_at(t, i);
      a.first_borders[i] = cuts.parts > 1 ? second_begin(t, cuts) : -1;
    }
    __syncthreads();
    const int borders = border_count(), lane = threadIdx.x % 32;
    // A warp asks 32 tiles at a time whether they have a part that begins at a border.
    const auto each = [&](auto&& visit) {
      for (int border = threadIdx.x / 32; border < borders; border += kListThreads / 32) {
        visit(border, [&](int i) {
          const int part = i < tiles ? a.first_borders[i] - border : -1;
          return part >= 0 && part < a.part_offsets[i + 1] - a.part_offsets[i] ? part : -1;
        });
      }
      __syncthreads();
    };
    each([&](int border, auto&& part_of) {
      int parts = 0, before = 0;
      for (int first = 0; first < tiles; first += 32) {
        const int i = first + lane;
        parts += __popc(__ballot_sync(0xffffffffu, part_of(i) >= 0));
        before += __popc(__ballot_sync(0xffffffffu, i < tiles && end_row(at(i)) > int64_t{border} * slices.rows));
      }
      if (lane == 0) a.border_parts[border] = parts, a.tiles_before[border] = before;
    });
    // From the last border to the first, as walks go.
    exclusive_offsets(block, borders, kMaxSteps, a.parts_before,
                      [&](int i) { return a.border_parts[borders - 1 - i]; });
    each([&](int border, auto&& part_of) {
      int place = a.tiles_before[border] + a.parts_before[borders - 1 - border];
      for (int first = 0; first < tiles; first += 32) {
        const int part = part_of(first + lane);
        const unsigned peers = __ballot_sync(0xffffffffu, part >= 0);
        if (part >= 0) a.part_places[a.part_offsets[first + lane] + part] = place + __popc(peers & ((1u << lane) - 1));
        place += __popc(peers);
      }
    });
  }

  // The place of a part in raster order.
  __device__ int place_of(const OwnedTile& t, int index, int part) const {
    if (!is_split()) return index;
    if (part > 0) return a.part_places[a.part_offsets[index] + part - 1];
    // Behind the parts that begin before this tile's walk, or with it: at this border and later
    // ones.
    return index + a.parts_before[max(border_count() - ceil_div(end_row(t), slices.rows), 0)];
  }

  // Writes the items in raster order, and the cost class of each.
  __device__ void write_in_raster_order() const {
    int* first_class_tiles = a.node_sums;  // by the end of their walks
    for (int i = threadIdx.x; i <= a.nodes.num_nodes; i += kListThreads) first_class_tiles[i] = 0;
    for (int i = threadIdx.x; i < items; i += kListThreads) {
      // Where offsets contradict each other, places stay empty.
      a.in_raster_order[i] = BackwardItem{0, 0, 0, 0, -1, -1};
      a.item_bins[i] = (kCostClasses - 1) * kTileBins;
      a.in_local_order[i] = 0;
    }
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const TileCuts cuts = cuts_at(t, i);
      for (int part = 0; part < cuts.parts; ++part) {
        const int cost = cost_at(t, i, cuts, part);
        atomicMax(&block.longest, cost);
        if (t.is_leaf) atomicMax(&block.longest_leaf, cost);
      }
    }
    if (threadIdx.x == 0) *a.split_count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const OwnedTile t = at(i);
      const TileCuts cuts = cuts_at(t, i);
      int slot = -1;
      if (cuts.parts > 1) {
        slot = static_cast<int>(
            atomicAdd(&block.used_slots, static_cast<unsigned long long>(cuts.parts) * a.num_kv_heads));
        a.splits[atomicAdd(a.split_count, 1)] = SplitTile{t.node, t.n_block, slot, cuts.parts};
      }
      for (int part = 0; part < cuts.parts; ++part) {
        const int place = place_of(t, i, part), begin = cuts.begin(part), steps = cuts.begin(part + 1) - begin;
        if (place < 0 || place >= items) continue;
        const int own_slot = slot < 0 ? -1 : slot + part * a.num_kv_heads;
        a.in_raster_order[place] = BackwardItem{t.node, t.n_block, begin, steps, own_slot, -1};
        const int bin = bin_of(t, cost_at(t, i, cuts, part), place), index = bin / kTileBins;
        a.item_bins[place] = bin;
        atomicAdd(&block.class_steps[index], static_cast<unsigned long long>(steps));
        if (index == 0) {
          atomicMax(&block.widest, atomicAdd(&first_class_tiles[t.end], 1) + 1);
        } else if (begins_in_waves(owned_tiles(a.nodes.node(t.node), a.block_n), a.num_sms)) {
          atomicOr(&block.alternating, 1 << index);
        }
      }
    }
    __syncthreads();
  }

  // Sorts the items into classes. Each warp takes 32 neighbours, and writes those of one bin in
  // order, with one place in the list from a shared counter.
  __device__ void sort() const {
    for (int i = threadIdx.x; i < items; i += kListThreads) atomicAdd(&block.bins[a.item_bins[i]], 1);
    __syncthreads();
    bins_to_places<kCostClasses * kTileBins>(block);
    if (threadIdx.x < kCostClasses) a.order->begin[threadIdx.x] = block.bins[threadIdx.x * kTileBins];
    __syncthreads();
    const bool in_table_order = !is_split() && !a.orders_dq && has_wide_paths(block.longest_path, a.block_n, a.num_sms);
    // Where bins are larger than that, one warp alone keeps the order of blocks that wait for
    // others.
    const int threads = a.orders_dq && items > 32 * kTileBins ? 32 : kListThreads;
    for (int first = 0; first < items && threadIdx.x < threads; first += threads) {
      const int i = first + threadIdx.x, lane = threadIdx.x % 32;
      const int bin = i < items ? a.item_bins[i] : -1;
      const unsigned peers = __match_any_sync(0xffffffffu, bin);
      const int before = __popc(peers & ((1u << lane) - 1));
      int place = 0;
      if (i < items && before == 0) place = atomicAdd(&block.bins[bin], __popc(peers));
      place = __shfl_sync(peers, place, __ffs(peers) - 1) + before;
      if (i >= items) continue;
      const BackwardItem item = a.in_raster_order[i];
      a.items[place] = item;
      a.in_local_order[in_table_order ? min(a.tile_offsets[item.node] + item.n_block, items - 1) : i] = place;
    }
    __syncthreads();
  }

  // The tile before it on its path, whose keys are seen by the same queries and more; -1: none.
  __device__ int tile_before(int index) const {
    const OwnedTile t = at(index);
    if (t.n_block > 0) return index - 1;
    int above = a.nodes.node(t.node).parent;
    while (above >= 0 && a.nodes.node(above).kv_len == 0) above = a.nodes.node(above).parent;
    if (above < 0) return -1;
    const int before = a.tile_begins[above] + owned_tiles(a.nodes.node(above), a.block_n) - 1;
    return before >= 0 && before < tiles ? before : -1;
  }

  // The place of a part in the list.
  __device__ int item_of(const OwnedTile& t, int index, int part) const {
    return a.in_local_order[clamp_int(place_of(t, index, part), 0, items - 1)];
  }

  // Tells every item which one comes before it. Offsets that contradict each other may make that a
  // later one: nobody waits for those.
  __device__ void link() const {
    for (int i = threadIdx.x; i < tiles; i += kListThreads) {
      const int above = tile_before(i);
      if (above < 0) continue;
      const OwnedTile t = at(i), upper = at(above);
      const int parts = cuts_at(t, i).parts, upper_parts = cuts_at(upper, above).parts;
      for (int part = 0; part < parts; ++part) {
        const int same_slice = is_split() ? first_slice(upper) - first_slice(t) + part : 0;
        const int item = item_of(t, i, part), before = item_of(upper, above, clamp_int(same_slice, 0, upper_parts - 1));
        if (before < item) a.items[item].before = before;
      }
    }
  }

  __device__ void finish_order() const {
    if (threadIdx.x > 0) return;
    BackwardOrder& order = *a.order;
    order.begin[kCostClasses] = items;
    order.ordered = a.orders_dq, order.alternating = 0, order.local_heads = 0;
    if (a.orders_dq) return;
    int64_t head_steps = 0;
    for (const unsigned long long steps : block.class_steps) head_steps += static_cast<int64_t>(steps);
    const int64_t head_time = ceil_div<int64_t>(head_steps, a.num_sms);
    const bool spread = is_split() ? are_mixed && a.num_kv_heads >= kFewestLocalHeads
                                   : is_spread(head_steps, static_cast<int64_t>(block.class_steps[0]), block.longest,
                                               head_time);
    order.local_heads = spread ? local_heads_of(block.longest, head_time, a.num_kv_heads) : 0;
    order.by_head = is_split() || order.local_heads > 0;
    order.alternating = 0;
    if (order.by_head) return;
    order.alternating =
        block.alternating | first_class_alternates(order.begin[1], block.widest, a.num_kv_heads, a.num_sms);
  }
};

__device__ inline void build_backward_list(const BackwardListArgs& a) {
  __shared__ ListBlock block;
  find_runs(a, block);
  BackwardListBuilder list{a, block, number_tiles(a, block)};
  list.clear_sums();
  list.count_steps();
  list.choose_slices();
  list.place_parts();
  list.write_in_raster_order();
  list.sort();
  if (a.orders_dq) list.link();
  list.finish_order();
}

}  // namespace dualkv
