// SPDX-License-Identifier: BSD-3-Clause
// Hopper decode over pages. A block has a warpgroup of producers, which gather rows of K and V by
// asynchronous copies of 16 bytes, wherever pages lie, and one of consumers, 64 rows of queries:
// the queries and heads of all requests that share an item's keys.
//
//   S = Q K^T;  P = exp(S - max);  O += P V        (as in forward.h, in its order: the same bits)
//
// The state of a row (O, maximum, sums) passes from item to item through memory. Producers never
// wait for states: while consumers do, the ring fills. Blocks take items in the order of the list,
// in which an item comes after all that it waits for, so that whoever has the first open item can
// finish it: no deadlock, whatever runs at the same time.
#pragma once

#include "decode_params.h"
#include "ptx/cp_async.h"
#include "sm90/config.h"
#include "sm90/tile.h"
#include "tile/mask.h"
#include "tile/online_softmax.h"

namespace dualkv::sm90 {

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
    for (int i = 0; i < kTileStages; ++i) barrier(i).init(kWarpgroup / 32, kWarpgroup);
    for (int i = 0; i < Config::kWorkSlots; ++i) work_ready(i).init(kWarpgroup / 32);
    ptx::mbarrier_init_fence();
  }

 private:
  static constexpr int kTileStages = Config::kStagesQ + 2 * Config::kStagesKv;
  static_assert((kTileStages + Config::kWorkSlots) * 16 + Config::kWorkSlots * sizeof(DecodeWork) <= Config::kRestBytes);
  __device__ __forceinline__ PipelineBarrier barrier(int index) const { return {rest + index * 16}; }
};

// Named barriers of the two warpgroups.
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

