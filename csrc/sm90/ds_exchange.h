// SPDX-License-Identifier: BSD-3-Clause
// Exchange of dS through shared memory, for the backward kernels that also make dQ: dQ sums over
// the keys of both warpgroups, so that each reads what both wrote.
#pragma once

#include "ptx/stmatrix.h"
#include "sm90/kv_walk.h"

namespace dualkv::sm90 {

template <class Config>
struct DsShared : KvShared<Config> {
  using KvShared<Config>::barrier;

  __device__ __forceinline__ uint32_t ds(int buffer) const {
    return this->base + Config::kOffsetDs + buffer * Config::TileDs::kBytes;
  }
  // Full when both warpgroups have written dS, empty when both have made dQ of it: the same warps
  // are producers and consumers.
  __device__ __forceinline__ PipelineBarrier ds_ready(int buffer) const { return {barrier(kFirst + 2 * buffer)}; }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    for (int buffer = 0; buffer < Config::kStagesDs; ++buffer) ds_ready(buffer).init(kConsumerWarps, kConsumerWarps);
    KvShared<Config>::init_barriers();
  }

 private:
  static constexpr int kFirst = 2 + 2 * (Config::kStagesQ + Config::kStagesDo);  // after KvShared

 protected:
  static constexpr int kNextBarrier = kFirst + 2 * Config::kStagesDs;
  static_assert(kNextBarrier * 8 <= Config::kBarrierBytes);
};

// Consumer warpgroup that takes part in the exchange.
template <typename T, class Config, class Shared, bool kSoftcap>
struct DsWarpgroup : KvWarpgroup<T, Config, Shared, kSoftcap> {
  using Base = KvWarpgroup<T, Config, Shared, kSoftcap>;
  using Base::block, Base::lane, Base::shared, Base::steps, Base::thread, Base::kBlockM, Base::kBlockN;
  using typename Base::Operand, typename Base::TileK;
  using TileDs = typename Config::TileDs;
  using QState = PipelineState<Config::kStagesQ>;
  using DoState = PipelineState<Config::kStagesDo>;
  using DsState = PipelineState<Config::kStagesDs>;

  const int group = this->first_key / 64;

  __device__ __forceinline__ const FlaggedStep& step_of(const QState& state) const {
    return steps[state.template place<Config::kSteps>()];
  }

  __device__ __forceinline__ void store_ds(const Operand& ds, const DsState& made) const {
    shared.ds_ready(made.stage).wait_empty(made.phase);
    const int row = group * 64 + thread / 32 * 16 + lane % 16;
    const uint32_t address = shared.ds(made.stage) + TileDs::chunk_offset(row, lane / 16);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) ptx::stmatrix_x4(TileDs::column(address, step), ds[step]);
  }

  // Announces the dS that store_ds() wrote. Products are issued between the two calls: the fence
  // waits for the writes, and meanwhile the tensor cores work.
  __device__ __forceinline__ void announce_ds(const DsState& made) const {
    ptx::fence_async_proxy();
    shared.ds_ready(made.stage).announce(lane);
  }

  // Zeroes dQ of foreign rows. Their dS is zero, but K may hold NaN, and 0 * NaN is NaN.
  // `first_row` is the row of the query tile at which `dq` starts.
  template <int kN8>
  __device__ __forceinline__ void zero_foreign_dq(float (&dq)[kN8][4], const FlaggedStep& step, int first_row) const {
    if (!(step.flags & FlaggedStep::kForeign)) return;
    int first = step.own_begin, end = step.own_end;
    const int row = first_row + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half, first -= 8, end -= 8) {
      const bool own = row >= first && row < end;
#pragma unroll
      for (int j = 0; j < kN8; ++j) {
        dq[j][2 * half] = own ? dq[j][2 * half] : 0.f;
        dq[j][2 * half + 1] = own ? dq[j][2 * half + 1] : 0.f;
      }
    }
  }

  __device__ __forceinline__ void wait_kv() const {
    shared.kv_ready().wait_full(0);
    if (block.tile.valid == kBlockN) return;
    this->template zero_rows<TileK, kBlockN>(shared.k(), 0, block.tile.valid);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierZeroed, Base::kConsumerThreads);
  }
};

}  // namespace dualkv::sm90
