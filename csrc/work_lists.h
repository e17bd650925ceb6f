// SPDX-License-Identifier: BSD-3-Clause
// Work lists in the caller's scratch memory; the kernels of kernels/ fill them on the device.
#pragma once

#include "kernels/kernels.h"
#include "problem.h"

namespace dualkv {

// The arrays of a call one after the other, each on a boundary of 128 bytes. Without memory the
// addresses are offsets: used() is what the call needs.
class Scratch {
 public:
  explicit Scratch(void* memory) : begin_(reinterpret_cast<uintptr_t>(memory)) {}

  template <typename Item = int>
  Item* take(int64_t count) {
    const uintptr_t taken = begin_ + used_;
    used_ += ceil_div<int64_t>(count * static_cast<int64_t>(sizeof(Item)), kAlignment) * kAlignment;
    return reinterpret_cast<Item*>(taken);
  }

  // Behind what was taken.
  uint8_t* end() const { return reinterpret_cast<uint8_t*>(begin_ + used_); }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 128;
  uintptr_t begin_;
  int64_t used_ = 0;
};

// A contiguous tensor of 16-bit elements.
inline ClearedRows cleared_rows(const DualkvTensor& t) { return {t.data, t.heads * t.head_dim * 2}; }

// A list of query tiles, `queries` of a node each, or of siblings of which so many may share one
// where there are `least_tiles`.
class ForwardList {
 public:
  ForwardList(const Problem& problem, int queries, int block_n, Scratch& scratch, int siblings = 1, int least_tiles = 0)
      : stream_(problem.stream) {
    args_.nodes = problem.nodes;
    args_.block_m = queries, args_.block_n = block_n, args_.sees = problem.shape.sees;
    args_.num_heads = problem.shape.num_heads;
    args_.slice_queries = siblings > 1 ? queries / siblings : 0, args_.least_tiles = least_tiles;
    args_.capacity = forward_capacity(args_.nodes, queries);
    args_.tile_offsets = scratch.take(args_.nodes.num_nodes + 1);
    args_.last_tiles = scratch.take(siblings > 1 ? args_.nodes.num_nodes : 0);
    args_.items = scratch.take<ForwardItem>(args_.capacity);
    args_.count = scratch.take(1), args_.next = scratch.take(1);
  }

  // Fills it, and clears the rows of `out` (and of `lse`, unless null) that are in no node.
  WorkList<ForwardItem> prepare(const DualkvTensor& out, float* lse) {
    args_.rows = cleared_rows(out), args_.lse = lse;
    prepare_forward(args_, stream_);
    count_launch("dualkv_prepare_forward");
    return {args_.items, args_.count, args_.capacity, args_.next};
  }

 private:
  ForwardListArgs args_{};
  cudaStream_t stream_;
};

// What passes between the kernels of the backward: the list of KV tiles, the tiles that were split
// and the slots for their parts, the row statistics and, if asked for, the fp32 sums of dQ.
struct BackwardList {
  NodeTable nodes;  // with their runs
  WorkList<BackwardItem> work;
  WorkList<SplitTile> splits;
  RowStatistics statistics{};
  float* dq_sum = nullptr;
  uint64_t* dq_semaphores = nullptr;
  float* dkv_slots = nullptr;

  BackwardList(const Problem& problem, const BackwardPlan& plan, Scratch& scratch) : capacity_(plan.capacities) {
    place(problem, plan, scratch);
    const ProblemShape& shape = problem.shape;
    const TileInfo& tiles = plan.kernel.tiles;
    const Pack heads = plan.kernel.pack;
    nodes = args_.nodes;
    work = {args_.items, args_.order->begin + kCostClasses, capacity_.items, next_, args_.order, args_.in_local_order};
    splits = {args_.splits, args_.split_count, capacity_.splits};
    args_.block_m = heads.queries(tiles.block_m), args_.block_n = tiles.block_n, args_.sees = shape.sees;
    args_.num_kv_heads = shape.num_kv_heads, args_.packs_per_group = heads.queries(shape.heads_per_group());
    args_.num_sms = plan.tiles_at_a_time;
    args_.tile_capacity = capacity_.tiles, args_.slot_capacity = capacity_.slots;
    args_.query_capacity = shape.q_rows;
  }

