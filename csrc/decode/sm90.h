// SPDX-License-Identifier: BSD-3-Clause
// Hopper decode over pages. A block has a warpgroup of producers, which gather rows of K and V by
// asynchronous copies of 16 bytes, wherever pages lie, and one of consumers, 64 rows of queries:
// the queries and heads of all requests that share an item's keys.
//
//   S = Q K^T;  P = exp(S - max);  O += P V     (as in sm90/forward.h, in its order: the same bits)
//
// The state of a row (O, maximum, sums) passes from item to item through memory. Producers never
// wait for states: while consumers do, the ring fills. Blocks take items in the order of the list,
// in which an item comes after all that it waits for, so that whoever has the first open item can
// finish it: no deadlock, whatever runs at the same time.
#pragma once

#include "decode/rows.h"
#include "ptx/tma.h"
#include "sm90/config.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

// Tensor maps of K and V, with the rows of all pages and boxes of kPageRows rows x one panel. They
// load branches, whose tiles begin with a page: a box takes one thread one instruction, where copies
// of 16 bytes take four warps 14 each, and products need no fence.
struct DecodeMaps {
  CUtensorMap k, v;
  int64_t k_rows, v_rows;  // of a page
  bool exist;              // strides may be such that there are none

  __device__ __forceinline__ bool load(const DecodeItem& item) const { return exist && item.is_branch(); }
};

// An item for one KV head, in a slot of shared memory.
struct DecodeWork {
  DecodeItem item;
  int kv_head;
  int exists;  // 0: the list is over
  int unused[2];
};

// Shared memory: queries, rings of K and V, and in the bytes that alignment leaves, before or after
// them, barriers and items. Two blocks fill a multiprocessor where the head dim lets them.
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
  __device__ __forceinline__ PipelineBarrier queries_ready(int stage) const { return barrier(stage); }
  __device__ __forceinline__ PipelineBarrier k_ready(int stage) const { return barrier(Config::kStagesQ + stage); }
  __device__ __forceinline__ PipelineBarrier v_ready(int stage) const {
    return barrier(Config::kStagesQ + Config::kStagesKv + stage);
  }
  __device__ __forceinline__ PipelineBarrier work_ready(int slot) const { return barrier(kTileStages + slot); }
  __device__ __forceinline__ uint32_t work(int slot) const {
    return rest + (kTileStages + Config::kWorkSlots) * 16 + slot * static_cast<int>(sizeof(DecodeWork));
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = Config::kConsumers * kWarpgroup / 32;
    for (int i = 0; i < kTileStages; ++i) barrier(i).init(kWarps, kWarpgroup);
    for (int i = 0; i < Config::kWorkSlots; ++i) work_ready(i).init(kWarps);
    ptx::mbarrier_init_fence();
  }

 private:
  static constexpr int kTileStages = Config::kStagesQ + 2 * Config::kStagesKv;
  static_assert((kTileStages + Config::kWorkSlots) * 16 + Config::kWorkSlots * sizeof(DecodeWork) <= Config::kRestBytes);
  __device__ __forceinline__ PipelineBarrier barrier(int index) const { return {rest + index * 16}; }
};

