// SPDX-License-Identifier: BSD-3-Clause
// Hopper backward for head dims up to 128. A block owns a KV tile of one KV head, 64 keys for each
// consumer warpgroup, and walks all queries that see it, of all query heads of the KV group. A
// producer thread loads them.
//
//   S^T = K Q^T;  P^T = exp(S^T - LSE);  dP^T = V dO^T;  dS^T = P^T * (dP^T - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// The transposed form makes P^T and dS^T register operands of dV and dK. Only dS passes through
// shared memory, because dQ sums over both warpgroups' keys. dQ is added to an fp32 buffer in
// fragment order by bulk reduction.
//
// The loop is software-pipelined: products of two steps are queued together, and dQ of a step is
// made one step later, so that no warpgroup waits for the dS of the other. The two warpgroups
// ping-pong: while one computes P and dS, the tensor cores work for the other. README.md has a
// picture.
#pragma once

#include "core/dq_semaphore.h"
#include "sm90/ds_exchange.h"

namespace dualkv::sm90 {

template <class Config>
struct BackwardShared : DsShared<Config> {
  using DsShared<Config>::barrier, DsShared<Config>::kNextBarrier;

  __device__ __forceinline__ uint32_t dq(int group) const {
    return this->base + Config::kOffsetDq + group * Config::kDqBytes;
  }

  // Completes when the reduction has read dQ of a warpgroup from shared memory.
  __device__ __forceinline__ uint32_t dq_read(int group) const { return barrier(kNextBarrier + group); }
  // Ping-pong: completes when a warpgroup may issue its products.
  __device__ __forceinline__ uint32_t issue_order(int group) const {
    return barrier(kNextBarrier + Config::kConsumers + group);
  }

  __device__ __forceinline__ void init_barriers() const {
    static_assert((kNextBarrier + 2 * Config::kConsumers) * 8 <= Config::kBarrierBytes);
    for (int group = 0; group < Config::kConsumers; ++group) {
      ptx::mbarrier_init(dq_read(group), 1);
      ptx::mbarrier_init(issue_order(group), 4);
    }
    DsShared<Config>::init_barriers();
  }
};

// One consumer warpgroup, 64 keys of the tile. kSkipsHidden: skip the steps of which these keys are
// not visible; with dQ, only the warpgroup's part of dQ is made for them.
template <typename T, class Config, bool kComputeDq, bool kSkipsHidden, bool kSoftcap>
struct BackwardConsumer : DsWarpgroup<T, Config, BackwardShared<Config>, kSoftcap> {
  using Base = DsWarpgroup<T, Config, BackwardShared<Config>, kSoftcap>;
  using Base::block, Base::group, Base::lane, Base::p, Base::shared, Base::steps, Base::steps_done, Base::thread;
  using Base::kBlockM, Base::kBlockN, Base::kHeadDim;
  using typename Base::TileDs, typename Base::TileK, typename Base::Statistic;
  using typename Base::DoState, typename Base::DsState, typename Base::QState;
  using Base::issue_accumulate, Base::issue_dp, Base::issue_scores, Base::k_tile, Base::load_statistic, Base::mask;
  using Base::step_of, Base::wait_kv;
  static constexpr bool kSplitRows = Config::kSplitRows;
  // dK is issued after S and dP of the next step. This needs no dQ (the warpgroups do not wait for
  // each other then) and registers for dS beside them: 128 queries a tile leave none.
  static constexpr bool kLateDk = !kComputeDq && kBlockM == 64;
  // The first iteration has no dQ to make and is peeled. With 128 queries a tile two copies of the
  // loop would spill: there dQ is made of whatever the buffer holds, and dropped.
  static constexpr bool kPeelsFirst = kBlockM == 64;

  // dP is issued after the mask in start(), which here runs in the middle of the walk: the live
  // sums leave no registers for dP beside a mask with 128 queries a tile.
  static constexpr bool kLateDp = !kComputeDq && kBlockM == 128;

  // Hidden steps are skipped, but still take part in ping-pong and dQ.
  static constexpr bool kSkipsWithDq = kComputeDq && kSkipsHidden;

  typename Base::template Gradient<kHeadDim> dk, dv;
  typename Base::Scores s, dp;
  typename Base::Operand probabilities, ds;
  float dq[Config::kDqCols / 8][4];

  // Current step.
  QState q;
  DoState dout;
  uint32_t flags;

