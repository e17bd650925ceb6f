// SPDX-License-Identifier: BSD-3-Clause
// Shared memory of the Hopper kernels of decoding, and the warpgroup that loads: copies of 16 bytes
// wherever pages lie, or tensor maps.
#pragma once

#include <type_traits>

#include "decode/paged_rows.h"
#include "ptx/memory.h"
#include "ptx/tma.h"
#include "sm90/config.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

// Tensor maps of K and V, with the rows of all pages and boxes of kPageRows rows x one panel. They
// load branches, whose tiles begin with a page: a box takes one thread one instruction, where
// copies of 16 bytes take four warps 14 each, and products need no fence.
struct DecodeMaps {
  CUtensorMap k, v;
  int64_t k_rows, v_rows;  // of a page
  bool exist;              // strides may be such that there are none

  __device__ __forceinline__ bool load(const DecodeItem& item) const { return exist && item.is_branch(); }
};

// Panels of a tile of latents that are loaded, and left, together. Part 0 has those of V that the
// two warpgroups of outputs multiply first, part 1 the others and the columns that are K alone. So
// half of a tile is loaded while the other half is still multiplied, and scores begin with part 0.
template <int kPart>
struct LatentPart {
  static constexpr int kCount = 4 + kPart;
  DUALKV_HD static constexpr int turn(int i) { return 2 * kPart + i + (i < 2 ? 0 : 2); }
};

// An item for one KV head, in a slot of shared memory.
struct DecodeWork {
  DecodeItem item;
  int kv_head;
  int exists;  // 0: the list is over
  int unused[2];
};

// Shared memory: queries, rings of K and V, and in the bytes that alignment leaves, before or after
// them, barriers and items. Two blocks fill a multiprocessor where the head dim lets them. Latents
// have one ring, whose tiles are K and V, and P of a tile.
template <class Config>
struct DecodeShared {
  uint32_t tiles, rest;

  explicit __device__ __forceinline__ DecodeShared(uint32_t begin) : tiles((begin + 1023) & ~1023u) {
    rest = tiles - begin >= Config::kRestBytes ? begin : tiles + Config::kTileBytes;
  }
  __device__ __forceinline__ uint32_t q(int stage) const { return tiles + stage * Config::TileQ::kBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return tiles + Config::kOffsetK + stage * Config::TileKv::kBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return tiles + Config::kOffsetV + stage * Config::TileKv::kBytes;
  }
  // Four numbers of a thread's rows, and its P, 16 columns at a time.
  __device__ __forceinline__ uint32_t rows_of(int thread) const { return tiles + Config::kOffsetP + thread * 16; }
  __device__ __forceinline__ uint32_t probabilities(int thread, int step) const {
    return rows_of(thread) + (1 + step) * kWarpgroup * 16;
  }
  __device__ __forceinline__ PipelineBarrier queries_ready(int stage) const { return barrier(stage); }
  __device__ __forceinline__ PipelineBarrier k_ready(int stage, int part = 0) const {
    return barrier(Config::kStagesQ + stage * Config::kParts + part);
  }
  __device__ __forceinline__ PipelineBarrier v_ready(int stage) const { return barrier(kAfterK + stage); }
  __device__ __forceinline__ PipelineBarrier probabilities_ready() const { return v_ready(0); }
  __device__ __forceinline__ PipelineBarrier work_ready(int slot) const { return barrier(kTileStages + slot); }
  __device__ __forceinline__ uint32_t work(int slot) const {
    return rest + (kTileStages + Config::kWorkSlots) * 16 + slot * static_cast<int>(sizeof(DecodeWork));
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kTileStages; ++i) {
      const bool has_queries = i < Config::kStagesQ, is_loaded = !Config::kLatents || i < kAfterK;
      barrier(i).init(has_queries ? Config::kScoreWarps : Config::kOutputWarps,
                      is_loaded ? kWarpgroup : Config::kScoreWarps);
    }
    for (int i = 0; i < Config::kWorkSlots; ++i) work_ready(i).init(Config::kConsumers * kWarpgroup / 32);
    ptx::mbarrier_init_fence();
  }

 private:
  static constexpr int kAfterK = Config::kStagesQ + Config::kStagesKv * Config::kParts;
  static constexpr int kTileStages = kAfterK + (Config::kLatents ? 1 : Config::kStagesKv);
  static_assert((kTileStages + Config::kWorkSlots) * 16 + Config::kWorkSlots * sizeof(DecodeWork) <= Config::kRestBytes);
  __device__ __forceinline__ PipelineBarrier barrier(int index) const { return {rest + index * 16}; }
};

