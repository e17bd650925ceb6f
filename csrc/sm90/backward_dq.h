// SPDX-License-Identifier: BSD-3-Clause
// Hopper dQ kernel, for deterministic mode, wide heads and short walks: a block owns a query tile
// of a pack of heads and streams K and V, so that every sum has one owner and one order. S and dP
// are computed a second time.
//
//   S = Q K^T;  P = exp(S - LSE);  dP = dO V^T;  dS = P * (dP - delta);  dQ += dS K
//
// dS is the register operand of dQ, and the warpgroups exchange nothing. At d = 512 they do: two
// share 64 queries, one computes S, the other dP, they exchange both in the stage of V, and each
// sums half of the columns of dQ. Blocks are persistent, as in forward.h.
#pragma once

#include "sm90/config.h"
#include "sm90/maps.h"
#include "sm90/query_work.h"
#include "sm90/tile.h"
#include "tile/mask.h"

namespace dualkv::sm90 {

struct BackwardDqMaps {
  CUtensorMap q, dout;
  RegionMaps kv;
};

template <class Config>
struct BackwardDqShared : QueryShared<Config> {
  __device__ __forceinline__ uint32_t dout(int stage) const {
    return this->base + Config::kOffsetDo + stage * Config::TileDo::kBytes;
  }
};

// Heads that share a query tile. One at d = 512, where packs cost the backward 0.5 to 1.2%
// (docs/notes/wide_heads.md).
template <class Config, typename T>
__device__ __forceinline__ Pack pack_of(const BackwardDqParams<T>& p) {
  return Config::kPacksHeads ? p.heads : Pack{};
}

// Part of dS that a warpgroup computes: all, or S or dP where two share the queries.
enum class DqRole { all, scores, dp };

// One consumer warpgroup: 64 rows of each query tile, and all or half of the columns of their dQ.
template <typename T, class Config, DqRole kRole>
struct BackwardDqConsumer {
  using TileQ = typename Config::TileQ;
  using TileDo = typename Config::TileDo;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kSharers = Config::kSharers, kColumns = Config::kHeadDim / kSharers;
  static constexpr int kBlockN = Config::kBlockN;

  const BackwardDqShared<Config>& shared;
  const BackwardDqParams<T>& p;
  const KvStep (&steps)[Config::kStagesK];
  // Index of the warpgroup. Broadcast, so that the compiler knows it to be warp-uniform.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int group_row = group / kSharers * 64, group_column = group % kSharers * kColumns;
  const int row0 = group_row + thread / 32 * 16 + lane / 4;  // this thread's first row

  PipelineState<Config::kStagesK> k_state;
  PipelineState<Config::kStagesV> v_state;
  PipelineState<Config::kStagesQ> query_state;
  float lse_log2[2], delta[2];
  float s[1][kBlockN / 8][4], dp[1][kBlockN / 8][4];
  float dq[1][kColumns / 8][4];
  uint32_t ds[kBlockN / 16][4];

  RowProducts<T, TileQ, TileK, kBlockN / 8> score_products;
  RowProducts<T, TileDo, TileV, kBlockN / 8> dp_products;

  // Query (relative to the tile) and head (of the pack) of a row of the tile.
  __device__ __forceinline__ int query_of(int row) const { return pack_of<Config>(p).queries(row); }
  __device__ __forceinline__ int head_of(int row) const { return pack_of<Config>(p).of_row(row); }