  // Fills it, and clears the rows of the gradients of keys that are in no node.
  template <typename T>
  void prepare(const Problem& problem, const DualkvBackward& tensors) {
    args_.keys[0] = cleared_rows(tensors.dk), args_.keys[1] = cleared_rows(tensors.dv);
    args_.decoded[0] = cleared_rows(tensors.dk_decoded), args_.decoded[1] = cleared_rows(tensors.dv_decoded);
    prepare_backward<T>(args_,
                        {problem.shape, view_of<const T>(tensors.out), view_of<const T>(tensors.dout), tensors.lse,
                         tensors.dlse, statistics},
                        problem.stream);
    count_launch("dualkv_prepare_backward");
  }

 private:
  void place(const Problem& problem, const BackwardPlan& plan, Scratch& scratch) {
    const ProblemShape& shape = problem.shape;
    const TileInfo& tiles = plan.kernel.tiles;
    const Pack heads = plan.kernel.pack;
    const int queries = heads.queries(tiles.block_m), packs = heads.queries(shape.num_heads);
    args_.nodes = problem.nodes;
    statistics.heads = heads;
    statistics.padded_rows = ceil_div<int64_t>(shape.q_rows, RowStatistics::kPadding) * RowStatistics::kPadding;
    statistics.lse_log2 = scratch.take<float>(shape.num_heads * statistics.padded_rows);
    statistics.delta = scratch.take<float>(shape.num_heads * statistics.padded_rows);
    args_.orders_dq = plan.sums == DqSums::in_order;
    if (plan.sums != DqSums::none) {
      const int64_t rows = int64_t{ceil_div(shape.q_rows, queries)} * tiles.block_m;
      dq_sum = scratch.take<float>(packs * rows * plan.padded_head_dim());
      if (args_.orders_dq) {
        dq_semaphores = scratch.take<uint64_t>(int64_t{capacity_.items} * shape.num_kv_heads * kDqAdders);
        next_ = scratch.take(1);
      }
      args_.dq_sum = {dq_sum, scratch.end() - reinterpret_cast<uint8_t*>(dq_sum)};
    }
    dkv_slots = scratch.take<float>(int64_t{capacity_.slots} * 2 * tiles.block_n * plan.padded_head_dim());

    const int offsets = args_.nodes.num_nodes + 1;
    args_.run_counts = scratch.take(offsets), args_.run_begins = scratch.take(offsets);
    args_.nodes.runs = {args_.run_counts, args_.run_begins};
    for (int** array : {&args_.tile_offsets, &args_.query_offsets, &args_.node_sums, &args_.tile_begins}) {
      *array = scratch.take(offsets);
    }
    for (int** array : {&args_.tile_nodes, &args_.tile_steps, &args_.part_offsets, &args_.first_borders}) {
      *array = scratch.take(capacity_.tiles + 1);
    }
    args_.part_places = scratch.take(capacity_.items - capacity_.tiles);
    for (int** array : {&args_.border_parts, &args_.tiles_before, &args_.parts_before}) {
      *array = scratch.take(ceil_div(shape.q_rows, queries) + capacity_.items - capacity_.tiles + 2);
    }
    for (BackwardItem** array : {&args_.in_raster_order, &args_.items}) {
      *array = scratch.take<BackwardItem>(capacity_.items);
    }
    for (int** array : {&args_.item_bins, &args_.in_local_order}) *array = scratch.take(capacity_.items);
    args_.order = scratch.take<BackwardOrder>(1);
    args_.splits = scratch.take<SplitTile>(capacity_.splits), args_.split_count = scratch.take(1);
  }

  BackwardListArgs args_{};
  BackwardCapacities capacity_;
  int* next_ = nullptr;
};

}  // namespace dualkv
