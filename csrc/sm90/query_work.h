// SPDX-License-Identifier: BSD-3-Clause
// Work scheduling of persistent blocks that own query tiles. A scheduler thread takes items from
// the list (three dependent reads) and loads their queries, while the producer thread is still
// loading the KV tiles of the previous item. Items are passed in slots in shared memory, each with
// a full and an empty barrier. The geometry of a KV tile is passed along with its K.
#pragma once

#include "kernels/query_block.h"
#include "sm90/maps.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

// Items of the consumers, of the producer, and the next one.
constexpr int kWorkSlots = 3;

// Roles of the first warpgroup: warp 0 has the producer, warp 1 the scheduler. All other threads
// exit first, so that the compiler knows each of the two to be alone in its warp; otherwise it
// keeps none of their state in uniform registers, and spills.
enum class QueryRole { none, produce, hand_out };
__device__ __forceinline__ QueryRole query_role() {
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x % 32 > 0 || warp > 1) return QueryRole::none;
  return warp == 0 ? QueryRole::produce : QueryRole::hand_out;
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
  __device__ __forceinline__ PipelineBarrier queries_ready(int stage) const { return pipeline_barrier(stage); }
  __device__ __forceinline__ PipelineBarrier k_ready(int stage) const {
    return pipeline_barrier(Config::kStagesQ + stage);
  }
  __device__ __forceinline__ PipelineBarrier v_ready(int stage) const {
    return pipeline_barrier(Config::kStagesQ + Config::kStagesK + stage);
  }
  __device__ __forceinline__ PipelineBarrier work_ready(int slot) const { return pipeline_barrier(kTileStages + slot); }
  // Signals that the producer has started an item.
  __device__ __forceinline__ uint32_t work_begun() const { return pipeline_barrier(kTileStages + kWorkSlots).barrier; }

  __device__ __forceinline__ void init_barriers() const {
    for (int index = 0; index < kTileStages + kWorkSlots; ++index) pipeline_barrier(index).init(Config::kConsumers * 4);
    ptx::mbarrier_init(work_begun(), 1);
    ptx::mbarrier_init_fence();
  }

 private:
  static constexpr int kTileStages = Config::kStagesQ + Config::kStagesK + Config::kStagesV;
};

struct QueryWork {
  QueryBlock block;
  int valid;  // 0: end of the list
};

// Scheduler thread. Writes items into one slot after the other, once the consumers have released
// it, and loads the queries by load(stage, barrier, block). An item is taken when the producer
// starts the previous one, no earlier: an item that waits could start on another block. The end of
// the list is published as an invalid item.
template <class Config, class Shared, class Params, class Load>
__device__ __forceinline__ void hand_out_works(const Shared& shared, const Params& p, QueryWork (&works)[kWorkSlots],
                                               QueryTiling tiling, Load load) {
  const int items = *p.work.count;
  int index = blockIdx.x;
  PipelineState<Config::kStagesQ> queries;
  PipelineState<1> begun;
  for (PipelineState<kWorkSlots> state;; state.advance()) {
    const PipelineBarrier ready = shared.work_ready(state.stage);
    QueryWork& work = works[state.stage];
    ready.wait_empty(state.phase);
    const bool exists = QueryBlock::exists(index, items, p.shape, tiling.heads);
    work.valid = exists;
    if (exists) work.block.load(index, items, p.work, p.nodes, p.shape, tiling);
    ptx::mbarrier_arrive(ready.full());
    if (!exists) return;
    const PipelineBarrier queries_ready = shared.queries_ready(queries.stage);
    queries_ready.wait_empty(queries.phase);
    load(queries.stage, queries_ready, work.block);
    queries.advance();
    ptx::mbarrier_wait(shared.work_begun(), begun.phase);
    begun.advance();
    index = gridDim.x + atomicAdd(p.work.next, 1);
  }
}

// Producer: loads K of the walk's current tile by load(address, barrier, tile). The copies are
// issued before the step is written: no consumer reads it before this thread arrives.
template <class Config, class Shared, class Walk, class Load>
__device__ __forceinline__ KvStep load_k_step(const Shared& shared, KvStep (&steps)[Config::kStagesK],
                                              const Walk& path, const NodeTable& nodes, int group, Visibility sees,
                                              PipelineState<Config::kStagesK>& state, Load load) {
  const KvStep step = path.step(nodes, Config::kBlockN, group, sees);
  const PipelineBarrier ready = shared.k_ready(state.stage);
  ready.wait_empty(state.phase);
  load(shared.k(state.stage), ready.full(), step.tile);
  steps[state.stage] = step;
  ready.expect(Config::TileK::kBytes);
  state.advance();
  return step;
}

// Producer: loads V of a tile.
template <class Config, class Shared, class Load>
__device__ __forceinline__ void load_v_tile(const Shared& shared, const KvTile& tile,
                                            PipelineState<Config::kStagesV>& state, Load load) {
  const PipelineBarrier ready = shared.v_ready(state.stage);
  ready.wait_empty(state.phase);
  ready.expect(Config::TileV::kBytes);
  load(shared.v(state.stage), ready.full(), tile);
  state.advance();
}

// Calls body(block, barrier of its slot) for every item of the list.
template <class Shared, class Body>
__device__ __forceinline__ void for_each_work(const Shared& shared, const QueryWork (&works)[kWorkSlots], Body body) {
  for (PipelineState<kWorkSlots> state;; state.advance()) {
    const PipelineBarrier ready = shared.work_ready(state.stage);
    ready.wait_full(state.phase);
    if (!works[state.stage].valid) return;
    body(works[state.stage].block, ready);
  }
}

// Producer: calls load(block) for every item.
template <class Shared, class Load>
__device__ __forceinline__ void produce_works(const Shared& shared, const QueryWork (&works)[kWorkSlots], Load load) {
  for_each_work(shared, works, [&](const QueryBlock& block, const PipelineBarrier&) {
    ptx::mbarrier_arrive(shared.work_begun());
    load(block);
  });
}

// Consumer warps: call attend(block) for every item.
template <class Shared, class Attend>
__device__ __forceinline__ void consume_works(const Shared& shared, const QueryWork (&works)[kWorkSlots], int lane,
                                              Attend attend) {
  for_each_work(shared, works, [&](const QueryBlock& block, const PipelineBarrier& ready) {
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
