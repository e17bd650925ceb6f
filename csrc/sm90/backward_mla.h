// SPDX-License-Identifier: BSD-3-Clause
// Hopper backward for (192, 128), the head dims of MLA, by the five products of backward.h: a block
// owns a KV tile of one KV head, 64 keys for each consumer warpgroup.
//
// dK and dV of 64 keys take 160 registers a thread. What is left holds either S or dP, and a third
// of a warpgroup's dQ. So S comes first, P is rounded, and dP takes its registers. dQ is made in
// three parts, each added to its sums from registers before the next: shared memory has no room to
// stage it. While a warpgroup waits for a product, the tensor cores work for the other.
#pragma once

#include "sm90/ds_exchange.h"

namespace dualkv::sm90 {

// One consumer warpgroup, 64 keys of the tile.
template <typename T, class Config, bool kComputeDq, bool kSoftcap>
struct BackwardMlaConsumer : DsWarpgroup<T, Config, DsShared<Config>, kSoftcap> {
  using Base = DsWarpgroup<T, Config, DsShared<Config>, kSoftcap>;
  using Base::block, Base::group, Base::lane, Base::p, Base::shared, Base::steps, Base::steps_done, Base::thread;
  using Base::kBlockM, Base::kBlockN, Base::kHeadDim, Base::kHeadDimV;
  using typename Base::DoState, typename Base::Operand, typename Base::QState, typename Base::Statistic;
  using typename Base::TileDs, typename Base::TileK;
  using Base::announce_ds, Base::issue_accumulate, Base::issue_dp, Base::issue_scores, Base::k_tile, Base::mask;
  using Base::load_statistic, Base::step_of, Base::store_ds, Base::wait_kv;
  static constexpr int kPartCols = 32;  // columns of a part of dQ, which is within a panel of K
  static_assert(Config::kDqCols == 3 * kPartCols && Config::kStagesDs == Config::kStagesDo);

  typename Base::template Gradient<kHeadDim> dk;
  typename Base::template Gradient<kHeadDimV> dv;
  typename Base::Scores x;  // S^T and P^T, then dP^T and dS^T
  Operand probabilities, ds;
  float dq[kPartCols / 8][4];

  // Current step. Its dS has the stage of `dout`.
  QState q;
  DoState dout;
  uint32_t flags;

  // Issues one part of this warpgroup's columns of dQ.
  __device__ __forceinline__ void issue_dq(const DoState& made, int part) {
    const uint32_t a = shared.ds(made.stage), b = from_column<TileK>(k_tile(), group * Config::kDqCols + part * kPartCols);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, kPartCols>::template ss<1, 1>(dq, along_rows<TileDs>(a, step), along_rows<TileK>(b, step), step > 0);
    }
    ptx::wgmma_commit();
  }

  // Adds a part of dQ to its sums, after the wait for it.
  __device__ __forceinline__ void add_dq(const QState& state, int part) {
    ptx::pin(dq);
    const FlaggedStep& step = step_of(state);
    this->zero_foreign_dq(dq, step, 0);
    // Made to vary: otherwise the compiler keeps twelve addresses through the loop.
    const uint32_t own = varying(group * (Config::kDqBytes / 4) + thread * 4, steps_done);
    float* sum = p.dq_sum + (int64_t{step.dq_tile} * (kBlockM * kHeadDim) + own) + part * (kPartCols / 8 * kWarpgroup * 4);
#pragma unroll
    for (int j = 0; j < kPartCols / 8; ++j) ptx::reduce_add_v4(sum + j * (kWarpgroup * 4), dq[j]);
  }

