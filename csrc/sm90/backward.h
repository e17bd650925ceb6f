// Backward on Hopper for head dims up to 128: a block owns a KV tile of one KV head, half of it a consumer warpgroup,
// and walks all queries that see it, of all query heads of the KV group; a producer thread feeds it.
//
//   S^T = K Q^T;  P^T = exp(S^T - LSE);  dP^T = V dO^T;  dS^T = P^T * (dP^T - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// The transposed form makes P^T and dS^T register operands of dV and dK; only dS passes through shared memory, because
// dQ sums over both warpgroups' keys. dQ leaves by a bulk reduction into an fp32 buffer in fragment order.
//
// The loop is rotated, so that the tensor cores have work while a warpgroup does arithmetic: S of the next step is
// issued before dQ of this one is stored, and dP of the next step and dK of this one run during the exponentials.
// README.md has a picture.
#pragma once

#include "ptx/stmatrix.h"
#include "sm90/kv_walk.h"

namespace dualkv::sm90 {

template <class Config>
struct BackwardShared : KvShared<Config> {
  __device__ __forceinline__ uint32_t ds(int buffer) const {
    return this->base + Config::kOffsetDs + buffer * Config::TileDs::kBytes;
  }
  __device__ __forceinline__ uint32_t dq(int group) const {
    return this->base + Config::kOffsetDq + group * Config::kDqBytes;
  }
};

// One consumer warpgroup: 64 keys of the tile.
template <typename T, class Config, bool kComputeDq>
struct BackwardConsumer : KvWarpgroup<T, Config, BackwardShared<Config>> {
  using Base = KvWarpgroup<T, Config, BackwardShared<Config>>;
  using Base::block, Base::col0, Base::lane, Base::p, Base::row0, Base::shared, Base::steps, Base::steps_done;
  using Base::thread, Base::kBlockM, Base::kBlockN, Base::kHeadDim, Base::kConsumerThreads;
  using typename Base::TileK, typename Base::Statistic;
  using Base::issue_accumulate, Base::issue_dp, Base::issue_scores, Base::k_tile, Base::load_statistic, Base::mask;
  using TileDs = typename Config::TileDs;
  static constexpr bool kSplitRows = Config::kSplitRows, kLateDk = Config::kLateDk;

  const int group = this->first_key / 64;

  typename Base::template Gradient<kHeadDim> dk, dv;
  typename Base::Scores s, dp;
  typename Base::Operand probabilities, ds;
  float dq[Config::kDqCols / 8][4];

  __device__ __forceinline__ void issue_dq(int buffer) {
    const uint32_t a = shared.ds(buffer) + (kSplitRows ? group * TileDs::kPanelBytes : 0);
    const uint32_t b = k_tile() + (kSplitRows ? 0 : group * (Config::kDqCols / 64) * TileK::kPanelBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, Config::kDqCols>::template ss<1, 1>(dq, along_rows<TileDs>(a, step), along_rows<TileK>(b, step),
                                                        step > 0);
    }
    ptx::wgmma_commit();
  }

  // dS^T = P^T * (dP^T - delta), of the scores before the softcap.
  __device__ __forceinline__ void differentiate(const Statistic& delta, uint32_t lse_address) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[j][e] = s[j][e] * (dp[j][e] - delta[j / 2][j % 2 * 2 + e % 2]);
    this->multiply_by_slope(dp, s, lse_address);
  }

  // Zeroes dS where a key is not seen: P is zero there, but dP may be anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void mask_ds() {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[j][e] = s[j][e] == 0.f ? 0.f : dp[j][e];
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

