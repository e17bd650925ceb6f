// SPDX-License-Identifier: BSD-3-Clause
// Forward: one block per (query tile, query head). K and V stream through shared memory, the
// queries' own node first.
//
//   S = Q K^T;  P = exp(S - max);  O += P V        (online; O is normalised and rounded once)
//
// K_n+1 is loaded during softmax and P V, V_n during Q K^T; two blocks a multiprocessor fill each
// other's waits.
#pragma once

#include "sm80/query_block.h"
#include "tile/mask.h"
#include "tile/online_softmax.h"

namespace dualkv::sm80 {

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    dualkv_sm80_forward(const __grid_constant__ ForwardParams<T> p) {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  constexpr int kM16 = Config::kWarpM / 16, kSteps = Config::kHeadDim / 16;

  __shared__ WalkedBlock block;
  if (!block.take<Config>(p)) return;
  const QueryBlock& work = block.query;

  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t s_q = ptx::shared_address(shared), s_k = s_q + TileQ::kBytes, s_v = s_k + TileKv::kBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Config::kWarpM;
  const uint32_t q_address = rows_first_address<TileQ>(s_q + warp_row * TileQ::kRowBytes, lane);
  const uint32_t k_address = columns_first_address<TileKv>(s_k, lane);
  const uint32_t v_address = rows_first_address<TileKv>(s_v, lane);

  const auto start_k = [&](int n) {
    start_kv<Config>(s_k, p.kv, block.step(n).tile, work.kv_head, p.shape.head_dim, &KvPair<const T>::k);
  };
  const auto start_v = [&](int n) {
    start_kv<Config>(s_v, p.kv, block.step(n).tile, work.kv_head, p.shape.head_dim_v, &KvPair<const T>::v);
  };
  load_rows<TileQ, Config::kBlockM, Config::kThreads>(s_q, p.q.at(work.q_tile.row, work.head), p.q.row_stride, 0,
                                                      work.q_tile.rows, p.shape.head_dim);
  start_k(0);

  OnlineSoftmax<kM16> softmax;
  float o[kM16][Config::kHeadDim / 8][4];
  clear(o);
  bool last = false;
  for (int n = 0; !last; ++n) {
    last = block.step(n).last;
    ptx::cp_async_wait<0>();
    __syncthreads();  // K_n is loaded, and all warps are done with V_n-1
    start_v(n);
    if (!last && threadIdx.x == 0) block.find<Config>(n + 2, p);

    float s[kM16][Config::kBlockN / 8][4];
    clear(s);
    warp_matmul<T, kSteps>(
        s, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4(a, TileQ::at(q_address, i, k)); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4(b, TileKv::at(k_address, j, k)); });

    ptx::cp_async_wait<0>();
    __syncthreads();  // V_n is loaded, and all warps are done with K_n
    if (!last) start_k(n + 1);

    cap_scores(s, p.shape.softcap);
    const KvStep& step = block.step(n);
    if (needs_mask(step, work.q_tile.q_pos)) mask_queries(s, warp_row, lane, -CUDART_INF_F, step.tile, work, p.shape.sees);
    // Skipped where no maximum moved: multiplying by exactly 1 changes no bit, and after a few
    // tiles the maximum of most rows stops moving.
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    float rescale[kM16][2];
    if (softmax.raise_maximum(s, scale_log2, rescale)) {
      softmax.rescale_sum(rescale);
      scale_rows(o, rescale);
    }
    softmax.exponentiate(s, scale_log2);
    warp_matmul<T, Config::kBlockN / 16>(
        o, [&](int k, int i, uint32_t(&a)[4]) { accumulator_to_a<T>(s[i][2 * k], s[i][2 * k + 1], a); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, TileKv::at(v_address, k, j)); });
  }

  float inverse_sum[kM16][2];
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float lse;
      inverse_sum[i][half] = softmax.finish(i, half, p.shape.softmax_scale, p.sink(work.head), lse);
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && row < work.q_tile.rows) {
        p.lse[static_cast<int64_t>(work.head) * p.shape.q_rows + work.q_tile.row + row] = lse;
      }
    }
  scale_rows(o, inverse_sum);
  // Safe without a barrier: a warp overwrites only the rows of sQ that it alone has read.
  store_accumulator<TileQ, T>(s_q, warp_row, 0, o, 1.f, lane);
  __syncthreads();
  store_rows<TileQ, Config::kBlockM, Config::kThreads>(p.out.at(work.q_tile.row, work.head), p.out.row_stride, s_q,
                                                       work.q_tile.rows, p.shape.head_dim_v);
}

}  // namespace dualkv::sm80