// Named barriers of the warpgroups that load and that multiply.
constexpr int kProducersMeet = 1, kConsumersMeet = 2;

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

  __device__ __forceinline__ void load_k(const LocatedPages& at, int kv_head, uint64_t policy) {
    const PipelineBarrier ready = shared.k_ready(k_state.stage);
    ready.wait_empty(k_state.phase);
    rows.copy_k(shared.k(k_state.stage), at, kv_head, policy);
    ptx::cp_async_arrive(ready.full());
    k_state.advance();
  }
  __device__ __forceinline__ void load_v(const LocatedPages& at, int kv_head, uint64_t policy) {
    const PipelineBarrier ready = shared.v_ready(v_state.stage);
    ready.wait_empty(v_state.phase);
    rows.copy_v(shared.v(v_state.stage), at, kv_head, policy);
    ptx::cp_async_arrive(ready.full());
    v_state.advance();
  }
  __device__ __forceinline__ void load_queries(const DecodeItem& item, int kv_head) {
    // Fewer at a time where the producers have 40 registers.
    constexpr int kSteps = decltype(rows)::kQuerySteps / (Config::kConsumers > 1 ? 4 : 1);
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

  // The first kBoxes lanes load one box of the tile each; all threads arrive.
  static constexpr int kSlabs = TileKv::kRows / kPageRows, kBoxes = kSlabs * TileKv::kPanels;
  static_assert(kBoxes <= 32 && TileKv::kRows % kPageRows == 0);
  __device__ __forceinline__ void load_box(PipelineBarrier ready, int phase, uint32_t tile, const CUtensorMap& map,
                                           const FetchedPages& at, int64_t rows_of_page, int kv_head) const {
    const int slab = thread % kSlabs, panel = thread / kSlabs;
    ready.wait_empty(phase);
    if (thread == 0) {
      ready.expect(TileKv::kBytes);
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
      load_box(shared.v_ready(v_state.stage), v_state.phase, shared.v(v_state.stage), maps.v, before, maps.v_rows,
               kv_head);
      v_state.advance();
    };
    for (int step = 0; step < tiles; ++step) {
      const FetchedPages now = next;
      next = fetch(step + 1);
      load_box(shared.k_ready(k_state.stage), k_state.phase, shared.k(k_state.stage), maps.k, now, maps.k_rows,
               kv_head);
      k_state.advance();
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

// The warpgroups that multiply, 64 rows each, on the same tiles.
template <typename T, class Config, bool kSoftcap>
struct DecodeConsumer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  using Softmax = OnlineSoftmax<1, 8>;
  static constexpr int kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;

  const DecodeShared<Config>& shared;
  const DecodeParams<T>& p;
  const DecodeMaps& maps;
  const int lane = threadIdx.x % 32;
  const int first_row = Config::kConsumers > 1 ? (threadIdx.x / kWarpgroup - 1) * kDecodeRows : 0;
  bool is_copied = false;  // the item's tiles come by copies, which products see after a fence
  static constexpr int kThreads = Config::kConsumers * kWarpgroup;
  DecodeRows<T, kHeadDim, Arch::sm90, kThreads> rows{p};
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKv> k_state, v_state;
  using Scores = float[1][kBlockN / 8][4];
  RowProducts<T, TileQ, TileKv, kBlockN / 8, 1> products;
  float o[1][kHeadDim / 8][4];
  uint32_t probabilities[kBlockN / 16][4];

  static __device__ __forceinline__ void meet() { ptx::named_barrier_sync(kConsumersMeet, kThreads); }

  // Copies by other threads are visible behind their barrier, and to products behind a fence, which
  // comes once a step: it is a memory barrier, too.
  __device__ __forceinline__ void wait_k() const { shared.k_ready(k_state.stage).wait_full(k_state.phase); }
  __device__ __forceinline__ void take_scores(Scores& s) {
    products.take(s[0]);
    shared.k_ready(k_state.stage).release(lane);
    k_state.advance();
  }
  __device__ __forceinline__ void wait_v() const {
    shared.v_ready(v_state.stage).wait_full(v_state.phase);
    if (is_copied) ptx::fence_async_proxy();
  }
  __device__ __forceinline__ void release_v() {
    shared.v_ready(v_state.stage).release(lane);
    v_state.advance();
  }

  __device__ __forceinline__ void issue_scores(Scores& s) {
    const uint32_t q = varying(shared.q(q_state.stage) + first_row * TileQ::kRowBytes, k_state.stage);
    ptx::wgmma_fence();
    products.issue(s[0], q, shared.k(k_state.stage));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_output(bool accumulate) {
    const uint32_t v = shared.v(v_state.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, kHeadDim>::template rs<1>(o[0], probabilities[step], along_rows<TileKv>(v, step),
                                              accumulate || step > 0);
    }
    ptx::wgmma_commit();
  }

  struct Rescaling {
    bool moved;
    float factors[1][2];
  };

  // Softcap, mask and softmax. `has_output`: some tile came before, of this item or another.
  __device__ __forceinline__ Rescaling to_probabilities(Scores& s, const DecodeItem& item, const DecodeTile& keys,
                                                        bool has_output, Softmax& softmax) {
    if constexpr (kSoftcap) cap_scores(s[0], p.shape.softcap);
    rows.mask(s, item, keys);
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    Rescaling rescaling;
    rescaling.moved = softmax.raise_maximum(s, scale_log2, rescaling.factors) && has_output;
    if (!has_output) rescaling.factors[0][0] = rescaling.factors[0][1] = 1.f;
    softmax.exponentiate(s, scale_log2, rescaling.factors);
    ptx::pin(s[0]);
    return rescaling;
  }

  // Rounds P, which frees the scores.
  __device__ __forceinline__ void pack(const Scores& s) {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], probabilities[step]);
  }

  __device__ __forceinline__ void attend(const DecodeItem& item, int kv_head) {
    rows.find(item, kv_head);
    is_copied = !Config::kMaps || !maps.load(item);
    Softmax softmax;
    clear(o);
    const bool has_states = item.waits >= 0;
    if (has_states) rows.take(item, kv_head, o, softmax, meet);
    const DecodeWalk walk(item, kBlockN, p.shape.sees);
    const int tiles = walk.tiles();
    if (tiles > 0) {
      if (Config::kConsumers > 1 && first_row >= item.rows) {
        skip(tiles);
      } else {
        multiply(item, walk, tiles, has_states, softmax);
      }
    }
    rows.finish(item, kv_head, o, softmax, meet);
  }

  // This warpgroup has no rows of the item; it releases the tiles, for which the producers wait.
  __device__ __forceinline__ void skip(int tiles) {
    for (int step = 0; step < tiles; ++step) {
      wait_k();
      shared.k_ready(k_state.stage).release(lane);
      k_state.advance();
      wait_v();
      release_v();
    }
    shared.queries_ready(q_state.stage).wait_full(q_state.phase);
    shared.queries_ready(q_state.stage).release(lane);
    q_state.advance();
  }

  // While the softmax of a tile runs, tensor cores have P V of the tile before and, where registers
  // allow it, the scores of the tile after: a lone walk, of a branch, is as long as what nothing
  // overlaps. No product is in flight from one step to the next, or ptxas would let none run beside
  // other instructions.
  __device__ __forceinline__ void multiply(const DecodeItem& item, const DecodeWalk& walk, int tiles, bool has_states,
                                           Softmax& softmax) {
    Scores now, next;
    const auto start_next = [&](int step) {
      if (!Config::kScoresAhead || step + 1 >= tiles) return;
      issue_scores(next);
    };
    const auto wait_next = [&](int step) {
      if (Config::kScoresAhead && step + 1 < tiles) wait_k();
    };
    const auto take_next = [&](int step) {
      if (!Config::kScoresAhead || step + 1 >= tiles) return;
      take_scores(next);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) now[0][j][e] = next[0][j][e];
    };
    shared.queries_ready(q_state.stage).wait_full(q_state.phase);
    wait_k();
    ptx::fence_async_proxy();
    issue_scores(now);
    ptx::wgmma_wait<0>();
    take_scores(now);
    wait_next(0);
    if (is_copied) ptx::fence_async_proxy();
    start_next(0);
    Rescaling rescaling = to_probabilities(now, item, walk.tile(0), has_states, softmax);
    ptx::wgmma_wait<0>();
    if (rescaling.moved) scale_rows(o, rescaling.factors);
    pack(now);
    take_next(0);
    bool accumulate = has_states;
    if (!Config::kScoresAhead && tiles > 1) wait_k();
    for (int step = 1; step < tiles; ++step) {
      wait_next(step);
      wait_v();
      if (!Config::kScoresAhead) issue_scores(now);
      issue_output(accumulate);
      start_next(step);
      accumulate = true;
      if (!Config::kScoresAhead) {
        ptx::wgmma_wait<1>();
        take_scores(now);
      }
      rescaling = to_probabilities(now, item, walk.tile(step), true, softmax);
      // Here, as in sm90/forward.h: the compiler moves nothing across its loop.
      if (!Config::kScoresAhead && step + 1 < tiles) wait_k();
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      release_v();
      if (rescaling.moved) scale_rows(o, rescaling.factors);
      pack(now);
      take_next(step);
    }
    shared.queries_ready(q_state.stage).release(lane);
    q_state.advance();
    wait_v();
    issue_output(accumulate);
    ptx::wgmma_wait<0>();
    ptx::pin(o[0]);
    release_v();
  }

  __device__ __forceinline__ void run() {
    for (PipelineState<Config::kWorkSlots> slot;; slot.advance()) {
      const PipelineBarrier ready = shared.work_ready(slot.stage);
      ready.wait_full(slot.phase);
      const DecodeWork work = load_struct<DecodeWork>(shared.work(slot.stage));
      ready.release(lane);
      if (!work.exists) break;
      attend(work.item, work.kv_head);
    }
    rows.leave(shared.q(0), meet);
  }
};

template <typename T, class Config, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    dualkv_sm90_decode(const __grid_constant__ DecodeParams<T> p, const __grid_constant__ DecodeMaps maps) {
  extern __shared__ uint8_t bytes[];
  const DecodeShared<Config> shared(ptx::shared_address(bytes));
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    if constexpr (Config::kMovesRegisters) ptx::give_registers<Config::kRegisters.producer>();
    DecodeProducer<T, Config>{shared, p, maps}.run();
  } else {
    if constexpr (Config::kMovesRegisters) ptx::take_registers<Config::kRegisters.consumer>();
    DecodeConsumer<T, Config, kSoftcap>{shared, p, maps}.run();
  }
}

}  // namespace dualkv::sm90
