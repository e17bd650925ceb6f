// Backward on Hopper for head dims up to 128: a block owns a KV tile of one KV head, half of it a consumer warpgroup,
// and walks all queries that see it, of all query heads of the KV group; a producer thread feeds it.
//
//   S^T = K Q^T;  P^T = exp(S^T - LSE);  dP^T = V dO^T;  dS^T = P^T * (dP^T - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// The transposed form makes P^T and dS^T register operands of dV and dK; only dS passes through shared memory, because
// dQ sums over both warpgroups' keys. dQ leaves by a bulk reduction into an fp32 buffer in fragment order.
//
// The loop is rotated so that products are always queued behind the arithmetic: the scores of the next step are issued
// before dQ of this one is stored, dP of the next and dK of this one run beside the exponentials.
#pragma once

#include "core/kv_block.h"
#include "core/mask.h"
#include "ptx/stmatrix.h"
#include "sm90/config.h"
#include "sm90/maps.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

struct BackwardMaps {
  CUtensorMap q, dout;
  RegionMaps kv;
};

// Addresses in shared memory.
template <class Config>
struct BackwardShared {
  using TileQ = typename Config::TileQ;
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return base + Config::kOffsetV; }
  __device__ __forceinline__ uint32_t q(int stage) const { return base + Config::kOffsetQ + stage * TileQ::kBytes; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return base + Config::kOffsetDo + stage * TileQ::kBytes; }
  __device__ __forceinline__ uint32_t ds(int buffer) const {
    return base + Config::kOffsetDs + buffer * Config::TileDs::kBytes;
  }
  __device__ __forceinline__ uint32_t dq(int group) const {
    return base + Config::kOffsetDq + group * Config::kDqBytes;
  }
  __device__ __forceinline__ uint32_t lse(int stage) const {
    return base + Config::kOffsetLse + stage * Config::kBlockM * 4;
  }
  __device__ __forceinline__ uint32_t delta(int stage) const {
    return base + Config::kOffsetDelta + stage * Config::kBlockM * 4;
  }
  __device__ __forceinline__ uint32_t barrier(int index) const { return base + Config::kOffsetBarriers + index * 8; }
  __device__ __forceinline__ Handshake kv_ready() const { return {barrier(0)}; }
  __device__ __forceinline__ Handshake q_ready(int stage) const { return {barrier(2 + 2 * stage)}; }
  __device__ __forceinline__ Handshake dout_ready(int stage) const {
    return {barrier(2 + 2 * (Config::kStagesQ + stage))};
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    kv_ready().init(kConsumerWarps);
    for (int stage = 0; stage < Config::kStagesQ; ++stage) q_ready(stage).init(kConsumerWarps);
    for (int stage = 0; stage < Config::kStagesDo; ++stage) dout_ready(stage).init(kConsumerWarps);
    ptx::mbarrier_init_fence();
  }
};

// Named barriers of the consumers; 0 is __syncthreads.
constexpr int kBarrierWarpgroup = 1;  // and 2: of one warpgroup
constexpr int kBarrierDs = 3;         // dS of both warpgroups is written
constexpr int kBarrierZeroed = 4;     // foreign rows are zero

// A step as the consumers read it: `flags` is all that they need to know of most steps, in one word that they can load
// long before it is needed. Shared memory is busy with operands; a load that somebody waits for costs 3% of the loop.
struct FlaggedStep : BackwardStep {
  static constexpr uint32_t kLast = 1, kForeign = 2, kNextForeign = 4, kNextMasked = 8;
  uint32_t flags;
  int dq_tile;
};