  // dS has as many buffers as Q, or as dO.
  __device__ __forceinline__ auto ds_state() const {
    static_assert(Config::kStagesDs == Config::kStagesQ || Config::kStagesDs == Config::kStagesDo);
    if constexpr (Config::kStagesDs == Config::kStagesQ) {
      return q;
    } else {
      return dout;
    }
  }

  // Issues dQ of a step, once both warpgroups have written their dS.
  __device__ __forceinline__ void issue_dq(const DsState& made) {
    shared.ds_ready(made.stage).wait_full(made.phase);
    const uint32_t a = shared.ds(made.stage) + (kSplitRows ? group * TileDs::kPanelBytes : 0);
    const uint32_t b = k_tile() + (kSplitRows ? 0 : group * (Config::kDqCols / 64) * TileK::kPanelBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, Config::kDqCols>::template ss<1, 1>(dq, along_rows<TileDs>(a, step), along_rows<TileK>(b, step),
                                                        step > 0);
    }
    ptx::wgmma_commit();
  }

  // Computes dS^T = P^T * (dP^T - delta), times the derivative of the softcap.
  __device__ __forceinline__ void differentiate(const Statistic& delta, uint32_t lse_address) {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[j][e] = s[j][e] * (dp[j][e] - delta[j / 2][j % 2 * 2 + e % 2]);
    this->multiply_by_slope(dp, s, lse_address);
  }

  // Zeroes dS of masked keys: P is zero there, but dP may be anything, and 0 * NaN is NaN.
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

  __device__ __forceinline__ void store_ds() const { Base::store_ds(ds, ds_state()); }
  __device__ __forceinline__ void store_zero_ds() const {
    const auto made = ds_state();
    shared.ds_ready(made.stage).wait_empty(made.phase);
    const uint32_t rows = shared.ds(made.stage) + group * 64 * TileDs::kRowBytes + thread * 16;
#pragma unroll
    for (int panel = 0; panel < TileDs::kPanels; ++panel)
#pragma unroll
      for (int byte = 0; byte < 64 * TileDs::kRowBytes; byte += kWarpgroup * 16) {
        ptx::store_shared_128(rows + panel * TileDs::kPanelBytes + byte, make_uint4(0, 0, 0, 0));
      }
  }
  __device__ __forceinline__ void announce_ds() const { Base::announce_ds(ds_state()); }

  // Writes dQ of a step to shared memory, 16-byte chunks in fragment order, once the previous
  // reduction has read the buffer.
  __device__ __forceinline__ void stage_dq(const QState& state, const DsState& made) {
    shared.ds_ready(made.stage).release(lane);
    this->zero_foreign_dq(dq, step_of(state), kSplitRows ? group * 64 : 0);
    ptx::mbarrier_wait(shared.dq_read(group), state.template place<Config::kSteps>() % 2 ^ 1);
    const uint32_t address = shared.dq(group) + thread * 16;
#pragma unroll
    for (int j = 0; j < Config::kDqCols / 8; ++j) ptx::store_shared_float4(address + j * kWarpgroup * 16, dq[j]);
  }

  // Signals the reducing warp that dQ is staged, or that there is none. Products are issued between
  // stage_dq() and this, to cover the fence, as after store_ds().
  __device__ __forceinline__ void send_dq() const {
    ptx::fence_async_proxy();
    ptx::named_barrier_arrive(kBarrierStaged + group, kWarpgroup + 32);
  }

