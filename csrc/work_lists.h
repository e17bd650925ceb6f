// Work lists with the memory that holds them; kernels/work_list.cu fills it on the device.
#pragma once

#include <optional>

#include "kernels/kernels.h"
#include "problem.h"

namespace dualkv {

// One allocation of int32 for all arrays of a list.
class IntArrays {
 public:
  // How many ints `count` items take.
  template <typename Item>
  static int64_t size_of(int64_t count) {
    static_assert(sizeof(Item) % sizeof(int) == 0 && alignof(Item) == alignof(int), "items are made of ints");
    return count * static_cast<int64_t>(sizeof(Item) / sizeof(int));
  }

  IntArrays(const Problem& problem, int64_t ints)
      : storage_(uninitialised(problem.segments, {ints}, at::kInt)), next_(int_pointer(storage_)) {}

  template <typename Item = int>
  Item* take(int64_t count) {
    int* taken = next_;
    next_ += size_of<Item>(count);
    return reinterpret_cast<Item*>(taken);
  }

 private:
  Tensor storage_;
  int* next_;
};

inline ClearedRows cleared_rows(const Tensor& t) {
  return {t.data_ptr(), t.size(1) * t.size(2) * static_cast<int64_t>(t.element_size())};
}

// A list of query tiles. Building it clears the rows of `out` (and of `lse`, where defined) that are in none of them.
struct ForwardList {
  IntArrays arrays;
  WorkList<ForwardItem> work;

  // `queries` of a sequence make a tile.
  ForwardList(const Problem& problem, int queries, int block_n, const Tensor& out, const Tensor& lse)
      : ForwardList(problem, queries, block_n, out, lse, forward_capacity(problem.layout(), queries)) {}

 private:
  ForwardList(const Problem& problem, int queries, int block_n, const Tensor& out, const Tensor& lse, int64_t capacity)
      : arrays(problem, problem.segments.size(0) + 1 + IntArrays::size_of<ForwardItem>(capacity) + 2) {
    const GroupLayout layout = problem.layout();
    int* offsets = arrays.take(layout.num_segments + 1);
    auto* items = arrays.take<ForwardItem>(capacity);
    int* counters = arrays.take(2);
    work = {items, counters, static_cast<int>(capacity), counters + 1};
    build_forward_list({layout, queries, block_n, problem.shape.causal, work.capacity, offsets, items, counters,
                        counters + 1, cleared_rows(out), lse.defined() ? lse.data_ptr<float>() : nullptr,
                        problem.shape.num_heads},
                       problem.stream);
    count_launch("dualkv_work_list_forward");
  }
};

// The list of KV tiles, and the tiles whose queries were split. Building it clears the rows of the gradients that are in
// none of them, and dq_sum where it is defined.
struct BackwardList {
  std::optional<IntArrays> arrays;
  GroupLayout layout;  // with the runs of segments
  WorkList<BackwardItem> work;
  WorkList<SplitTile> splits;
  int slots;

  BackwardList(const Problem& problem, const TileInfo& tiles, const Keys& gradients, const Tensor& dq_sum)
      : layout(problem.layout()) {
    const ProblemShape& shape = problem.shape;
    const BackwardCapacities most = backward_capacities(layout, tiles.block_m, tiles.block_n, shape.num_heads,
                                                        shape.num_kv_heads, shape.num_sms);
    slots = most.slots;
    const int owners = layout.num_groups + layout.num_segments;
    const int segments = layout.num_segments;
    arrays.emplace(problem, 2 * (segments + 1) + (owners + 1) + most.tiles +
                                IntArrays::size_of<BackwardItem>(most.items) +
                                IntArrays::size_of<SplitTile>(most.splits) + IntArrays::size_of<BackwardOrder>(1) + 1);
    int* run_counts = arrays->take(segments + 1);
    int* run_begins = arrays->take(segments + 1);
    layout.runs = {run_counts, run_begins};
    int* offsets = arrays->take(owners + 1);
    int* steps = arrays->take(most.tiles);
    auto* items = arrays->take<BackwardItem>(most.items);
    auto* split_items = arrays->take<SplitTile>(most.splits);
    auto* order = arrays->take<BackwardOrder>(1);
    int* split_count = arrays->take(1);
    work = {items, order->begin + kCostClasses, most.items, nullptr, order};
    splits = {split_items, split_count, most.splits};
    const int64_t dq_bytes = dq_sum.defined() ? static_cast<int64_t>(dq_sum.nbytes()) : 0;
    build_backward_list({layout, run_counts, run_begins, tiles.block_m, tiles.block_n, shape.causal,
                         shape.num_kv_heads, shape.heads_per_group(), shape.num_sms, most.tiles, slots, offsets,
                         steps, items, order, split_items, split_count,
                         {cleared_rows(gradients.k_context), cleared_rows(gradients.v_context)},
                         {cleared_rows(gradients.k_decoded), cleared_rows(gradients.v_decoded)},
                         {dq_bytes ? dq_sum.data_ptr() : nullptr, dq_bytes}},
                        problem.stream);
    count_launch("dualkv_work_list_backward");
  }
};

}  // namespace dualkv