// The producer thread: Q_0, K and V, then dO_m before Q_m+1. A step's geometry travels with its Q.
template <typename T, class Config>
struct BackwardProducer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  static constexpr int kBlockM = Config::kBlockM;

  const BackwardShared<Config>& shared;
  const BackwardParams<T>& p;
  const BackwardMaps& maps;
  KvBlock& block;
  FlaggedStep (&steps)[Config::kStagesQ];
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesDo> dout_state;

  // The walk stands at the step after this one.
  __device__ __forceinline__ void flag(FlaggedStep& step) const {
    const QueryWalk& next = block.walk;
    step.dq_tile = step.head * ceil_div(p.shape.q_rows, kBlockM) + step.m_block;
    step.flags = step.has_foreign_rows(kBlockM) ? FlaggedStep::kForeign : 0;
    if (step.last) {
      step.flags |= FlaggedStep::kLast;
      return;
    }
    if (has_foreign_rows(next.range, next.m_block, kBlockM)) step.flags |= FlaggedStep::kNextForeign;
    if (needs_mask(next.tile, next.range, next.m_block, kBlockM, Config::kBlockN)) {
      step.flags |= FlaggedStep::kNextMasked;
    }
  }

  // Publishes the next step, with its Q and LSE.
  __device__ __forceinline__ const BackwardStep& load_q() {
    const Handshake ready = shared.q_ready(q_state.stage);
    ready.wait_empty(q_state.phase);
    FlaggedStep& step = steps[q_state.stage];
    block.take_step(step);
    flag(step);
    if (!step.valid) {
      ptx::mbarrier_arrive(ready.full());
      return step;
    }
    const int row = step.m_block * kBlockM;
    ready.expect(TileQ::kBytes + kBlockM * 4);
    load_tile<TileQ>(shared.q(q_state.stage), maps.q, ready.full(), step.head, row);
    ptx::bulk_load(shared.lse(q_state.stage), p.statistics.lse_log2 + p.statistics.index(step.head, row), kBlockM * 4,
                   ready.full());
    q_state.advance();
    return step;
  }

  __device__ __forceinline__ void load_dout(const BackwardStep& step) {
    const Handshake ready = shared.dout_ready(dout_state.stage);
    ready.wait_empty(dout_state.phase);
    const int row = step.m_block * kBlockM;
    ready.expect(TileQ::kBytes + kBlockM * 4);
    load_tile<TileQ>(shared.dout(dout_state.stage), maps.dout, ready.full(), step.head, row);
    ptx::bulk_load(shared.delta(dout_state.stage), p.statistics.delta + p.statistics.index(step.head, row),
                   kBlockM * 4, ready.full());
    dout_state.advance();
  }

  __device__ __forceinline__ void load_kv() {
    const KvMaps& kv = maps.kv.of(block.tile.region);
    shared.kv_ready().expect(2 * TileKv::kBytes);
    load_tile<TileKv>(shared.k(), kv.k, shared.kv_ready().full(), block.kv_head, block.tile.row);
    load_tile<TileKv>(shared.v(), kv.v, shared.kv_ready().full(), block.kv_head, block.tile.row);
  }

  __device__ __forceinline__ void run() {
    const BackwardStep* step = &load_q();
    load_kv();
    while (step->valid) {
      load_dout(*step);
      if (step->last) return;
      step = &load_q();
    }
  }
};