  __device__ __forceinline__ void issue_scores(int steps_done, int k_stage) {
    ptx::wgmma_fence();
    const uint32_t q = varying(shared.q(query_state.stage), steps_done);
    score_products.issue(s[0], q + group_row * TileQ::kRowBytes, shared.k(k_stage));
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_dq(uint32_t k_tile) {
    const uint32_t k = from_column<TileK>(k_tile, group_column);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, kColumns>::template rs<1>(dq[0], ds[step], along_rows<TileK>(k, step), true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void wait_queries() const {
    shared.queries_ready(query_state.stage, 0).wait_full(query_state.phase);
  }
  __device__ __forceinline__ void release_queries() {
    shared.queries_ready(query_state.stage, 0).release(lane);
    query_state.advance();
  }

  // Waits for the next K and zeroes its foreign rows, because K is an operand of dQ.
  __device__ __forceinline__ KvStep wait_k(const PipelineState<Config::kStagesK>& state) const {
    shared.k_ready(state.stage).wait_full(state.phase);
    const KvStep step = steps[state.stage];
    if (step.tile.valid < kBlockN) {
      zero_tail<TileK, kBlockN>(shared.k(state.stage), step.tile.valid, group, thread);
    }
    return step;
  }

  __device__ __forceinline__ void mask(float (&x)[1][kBlockN / 8][4], const QueryBlock& work,
                                       const KvTile& tile) const {
    const int q_pos = work.q_tile.q_pos;
    const Visibility sees = p.shape.sees;
    const auto first = [&](int row) { return first_column(tile, q_pos + query_of(row), sees); };
    const auto end = [&](int row) { return end_column(tile, q_pos + query_of(row), sees); };
    if (sees.has_window()) return mask_fragment(x, row0, lane % 4 * 2, 0.f, first, end);
    mask_fragment(x, row0, lane % 4 * 2, 0.f, end);
  }

  __device__ __forceinline__ void load_statistics(const QueryBlock& work) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + half * 8, query = query_of(row);
      const bool valid = query < work.q_tile.rows;
      const int64_t index = p.statistics.index(work.head + head_of(row), work.q_tile.row + query);
      lse_log2[half] = valid ? p.statistics.lse_log2[index] : 0.f;
      delta[half] = valid ? p.statistics.delta[index] : 0.f;
    }
  }

  // Computes P = exp2(S * scale - LSE), of capped scores.
  __device__ __forceinline__ void exponentiate() {
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    cap_scores(s[0], p.shape.softcap);
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][j][e] = exp2_approx(s[0][j][e] * scale_log2 - lse_log2[e / 2]);
  }

  // Computes P while dP is still in flight, then dS, rounded into the A fragments of dQ.
  __device__ __forceinline__ void finish_step(const QueryBlock& work, const KvStep& step, int q_pos) {
    const bool is_masked = needs_mask(step, q_pos);
    ptx::wgmma_wait<1>();
    score_products.take(s[0]);
    exponentiate();
    ptx::pin(s[0]);
    // The branch also orders code: without it the compiler moves the exponentials after the wait
    // for dP, and the two no longer overlap.
    if (is_masked) mask(s, work, step.tile);
    if (p.shape.softcap.exists()) multiply_by_slope(s[0], lse_log2, p.shape.softcap);
    ptx::wgmma_wait<0>();
    dp_products.take(dp[0]);
    shared.v_ready(v_state.stage).release(lane);
    v_state.advance();
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[0][j][e] = s[0][j][e] * (dp[0][j][e] - delta[e / 2]);
    if (is_masked) {
      // P of a masked key is zero, but dP may be anything, and 0 * NaN is NaN.
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[0][j][e] = s[0][j][e] == 0.f ? 0.f : dp[0][j][e];
    }
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      accumulator_to_a<T>(dp[0][2 * step], dp[0][2 * step + 1], ds[step]);
  }

  __device__ __forceinline__ void issue_dp(int steps_done) {
    shared.v_ready(v_state.stage).wait_full(v_state.phase);
    ptx::wgmma_fence();
    const uint32_t dout = varying(shared.dout(query_state.stage), steps_done);
    dp_products.issue(dp[0], dout + group_row * TileDo::kRowBytes, shared.v(v_state.stage));
    ptx::wgmma_commit();
  }

  // Products of the next step that are issued before the wait for dQ of this one, and after it.
  __device__ __forceinline__ void issue_early(int steps_done, int k_stage) {
    if constexpr (kRole == DqRole::dp) return issue_dp(steps_done);
    issue_scores(steps_done, k_stage);
  }
  __device__ __forceinline__ void issue_late(int steps_done) {
    if constexpr (kRole == DqRole::all) issue_dp(steps_done);
  }

