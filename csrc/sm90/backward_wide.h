// SPDX-License-Identifier: BSD-3-Clause
// Hopper dK and dV for head dims 192 and 256, where no warpgroup has registers for both: a block
// owns 64 keys of one KV head, one consumer warpgroup sums dV and the other dK. dQ comes from
// backward_dq.h.
//
//   sum_dv:  S^T = K Q^T;   P^T = exp(S^T - LSE);             dV += P^T dO
//   sum_dk:  dP^T = V dO^T;  dS^T = P^T * (dP^T - delta);      dK += dS^T Q
//
// S^T and dP^T have the same fragment layout. So P is handed over thread by thread: thread i writes
// its elements, rounded, and thread i of the other warpgroup reads them.
#pragma once

#include "sm90/kv_walk.h"

namespace dualkv::sm90 {

template <class Config>
struct BackwardWideShared : KvShared<Config> {
  __device__ __forceinline__ uint32_t probabilities(int buffer) const {
    static_assert(Config::kStagesP == 2, "as many as BackwardWideConsumer has buffers");
    return this->base + Config::kOffsetP + buffer * Config::kBytesP;
  }
  __device__ __forceinline__ PipelineBarrier probabilities_ready(int buffer) const {
    return {this->barrier(2 + 2 * (Config::kStagesQ + Config::kStagesDo + buffer))};
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int buffer = 0; buffer < 2; ++buffer) probabilities_ready(buffer).init(4, 4);
    KvShared<Config>::init_barriers();
  }
};

// Consumer warpgroup. It calls sum_dv() or sum_dk(), which leaves dV or dK, of kCols columns, in
// `sum`.
template <typename T, class Config, int kCols, class Shared = BackwardWideShared<Config>>
struct BackwardWideConsumer : KvWarpgroup<T, Config, Shared> {
  using Base = KvWarpgroup<T, Config, Shared>;
  using Base::lane, Base::p, Base::shared, Base::steps, Base::steps_done, Base::thread, Base::kBlockM;
  using Base::issue_accumulate, Base::issue_dp, Base::issue_scores, Base::load_statistic, Base::mask;
  using typename Base::Operand, typename Base::Statistic;

  typename Base::template Gradient<kCols> sum;
  typename Base::Scores x;  // S^T and P^T, or dP^T and dS^T
  Operand operand;
  PipelineState<Config::kStagesQ> q, next_q;
  PipelineState<Config::kStagesDo> dout, next_dout;
  PipelineState<2> probabilities;

  __device__ __forceinline__ void look_ahead() {
    next_q = q;
    next_q.advance();
    next_dout = dout;
    next_dout.advance();
  }
  __device__ __forceinline__ void advance() {
    q = next_q;
    dout = next_dout;
    ++steps_done;
  }

  __device__ __forceinline__ void wait_q(const PipelineState<Config::kStagesQ>& state) const {
    shared.q_ready(state.stage).wait_full(state.phase);
  }
  __device__ __forceinline__ void wait_dout(const PipelineState<Config::kStagesDo>& state) const {
    shared.dout_ready(state.stage).wait_full(state.phase);
  }

  // Waits for Q of the next step and zeroes foreign rows of its Q and dO. `flags` are those of the
  // current step.
  __device__ __forceinline__ void wait_next_q(uint32_t flags) const {
    wait_q(next_q);
    if (flags & FlaggedStep::kNextForeign) {
      this->zero_foreign_rows(steps[next_q.stage], next_q.stage, next_dout.stage, next_dout.phase);
    }
  }