// Named barriers of the warpgroups that load, that multiply, and of latents that make scores.
constexpr int kProducersMeet = 1, kConsumersMeet = 2, kScoresMeet = 3;

// Words of a struct, to and from shared memory.
template <typename Struct>
__device__ __forceinline__ void store_struct(uint32_t address, const Struct& value) {
  static_assert(sizeof(Struct) % 16 == 0);
  uint4 words[sizeof(Struct) / 16];
  memcpy(words, &value, sizeof(Struct));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Struct) / 16); ++i) ptx::store_shared_128(address + i * 16, words[i]);
}
template <typename Struct>
__device__ __forceinline__ Struct load_struct(uint32_t address) {
  uint4 words[sizeof(Struct) / 16];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Struct) / 16); ++i) words[i] = ptx::load_shared_128(address + i * 16);
  Struct value;
  memcpy(&value, words, sizeof(Struct));
  return value;
}

// Consumers: calls attend(work) for each item of the block.
template <class Config, class Attend>
__device__ __forceinline__ void each_work(const DecodeShared<Config>& shared, int lane, Attend attend) {
  for (PipelineState<Config::kWorkSlots> slot;; slot.advance()) {
    const PipelineBarrier ready = shared.work_ready(slot.stage);
    ready.wait_full(slot.phase);
    const DecodeWork work = load_struct<DecodeWork>(shared.work(slot.stage));
    ready.release(lane);
    if (!work.exists) return;
    attend(work);
  }
}

// The warpgroup that loads.
template <typename T, class Config>
struct DecodeProducer {
  using TileKv = typename Config::TileKv;

  const DecodeShared<Config>& shared;
  const DecodeParams<T>& p;
  const DecodeMaps& maps;
  const int thread = threadIdx.x;
  const PagedRows<T, typename Config::TileQ, typename Config::TileKv> rows{p};
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKv> k_state, v_state;

  // Calls load(panels, barrier) for each part of the next tile of K.
  template <class Load>
  __device__ __forceinline__ void each_part(Load load) {
    if constexpr (Config::kLatents) {
      static_assert(Config::kParts == 2 && TileKv::kPanels == 9, "as LatentPart has them");
      load(LatentPart<0>(), shared.k_ready(k_state.stage, 0));
      load(LatentPart<1>(), shared.k_ready(k_state.stage, 1));
    } else {
      load(AllTurns<TileKv::kPanels>(), shared.k_ready(k_state.stage));
    }
    k_state.advance();
  }
  __device__ __forceinline__ void load_k(const LocatedPages& at, int kv_head, uint64_t policy) {
    each_part([&](auto part, const PipelineBarrier& ready) {
      using Turns = std::conditional_t<Config::kLatents, decltype(part), AllTurns<decltype(rows)::kTurns>>;
      ready.wait_empty(k_state.phase);
      rows.template copy_k<Turns>(shared.k(k_state.stage), at, kv_head, policy);
      ptx::cp_async_arrive(ready.full());
    });
  }
  __device__ __forceinline__ void load_v(const LocatedPages& at, int kv_head, uint64_t policy) {
    if constexpr (Config::kLatents) return;
    const PipelineBarrier ready = shared.v_ready(v_state.stage);
    ready.wait_empty(v_state.phase);
    rows.copy_v(shared.v(v_state.stage), at, kv_head, policy);
    ptx::cp_async_arrive(ready.full());
    v_state.advance();
  }
  __device__ __forceinline__ void load_queries(const DecodeItem& item, int kv_head) {
    // At most four at a time where the producers have 40 registers.
    constexpr int kSteps = min_int(decltype(rows)::kQuerySteps, Config::kConsumers > 1 ? 4 : kDecodeRows);
    constexpr int kFound = kSteps * decltype(rows)::kRowsAtOnce;
    int found[kSteps];
    rows.find_queries(item, found);
    const PipelineBarrier ready = shared.queries_ready(q_state.stage);
    ready.wait_empty(q_state.phase);
    rows.copy_queries(shared.q(q_state.stage), item, kv_head, found);
#pragma unroll 1
    for (int first = kFound; first < min_int(Config::kRows, item.rows); first += kFound) {
      rows.find_queries(item, found, first);
      rows.copy_queries(shared.q(q_state.stage), item, kv_head, found, first);
    }
    ptx::cp_async_arrive(ready.full());
    q_state.advance();
  }