  // Returns once dS of both warpgroups is in shared memory, and the reduction before has read the buffer of dQ.
  __device__ __forceinline__ void exchange_ds() const {
    ptx::fence_async_proxy();
    if (thread == 0) ptx::bulk_wait_read();
    ptx::named_barrier_sync(kBarrierDs, kConsumerThreads);
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

  // Adds the dQ that stage_dq() wrote to the sums of its query tile, by one bulk reduction a warpgroup. Products are
  // issued between the two calls: the fence waits for the writes, and meanwhile the tensor cores work. Only the first
  // warp waits for the other three; these write to the buffer again only behind exchange_ds(), which waits for the
  // reduction.
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
    this->template zero_rows<TileK, kBlockN>(shared.k(), 0, block.tile.valid);  // an operand of dQ
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
    if (flags & FlaggedStep::kForeign) this->zero_foreign_rows(steps[q.stage], q.stage, dout.stage, dout.phase);
    issue_scores(s, shared.q(q.stage));
    shared.dout_ready(dout.stage).wait_full(dout.phase);
    issue_dp(dp, shared.dout(dout.stage));
    Statistic lse, delta;
    load_statistic(lse, shared.lse(q.stage));
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    this->exponentiate(s, lse);
    load_statistic(delta, shared.delta(dout.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    mask(s, steps[q.stage]);
    differentiate(delta, shared.lse(q.stage));
    mask_ds();
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
        this->zero_foreign_rows(steps[next_q.stage], next_q.stage, next_dout.stage, next_dout.phase);
      }
      ptx::wgmma_wait<kComputeDq ? 1 : 0>();
      shared.dout_ready(dout.stage).release(lane);
      issue_scores(s, shared.q(next_q.stage));
      Statistic lse, delta;
      load_statistic(lse, shared.lse(next_q.stage));
      if (kComputeDq) {
        ptx::wgmma_wait<1>();
        ptx::pin(dq);
        stage_dq(steps[q.stage], flags);
      }
      shared.dout_ready(next_dout.stage).wait_full(next_dout.phase);
      issue_dp(dp, shared.dout(next_dout.stage));
      if (kComputeDq) send_dq(steps[q.stage]);
      if (kLateDk) issue_accumulate(dk, ds, shared.q(q.stage));
      if (!kLateDk) shared.q_ready(q.stage).release(lane);
      const uint32_t next_flags = steps[next_q.stage].flags;
      ptx::wgmma_wait<kLateDk ? 2 : 1>();
      ptx::pin(s);
      this->exponentiate(s, lse);
      ptx::pin(s);
      // The compiler moves nothing across this branch: else it would move the exponentials behind the wait for dP, and
      // the two would no longer run at the same time.
      if (flags & FlaggedStep::kNextMasked) mask(s, steps[next_q.stage]);
      load_statistic(delta, shared.delta(next_dout.stage));
      ptx::wgmma_wait<kLateDk ? 1 : 0>();
      ptx::pin(dp);
      differentiate(delta, shared.lse(next_q.stage));
      if (flags & FlaggedStep::kNextMasked) mask_ds();
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

  // Both go through this warpgroup's rows of V. Those of K will not do: the other warpgroup may still read them, for
  // dQ. The address is v_tile() and not shared.v(), with which ptxas spends 15 more instructions a step on descriptors.
  __device__ __forceinline__ void store() const {
    const KvPair<T>& out = p.dkv.of(block.tile.region);
    Base::store(dk, 0, p.shape.softmax_scale, out.k, Base::v_tile());
    Base::store(dv, 1, 1.f, out.v, Base::v_tile());
  }
};

template <typename T, class Config, bool kComputeDq>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward(const __grid_constant__ BackwardParams<T> p, const __grid_constant__ BackwardMaps maps) {
  __shared__ KvBlock block;
  __shared__ FlaggedStep steps[Config::kStagesQ];
  extern __shared__ uint8_t bytes[];
  const BackwardShared<Config> shared{{(ptx::shared_address(bytes) + 1023) & ~1023u}};
  if (!start_block<Config>(shared, block, p)) return;

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::Registers::kProducer>();
    if (threadIdx.x == 0) BackwardProducer<T, Config>{shared, p, maps, block, steps}.run();
  } else {
    ptx::take_registers<Config::Registers::kConsumer>();
    // Broadcast, so that the compiler knows it to be uniform.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
    BackwardConsumer<T, Config, kComputeDq> consumer{{shared, p, block, steps, group * 64}};
    consumer.run();
    consumer.store();
  }
}

}  // namespace dualkv::sm90
