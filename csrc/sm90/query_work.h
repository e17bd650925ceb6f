// SPDX-License-Identifier: BSD-3-Clause
// Work scheduling of persistent blocks that own query tiles. Four threads of the first warpgroup
// feed the consumers, each alone in its warp:
//
//     scheduler  items of the list (three dependent reads), their queries, during the item before
//     walker     the steps of an item's walk: KV tiles of its path; it reads nodes
//     loaders    the copies of K of a step, and those of V
//
// Items pass in slots in shared memory, steps in a ring, each slot with a full and an empty
// barrier. The walker is some steps ahead: to enter a node, and to gather tails, takes it 1000 to
// 2000 cycles, as long as the products of a tile. One thread that walked and loaded came late at
// every node.
#pragma once

#include "kernels/query_block.h"
#include "sm90/maps.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

// Items of the consumers, of the walker, and the next one.
constexpr int kWorkSlots = 3;

// Steps between the walker and the loader that is behind.
constexpr int kWalkSlots = 4;

// Roles of the first warpgroup's warps. All threads but the first of each exit once they know it,
// and roles end by exit_thread(): where they met again the compiler would take their code for
// divergent, keep none of their state in uniform registers, and spill.
enum class QueryRole { walk, hand_out, load_k, load_v };
__device__ __forceinline__ QueryRole query_role() {
  return static_cast<QueryRole>(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0));
}

// Shared-memory layout: the queries, then rings of K and V.
template <class Config>
struct QueryShared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int stage) const { return base + stage * Config::TileQ::kBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + Config::kOffsetK + stage * Config::TileK::kBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + Config::kOffsetV + stage * Config::TileV::kBytes;
  }
  __device__ __forceinline__ PipelineBarrier pipeline_barrier(int index) const {
    return {base + Config::kOffsetBarriers + index * 16};
  }
  __device__ __forceinline__ PipelineBarrier queries_ready(int stage, int slice) const {
    return pipeline_barrier(stage * Config::kSlices + slice);
  }
  __device__ __forceinline__ PipelineBarrier k_ready(int stage) const { return pipeline_barrier(kSlices + stage); }
  __device__ __forceinline__ PipelineBarrier v_ready(int stage) const {
    return pipeline_barrier(kSlices + Config::kStagesK + stage);
  }
  __device__ __forceinline__ PipelineBarrier work_ready(int slot) const { return pipeline_barrier(kTileStages + slot); }
  __device__ __forceinline__ PipelineBarrier step_ready(int slot) const {
    return pipeline_barrier(kTileStages + kWorkSlots + slot);
  }
  // Signals that the loader of K has the first step of an item.
  __device__ __forceinline__ uint32_t work_begun() const { return pipeline_barrier(kPipelines).barrier; }

  // `slices` as of QueryTiling.
  __device__ __forceinline__ void init_barriers(int slices) const {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    for (int index = 0; index < kSlices; ++index) pipeline_barrier(index).init(kConsumerWarps / slices);
    for (int index = kSlices; index < kTileStages + kWorkSlots; ++index) pipeline_barrier(index).init(kConsumerWarps);
    for (int slot = 0; slot < kWalkSlots; ++slot) {
      ptx::mbarrier_init(step_ready(slot).full(), 1);
      ptx::mbarrier_init(step_ready(slot).empty(), 2);  // both loaders, a thread each
    }
    ptx::mbarrier_init(work_begun(), 1);
    ptx::mbarrier_init_fence();
  }

 private:
  static constexpr int kSlices = Config::kStagesQ * Config::kSlices;
  static constexpr int kTileStages = kSlices + Config::kStagesK + Config::kStagesV;
  static constexpr int kPipelines = kTileStages + kWorkSlots + kWalkSlots;
  static_assert((kPipelines + 1) * 16 <= kBarrierBytes, "room for barriers");
};

template <class Block>
struct QueryWork {
  Block block;
  int valid;  // 0: end of the list
};

// A step of a walk, as the loaders take it.
struct WalkStep {
  KvStep step;
  int kv_head;
  int valid;  // 0: all walks are over
};

