// SPDX-License-Identifier: BSD-3-Clause
// Separate dQ kernel, for deterministic mode: one block owns a query tile of one head and streams K
// and V, so that every sum has one owner and one order. It computes S and dP a second time. The
// alternative, a fixed order of all KV tiles' additions to a shared fp32 dQ, makes blocks wait.
#pragma once

#include "sm80/query_block.h"
#include "tile/mask.h"
#include "tile/online_softmax.h"

namespace dualkv::sm80 {

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    dualkv_sm80_backward_dq(const __grid_constant__ BackwardDqParams<T> p) {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  constexpr int kM16 = Config::kWarpM / 16, kSteps = Config::kHeadDim / 16, kN8 = Config::kBlockN / 8;

  __shared__ WalkedBlock block;
  if (!block.take<Config>(p)) return;
  const QueryBlock& work = block.query;

  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t s_q = ptx::shared_address(shared), s_dout = s_q + TileQ::kBytes;
  const uint32_t s_k = s_dout + TileQ::kBytes, s_v = s_k + TileKv::kBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Config::kWarpM;
  const uint32_t q_address = rows_first_address<TileQ>(s_q + warp_row * TileQ::kRowBytes, lane);
  const uint32_t dout_address = q_address + TileQ::kBytes;
  const uint32_t k_address = columns_first_address<TileKv>(s_k, lane), v_address = k_address + TileKv::kBytes;
  const uint32_t k_rows_address = rows_first_address<TileKv>(s_k, lane);

  const auto start_k = [&](int n) {
    start_kv<Config>(s_k, p.kv, block.step(n).tile, work.kv_head, p.shape.head_dim, &KvPair<const T>::k);
  };
  const auto start_v = [&](int n) {
    start_kv<Config>(s_v, p.kv, block.step(n).tile, work.kv_head, p.shape.head_dim_v, &KvPair<const T>::v);
  };
  load_rows<TileQ, Config::kBlockM, Config::kThreads>(s_q, p.q.at(work.q_tile.row, work.head), p.q.row_stride, 0,
                                                      work.q_tile.rows, p.shape.head_dim);
  load_rows<TileQ, Config::kBlockM, Config::kThreads>(s_dout, p.dout.at(work.q_tile.row, work.head), p.dout.row_stride,
                                                      0, work.q_tile.rows, p.shape.head_dim_v);
  start_k(0);
  start_v(0);

  float lse_log2[kM16][2], delta[kM16][2];
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
      const bool valid = row < work.q_tile.rows;
      const int64_t index = p.statistics.index_in_pack(work.head, work.q_tile.row + row);
      lse_log2[i][half] = valid ? p.statistics.lse_log2[index] : 0.f;
      delta[i][half] = valid ? p.statistics.delta[index] : 0.f;
    }

  float dq[kM16][Config::kHeadDim / 8][4];
  clear(dq);
  bool last = false;
  for (int n = 0; !last; ++n) {
    last = block.step(n).last;
    ptx::cp_async_wait<0>();
    __syncthreads();  // K_n and V_n are loaded
    if (!last && threadIdx.x == 0) block.find<Config>(n + 2, p);
    float s[kM16][kN8][4], dp[kM16][kN8][4];
    clear(s);
    warp_matmul<T, kSteps>(
        s, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4(a, TileQ::at(q_address, i, k)); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4(b, TileKv::at(k_address, j, k)); });
    cap_scores(s, p.shape.softcap);  // before dP takes registers
    clear(dp);
    warp_matmul<T, kSteps>(
        dp, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4(a, TileQ::at(dout_address, i, k)); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4(b, TileKv::at(v_address, j, k)); });
    __syncthreads();  // all warps are done with V_n
    if (!last) start_v(n + 1);

    const float scale_log2 = p.shape.softmax_scale * kLog2e;
#pragma unroll
    for (int i = 0; i < kM16; ++i) {
#pragma unroll
      for (int j = 0; j < kN8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = exp2_approx(s[i][j][e] * scale_log2 - lse_log2[i][e / 2]);
      if (p.shape.softcap.exists()) multiply_by_slope(s[i], lse_log2[i], p.shape.softcap);
#pragma unroll
      for (int j = 0; j < kN8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] *= dp[i][j][e] - delta[i][e / 2];
    }
    const KvStep& step = block.step(n);
    if (needs_mask(step, work.q_tile.q_pos)) mask_queries(s, warp_row, lane, 0.f, step.tile, work, p.shape.sees);
    warp_matmul<T, Config::kBlockN / 16>(
        dq, [&](int k, int i, uint32_t(&a)[4]) { accumulator_to_a<T>(s[i][2 * k], s[i][2 * k + 1], a); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, TileKv::at(k_rows_address, k, j)); });
    __syncthreads();  // all warps are done with K_n
    if (!last) start_k(n + 1);
  }

  // Safe without a barrier: a warp overwrites only the rows of sQ that it alone has read.
  store_accumulator<TileQ, T>(s_q, warp_row, 0, dq, p.shape.softmax_scale, lane);
  __syncthreads();
  store_rows<TileQ, Config::kBlockM, Config::kThreads>(p.dq.at(work.q_tile.row, work.head), p.dq.row_stride, s_q,
                                                       work.q_tile.rows, p.shape.head_dim);
}

}  // namespace dualkv::sm80
