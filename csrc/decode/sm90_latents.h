// SPDX-License-Identifier: BSD-3-Clause
// Hopper decode of latents (MLA, absorbed): one KV head of 576 columns, of which the first 512 are
// the values. A tile of them in shared memory is K and V.
//
// No warpgroup has registers for 64 rows of 512 columns of O. If two computed scores both, these
// would take as long as everything else. So one warpgroup makes the scores and probabilities of
// 64 rows, and two multiply them with half of the columns of V each:
//
//   scores:   S = Q K^T;  P = exp(S - max)           -> P and the factors of O, by shared memory
//   outputs:  O = O * factor + P V
//
// While the outputs multiply tile n, the scores are at tile n + 1: tensor cores have products of
// one while the other is in its softmax, or waits.
#pragma once

#include "decode/rows.h"
#include "decode/sm90_loads.h"

namespace dualkv::sm90 {

// Tiles of copies, which products see after a fence.
template <class Config>
__device__ __forceinline__ bool is_copied(const DecodeMaps& maps, const DecodeItem& item) {
  return !Config::kMaps || !maps.load(item);
}

template <typename T, class Config, bool kSoftcap>
struct LatentScores {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  using Softmax = OnlineSoftmax<1, 8>;
  static constexpr int kBlockN = Config::kBlockN;
  using Scores = float[1][kBlockN / 8][4];

  const DecodeShared<Config>& shared;
  const DecodeParams<T>& p;
  const DecodeMaps& maps;
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  DecodeRows<T, Config::kHeadDimV, Arch::sm90> rows{p, thread};
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesKv> k_state;
  PipelineState<1> p_state;
  RowProducts<T, TileQ, TileKv, kBlockN / 8, 1> products;

  // Three sums of three panels each, of which those of the first part are the first.
  __device__ __forceinline__ void multiply(Scores& s, bool has_copies) {
    const uint32_t q = varying(shared.q(q_state.stage), k_state.stage);
    const auto order = [](int step) {
      constexpr int kFirst = LatentPart<0>::kCount;
      const int panel = step / 4;
      return (panel < kFirst ? LatentPart<0>::turn(panel) : LatentPart<1>::turn(panel - kFirst)) * 4 + step % 4;
    };
    const auto wait_for = [&](int sum) {
      if (sum > 1) return;
      shared.k_ready(k_state.stage, sum).wait_full(k_state.phase);
      if (has_copies) ptx::fence_async_proxy();
      ptx::wgmma_fence();
    };
    products.issue(s[0], q, shared.k(k_state.stage), order, wait_for);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    products.take(s[0]);
  }

  // Sends go where the P before was, once the outputs are done with that. They go thread by thread,
  // as the outputs' threads have the same rows.
  __device__ __forceinline__ void send(const float (&rows_of)[4]) {
    ptx::store_shared_float4(shared.rows_of(thread), rows_of);
    shared.probabilities_ready().announce(lane);
    p_state.advance();
  }
  __device__ __forceinline__ void send(const Scores& s, const float (&factors)[1][2]) {
    wait_sent();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      uint32_t a[4];
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], a);
      ptx::store_shared_128(shared.probabilities(thread, step), make_uint4(a[0], a[1], a[2], a[3]));
    }
    send({factors[0][0], factors[0][1], 0.f, 0.f});
  }
  __device__ __forceinline__ void send(const Softmax& softmax) {
    wait_sent();
    send({softmax.row_sum[0][0], softmax.row_sum[0][1], softmax.row_max[0][0], softmax.row_max[0][1]});
  }
  __device__ __forceinline__ void wait_sent() const { shared.probabilities_ready().wait_empty(p_state.phase); }

  __device__ __forceinline__ void attend(const DecodeItem& item, int kv_head) {
    Softmax softmax;
    if (item.waits >= 0) {
      rows.find(item, kv_head);
      rows.await(item, kv_head, [] { ptx::named_barrier_sync(kScoresMeet, kWarpgroup); });
      rows.take_statistics(item, softmax);
    }
    const DecodeWalk walk(item, kBlockN, p.shape.sees);
    const int tiles = walk.tiles();
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    if (tiles > 0) shared.queries_ready(q_state.stage).wait_full(q_state.phase);
    for (int step = 0; step < tiles; ++step) {
      Scores s;
      multiply(s, step == 0 || is_copied<Config>(maps, item));  // queries are copied, too
      k_state.advance();  // the outputs release it
      if constexpr (kSoftcap) cap_scores(s[0], p.shape.softcap);
      rows.mask(s, item, walk.tile(step));
      float factors[1][2];
      softmax.raise_maximum(s, scale_log2, factors);
      softmax.exponentiate(s, scale_log2, factors);
      send(s, factors);
    }
    if (tiles > 0) {
      shared.queries_ready(q_state.stage).release(lane);
      q_state.advance();
    }
    send(softmax);
  }
};

// Two warpgroups.
template <typename T, class Config>
struct LatentOutputs {
  using TileKv = typename Config::TileKv;
  static constexpr int kThreads = 2 * kWarpgroup, kBlockN = Config::kBlockN;
  using Rows = DecodeRows<T, Config::kHeadDimV, Arch::sm90, kThreads, 2>;