// Scheduler thread. Writes items into one slot after the other, once the consumers have released
// it, and loads the queries by load(stage, slice, barrier, block). An item is taken when the loader
// of K has the first step of the previous one, no earlier: an item that waits could start on
// another block. The end of the list is published as an invalid item.
template <class Config, class Shared, class Params, class Block, class Load>
__device__ __forceinline__ void hand_out_works(const Shared& shared, const Params& p,
                                               QueryWork<Block> (&works)[kWorkSlots], QueryTiling tiling, Load load) {
  const int items = *p.work.count;
  int index = blockIdx.x;
  PipelineState<Config::kStagesQ> queries;
  PipelineState<1> begun;
  for (PipelineState<kWorkSlots> state;; state.advance()) {
    const PipelineBarrier ready = shared.work_ready(state.stage);
    QueryWork<Block>& work = works[state.stage];
    ready.wait_empty(state.phase);
    const bool exists = Block::exists(index, items, p.shape, tiling.heads);
    work.valid = exists;
    if (exists) work.block.load(index, items, p.work, p.nodes, p.shape, tiling);
    ptx::mbarrier_arrive(ready.full());
    if (!exists) return;
    for (int slice = 0; slice < tiling.slices; ++slice) {
      const PipelineBarrier queries_ready = shared.queries_ready(queries.stage, slice);
      queries_ready.wait_empty(queries.phase);
      load(queries.stage, slice, queries_ready, work.block);
    }
    queries.advance();
    ptx::mbarrier_wait(shared.work_begun(), begun.phase);
    begun.advance();
    index = gridDim.x + atomicAdd(p.work.next, 1);
  }
}

// Calls body(block, barrier of its slot) for every item of the list.
template <class Shared, class Block, class Body>
__device__ __forceinline__ void for_each_work(const Shared& shared, const QueryWork<Block> (&works)[kWorkSlots],
                                              Body body) {
  for (PipelineState<kWorkSlots> state;; state.advance()) {
    const PipelineBarrier ready = shared.work_ready(state.stage);
    ready.wait_full(state.phase);
    if (!works[state.stage].valid) return;
    body(works[state.stage].block, ready);
  }
}

// Publishes the steps of an item's walk. `group` as for PathWalk::step.
template <class Walk, class Publish>
__device__ __forceinline__ void walk_work(const QueryBlock& work, Walk& walk, const NodeTable& nodes, int block_n,
                                          int group, Visibility sees, Publish publish) {
  walk.start(nodes, work.node, work.q_tile, block_n, sees);
  while (true) {
    const KvStep step = walk.step(nodes, block_n, group, sees);
    publish(step);
    if (step.last) return;
    walk.next(nodes, block_n, sees);
  }
}
template <int kSlices, class Walk, class Publish>
__device__ __forceinline__ void walk_work(const SiblingBlock<kSlices>& work, Walk& walk, const NodeTable& nodes,
                                          int block_n, int group, Visibility sees, Publish publish) {
  walk_siblings(work.tile, walk, nodes, block_n, group, sees, publish);
}

// Walker thread: publishes the steps of all items, then their end.
template <class Config, class Shared, class Block, class Walk>
__device__ __forceinline__ void walk_works(const Shared& shared, const QueryWork<Block> (&works)[kWorkSlots],
                                           WalkStep (&ring)[kWalkSlots], Walk walk, const NodeTable& nodes, int group,
                                           Visibility sees) {
  PipelineState<kWalkSlots> state;
  const auto publish = [&](const WalkStep& step) {
    const PipelineBarrier ready = shared.step_ready(state.stage);
    ready.wait_empty(state.phase);
    ring[state.stage] = step;
    ptx::mbarrier_arrive(ready.full());
    state.advance();
  };
  for_each_work(shared, works, [&](const Block& work, const PipelineBarrier&) {
    walk_work(work, walk, nodes, Config::kBlockN, group, sees,
              [&](const KvStep& step) { publish({step, work.kv_head, 1}); });
  });
  publish({});
  ptx::exit_thread();
}