// One consumer warpgroup: 64 keys of the tile.
template <typename T, class Config, bool kComputeDq>
struct BackwardConsumer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  using TileDs = typename Config::TileDs;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  static constexpr int kConsumerThreads = Config::kConsumers * kWarpgroup;
  static constexpr bool kSplitRows = Config::kSplitRows, kLateDk = Config::kLateDk;

  const BackwardShared<Config>& shared;
  const BackwardParams<T>& p;
  const KvBlock& block;
  const FlaggedStep (&steps)[Config::kStagesQ];
  // Broadcast, so that the compiler knows it to be uniform.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int row0 = group * 64 + thread / 32 * 16 + lane / 4;  // this thread's first key
  const int col0 = lane % 4 * 2;                              // and its first query

  float dk[kHeadDim / 8][4], dv[kHeadDim / 8][4];
  float s[kBlockM / 8][4], dp[kBlockM / 8][4];
  float dq[Config::kDqCols / 8][4];
  uint32_t probabilities[kBlockM / 16][4], ds[kBlockM / 16][4];

  // acc = X Y^T of this warpgroup's half of K or V, and Q or dO.
  __device__ __forceinline__ void issue_transposed(float (&acc)[kBlockM / 8][4], uint32_t kv_tile, uint32_t q_tile) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      ptx::Wgmma<T, kBlockM>::template ss<0, 0>(
          acc, along_columns<TileKv>(kv_tile + group * 64 * TileKv::kRowBytes, step),
          along_columns<TileQ>(q_tile, step), step > 0);
    }
    ptx::wgmma_commit();
  }

  // acc += A Y: A is P^T or dS^T, Y is dO or Q.
  __device__ __forceinline__ void issue_accumulate(float (&acc)[kHeadDim / 8][4],
                                                   const uint32_t (&a)[kBlockM / 16][4], uint32_t q_tile) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
      ptx::Wgmma<T, kHeadDim>::template rs<1>(acc, a[step], along_rows<TileQ>(q_tile, step), true);
    }
    ptx::wgmma_commit();
  }

  int steps_done = 0;
  __device__ __forceinline__ uint32_t k_tile() const { return varying(shared.k(), steps_done); }
  __device__ __forceinline__ uint32_t v_tile() const { return varying(shared.v(), steps_done); }

  __device__ __forceinline__ void issue_dq(int buffer) {
    const uint32_t a = shared.ds(buffer) + (kSplitRows ? group * TileDs::kPanelBytes : 0);
    const uint32_t b = k_tile() + (kSplitRows ? 0 : group * (Config::kDqCols / 64) * TileKv::kPanelBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, Config::kDqCols>::template ss<1, 1>(dq, along_rows<TileDs>(a, step), along_rows<TileKv>(b, step),
                                                        step > 0);
    }
    ptx::wgmma_commit();
  }

  // A row statistic of this thread's queries: [j][e] of queries 16 j + {0, 1, 8, 9} + col0. Loaded before the wait for
  // the scores, whose products keep shared memory busy.
  using Statistic = float[kBlockM / 16][4];
  __device__ __forceinline__ void load_statistic(Statistic& x, uint32_t address) const {
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) ptx::load_shared_float4(x[j], address + j * 64 + col0 * 8);
  }

  // P^T = exp2(S^T * scale - LSE).
  __device__ __forceinline__ void exponentiate(const Statistic& lse) {
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = exp2_approx(s[j][e] * scale_log2 - lse[j / 2][j % 2 * 2 + e % 2]);
  }

  // dS^T = P^T * (dP^T - delta).
  __device__ __forceinline__ void differentiate(const Statistic& delta) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[j][e] = s[j][e] * (dp[j][e] - delta[j / 2][j % 2 * 2 + e % 2]);
  }

  __device__ __forceinline__ void mask(float (&x)[kBlockM / 8][4], const BackwardStep& step) const {
    const QueryRange range = step.range;
    const KvTile tile = block.tile;
    const int first_row = step.m_block * kBlockM;
    mask_transposed(x, row0, col0, [&](int column) { return visible_columns(tile, range, first_row + column); });
  }

  // Rounds P^T and dS^T into the A fragments of the next products.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
      accumulator_to_a<T>(s[2 * step], s[2 * step + 1], probabilities[step]);
      accumulator_to_a<T>(dp[2 * step], dp[2 * step + 1], ds[step]);
    }
  }

  __device__ __forceinline__ void store_ds(int buffer) {
    const int row = group * 64 + thread / 32 * 16 + lane % 16;
    const uint32_t address = shared.ds(buffer) + TileDs::chunk_offset(row, lane / 16);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) ptx::stmatrix_x4(TileDs::column(address, step), ds[step]);
  }

  // Passes once dS of both warpgroups is written, and the buffer of dQ has been read.
  __device__ __forceinline__ void exchange_ds() const {
    ptx::fence_async_proxy();
    if (thread == 0) ptx::bulk_wait_read();
    ptx::named_barrier_sync(kBarrierDs, kConsumerThreads);
  }

  // Rows outside [first, end) of a tile become zero, by all threads of the consumers.
  template <class Tile, int kRows>
  __device__ __forceinline__ void zero_rows(uint32_t tile, int first, int end) const {
    constexpr int kPanelChunks = kRows * Tile::kPanelChunks;
#pragma unroll 1
    for (int index = threadIdx.x - kWarpgroup; index < Tile::kPanels * kPanelChunks; index += kConsumerThreads) {
      const int row = index % kPanelChunks / Tile::kPanelChunks;
      if (row < first || row >= end) ptx::store_shared_128(tile + index * 16, make_uint4(0, 0, 0, 0));
    }
  }

  // Foreign rows of Q and dO are operands of dK and dV, and 0 * NaN is NaN.
  __device__ __forceinline__ void zero_foreign_rows(const BackwardStep& step, int q_stage, int dout_stage,
                                                    int dout_phase) const {
    shared.dout_ready(dout_stage).wait_full(dout_phase);
    zero_rows<TileQ, kBlockM>(shared.q(q_stage), step.first_row(kBlockM), step.end_row(kBlockM));
    zero_rows<TileQ, kBlockM>(shared.dout(dout_stage), step.first_row(kBlockM), step.end_row(kBlockM));
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierZeroed, kConsumerThreads);
  }

  // Writes dQ of a step to shared memory, 16-byte chunks in fragment order.
  __device__ __forceinline__ void stage_dq(const FlaggedStep& step, uint32_t flags) {
    if (flags & FlaggedStep::kForeign) {
      // dS of foreign rows is zero, but K may hold what those rows must not see.
      const int first = step.first_row(kBlockM), end = step.end_row(kBlockM);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (kSplitRows ? group * 64 : 0) + thread / 32 * 16 + lane / 4 + half * 8;
        const bool own = row >= first && row < end;
#pragma unroll
        for (int j = 0; j < Config::kDqCols / 8; ++j) {
          dq[j][2 * half] = own ? dq[j][2 * half] : 0.f;
          dq[j][2 * half + 1] = own ? dq[j][2 * half + 1] : 0.f;
        }
      }
    }
    const uint32_t address = shared.dq(group) + thread * 16;
