// SPDX-License-Identifier: BSD-3-Clause
// Hopper dK and dV for heads wider than 256, of which 64 keys would fill every register of a
// multiprocessor. Several blocks share these keys: each computes S and dP, and sums its columns of
// dV in one warpgroup and of dK in the other, as in backward_wide.h. dQ comes from backward_dq.h.
//
//   sum_dv:  S^T = K Q^T;   P^T = exp(S^T - LSE);             dV += P^T dO
//   sum_dk:  dP^T = V dO^T;  dS^T = P^T * (dP^T - delta);      dK += dS^T Q
//
// K and V, two tiles of Q and one of dO fill shared memory. A block needs the other blocks' columns
// of Q for S only, so that after S, P is handed from one warpgroup to the other in their place.
#pragma once

#include "sm90/backward_wide.h"

namespace dualkv::sm90 {

template <class Config>
struct BackwardColumnShared : BackwardWideShared<Config> {
  int column;  // first column of the block

  // One buffer per stage of Q: P of a step is stored in that step's stage.
  __device__ __forceinline__ uint32_t probabilities(int buffer) const {
    static_assert(Config::kStagesQ == 2, "as many as BackwardWideConsumer has buffers");
    return from_column<typename Config::TileQ>(this->q(buffer), (column + Config::kColumns) % Config::kHeadDim);
  }
};

// Consumer warpgroup. It calls sum_dv() or sum_dk(), which leaves the block's columns of dV or dK
// in `sum`.
template <typename T, class Config>
struct BackwardColumnConsumer : BackwardWideConsumer<T, Config, Config::kColumns, BackwardColumnShared<Config>> {
  using Base = BackwardWideConsumer<T, Config, Config::kColumns, BackwardColumnShared<Config>>;
  using Base::dout, Base::lane, Base::operand, Base::q, Base::shared, Base::steps, Base::sum, Base::x;
  using typename Base::Statistic, typename Base::TileDo, typename Base::TileQ;

  // Calls body(step, is_masked) for every step, once its Q is loaded and foreign rows are zero. The
  // body releases Q and dO.
  template <class Body>
  __device__ __forceinline__ void for_each_step(Body body) {
    uint32_t flags;
    if (!this->begin(flags)) return;
    for (bool is_masked = true;;) {
      body(steps[q.stage], is_masked);
      if (flags & FlaggedStep::kLast) return;
      is_masked = flags & FlaggedStep::kNextMasked;
      this->look_ahead();
      this->wait_next_q(flags);
      this->advance();
      flags = steps[q.stage].flags;
    }
  }

  __device__ __forceinline__ void sum_dv() {
    for_each_step([&](const FlaggedStep& step, bool is_masked) {
      Statistic lse;
      this->issue_scores(x, shared.q(q.stage));
      this->load_statistic(lse, shared.lse(q.stage));
      ptx::wgmma_wait<0>();
      this->score_products.take(x);
      this->send_probabilities(lse, is_masked, step);
      ptx::fence_async_proxy();  // the next Q is copied over P
      shared.q_ready(q.stage).release(lane);
      this->wait_dout(dout);
      this->issue_accumulate(sum, operand, from_column<TileDo>(shared.dout(dout.stage), shared.column));
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      shared.dout_ready(dout.stage).release(lane);
    });
  }

  __device__ __forceinline__ void sum_dk() {
    for_each_step([&](const FlaggedStep& step, bool is_masked) {
      Statistic delta;
      this->wait_dout(dout);
      this->issue_dp(x, shared.dout(dout.stage));
      this->load_statistic(delta, shared.delta(dout.stage));
      ptx::wgmma_wait<0>();
      this->dp_products.take(x);
      shared.dout_ready(dout.stage).release(lane);
      this->differentiate(delta, is_masked, step);
      this->issue_accumulate(sum, operand, from_column<TileQ>(shared.q(q.stage), shared.column));
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      shared.q_ready(q.stage).release(lane);
    });
  }
};

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward_columns(const __grid_constant__ BackwardParams<T> p,
                                 const __grid_constant__ BackwardMaps maps) {
  __shared__ KvBlock block;
  __shared__ FlaggedStep steps[Config::kSteps];
  extern __shared__ uint8_t bytes[];
  const int column = static_cast<int>(blockIdx.x) % Config::kColumnBlocks * Config::kColumns;
  const BackwardColumnShared<Config> shared{{{(ptx::shared_address(bytes) + 1023) & ~1023u}}, column};
  if (!feed_consumers<Config>(shared, block, steps, p, maps)) return;

  BackwardColumnConsumer<T, Config> consumer{{{shared, p, block, steps, 0}}};
  const KvPair<T>& out = p.dkv.of(block.tile.region);
  // Staging is the K or V tile that the warpgroup alone has read.
  if (threadIdx.x < 2 * kWarpgroup) {
    consumer.sum_dv();
    consumer.store(consumer.sum, 1, 1.f, out.v, shared.k(), column);
  } else {
    consumer.sum_dk();
    consumer.store(consumer.sum, 0, p.shape.softmax_scale, out.k, shared.v(), column);
  }
}

}  // namespace dualkv::sm90