  __device__ __forceinline__ void finish(const QueryBlock& work, const KvStep& step, int q_pos) {
    if constexpr (kRole == DqRole::all) return finish_step(work, step, q_pos);
    if constexpr (kRole == DqRole::scores) return finish_scores(work, step, q_pos);
    if constexpr (kRole == DqRole::dp) return finish_dp();
  }

  // Exchange of two warpgroups that share queries: dP goes to the one that has P, and dS comes
  // back, both in the stage of V, which is free once dP is computed. The two meet twice: when dP is
  // written, and when dS is.
  static constexpr int kBarrierMeet = 1 + Config::kConsumers;  // lower ones: zero_tail
  static constexpr int kBytesDp = kBlockN / 8 * kWarpgroup * 16, kBytesDs = kBlockN / 16 * kWarpgroup * 16;
  static_assert(kRole == DqRole::all || kBytesDp + kBytesDs <= TileV::kBytes, "dP and dS take the place of V");
  __device__ __forceinline__ uint32_t place_of_dp(int j) const {
    return shared.v(v_state.stage) + (j * kWarpgroup + thread) * 16;
  }
  __device__ __forceinline__ uint32_t place_of_ds(int step) const { return place_of_dp(kBlockN / 8 + step); }
  __device__ __forceinline__ void meet() const { ptx::named_barrier_sync(kBarrierMeet, 2 * kWarpgroup); }
  __device__ __forceinline__ void leave_v() {
    ptx::fence_async_proxy();  // the next V is copied over it
    shared.v_ready(v_state.stage).release(lane);
    v_state.advance();
  }