#pragma unroll
    for (int j = 0; j < Config::kDqCols / 8; ++j) ptx::store_shared_float4(address + j * kWarpgroup * 16, dq[j]);
  }

  // Adds it to the sums of its query tile, one bulk reduction a warpgroup. Products are issued between the two, because
  // the fence waits for the writes. Only the first warp waits for the others: they write again behind exchange_ds.
  __device__ __forceinline__ void send_dq(const FlaggedStep& step) {
    ptx::fence_async_proxy();
    if (thread >= 32) {
      ptx::named_barrier_arrive(kBarrierWarpgroup + group, kWarpgroup);
      return;
    }
    ptx::named_barrier_sync(kBarrierWarpgroup + group, kWarpgroup);
    if (thread == 0) {
      float* sum = p.dq_sum + int64_t{step.dq_tile} * (kBlockM * kHeadDim);
      ptx::bulk_reduce_add(sum + group * (Config::kDqBytes / 4), shared.dq(group), Config::kDqBytes);
      ptx::bulk_commit();
    }
  }

  __device__ __forceinline__ void wait_kv() const {
    shared.kv_ready().wait_full(0);
    if (block.tile.valid == kBlockN) return;
    zero_rows<TileKv, kBlockN>(shared.k(), 0, block.tile.valid);  // an operand of dQ
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierZeroed, kConsumerThreads);
  }

  __device__ __forceinline__ void run() {
    PipelineState<Config::kStagesQ> q, next_q;
    PipelineState<Config::kStagesDo> dout, next_dout;
    int buffer = 0;
    clear(dk);
    clear(dv);
    wait_kv();
    shared.q_ready(q.stage).wait_full(q.phase);
    if (!steps[q.stage].valid) return;
    uint32_t flags = steps[q.stage].flags;
    if (flags & FlaggedStep::kForeign) zero_foreign_rows(steps[q.stage], q.stage, dout.stage, dout.phase);
    issue_transposed(s, k_tile(), shared.q(q.stage));
    shared.dout_ready(dout.stage).wait_full(dout.phase);
    issue_transposed(dp, v_tile(), shared.dout(dout.stage));
    Statistic lse, delta;
    load_statistic(lse, shared.lse(q.stage));
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    exponentiate(lse);
    load_statistic(delta, shared.delta(dout.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    differentiate(delta);
    mask(s, steps[q.stage]);
    mask(dp, steps[q.stage]);
    pack();
    if (kComputeDq) store_ds(buffer);

    while (!(flags & FlaggedStep::kLast)) {
      next_q = q;
      next_q.advance();
      next_dout = dout;
      next_dout.advance();
      issue_accumulate(dv, probabilities, shared.dout(dout.stage));
      if (!kLateDk) issue_accumulate(dk, ds, shared.q(q.stage));
      if (kComputeDq) {
        exchange_ds();
        issue_dq(buffer);
      }
      shared.q_ready(next_q.stage).wait_full(next_q.phase);
      if (flags & FlaggedStep::kNextForeign) {
        zero_foreign_rows(steps[next_q.stage], next_q.stage, next_dout.stage, next_dout.phase);
      }
      ptx::wgmma_wait<kComputeDq ? 1 : 0>();
      shared.dout_ready(dout.stage).release(lane);
      issue_transposed(s, k_tile(), shared.q(next_q.stage));
      Statistic lse, delta;
      load_statistic(lse, shared.lse(next_q.stage));
      if (kComputeDq) {
        ptx::wgmma_wait<1>();
        ptx::pin(dq);
        stage_dq(steps[q.stage], flags);
      }
      shared.dout_ready(next_dout.stage).wait_full(next_dout.phase);
      issue_transposed(dp, v_tile(), shared.dout(next_dout.stage));
      if (kLateDk) issue_accumulate(dk, ds, shared.q(q.stage));
      if (kComputeDq) send_dq(steps[q.stage]);
      if (!kLateDk) shared.q_ready(q.stage).release(lane);
      const uint32_t next_flags = steps[next_q.stage].flags;
      ptx::wgmma_wait<kLateDk ? 2 : 1>();
      ptx::pin(s);
      exponentiate(lse);
      ptx::pin(s);
      // This branch keeps the compiler from sinking the exponentials below the wait for dP, out of its shadow.
      if (flags & FlaggedStep::kNextMasked) mask(s, steps[next_q.stage]);
      load_statistic(delta, shared.delta(next_dout.stage));
      ptx::wgmma_wait<kLateDk ? 1 : 0>();
      ptx::pin(dp);
      differentiate(delta);
      if (flags & FlaggedStep::kNextMasked) mask(dp, steps[next_q.stage]);
      if (kLateDk) {
        ptx::wgmma_wait<0>();
        shared.q_ready(q.stage).release(lane);
      }
      pack();
      buffer ^= 1;
      if (kComputeDq) store_ds(buffer);
      q = next_q;
      dout = next_dout;
      flags = next_flags;
      ++steps_done;
    }
    issue_accumulate(dv, probabilities, shared.dout(dout.stage));
    issue_accumulate(dk, ds, shared.q(q.stage));
    if (kComputeDq) {
      exchange_ds();
      issue_dq(buffer);
      ptx::wgmma_wait<0>();
      ptx::pin(dq);
      stage_dq(steps[q.stage], flags);
      send_dq(steps[q.stage]);
      if (thread == 0) ptx::bulk_wait_read();  // shared memory must outlive its readers
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::pin(dk);
  }

  // Straight from registers: a thread holds two neighbouring columns of two rows.
  template <typename Store>
  __device__ __forceinline__ void for_each_pair(const float (&acc)[kHeadDim / 8][4], Store store) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) store(row0 + half * 8, col0 + j * 8, acc[j][2 * half], acc[j][2 * half + 1]);
  }

  __device__ __forceinline__ void store_rows(const float (&acc)[kHeadDim / 8][4], float scale,
                                             const TensorView<T>& view) const {
    for_each_pair(acc, [&](int row, int col, float x, float y) {
      if (row >= block.tile.valid || col >= p.shape.head_dim) return;
      *reinterpret_cast<uint32_t*>(view.at(block.tile.row + row, block.kv_head) + col) = pack2<T>(x * scale, y * scale);
    });
  }

  __device__ __forceinline__ void store() const {
    if (block.slot >= 0) {
      constexpr int kTileFloats = kBlockN * kHeadDim;
      float* slot = p.dkv_slots + int64_t{block.slot} * (2 * kTileFloats);
      for_each_pair(dk, [&](int row, int col, float x, float y) {
        *reinterpret_cast<float2*>(slot + row * kHeadDim + col) = make_float2(x, y);
      });
      for_each_pair(dv, [&](int row, int col, float x, float y) {
        *reinterpret_cast<float2*>(slot + kTileFloats + row * kHeadDim + col) = make_float2(x, y);
      });
      return;
    }
    const KvPair<T>& out = p.dkv.of(block.tile.region);
    store_rows(dk, p.shape.softmax_scale, out.k);
    store_rows(dv, 1.f, out.v);
  }
};

template <typename T, class Config, bool kComputeDq>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward(const __grid_constant__ BackwardParams<T> p, const __grid_constant__ BackwardMaps maps) {
  __shared__ KvBlock block;
  __shared__ FlaggedStep steps[Config::kStagesQ];
  extern __shared__ uint8_t bytes[];
  const BackwardShared<Config> shared{(ptx::shared_address(bytes) + 1023) & ~1023u};
  bool exists = false;
  if (threadIdx.x == 0) {
    shared.init_barriers();
    exists = block.load(p.work, p.layout, p.shape, Config::kBlockM, Config::kBlockN);
  }
  if (!__syncthreads_or(exists)) return;

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::Registers::kProducer>();
    if (threadIdx.x == 0) BackwardProducer<T, Config>{shared, p, maps, block, steps}.run();
  } else {
    ptx::take_registers<Config::Registers::kConsumer>();
    BackwardConsumer<T, Config, kComputeDq> consumer{shared, p, block, steps};
    consumer.run();
    consumer.store();
  }
}

}  // namespace dualkv::sm90
