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
#include "decode/sm90_latents.h"
#include "decode/sm90_loads.h"

namespace dualkv::sm90 {

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
    each_work(shared, lane, [&](const DecodeWork& work) { attend(work.item, work.kv_head); });
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
  } else if constexpr (Config::kLatents) {
    consume_latents<T, Config, kSoftcap>(shared, p, maps);
  } else {
    if constexpr (Config::kMovesRegisters) ptx::take_registers<Config::kRegisters.consumer>();
    DecodeConsumer<T, Config, kSoftcap>{shared, p, maps}.run();
  }
}

}  // namespace dualkv::sm90