  // The first lanes load one box of the panels each; all threads arrive.
  static constexpr int kSlabs = TileKv::kRows / kPageRows;
  template <class Panels>
  __device__ __forceinline__ void load_box(Panels, PipelineBarrier ready, int phase, uint32_t tile,
                                           const CUtensorMap& map, const FetchedPages& at, int64_t rows_of_page,
                                           int kv_head) const {
    constexpr int kBoxes = kSlabs * Panels::kCount;
    static_assert(kBoxes <= 32 && TileKv::kRows % kPageRows == 0);
    const int slab = thread % kSlabs, panel = Panels::turn(thread / kSlabs);
    ready.wait_empty(phase);
    if (thread == 0) {
      ready.expect(Panels::kCount * TileKv::kPanelBytes);
    } else {
      ptx::mbarrier_arrive(ready.full());
    }
    __syncwarp();
    if (thread >= kBoxes) return;
    ptx::tma_load_3d(tile + panel * TileKv::kPanelBytes + slab * (kPageRows * TileKv::kRowBytes), map, ready.full(),
                     panel * TileKv::kPanelCols, kv_head, rows.row_of(at, rows_of_page));
  }
  __device__ __forceinline__ void load_boxes(const DecodeItem& item, int kv_head, const DecodeWalk& walk, int tiles) {
    const auto fetch = [&](int step) {  // the first warp's
      return thread < 32 && step < tiles ? rows.fetch(item.request, walk.tile(step), thread % kSlabs) : FetchedPages{};
    };
    FetchedPages next = fetch(0), before{};
    load_queries(item, kv_head);
    const auto load_v = [&] {
      if constexpr (!Config::kLatents) {
        load_box(AllTurns<TileKv::kPanels>(), shared.v_ready(v_state.stage), v_state.phase, shared.v(v_state.stage),
                 maps.v, before, maps.v_rows, kv_head);
        v_state.advance();
      }
    };
    for (int step = 0; step < tiles; ++step) {
      const FetchedPages now = next;
      next = fetch(step + 1);
      each_part([&](auto panels, const PipelineBarrier& ready) {
        load_box(panels, ready, k_state.phase, shared.k(k_state.stage), maps.k, now, maps.k_rows, kv_head);
      });
      if (step > 0) load_v();
      before = now;
    }
    load_v();
  }

  // Loads K of a tile before V of the previous one: scores are one tile ahead.
  __device__ __forceinline__ void load(const DecodeItem& item, int kv_head) {
    const DecodeWalk walk(item, Config::kBlockN, p.shape.sees);
    const int tiles = walk.tiles();
    if (tiles == 0) return;
    if constexpr (Config::kMaps) {
      if (maps.load(item)) return load_boxes(item, kv_head, walk, tiles);
    }
    const uint64_t policy = rows.policy_of(item);
    FetchedPages next = rows.fetch(item.request, walk.tile(0));
    load_queries(item, kv_head);
    LocatedPages before{};
    for (int step = 0; step < tiles; ++step) {
      const LocatedPages now = rows.locate(next);
      if (step + 1 < tiles) next = rows.fetch(item.request, walk.tile(step + 1));
      load_k(now, kv_head, policy);
      if (step > 0) load_v(before, kv_head, policy);
      before = now;
    }
    load_v(before, kv_head, policy);
  }

  // The first thread takes items: the next one while the others still load. A split of an item that
  // folds is loaded, and multiplied, as an item of its own.
  __device__ __forceinline__ void run() {
    const unsigned kv_heads = p.shape.num_kv_heads, works = *p.count * kv_heads;
    // Also the first item. One that belonged to a block by its number would wait for that block to
    // start, while running blocks wait for the item and leave it no room: a deadlock beside another
    // launch.
    const auto take = [&] { return static_cast<unsigned>(atomicAdd(p.progress.next, 1)); };
    unsigned index = thread == 0 ? take() : 0;
    int step = 0;
    for (PipelineState<Config::kWorkSlots> slot;; slot.advance()) {
      const PipelineBarrier ready = shared.work_ready(slot.stage);
      if (thread == 0) {
        DecodeWork work{};
        work.exists = index < works;
        if (work.exists) {
          work.item = p.items[index / kv_heads];
          work.kv_head = static_cast<int>(index % kv_heads);
          if (work.item.folds > 0) work.item = p.splits.step(work.item, step, Config::kBlockN);
          step = step + 1 < work.item.folds ? step + 1 : 0;
          if (step == 0) index = take();
        }
        ready.wait_empty(slot.phase);
        store_struct(shared.work(slot.stage), work);
        ptx::mbarrier_arrive(ready.full());
      }
      ptx::named_barrier_sync(kProducersMeet, kWarpgroup);
      const DecodeWork work = load_struct<DecodeWork>(shared.work(slot.stage));
      if (!work.exists) return;
      load(work.item, work.kv_head);
    }
  }
};

}  // namespace dualkv::sm90