  const DecodeShared<Config>& shared;
  const DecodeParams<T>& p;
  const DecodeMaps& maps;
  const int lane = threadIdx.x % 32;
  Rows rows{p};
  PipelineState<Config::kStagesKv> k_state;
  PipelineState<1> p_state;
  typename Rows::Output o;
  uint32_t probabilities[kBlockN / 16][4];

  static __device__ __forceinline__ void meet() { ptx::named_barrier_sync(kConsumersMeet, kThreads); }

  __device__ __forceinline__ void wait_sent(float (&rows_of)[4]) const {
    shared.probabilities_ready().wait_full(p_state.phase);
    ptx::load_shared_float4(rows_of, shared.rows_of(rows.thread_of_rows));
  }
  __device__ __forceinline__ void release_sent() {
    shared.probabilities_ready().release(lane);
    p_state.advance();
  }

  __device__ __forceinline__ void receive() {
    float factors[4];
    wait_sent(factors);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      const uint4 a = ptx::load_shared_128(shared.probabilities(rows.thread_of_rows, step));
      probabilities[step][0] = a.x, probabilities[step][1] = a.y;
      probabilities[step][2] = a.z, probabilities[step][3] = a.w;
    }
    release_sent();
    const float by[1][2] = {{factors[0], factors[1]}};
    if (__any_sync(0xffffffffu, by[0][0] != 1.f || by[0][1] != 1.f)) scale_rows(o, by);
  }
  // In products of half of the columns, after each of which a part of the tile is left. ptxas takes
  // none of 128 sums in a kernel of 512 threads.
  static constexpr int kHalf = Rows::kColumns / 2;
  using Half = float[kHalf / 8][4];
  __device__ __forceinline__ Half& half_of_o(int half) {
    return *reinterpret_cast<Half*>(&o[0][half * (kHalf / 8)]);
  }
  __device__ __forceinline__ void multiply() {
    const uint32_t v = from_column<TileKv>(shared.v(k_state.stage), rows.column0);
    ptx::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < kBlockN / 16; ++step) {
        ptx::Wgmma<T, kHalf>::template rs<1>(half_of_o(half), probabilities[step],
                                             along_rows<TileKv>(from_column<TileKv>(v, half * kHalf), step), true);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<1>();
    ptx::pin(half_of_o(0));
    shared.k_ready(k_state.stage, 0).release(lane);
    ptx::wgmma_wait<0>();
    ptx::pin(half_of_o(1));
    shared.k_ready(k_state.stage, 1).release(lane);
    k_state.advance();
  }

  // How many tiles the item has, and whether they are copied.
  struct Walk {
    int tiles;
    bool is_copied;
  };
  __device__ __forceinline__ Walk begin(const DecodeWork& work) {
    rows.find(work.item, work.kv_head);
    clear(o);
    if (work.item.waits >= 0) {
      rows.await(work.item, work.kv_head, meet);
      rows.take_output(work.item, o);
    }
    return {DecodeWalk(work.item, kBlockN, p.shape.sees).tiles(), is_copied<Config>(maps, work.item)};
  }
  __device__ __forceinline__ void sum(const Walk& walk) {
    for (int step = 0; step < walk.tiles; ++step) {
      receive();
      for (int part = 0; part < 2; ++part) {  // they are there: for their bytes to be seen here
        shared.k_ready(k_state.stage, part).wait_full(k_state.phase);
      }
      if (walk.is_copied) ptx::fence_async_proxy();
      multiply();
    }
  }
  __device__ __forceinline__ void finish(const DecodeWork& work) {
    float sent[4];
    wait_sent(sent);
    release_sent();
    OnlineSoftmax<1, 8> softmax;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.row_sum[0][half] = sent[half], softmax.row_max[0][half] = sent[2 + half];
    }
    rows.finish(work.item, work.kv_head, o, softmax, meet);
  }

  // The item is read again at its end: its words would take registers that the sums need.
  __device__ __forceinline__ void run() {
    for (PipelineState<Config::kWorkSlots> slot;; slot.advance()) {
      const PipelineBarrier ready = shared.work_ready(slot.stage);
      const auto work = [&] { return load_struct<DecodeWork>(shared.work(slot.stage)); };
      ready.wait_full(slot.phase);
      if (!work().exists) break;
      sum(begin(work()));
      finish(work());
      ready.release(lane);
    }
    rows.leave(shared.q(0), meet);
  }
};

// The outputs come right behind the warpgroup that loads, as DecodeRows has it.
template <typename T, class Config, bool kSoftcap>
__device__ __forceinline__ void consume_latents(const DecodeShared<Config>& shared, const DecodeParams<T>& p,
                                                const DecodeMaps& maps) {
  if (threadIdx.x < 3 * kWarpgroup) {
    ptx::take_registers<Config::kRegisters.outputs>();
    LatentOutputs<T, Config>{shared, p, maps}.run();
  } else {
    static_assert(Config::kRegisters.scores * Config::kThreads <= 64 * 1024, "as many as at launch, or fewer");
    ptx::give_registers<Config::kRegisters.scores>();
    LatentScores<T, Config, kSoftcap> scores{shared, p, maps};
    each_work(shared, scores.lane, [&](const DecodeWork& work) { scores.attend(work.item, work.kv_head); });
  }
}

}  // namespace dualkv::sm90