// The warpgroup that loads. A thread copies one 16-byte chunk of every kRowsAtOnce-th row.
template <typename T, class Config>
struct DecodeProducer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  static constexpr int kBlockN = Config::kBlockN, kChunks = Config::kHeadDim / 8, kRowsAtOnce = kWarpgroup / kChunks;

  const DecodeShared<Config>& shared;
  const DecodeParams<T>& p;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int chunk = thread % kChunks, row0 = thread / kChunks;
  const int slabs = p.table.page_size / kPageRows;
  const float slabs_inverse = 1.f / slabs;
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKv> k_state, v_state;

  // A tile, and the page table's entry for the lane-th 16 rows of pages that it touches. It is read a
  // step before it is needed, and nothing is computed from it until then: threads issue in order, and
  // would wait for it.
  struct Fetched {
    DecodeTile tile;
    int entry, row;  // row: the first of the 16 in its page
  };
  // The same with the offsets of that row in K and in V.
  struct Located {
    DecodeTile tile;
    int64_t k, v;
  };

  __device__ __forceinline__ Fetched fetch(int request, const DecodeTile& tile) const {
    const int slab = tile.position / kPageRows + lane;
    // Exact below 2^21 slabs, and a fifth of an integer division.
    const int column = static_cast<int>((slab + 0.5f) * slabs_inverse);
    return {tile, p.table.entry(request, column), (slab - column * slabs) * kPageRows};
  }
  __device__ __forceinline__ Located locate(const Fetched& at) const {
    const int page = p.table.page_of(at.entry);
    return {at.tile, page * p.k.page_stride + at.row * p.k.row_stride,
            page * p.v.page_stride + at.row * p.v.row_stride};
  }

  static __device__ __forceinline__ uint32_t place(uint32_t tile, int row, int chunk, int panel_bytes) {
    return tile + chunk / TileKv::kPanelChunks * panel_bytes + TileKv::chunk_offset(row, chunk % TileKv::kPanelChunks);
  }

  // Goes along the 16-row slabs of pages, which the tile's rows need not begin with: a thread's row
  // in the tile, and with it its place in the swizzle, is the same in every slab but for the slab's
  // number. So a copy takes six instructions, where addresses row by row took 26: one warp a scheduler
  // issues 10 copies of a tile, and their latency was longer than that of memory. Rows of a page
  // after the last key are never read: the tile gets zeros for them.
  __device__ __forceinline__ void copy_rows(uint32_t tile, const PagedTensor<const T>& from, int64_t offset,
                                            const DecodeTile& keys, int kv_head, uint32_t barrier) const {
    constexpr int kCopies = kPageRows / kRowsAtOnce;  // of a slab, by each thread
    const int first_row = row0 - keys.position % kPageRows;
    const T* const source = from.data + kv_head * from.head_stride + chunk * 8 + row0 * from.row_stride;
    uint32_t places[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) places[i] = place(tile, first_row + i * kRowsAtOnce, chunk, TileKv::kPanelBytes);
#pragma unroll
    for (int slab = 0; slab <= kBlockN / kPageRows; ++slab) {
      const T* row_source = source + __shfl_sync(0xffffffffu, offset, slab);
#pragma unroll
      for (int i = 0; i < kCopies; ++i, row_source += kRowsAtOnce * from.row_stride) {
        const int row = first_row + slab * kPageRows + i * kRowsAtOnce;
        if (static_cast<unsigned>(row) >= kBlockN) continue;
        ptx::cp_async_16(places[i] + slab * (kPageRows * TileKv::kRowBytes), row_source, row < keys.valid);
      }
    }
    ptx::cp_async_arrive(barrier);
  }

  __device__ __forceinline__ void load_k(const Located& at, int kv_head) {
    const PipelineBarrier ready = shared.k_ready(k_state.stage);
    ready.wait_empty(k_state.phase);
    copy_rows(shared.k(k_state.stage), p.k, at.k, at.tile, kv_head, ready.full());
    k_state.advance();
  }
  __device__ __forceinline__ void load_v(const Located& at, int kv_head) {
    const PipelineBarrier ready = shared.v_ready(v_state.stage);
    ready.wait_empty(v_state.phase);
    copy_rows(shared.v(v_state.stage), p.v, at.v, at.tile, kv_head, ready.full());
    v_state.advance();
  }

  // Rows after the item's keep what they had: they are computed and never stored.
  __device__ __forceinline__ void load_queries(const DecodeItem& item, int kv_head) {
    constexpr int kSteps = kDecodeRows / kRowsAtOnce;
    const int heads = p.shape.heads_per_group();
    int rows[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = row0 + i * kRowsAtOnce;
      rows[i] = row < item.rows ? p.query(item.row + row) : 0;
    }
    const PipelineBarrier ready = shared.queries_ready(q_state.stage);
    ready.wait_empty(q_state.phase);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = row0 + i * kRowsAtOnce;
      if (row >= item.rows) continue;
      const T* const source = p.q.at(rows[i], kv_head * heads + (item.row + row) % heads) + chunk * 8;
      ptx::cp_async_16(place(shared.q(q_state.stage), row, chunk, TileQ::kPanelBytes), source, true);
    }
    ptx::cp_async_arrive(ready.full());
    q_state.advance();
  }

  // Loads K of a tile before V of the previous one: scores are one tile ahead.
  __device__ __forceinline__ void load(const DecodeItem& item, int kv_head) {
    const DecodeWalk walk(item, kBlockN, p.shape.sees);
    const int tiles = walk.tiles();
    if (tiles == 0) return;
    Fetched next = fetch(item.request, walk.tile(0));
    load_queries(item, kv_head);
    Located before{};
    for (int step = 0; step < tiles; ++step) {
      const Located now = locate(next);
      if (step + 1 < tiles) next = fetch(item.request, walk.tile(step + 1));
      load_k(now, kv_head);
      if (step > 0) load_v(before, kv_head);
      before = now;
    }
    load_v(before, kv_head);
  }

  // The first thread takes items: the next one while the others still load.
  __device__ __forceinline__ void run() {
    const unsigned kv_heads = p.shape.num_kv_heads, works = *p.count * kv_heads;
    unsigned index = blockIdx.x;
    for (PipelineState<Config::kWorkSlots> slot;; slot.advance()) {
      const PipelineBarrier ready = shared.work_ready(slot.stage);
      if (thread == 0) {
        DecodeWork work{};
        work.exists = index < works;
        if (work.exists) {
          work.item = p.items[index / kv_heads];
          work.kv_head = static_cast<int>(index % kv_heads);
          index = gridDim.x + atomicAdd(p.progress.next, 1);
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

// The warpgroup that multiplies.
template <typename T, class Config, bool kSoftcap>
struct DecodeConsumer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  using Softmax = OnlineSoftmax<1, 8>;
  static constexpr int kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;

  const DecodeShared<Config>& shared;
  const DecodeParams<T>& p;
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int row0 = thread / 32 * 16 + lane / 4;  // this thread's first row, and 8 after it the other

  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKv> k_state, v_state;
  float s[1][kBlockN / 8][4];
  RowProducts<T, TileQ, TileKv, kBlockN / 8, 1> scores;
  float o[1][kHeadDim / 8][4];
  uint32_t probabilities[kBlockN / 16][4];
  int slot[2];  // of the thread's rows: row of q * num_heads + head; -1: none

  // Copies by other threads are visible behind their barrier, and to products behind a fence, which
  // comes once a step: it is a memory barrier, too.
  __device__ __forceinline__ void wait_k() const { shared.k_ready(k_state.stage).wait_full(k_state.phase); }
  __device__ __forceinline__ void release_k() {
    shared.k_ready(k_state.stage).release(lane);
    k_state.advance();
  }
  __device__ __forceinline__ void wait_v() const {
    shared.v_ready(v_state.stage).wait_full(v_state.phase);
    ptx::fence_async_proxy();
  }
  __device__ __forceinline__ void release_v() {
    shared.v_ready(v_state.stage).release(lane);
    v_state.advance();
  }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t q = varying(shared.q(q_state.stage), k_state.stage);
    ptx::wgmma_fence();
    scores.issue(s[0], q, shared.k(k_state.stage));
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

  // Applies softcap and mask.
  __device__ __forceinline__ void mask(const DecodeItem& item, const DecodeTile& keys) {
    if constexpr (kSoftcap) cap_scores(s[0], p.shape.softcap);
    const Visibility sees = p.shape.sees;
    const KvTile tile{Region::keys, 0, keys.position, keys.valid};
    const bool hides_end = end_column(tile, item.q_pos, sees) < kBlockN;
    if (!hides_end && !sees.has_window()) return;
    const int heads = p.shape.heads_per_group(), offset = item.row % heads;
    const auto position = [&](int row) { return item.q_pos + (offset + row) / heads; };
    const auto first = [&](int row) { return first_column(tile, position(row), sees); };
    const auto end = [&](int row) { return end_column(tile, position(row), sees); };
    if (hides_end) mask_fragment(s, row0, lane % 4 * 2, -CUDART_INF_F, end);
    if (sees.has_window() && first(item.rows - 1) > 0) mask_front(s, row0, lane % 4 * 2, -CUDART_INF_F, first);
  }

  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], probabilities[step]);
  }

  __device__ __forceinline__ void find_rows(const DecodeItem& item, int kv_head) {
    const int heads = p.shape.heads_per_group();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + half * 8, head = kv_head * heads + (item.row + row) % heads;
      slot[half] = row < item.rows ? p.query(item.row + row) * p.shape.num_heads + head : -1;
    }
  }

  // A thread's columns of a row are neighbours in memory, so that a quad moves 64 bytes at a time.
  __device__ __forceinline__ float* state_of(int half) const {
    return p.states.out + int64_t{slot[half]} * kHeadDim + lane % 4 * (kHeadDim / 4);
  }
  __device__ __forceinline__ float* statistics_of(int half) const {
    return p.states.statistics + int64_t{slot[half]} * 8;
  }

  __device__ __forceinline__ void take_states(const DecodeItem& item, int kv_head, Softmax& softmax) {
    if (thread == 0) {
      ptx::wait_arrived(p.progress.arrived + item.waits * p.shape.num_kv_heads + kv_head, item.arrivals);
    }
    ptx::named_barrier_sync(kConsumersMeet, kWarpgroup);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slot[half] < 0) continue;
      const float* const from = state_of(half);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 2) {
        const float4 part = *reinterpret_cast<const float4*>(from + j * 2);
        o[0][j][2 * half] = part.x, o[0][j][2 * half + 1] = part.y;
        o[0][j + 1][2 * half] = part.z, o[0][j + 1][2 * half + 1] = part.w;
      }
      softmax.row_sum[0][half] = statistics_of(half)[lane % 4];
      softmax.row_max[0][half] = statistics_of(half)[4];
    }
  }

  __device__ __forceinline__ void hand_over(const DecodeItem& item, int kv_head, const Softmax& softmax) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slot[half] < 0) continue;
      float* const to = state_of(half);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 2) {
        *reinterpret_cast<float4*>(to + j * 2) = make_float4(o[0][j][2 * half], o[0][j][2 * half + 1],
                                                             o[0][j + 1][2 * half], o[0][j + 1][2 * half + 1]);
      }
      statistics_of(half)[lane % 4] = softmax.row_sum[0][half];
      if (lane % 4 == 0) statistics_of(half)[4] = softmax.row_max[0][half];
    }
    ptx::named_barrier_sync(kConsumersMeet, kWarpgroup);
    if (thread == 0) ptx::arrive(p.progress.arrived + item.signals * p.shape.num_kv_heads + kv_head);
  }

  __device__ __forceinline__ void store(Softmax& softmax) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = max_int(slot[half], 0) / p.shape.num_heads, head = max_int(slot[half], 0) % p.shape.num_heads;
      float lse;
      const float inverse_sum = softmax.finish(0, half, p.shape.softmax_scale, p.sink(head), lse);
      if (lane % 4 == 0 && slot[half] >= 0) p.lse[static_cast<int64_t>(head) * p.shape.q_rows + row] = lse;
      store_row<T>(o[0], half, inverse_sum, p.out.at(row, head), 0, slot[half] >= 0 ? kHeadDim : 0, lane);
    }
  }

  __device__ __forceinline__ void attend(const DecodeItem& item, int kv_head) {
    find_rows(item, kv_head);
    Softmax softmax;
    clear(o);
    const bool has_states = item.waits >= 0;
    if (has_states) take_states(item, kv_head, softmax);
    const DecodeWalk walk(item, kBlockN, p.shape.sees);
    const int tiles = walk.tiles();
    if (tiles > 0) multiply(item, walk, tiles, has_states, softmax);
    item.signals >= 0 ? hand_over(item, kv_head, softmax) : store(softmax);
  }

  __device__ __forceinline__ void multiply(const DecodeItem& item, const DecodeWalk& walk, int tiles, bool has_states,
                                           Softmax& softmax) {
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    float rescale[1][2];
    shared.queries_ready(q_state.stage).wait_full(q_state.phase);
    wait_k();
    ptx::fence_async_proxy();
    issue_scores();
    ptx::wgmma_wait<0>();
    scores.take(s[0]);
    release_k();
    mask(item, walk.tile(0));
    softmax.raise_maximum(s, scale_log2, rescale);
    if (has_states) {
      softmax.exponentiate(s, scale_log2, rescale);
      scale_rows(o, rescale);
    } else {
      softmax.exponentiate(s, scale_log2);
    }
    pack_probabilities();
    bool accumulate = has_states;
    if (tiles > 1) wait_k();
    for (int step = 1; step < tiles; ++step) {
      wait_v();
      issue_scores();
      issue_output(accumulate);
      accumulate = true;
      ptx::wgmma_wait<1>();
      scores.take(s[0]);
      release_k();
      mask(item, walk.tile(step));
      const bool moved = softmax.raise_maximum(s, scale_log2, rescale);
      softmax.exponentiate(s, scale_log2, rescale);
      ptx::pin(s[0]);
      if (step + 1 < tiles) wait_k();  // here, as in forward.h: the compiler moves nothing across its loop
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      release_v();
      if (moved) scale_rows(o, rescale);
      pack_probabilities();
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
    leave();
  }

  // The last block clears what the launch has counted: the next one starts from zeros.
  __device__ __forceinline__ void leave() const {
    int is_last = 0;
    ptx::named_barrier_sync(kConsumersMeet, kWarpgroup);
    if (thread == 0) {
      __threadfence();
      is_last = atomicAdd(p.progress.exits, 1) == static_cast<int>(gridDim.x) - 1;
      ptx::store_shared_32(shared.q(0), is_last);
    }
    ptx::named_barrier_sync(kConsumersMeet, kWarpgroup);
    if (ptx::load_shared_128(shared.q(0)).x == 0) return;
    const int counters = p.progress.branches * p.shape.num_kv_heads;
    for (int i = thread; i < counters; i += kWarpgroup) p.progress.arrived[i] = 0;
    if (thread == 0) *p.progress.next = 0, *p.progress.exits = 0;
  }
};

template <typename T, class Config, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    dualkv_sm90_decode(const __grid_constant__ DecodeParams<T> p) {
  extern __shared__ uint8_t bytes[];
  const DecodeShared<Config> shared(ptx::shared_address(bytes));
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    if constexpr (Config::kBlocks > 1) ptx::give_registers<Config::kProducerRegisters>();
    DecodeProducer<T, Config>{shared, p}.run();
  } else {
    if constexpr (Config::kBlocks > 1) ptx::take_registers<Config::kConsumerRegisters>();
    DecodeConsumer<T, Config, kSoftcap>{shared, p}.run();
  }
}

}  // namespace dualkv::sm90