  // Waits for the keys and the first Q, and reads the first step's flags. False if there is no
  // step.
  __device__ __forceinline__ bool begin(uint32_t& flags) {
    clear(sum);
    shared.kv_ready().wait_full(0);
    wait_q(q);
    if (!steps[q.stage].valid) return false;
    flags = steps[q.stage].flags;
    if (flags & FlaggedStep::kForeign) this->zero_foreign_rows(steps[q.stage], q.stage, dout.stage, dout.phase);
    return true;
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) accumulator_to_a<T>(x[2 * step], x[2 * step + 1], operand[step]);
  }

  // Computes P^T from the scores, into `operand` and for the other warpgroup.
  __device__ __forceinline__ void send_probabilities(const Statistic& lse, bool is_masked, const FlaggedStep& step) {
    this->exponentiate(x, lse);
    if (is_masked) mask(x, step);
    pack();
    if (p.shape.softcap.exists()) return send_slopes(lse);
    send(operand);
  }

  // With a softcap, the other warpgroup gets P^T times the cap's derivative.
  __device__ __forceinline__ void send_slopes(const Statistic& lse) {
    this->multiply_by_slope(x, x, lse);
    Operand slopes;
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) accumulator_to_a<T>(x[2 * step], x[2 * step + 1], slopes[step]);
    send(slopes);
  }

  __device__ __forceinline__ void send(const Operand& packed) {
    const PipelineBarrier ready = shared.probabilities_ready(probabilities.stage);
    ready.wait_empty(probabilities.phase);
    const uint32_t address = shared.probabilities(probabilities.stage) + thread * 16;
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      ptx::store_shared_128(address + i * kWarpgroup * 16,
                            make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]));
    }
    ready.announce(lane);
    probabilities.advance();
  }

  // Computes dS^T from dP^T and the other warpgroup's P^T, into `operand`.
  __device__ __forceinline__ void differentiate(const Statistic& delta, bool is_masked, const FlaggedStep& step) {
    const PipelineBarrier ready = shared.probabilities_ready(probabilities.stage);
    ready.wait_full(probabilities.phase);
    const uint32_t address = shared.probabilities(probabilities.stage) + thread * 16;
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      const uint4 packed = ptx::load_shared_128(address + i * kWarpgroup * 16);
      this->multiply_by_probabilities(x, i, {packed.x, packed.y, packed.z, packed.w}, delta[i]);
    }
    ready.release(lane);
    probabilities.advance();
    if (is_masked) mask(x, step);
    pack();
  }

  __device__ __forceinline__ void sum_dv() {
    Statistic lse;
    uint32_t flags;
    if (!begin(flags)) return;
    issue_scores(x, shared.q(q.stage));
    load_statistic(lse, shared.lse(q.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(x);
    shared.q_ready(q.stage).release(lane);
    send_probabilities(lse, true, steps[q.stage]);
    while (!(flags & FlaggedStep::kLast)) {
      look_ahead();
      wait_dout(dout);
      issue_accumulate(sum, operand, shared.dout(dout.stage));
      wait_next_q(flags);
      issue_scores(x, shared.q(next_q.stage));
      load_statistic(lse, shared.lse(next_q.stage));
      const uint32_t next_flags = steps[next_q.stage].flags;
      ptx::wgmma_wait<1>();
      shared.dout_ready(dout.stage).release(lane);
      ptx::wgmma_wait<0>();
      ptx::pin(x);
      // The step stays readable: the other warpgroup still holds the stage.
      shared.q_ready(next_q.stage).release(lane);
      send_probabilities(lse, flags & FlaggedStep::kNextMasked, steps[next_q.stage]);
      flags = next_flags;
      advance();
    }
    wait_dout(dout);
    issue_accumulate(sum, operand, shared.dout(dout.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
  }

  __device__ __forceinline__ void sum_dk() {
    Statistic delta;
    uint32_t flags;
    if (!begin(flags)) return;
    wait_dout(dout);
    issue_dp(x, shared.dout(dout.stage));
    load_statistic(delta, shared.delta(dout.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(x);
    shared.dout_ready(dout.stage).release(lane);
    differentiate(delta, true, steps[q.stage]);
    while (!(flags & FlaggedStep::kLast)) {
      look_ahead();
      issue_accumulate(sum, operand, shared.q(q.stage));
      wait_next_q(flags);
      wait_dout(next_dout);
      issue_dp(x, shared.dout(next_dout.stage));
      load_statistic(delta, shared.delta(next_dout.stage));
      const uint32_t next_flags = steps[next_q.stage].flags;
      ptx::wgmma_wait<1>();
      shared.q_ready(q.stage).release(lane);
      ptx::wgmma_wait<0>();
      ptx::pin(x);
      shared.dout_ready(next_dout.stage).release(lane);
      differentiate(delta, flags & FlaggedStep::kNextMasked, steps[next_q.stage]);
      flags = next_flags;
      advance();
    }
    issue_accumulate(sum, operand, shared.q(q.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
  }
};

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward_wide(const __grid_constant__ BackwardParams<T> p, const __grid_constant__ BackwardMaps maps) {
  __shared__ KvBlock block;
  __shared__ FlaggedStep steps[Config::kSteps];
  extern __shared__ uint8_t bytes[];
  const BackwardWideShared<Config> shared{{(ptx::shared_address(bytes) + 1023) & ~1023u}};
  if (!feed_consumers<Config>(shared, block, steps, p, maps)) return;

  const KvPair<T>& out = p.dkv.of(block.tile.region);
  if (threadIdx.x < 2 * kWarpgroup) {
    BackwardWideConsumer<T, Config, Config::kHeadDimV> consumer{{shared, p, block, steps, 0}};
    consumer.sum_dv();
    consumer.store(consumer.sum, 1, 1.f, out.v, shared.k());
  } else {
    BackwardWideConsumer<T, Config, Config::kHeadDim> consumer{{shared, p, block, steps, 0}};
    consumer.sum_dk();
    // Q is free for staging: the other warpgroup has used it before it sent the last P.
    consumer.store(consumer.sum, 0, p.shape.softmax_scale, out.k, shared.q(0));
  }
}

}  // namespace dualkv::sm90