  // Waits until the other warpgroup has issued the first products of its step. Warpgroup 0 starts.
  __device__ __forceinline__ void wait_issue_order() const {
    ptx::mbarrier_wait(shared.issue_order(group), steps_done % 2 ^ group ^ 1);
  }
  __device__ __forceinline__ void pass_issue_order() const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.issue_order(group ^ 1));
  }

  __device__ __forceinline__ const FlaggedStep& first_step() const { return kComputeDq ? steps[0] : step_of(q); }

  // v_tile(), made opaque to the compiler: otherwise the descriptors of V become values of the
  // whole kernel and the main loop recomputes them in every step, which costs 1%.
  __device__ __forceinline__ uint32_t v_outside_loop() const {
    uint32_t tile = Base::v_tile();
    if (kSkipsWithDq) asm volatile("" : "+r"(tile));
    return tile;
  }

  // Computes P and dS of the first step, with nothing else in flight.
  __device__ __forceinline__ void start() {
    flags = first_step().flags;
    if (flags & FlaggedStep::kForeign) this->zero_foreign_rows(first_step(), q.stage, dout.stage, dout.phase);
    issue_scores(s, shared.q(q.stage));
    shared.dout_ready(dout.stage).wait_full(dout.phase);
    if (!kLateDp) issue_dp(dp, shared.dout(dout.stage), v_outside_loop());
    Statistic lse, delta;
    load_statistic(lse, shared.lse(q.stage));
    ptx::wgmma_wait<kLateDp ? 0 : 1>();
    ptx::pin(s);
    this->exponentiate(s, lse);
    // Exponentials, mask and slopes are kept apart: interleaved they need more registers than there
    // are.
    if (kLateDp) {
      ptx::pin(s);
      mask(s, first_step());
      ptx::pin(s);
      issue_dp(dp, shared.dout(dout.stage));
    } else if (kSkipsWithDq) {
      ptx::pin(s);
      if (flags & FlaggedStep::kMasked) mask(s, first_step());
      ptx::pin(s);
    }
    load_statistic(delta, shared.delta(dout.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    ptx::pin(s);
    if (!kLateDp && !kSkipsWithDq) {
      mask(s, first_step());
      ptx::pin(s);
    }
    differentiate(delta, shared.lse(q.stage));
    mask_ds();
    pack();
    if (kComputeDq) store_ds();
  }

  // First step of which this warpgroup sees nothing.
  __device__ __forceinline__ void start_unseen() {
    flags = first_step().flags;
    if (flags & FlaggedStep::kForeign) this->zero_foreign_rows(first_step(), q.stage, dout.stage, dout.phase);
    shared.dout_ready(dout.stage).wait_full(dout.phase);
    store_zero_ds();
  }

  // One iteration: dV and dK of this step, P and dS of the next and, if kMakesDq, dQ of the
  // previous one. kSeesThis and kSeesNext: whether this warpgroup sees any of the two steps; if
  // not, its own products are skipped.
  template <bool kMakesDq, bool kSeesThis = true, bool kSeesNext = true>
  __device__ __forceinline__ void advance() {
    const QState next_q = q.next();
    const DoState next_dout = dout.next();
    const bool leaves = kMakesDq && ((kPeelsFirst && kSeesThis && kSeesNext) || steps_done > 0);
    if (kComputeDq) wait_issue_order();
    if (kSeesThis) {
      issue_accumulate(dv, probabilities, shared.dout(dout.stage));
      if (!kLateDk) issue_accumulate(dk, ds, shared.q(q.stage));
    }
    if (kComputeDq) announce_ds();
    if (kMakesDq) issue_dq(ds_state().previous());
    shared.q_ready(next_q.stage).wait_full(next_q.phase);
    if (kComputeDq) pass_issue_order();
    if (flags & FlaggedStep::kNextForeign) {
      this->zero_foreign_rows(step_of(next_q), next_q.stage, next_dout.stage, next_dout.phase);
    }
    ptx::wgmma_wait<kMakesDq ? 1 : 0>();
    shared.dout_ready(dout.stage).release(lane);
    if (!kLateDk) shared.q_ready(q.stage).release(lane);
    Statistic lse, delta;
    if (kSeesNext) {
      issue_scores(s, shared.q(next_q.stage));
      load_statistic(lse, shared.lse(next_q.stage));
    }
    if (kMakesDq) {
      ptx::wgmma_wait<kSeesNext ? 1 : 0>();
      ptx::pin(dq);
      if (leaves) stage_dq(q.previous(), ds_state().previous());
    }
    shared.dout_ready(next_dout.stage).wait_full(next_dout.phase);
    if (kSeesNext) {
      issue_dp(dp, shared.dout(next_dout.stage), kSeesThis ? Base::v_tile() : v_outside_loop());
    }
    if (leaves) send_dq();
    if (kLateDk) issue_accumulate(dk, ds, shared.q(q.stage));
    const uint32_t next_flags = step_of(next_q).flags;
    if (kSeesNext) {
      ptx::wgmma_wait<kLateDk ? 2 : 1>();
      ptx::pin(s);
      this->exponentiate(s, lse);
      ptx::pin(s);
      // The branch also orders code: without it the compiler moves the exponentials after the wait
      // for dP, and the two no longer overlap.
      if (flags & FlaggedStep::kNextMasked) mask(s, step_of(next_q));
      load_statistic(delta, shared.delta(next_dout.stage));
      ptx::wgmma_wait<kLateDk ? 1 : 0>();
      ptx::pin(dp);
      differentiate(delta, shared.lse(next_q.stage));
      if (flags & FlaggedStep::kNextMasked) mask_ds();
    }
    if (kLateDk) {
      ptx::wgmma_wait<0>();
      shared.q_ready(q.stage).release(lane);
    }
    if (kSeesNext) pack();
    ++steps_done;
    q = next_q;
    dout = next_dout;
    flags = next_flags;
    if (kComputeDq) kSeesNext ? store_ds() : store_zero_ds();
  }

  // Last step: dV and dK of it, and dQ of the last two. The very last dQ stays in registers.
  template <bool kSeesLast = true>
  __device__ __forceinline__ void finish() {
    if (kSeesLast) {
      issue_accumulate(dv, probabilities, shared.dout(dout.stage));
      issue_accumulate(dk, ds, shared.q(q.stage));
    }
    if (kComputeDq) {
      announce_ds();
      if (steps_done > 0) {
        issue_dq(ds_state().previous());
        ptx::wgmma_wait<0>();
        ptx::pin(dq);
        stage_dq(q.previous(), ds_state().previous());
        send_dq();
      }
      issue_dq(ds_state());
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::pin(dk);
    if (kComputeDq) ptx::pin(dq);
  }

  __device__ __forceinline__ void run() {
    clear(dk);
    clear(dv);
    wait_kv();
    shared.q_ready(q.stage).wait_full(q.phase);
    if (!steps[0].valid) {
      if (kComputeDq) send_dq();
      return;
    }
    if constexpr (!kComputeDq) {
      run_without_dq();
    } else if constexpr (kSkipsHidden) {
      run_with_dq();
    } else {
      start();
      if (kPeelsFirst && !(flags & FlaggedStep::kLast)) advance<false>();
      while (!(flags & FlaggedStep::kLast)) advance<kComputeDq>();
      finish();
    }
  }

  // Loop with dQ and skipped steps: both warpgroups make dQ of every step. Flags are reloaded after
  // the main loop: if the loaded value is used there, ptxas waits for it right after the load,
  // which costs 1% of the loop.
  __device__ __forceinline__ void run_with_dq() {
    const uint32_t hidden = FlaggedStep::kNextHidden << group;
    bool sees = !(steps[0].flags & FlaggedStep::kHidden << group);
    if (sees) {
      start();
      if (kPeelsFirst && !(flags & (FlaggedStep::kLast | hidden))) advance<false>();
    } else {
      start_unseen();
    }
    while (true) {
      if (sees) {
        while (!(flags & (FlaggedStep::kLast | hidden))) {
          do {
            advance<true>();
          } while (!(flags & (FlaggedStep::kLast | FlaggedStep::kNextHidden << 0 | FlaggedStep::kNextHidden << 1)));
          flags = step_of(q).flags;
        }
        if (flags & FlaggedStep::kLast) return finish();
        advance<true, true, false>();
      }
      sees = true;
      while ((flags & (FlaggedStep::kLast | hidden)) == hidden) advance<true, false, false>();
      if (flags & FlaggedStep::kLast) return finish<false>();
      advance<true, false, true>();
      flags = step_of(q).flags;
    }
  }

  // Loop without dQ: only the steps that this warpgroup sees.
  __device__ __forceinline__ void run_without_dq() {
    flags = steps[0].flags & FlaggedStep::kHidden << group ? FlaggedStep::kNextHidden << group : 0;
    while (true) {
      if (flags & FlaggedStep::kNextHidden << group) {
        skip_step();
      } else {
        start();
        while (!(flags & (FlaggedStep::kLast | FlaggedStep::kNextHidden << group))) advance<false>();
        finish();
        shared.dout_ready(dout.stage).release(lane);
        shared.q_ready(q.stage).release(lane);
      }
      if (flags & FlaggedStep::kLast) return;
      q.advance();
      dout.advance();
      shared.q_ready(q.stage).wait_full(q.phase);
    }
  }

  // Skips a step, except for zeroing its foreign rows, which both warpgroups do together.
  __device__ __forceinline__ void skip_step() {
    const FlaggedStep& step = step_of(q);
    flags = step.flags;
    if (flags & FlaggedStep::kForeign) this->zero_foreign_rows(step, q.stage, dout.stage, dout.phase);
    shared.dout_ready(dout.stage).wait_full(dout.phase);
    shared.dout_ready(dout.stage).release(lane);
    shared.q_ready(q.stage).release(lane);
  }

  // dK and dV are stored through this warpgroup's rows of V. Those of K will not do: the other
  // warpgroup may still read them for dQ. The address is v_tile(), not shared.v(), with which ptxas
  // spends 15 more instructions a step on descriptors. The last dQ follows dV, to give the one
  // before it time to leave shared memory.
  __device__ __forceinline__ void store() {
    const KvPair<T>& out = p.dkv.of(block.tile.region);
    Base::store(dv, 1, 1.f, out.v, Base::v_tile());
    if (kComputeDq && steps[0].valid) {
      stage_dq(q, ds_state());
      send_dq();
    }
    Base::store(dk, 0, p.shape.softmax_scale, out.k, Base::v_tile());
  }
};

// Reducing warp: adds dQ of one warpgroup to the sums of its query tiles, one bulk reduction a
// step. With p.dq_turns each addition waits on a semaphore of the previous block on the path, which
// owns the keys before this tile and sees the same queries: dQ is then summed in the order of its
// keys.
template <typename T, class Config>
__device__ __forceinline__ void add_dq(const BackwardShared<Config>& shared, const BackwardParams<T>& p,
                                       const KvBlock& block, const FlaggedStep (&steps)[Config::kSteps], int group) {
  // Steps published together, because publishing takes a microsecond. Over the default mode, 28 x
  // 16K x 2K takes 5% longer with 2, 6% with 3 and 8% with 4.
  constexpr int kPublished = 2;
  const bool adds = threadIdx.x % 32 == 0, ordered = p.dq_semaphores;
  uint64_t done = block.before < 0 ? DqSemaphore::kOver : 0;  // by the block before
  uint32_t next_tile = 0;  // of the next turn, or a later one
  int unpublished = 0;
  const auto ask = [&] { done = ptx::load_published(p.dq_semaphore(block.before, block.kv_head, group)); };
  for (int place = 0;; place = place + 1 < Config::kSteps ? place + 1 : 0) {
    // Asked before dQ is ready, because the answer takes a microsecond: 3 to 5% of the backward.
    if (adds && ordered && done >> 32 <= next_tile) ask();
    ptx::named_barrier_sync(kBarrierStaged + group, kWarpgroup + 32);
    const FlaggedStep& step = steps[place];
    // Read before dq_read() is signalled: after that the step may be overwritten.
    const bool valid = step.valid, last = !valid || step.last;
    const DqSemaphore turn(step.m_block, step.own_begin, step.pack);
    __syncwarp();
    if (adds && valid) {
      while (ordered && !turn.is_over(done)) ask();
      float* sum = p.dq_sum + int64_t{step.dq_tile} * (Config::kBlockM * Config::kHeadDim);
      ptx::bulk_reduce_add(sum + group * (Config::kDqBytes / 4), shared.dq(group), Config::kDqBytes);
      ptx::bulk_commit();
      ptx::bulk_wait_read();  // shared memory must outlive its readers
      ptx::mbarrier_arrive(shared.dq_read(group));
    }
    next_tile = turn.tile + 1;
    if (adds && ordered && (last || ++unpublished == kPublished)) {
      unpublished = 0;
      ptx::bulk_wait();
      ptx::publish(p.dq_semaphore(block.index, block.kv_head, group), last ? DqSemaphore::kOver : turn.number());
    }
    __syncwarp();
    if (last) return;
  }
}

template <typename T, class Config, bool kComputeDq, bool kSkipsHidden, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward(const __grid_constant__ BackwardParams<T> p, const __grid_constant__ BackwardMaps maps) {
  __shared__ KvBlock block;
  __shared__ FlaggedStep steps[Config::kSteps];
  extern __shared__ uint8_t bytes[];
  const BackwardShared<Config> shared{{(ptx::shared_address(bytes) + 1023) & ~1023u}};
  if (!start_block<Config>(shared, block, p)) return;

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::kRegisters.producer>();
    // Broadcast, so that the compiler knows it to be warp-uniform.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    if (threadIdx.x == 0) {
      BackwardProducer<T, Config, kSkipsHidden>{shared, p, maps, block, steps}.run();
    } else if (kComputeDq && (warp == 1 || warp == 2)) {
      add_dq(shared, p, block, steps, warp - 1);
    }
  } else {
    ptx::take_registers<Config::kRegisters.consumer>();
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
    BackwardConsumer<T, Config, kComputeDq, kSkipsHidden, kSoftcap> consumer{{shared, p, block, steps, group * 64}};
    consumer.run();
    consumer.store();
  }
}

}  // namespace dualkv::sm90