  __device__ __forceinline__ void finish_scores(const QueryBlock& work, const KvStep& step, int q_pos) {
    const bool is_masked = needs_mask(step, q_pos);
    ptx::wgmma_wait<0>();
    score_products.take(s[0]);
    exponentiate();
    if (p.shape.softcap.exists()) multiply_by_slope(s[0], lse_log2, p.shape.softcap);
    meet();
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      float x[4];
      ptx::load_shared_float4(x, place_of_dp(j));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][j][e] *= x[e] - delta[e / 2];
    }
    if (is_masked) mask(s, work, step.tile);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], ds[step]);
      ptx::store_shared_128(place_of_ds(step), make_uint4(ds[step][0], ds[step][1], ds[step][2], ds[step][3]));
    }
    meet();
    leave_v();
  }

  __device__ __forceinline__ void finish_dp() {
    ptx::wgmma_wait<0>();
    dp_products.take(dp[0]);
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) ptx::store_shared_float4(place_of_dp(j), dp[0][j]);
    meet();
    meet();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      const uint4 x = ptx::load_shared_128(place_of_ds(step));
      ds[step][0] = x.x, ds[step][1] = x.y, ds[step][2] = x.z, ds[step][3] = x.w;
    }
    leave_v();
  }

  // Skips an item of which this warpgroup has no query, as the last tile of a node may. It still
  // releases all tiles: its loader reuses a stage when both warpgroups have released it.
  __device__ __forceinline__ void skip_work() {
    wait_queries();
    release_queries();
    for (bool last = false; !last;) {
      shared.k_ready(k_state.stage).wait_full(k_state.phase);
      last = steps[k_state.stage].last;
      shared.k_ready(k_state.stage).release(lane);
      k_state.advance();
      shared.v_ready(v_state.stage).wait_full(v_state.phase);
      shared.v_ready(v_state.stage).release(lane);
      v_state.advance();
    }
  }

  __device__ __forceinline__ void attend(const QueryBlock& work) {
    if (query_of(group_row) >= work.q_tile.rows) return skip_work();
    const int q_pos = work.q_tile.q_pos + query_of(group_row);
    load_statistics(work);
    clear(dq);
    wait_queries();
    KvStep now = wait_k(k_state);
    issue_early(0, k_state.stage);
    issue_late(0);
    finish(work, now, q_pos);
    for (int n = 1; !now.last; ++n) {
      PipelineState<Config::kStagesK> next_k = k_state;
      next_k.advance();
      now = wait_k(next_k);
      issue_dq(shared.k(k_state.stage));
      issue_early(n, next_k.stage);
      ptx::wgmma_wait<1>();  // dQ: its operands are overwritten next
      shared.k_ready(k_state.stage).release(lane);
      k_state = next_k;
      issue_late(n);
      finish(work, now, q_pos);
    }
    release_queries();
    issue_dq(shared.k(k_state.stage));
    ptx::wgmma_wait<0>();
    ptx::pin(dq[0]);
    shared.k_ready(k_state.stage).release(lane);
    k_state.advance();
    store(work);
  }

  __device__ __forceinline__ void run(const QueryWork<QueryBlock> (&works)[kWorkSlots]) {
    consume_works(shared, works, lane, [&](const QueryBlock& work) { attend(work); });
  }

  __device__ __forceinline__ void store(const QueryBlock& work) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + half * 8, query = query_of(row);
      T* out = p.dq.at(work.q_tile.row + query, work.head + head_of(row));
      store_row<T>(dq[0], half, p.shape.softmax_scale, out, group_column, query < work.q_tile.rows ? p.shape.head_dim : 0,
                   lane);
    }
  }
};

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_backward_dq(const __grid_constant__ BackwardDqParams<T> p, const __grid_constant__ BackwardDqMaps maps) {
  __shared__ QueryWork<QueryBlock> works[kWorkSlots];
  __shared__ KvStep steps[Config::kStagesK];
  __shared__ WalkStep ring[kWalkSlots];
  extern __shared__ uint8_t bytes[];
  const BackwardDqShared<Config> shared{{(ptx::shared_address(bytes) + 1023) & ~1023u}};
  if (threadIdx.x == 0) shared.init_barriers(1);
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::kRegisters.producer>();
    const QueryRole role = query_role();
    if (threadIdx.x % 32 > 0) return;
    const Pack heads = pack_of<Config>(p);
    if (role == QueryRole::walk) {
      const int group = heads.queries(64);  // queries of a warpgroup
      walk_works<Config>(shared, works, ring, PathWalk<>{}, p.nodes, group, p.shape.sees);
    } else if (role == QueryRole::load_k) {
      load_keys<Config>(shared, ring, steps,
                        [&](const auto&, uint32_t k, uint32_t barrier, const KvTile& tile, int kv_head) {
        load_tile<typename Config::TileK>(k, maps.kv.of(tile.region).k, barrier, kv_head, tile.row);
      });
    } else if (role == QueryRole::load_v) {
      load_values<Config>(shared, ring, [&](uint32_t v, uint32_t barrier, const KvTile& tile, int kv_head) {
        load_tile<typename Config::TileV>(v, maps.kv.of(tile.region).v, barrier, kv_head, tile.row);
      });
    } else {
      using TileQ = typename Config::TileQ;
      using TileDo = typename Config::TileDo;
      const auto load = [&](int stage, int, const PipelineBarrier& ready, const QueryBlock& work) {
        ready.expect(TileQ::kBytes + TileDo::kBytes);
        load_tile<TileQ>(shared.q(stage), maps.q, ready.full(), work.head, work.q_tile.row);
        load_tile<TileDo>(shared.dout(stage), maps.dout, ready.full(), work.head, work.q_tile.row);
      };
      hand_out_works<Config>(shared, p, works, QueryTiling{heads.queries(Config::kBlockM), heads.heads()}, load);
    }
  } else {
    ptx::take_registers<Config::kRegisters.consumer>();
    if constexpr (Config::kSharers == 1) {
      BackwardDqConsumer<T, Config, DqRole::all>{shared, p, steps}.run(works);
    } else if (threadIdx.x < 2 * kWarpgroup) {
      BackwardDqConsumer<T, Config, DqRole::scores>{shared, p, steps}.run(works);
    } else {
      BackwardDqConsumer<T, Config, DqRole::dp>{shared, p, steps}.run(works);
    }
  }
}

}  // namespace dualkv::sm90