  __device__ __forceinline__ void pack(Operand& operand) const {
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) accumulator_to_a<T>(x[2 * step], x[2 * step + 1], operand[step]);
  }

  // Computes dS^T = P^T * (dP^T - delta). delta is loaded piece by piece: no registers for all of
  // it.
  __device__ __forceinline__ void differentiate(uint32_t delta_address) {
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      float delta[4];
      this->load_statistic_piece(delta, delta_address, i);
      this->multiply_by_probabilities(x, i, probabilities[i], delta);
    }
  }

  // Finishes a step whose scores in `x` have been issued: P, dV, dP and dS.
  __device__ __forceinline__ void finish_scores(const QState& q, const DoState& dout, bool is_masked) {
    {
      Statistic lse;
      load_statistic(lse, shared.lse(q.stage));
      ptx::wgmma_wait<0>();
      ptx::pin(x);
      this->exponentiate(x, lse);
    }
    if (is_masked) mask(x, step_of(q));
    pack(probabilities);
    shared.dout_ready(dout.stage).wait_full(dout.phase);
    if (kSoftcap) {
      // dS takes P times the cap's derivative, which overwrites P: dV must be done first.
      issue_accumulate(dv, probabilities, shared.dout(dout.stage));
      ptx::wgmma_wait<0>();
      this->multiply_by_slope(x, x, shared.lse(q.stage));
      pack(probabilities);
      issue_dp(x, shared.dout(dout.stage));
      ptx::wgmma_wait<0>();
    } else {
      issue_dp(x, shared.dout(dout.stage));
      issue_accumulate(dv, probabilities, shared.dout(dout.stage));
      ptx::wgmma_wait<1>();
    }
    ptx::pin(x);
    differentiate(shared.delta(dout.stage));
    if (is_masked) mask(x, step_of(q));
    pack(ds);
    ptx::wgmma_wait<0>();
    shared.dout_ready(dout.stage).release(lane);
    if (kComputeDq) store_ds(ds, dout);
  }

  // One iteration: dK of this step, dV and dS of the next and, if kMakesDq, dQ of the previous one,
  // of which the other warpgroup's dS is long complete.
  template <bool kMakesDq>
  __device__ __forceinline__ void advance() {
    const QState next_q = q.next(), last_q = q.previous();
    const DoState next_dout = dout.next(), made = dout.previous();
    if (kMakesDq) {
      shared.ds_ready(made.stage).wait_full(made.phase);
      issue_dq(made, 0);
    }
    issue_accumulate(dk, ds, shared.q(q.stage));
    if (kComputeDq) announce_ds(dout);
    if (kMakesDq) {
      ptx::wgmma_wait<1>();
      add_dq(last_q, 0);
      issue_dq(made, 1);
    }
    shared.q_ready(next_q.stage).wait_full(next_q.phase);
    ptx::wgmma_wait<kMakesDq ? 1 : 0>();
    shared.q_ready(q.stage).release(lane);
    if (flags & FlaggedStep::kNextForeign) {
      this->zero_foreign_rows(step_of(next_q), next_q.stage, next_dout.stage, next_dout.phase);
    }
    if (kMakesDq) {
      ptx::wgmma_wait<0>();
      add_dq(last_q, 1);
      issue_dq(made, 2);
    }
    issue_scores(x, shared.q(next_q.stage));
    if (kMakesDq) {
      ptx::wgmma_wait<1>();
      shared.ds_ready(made.stage).release(lane);
      add_dq(last_q, 2);
    }
    const uint32_t next_flags = step_of(next_q).flags;
    finish_scores(next_q, next_dout, flags & FlaggedStep::kNextMasked);
    ++steps_done;
    q = next_q;
    dout = next_dout;
    flags = next_flags;
  }

  // dQ of a step with nothing else in flight.
  __device__ __forceinline__ void make_dq(const QState& state, const DoState& made) {
    shared.ds_ready(made.stage).wait_full(made.phase);
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      issue_dq(made, part);
      ptx::wgmma_wait<0>();
      add_dq(state, part);
    }
    shared.ds_ready(made.stage).release(lane);
  }

  __device__ __forceinline__ void run() {
    // Opaque: otherwise the compiler knows the value in the first steps, and computes descriptors
    // once that it then spills.
    asm volatile("" : "+r"(steps_done));
    clear(dk);
    clear(dv);
    wait_kv();
    shared.q_ready(q.stage).wait_full(q.phase);
    if (!steps[0].valid) return;
    flags = steps[0].flags;
    if (flags & FlaggedStep::kForeign) this->zero_foreign_rows(steps[0], q.stage, dout.stage, dout.phase);
    issue_scores(x, shared.q(q.stage));
    finish_scores(q, dout, true);
    if (!(flags & FlaggedStep::kLast)) advance<false>();
    while (!(flags & FlaggedStep::kLast)) advance<kComputeDq>();
    issue_accumulate(dk, ds, shared.q(q.stage));
    if (kComputeDq) announce_ds(dout);
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::pin(dk);
    if (!kComputeDq) return;
    if (steps_done > 0) make_dq(q.previous(), dout.previous());
    make_dq(q, dout);
  }

  // Everything is stored through this warpgroup's rows of V, which are narrower than dK. Those of K
  // will not do: the other warpgroup may still read them for dQ.
  __device__ __forceinline__ void store() {
    const KvPair<T>& out = p.dkv.of(block.tile.region);
    const float scale = p.shape.softmax_scale;
    constexpr int kFirst = kHeadDimV / 8, kRest = kHeadDim / 8 - kFirst;
    Base::store(dv, 1, 1.f, out.v, Base::v_tile());
    Base::store(reinterpret_cast<const float(&)[kFirst][4]>(dk), 0, scale, out.k, Base::v_tile());
    Base::store(reinterpret_cast<const float(&)[kRest][4]>(dk[kFirst]), 0, scale, out.k, Base::v_tile(), kHeadDimV);
  }
};

template <typename T, class Config, bool kComputeDq, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward_mla(const __grid_constant__ BackwardParams<T> p, const __grid_constant__ BackwardMaps maps) {
  __shared__ KvBlock block;
  __shared__ FlaggedStep steps[Config::kSteps];
  extern __shared__ uint8_t bytes[];
  const DsShared<Config> shared{{(ptx::shared_address(bytes) + 1023) & ~1023u}};
  if (!feed_consumers<Config>(shared, block, steps, p, maps)) return;

  // Broadcast, so that the compiler knows it to be warp-uniform.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  BackwardMlaConsumer<T, Config, kComputeDq, kSoftcap> consumer{{{shared, p, block, steps, group * 64}}};
  consumer.run();
  consumer.store();
}

}  // namespace dualkv::sm90