// Loader threads: call load(step) for every step.
template <class Shared, class Load>
__device__ __forceinline__ void for_each_step(const Shared& shared, const WalkStep (&ring)[kWalkSlots], Load load) {
  for (PipelineState<kWalkSlots> state;; state.advance()) {
    const PipelineBarrier ready = shared.step_ready(state.stage);
    ready.wait_full(state.phase);
    if (!ring[state.stage].valid) return;
    load(ring[state.stage]);
    ptx::mbarrier_arrive(ready.empty());
  }
}

// Loader of K: copies by load(stage, address, barrier, tile, KV head) and hands the step to the
// consumers. The copies are issued before the step is written: no consumer reads it before this
// thread arrives.
template <class Config, class Shared, class Load>
__device__ __forceinline__ void load_keys(const Shared& shared, const WalkStep (&ring)[kWalkSlots],
                                          KvStep (&steps)[Config::kStagesK], Load load) {
  PipelineState<Config::kStagesK> state;
  bool begins = true;
  for_each_step(shared, ring, [&](const WalkStep& next) {
    if (begins) ptx::mbarrier_arrive(shared.work_begun());
    const KvStep step = next.step;
    const int kv_head = next.kv_head;
    const PipelineBarrier ready = shared.k_ready(state.stage);
    ready.wait_empty(state.phase);
    load(state, shared.k(state.stage), ready.full(), step.tile, kv_head);
    steps[state.stage] = step;
    ready.expect(Config::TileK::kBytes);
    begins = Config::kSiblings > 1 ? step.last & slice_flags::kLast : step.last;
    state.advance();
  });
  ptx::exit_thread();
}

// Loader of V: copies by load(address, barrier, tile, KV head).
template <class Config, class Shared, class Load>
__device__ __forceinline__ void load_values(const Shared& shared, const WalkStep (&ring)[kWalkSlots], Load load) {
  PipelineState<Config::kStagesV> state;
  for_each_step(shared, ring, [&](const WalkStep& next) {
    const KvTile tile = next.step.tile;
    const int kv_head = next.kv_head;
    const PipelineBarrier ready = shared.v_ready(state.stage);
    ready.wait_empty(state.phase);
    ready.expect(Config::TileV::kBytes);
    load(shared.v(state.stage), ready.full(), tile, kv_head);
    state.advance();
  });
  ptx::exit_thread();
}

// Consumer warps: call attend(block) for every item.
template <class Shared, class Block, class Attend>
__device__ __forceinline__ void consume_works(const Shared& shared, const QueryWork<Block> (&works)[kWorkSlots],
                                              int lane, Attend attend) {
  for_each_work(shared, works, [&](const Block& block, const PipelineBarrier& ready) {
    attend(block);
    ready.release(lane);
  });
}

// Zeroes the foreign rows of [first, kRows) of a KV tile: they may hold NaN, and 0 * NaN is NaN.
// Every warpgroup zeroes them for itself: two that write the same zeros need not wait for each
// other.
template <class Tile, int kRows, class Foreign>
__device__ __forceinline__ void zero_rows(uint32_t tile, int first, int group, int thread, Foreign is_foreign) {
  constexpr int kChunks = Tile::kPanels * Tile::kPanelChunks;
  for (int index = first * kChunks + thread; index < kRows * kChunks; index += kWarpgroup) {
    const int row = index / kChunks, chunk = index % kChunks;
    if (!is_foreign(row)) continue;
    ptx::store_shared_128(tile + (chunk / Tile::kPanelChunks) * Tile::kPanelBytes + row * Tile::kRowBytes +
                              chunk % Tile::kPanelChunks * 16,
                          make_uint4(0, 0, 0, 0));
  }
  ptx::fence_async_proxy();
  ptx::named_barrier_sync(1 + group, kWarpgroup);
}

// Zeroes all rows after the first `valid` ones.
template <class Tile, int kRows>
__device__ __forceinline__ void zero_tail(uint32_t tile, int valid, int group, int thread) {
  zero_rows<Tile, kRows>(tile, valid, group, thread, [](int) { return true; });
}

}  // namespace dualkv::sm90
