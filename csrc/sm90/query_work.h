// How the producer thread of a persistent block hands items of the work list (query tiles) to its consumers: through
// two slots in shared memory, each with a barrier for "filled" and one for "emptied". The KV tiles of an item follow one
// by one: what a consumer must know of a tile travels with its K.
#pragma once

#include "core/query_block.h"
#include "sm90/maps.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

// Addresses in shared memory: the queries first, then rings of K and V.
template <class Config>
struct QueryShared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + Config::kOffsetK + stage * Config::TileK::kBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + Config::kOffsetV + stage * Config::TileV::kBytes;
  }
  __device__ __forceinline__ Handshake handshake(int index) const {
    return {base + Config::kOffsetBarriers + index * 16};
  }
  __device__ __forceinline__ Handshake queries_ready() const { return handshake(0); }
  __device__ __forceinline__ Handshake k_ready(int stage) const { return handshake(1 + stage); }
  __device__ __forceinline__ Handshake v_ready(int stage) const { return handshake(1 + Config::kStagesK + stage); }
  __device__ __forceinline__ Handshake work_ready(int slot) const {
    return handshake(1 + Config::kStagesK + Config::kStagesV + slot);
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kHandshakes = 1 + Config::kStagesK + Config::kStagesV + 2;
    for (int index = 0; index < kHandshakes; ++index) handshake(index).init(Config::kConsumers * 4);
    ptx::mbarrier_init_fence();
  }
};

struct QueryWork {
  QueryBlock block;
  int valid;  // 0: the list has ended
};

// Producer: writes item `index` of the list into the next slot, once the consumers have left it, and lets them have it.
// Behind the end of the list it tells them so and returns null.
template <class Config, class Shared, class Params>
__device__ __forceinline__ const QueryBlock* hand_out_work(const Shared& shared, const Params& p,
                                                          QueryWork (&works)[2], PipelineState<2>& state, int index,
                                                          int items, QueryTiling tiling) {
  const Handshake ready = shared.work_ready(state.stage);
  QueryWork& work = works[state.stage];
  ready.wait_empty(state.phase);
  work.valid = QueryBlock::exists(index, items, p.shape, tiling.heads);
  if (work.valid) work.block.load(index, items, p.work, p.nodes, p.shape, tiling);
  ptx::mbarrier_arrive(ready.full());
  state.advance();
  return work.valid ? &work.block : nullptr;
}

// Producer: loads the K of the walk's current tile by load(address, barrier, tile). The copies first: the step may follow
// while they are under way, for nobody reads it before this thread arrives.
template <class Config, class Shared, class Walk, class Load>
__device__ __forceinline__ KvStep load_k_step(const Shared& shared, KvStep (&steps)[Config::kStagesK],
                                              const Walk& path, const NodeTable& nodes, int group, Visibility sees,
                                              PipelineState<Config::kStagesK>& state, Load load) {
  const KvStep step = path.step(nodes, Config::kBlockN, group, sees);
  const Handshake ready = shared.k_ready(state.stage);
  ready.wait_empty(state.phase);
  load(shared.k(state.stage), ready.full(), step.tile);
  steps[state.stage] = step;
  ready.expect(Config::TileK::kBytes);
  state.advance();
  return step;
}

// The same for V of a tile.
template <class Config, class Shared, class Load>
__device__ __forceinline__ void load_v_tile(const Shared& shared, const KvTile& tile,
                                            PipelineState<Config::kStagesV>& state, Load load) {
  const Handshake ready = shared.v_ready(state.stage);
  ready.wait_empty(state.phase);
  ready.expect(Config::TileV::kBytes);
  load(shared.v(state.stage), ready.full(), tile);
  state.advance();
}

// Consumers: calls body(block) for every item, until the list ends.
template <class Shared, class Body>
__device__ __forceinline__ void for_each_work(const Shared& shared, const QueryWork (&works)[2], int lane, Body body) {
  for (PipelineState<2> state;; state.advance()) {
    const Handshake ready = shared.work_ready(state.stage);
    ready.wait_full(state.phase);
    if (!works[state.stage].valid) return;
    body(works[state.stage].block);
    ready.release(lane);
  }
}

// Zeroes those of the rows [first, kRows) of a KV tile that are foreign. They may hold NaN, and where a tile is an operand
// 0 * NaN is NaN. Every warpgroup zeroes them for itself: two that write the same zeros need not wait for each other.
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

// Of a tile whose first `valid` rows are keys.
template <class Tile, int kRows>
__device__ __forceinline__ void zero_tail(uint32_t tile, int valid, int group, int thread) {
  zero_rows<Tile, kRows>(tile, valid, group, thread, [](int) { return true; });
}

}  // namespace dualkv::sm90
