// Forward on Hopper: one producer thread feeds K and V tiles by bulk copies, two or three warpgroups of 64 query rows
// each consume them.
//
//   S = Q K^T;  P = exp(S - max);  O += P V        (online softmax; O is normalised and rounded once)
//
// Two overlaps keep the tensor cores busy: inside a warpgroup the softmax of tile n runs beside O += P V of tile n-1,
// and the warpgroups take turns in issuing their products, so that one is in softmax while another multiplies.
#pragma once

#include "core/mask.h"
#include "core/online_softmax.h"
#include "core/query_block.h"
#include "sm90/config.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

struct KvMaps {
  CUtensorMap k, v;
};

struct ForwardMaps {
  CUtensorMap q;
  KvMaps context, decoded;

  __device__ __forceinline__ const KvMaps& of(Region region) const {
    return region == Region::context ? context : decoded;
  }
};

// Addresses in shared memory.
template <class Config>
struct ForwardShared {
  using TileKv = typename Config::TileKv;
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + Config::kOffsetK + stage * TileKv::kBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + Config::kOffsetV + stage * TileKv::kBytes;
  }
  __device__ __forceinline__ uint32_t barrier(int index) const { return base + Config::kOffsetBarriers + index * 8; }
  __device__ __forceinline__ uint32_t full_q() const { return barrier(0); }
  __device__ __forceinline__ uint32_t full_k(int stage) const { return barrier(1 + stage); }
  __device__ __forceinline__ uint32_t empty_k(int stage) const { return barrier(1 + Config::kStages + stage); }
  __device__ __forceinline__ uint32_t full_v(int stage) const { return barrier(1 + 2 * Config::kStages + stage); }
  __device__ __forceinline__ uint32_t empty_v(int stage) const { return barrier(1 + 3 * Config::kStages + stage); }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    ptx::mbarrier_init(full_q(), 1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(full_k(stage), 1);
      ptx::mbarrier_init(full_v(stage), 1);
      ptx::mbarrier_init(empty_k(stage), kConsumerWarps);
      ptx::mbarrier_init(empty_v(stage), kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
};

// The producer: K_0, Q, then K_n before V_n-1, because scores are needed one tile earlier than values.
template <class Config>
__device__ void produce_forward(const ForwardShared<Config>& shared, const ForwardMaps& maps, const QueryBlock& work) {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  PipelineState k_state, v_state;
  const auto load_k = [&](int n) {
    const KvTile tile = kv_tile(work.segment, n, Config::kBlockN);
    ptx::mbarrier_wait(shared.empty_k(k_state.stage), k_state.phase ^ 1);
    ptx::mbarrier_arrive_expect(shared.full_k(k_state.stage), TileKv::kBytes);
    load_tile<TileKv>(shared.k(k_state.stage), maps.of(tile.region).k, shared.full_k(k_state.stage), work.kv_head,
                      tile.row);
    k_state.advance<Config::kStages>();
  };
  const auto load_v = [&](int n) {
    const KvTile tile = kv_tile(work.segment, n, Config::kBlockN);
    ptx::mbarrier_wait(shared.empty_v(v_state.stage), v_state.phase ^ 1);
    ptx::mbarrier_arrive_expect(shared.full_v(v_state.stage), TileKv::kBytes);
    load_tile<TileKv>(shared.v(v_state.stage), maps.of(tile.region).v, shared.full_v(v_state.stage), work.kv_head,
                      tile.row);
    v_state.advance<Config::kStages>();
  };
  load_k(0);
  ptx::mbarrier_arrive_expect(shared.full_q(), TileQ::kBytes);
  load_tile<TileQ>(shared.q(), maps.q, shared.full_q(), work.head, work.q_tile.row);
  for (int n = 1; n < work.kv_tiles; ++n) {
    load_k(n);
    load_v(n - 1);
  }
  load_v(work.kv_tiles - 1);
}

// One consumer warpgroup: 64 rows of the query tile.
template <typename T, class Config>
struct ForwardConsumer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kStages = Config::kStages;
  static constexpr int kSteps = kHeadDim / 16;

  const ForwardShared<Config>& shared;
  const QueryBlock& work;
  const ProblemShape& shape;
  const int group = threadIdx.x / kWarpgroup - 1, thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int row0 = thread / 32 * 16 + lane / 4;  // this thread's first row in the warpgroup's 64

  PipelineState k_state, v_state;
  OnlineSoftmax<1> softmax;
  float s[1][kBlockN / 8][4];
  float o[1][kHeadDim / 8][4];
  uint32_t probabilities[kBlockN / 16][4];

  __device__ __forceinline__ ForwardConsumer(const ForwardShared<Config>& shared_in, const QueryBlock& work_in,
                                             const ProblemShape& shape_in)
      : shared(shared_in), work(work_in), shape(shape_in) {}

  // Names 1 .. kConsumers: the turn of each warpgroup; the next ones: its private barrier.
  __device__ __forceinline__ void take_turn() const {
    if (Config::kTakeTurns) ptx::named_barrier_sync(1 + group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Config::kTakeTurns) ptx::named_barrier_arrive(1 + (group + 1) % Config::kConsumers, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void sync_group() const {
    ptx::named_barrier_sync(1 + Config::kConsumers + group, kWarpgroup);
  }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t q = shared.q() + group * 64 * TileQ::kRowBytes, k = shared.k(k_state.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::Wgmma<T, kBlockN>::template ss<0, 0>(s[0], along_columns<TileQ>(q, step), along_columns<TileKv>(k, step),
                                                step > 0);
    }
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

  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void wait_k() const { ptx::mbarrier_wait(shared.full_k(k_state.stage), k_state.phase); }
  __device__ __forceinline__ void release_k() {
    release(shared.empty_k(k_state.stage));
    k_state.template advance<kStages>();
  }

  // V of tile n. Rows past the region's end are foreign, and 0 * NaN is NaN: every warpgroup zeroes them for itself.
  __device__ __forceinline__ void wait_v(int n) const {
    ptx::mbarrier_wait(shared.full_v(v_state.stage), v_state.phase);
    const int valid = kv_tile(work.segment, n, kBlockN).valid;
    if (valid >= kBlockN) return;
    constexpr int kChunks = TileKv::kPanels * TileKv::kPanelChunks;
    for (int index = valid * kChunks + thread; index < kBlockN * kChunks; index += kWarpgroup) {
      const int row = index / kChunks, chunk = index % kChunks;
      ptx::store_shared_128(shared.v(v_state.stage) + (chunk / TileKv::kPanelChunks) * TileKv::kPanelBytes +
                                row * TileKv::kRowBytes + chunk % TileKv::kPanelChunks * 16,
                            make_uint4(0, 0, 0, 0));
    }
    ptx::fence_async_proxy();
    sync_group();
  }
  __device__ __forceinline__ void release_v() {
    release(shared.empty_v(v_state.stage));
    v_state.template advance<kStages>();
  }

  __device__ __forceinline__ void mask(int n) {
    const KvTile tile = kv_tile(work.segment, n, kBlockN);
    QueryTile rows = work.q_tile;
    rows.q_pos += group * 64;
    if (!needs_mask(tile, rows, kBlockN, shape.causal)) return;
    mask_fragment(s, row0, lane % 4 * 2, -CUDART_INF_F,
                  [&](int row) { return visible_columns(tile, rows.q_pos + row, shape.causal); });
  }

  // Rounds P into the A fragments of the next product; the scores are free for the next tile.
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], probabilities[step]);
  }

  __device__ __forceinline__ void run() {
    const float scale_log2 = shape.softmax_scale * kLog2e;
    float rescale[1][2];
    ptx::mbarrier_wait(shared.full_q(), 0);
    wait_k();
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::pin(s[0]);
    release_k();
    mask(0);
    softmax.raise_maximum(s, scale_log2, rescale);
    softmax.exponentiate(s, scale_log2);
    pack_probabilities();
    if (group == Config::kConsumers - 1) pass_turn();

    for (int n = 1; n < work.kv_tiles; ++n) {
      wait_k();
      wait_v(n - 1);
      take_turn();
      issue_scores();
      issue_output(n > 1);
      if (n + 1 < work.kv_tiles || group + 1 < Config::kConsumers) pass_turn();
      ptx::wgmma_wait<1>();
      ptx::pin(s[0]);
      release_k();
      mask(n);
      const bool moved = softmax.raise_maximum(s, scale_log2, rescale);
      softmax.rescale_sum(rescale);
      softmax.exponentiate(s, scale_log2);
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      release_v();
      if (moved) scale_rows(o, rescale);
      pack_probabilities();
    }
    wait_v(work.kv_tiles - 1);
    issue_output(work.kv_tiles > 1);
    ptx::wgmma_wait<0>();
    ptx::pin(o[0]);
    release_v();
  }

  __device__ __forceinline__ void store(const ForwardParams<T>& p) {
    float inverse_sum[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float lse;
      inverse_sum[0][half] = softmax.finish(0, half, shape.softmax_scale, lse);
      const int row = group * 64 + row0 + half * 8;
      if (lane % 4 == 0 && row < work.q_tile.rows) {
        p.lse[static_cast<int64_t>(work.head) * shape.q_rows + work.q_tile.row + row] = lse;
      }
    }
    scale_rows(o, inverse_sum);
    sync_group();  // the whole warpgroup has left Q
    const uint32_t rows = shared.q() + group * 64 * TileQ::kRowBytes;
    store_accumulator<TileQ, T>(rows, thread / 32 * 16, 0, o, 1.f, lane);
    sync_group();
    store_rows<TileQ, 64, kWarpgroup>(p.out.at(work.q_tile.row + group * 64, work.head), p.out.row_stride, rows,
                                      work.q_tile.rows - group * 64, shape.head_dim, thread);
  }
};

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_forward(const __grid_constant__ ForwardParams<T> p, const __grid_constant__ ForwardMaps maps) {
  __shared__ QueryBlock work;
  if (!work.take(p.work, p.layout, p.shape, Config::kBlockM, Config::kBlockN)) return;
  extern __shared__ uint8_t bytes[];
  const ForwardShared<Config> shared{(ptx::shared_address(bytes) + 1023) & ~1023u};
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::Registers::kProducer>();
    if (threadIdx.x == 0) produce_forward(shared, maps, work);
  } else {
    ptx::take_registers<Config::Registers::kConsumer>();
    ForwardConsumer<T, Config> consumer(shared, work, p.shape);
    consumer.run();
    consumer.store(p);
  }
}

}  // namespace dualkv::sm90
