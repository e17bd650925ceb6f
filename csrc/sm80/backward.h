// SPDX-License-Identifier: BSD-3-Clause
// Backward: one block owns a KV tile of one KV head and walks all queries that see it, of all query
// heads of the KV group. dK and dV stay in registers and are written once.
//
//   S = Q K^T;  P = exp(S - LSE);  dP = dO V^T;  dS = P * (dP - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// P and dS pass through shared memory, because the following products divide them among the warps
// in another way. dQ is added in fp32 to a buffer in fragment order; if p.dq_sum is null
// (deterministic mode), it comes from backward_dq.h.
#pragma once

#include "kernels/kv_block.h"
#include "sm80/fragment_grid.h"
#include "tile/mask.h"

namespace dualkv::sm80 {

// Ring of three steps: one is computed, the next is loading, and thread 0 finds the one after.
__device__ __forceinline__ int following(int slot) { return slot == 2 ? 0 : slot + 1; }

template <typename T, class Config>
struct BackwardBlock {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  using TileP = typename Config::TileP;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  static constexpr int kThreads = Config::kThreads;
  using FragS = FragmentGrid<typename Config::GridS, kBlockM, kBlockN>;
  using FragKv = FragmentGrid<typename Config::GridKv, kBlockN, kHeadDim>;
  using FragQ = FragmentGrid<typename Config::GridQ, kBlockM, kHeadDim>;

  const BackwardParams<T>& p;
  const uint32_t shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ __forceinline__ uint32_t s_q(int stage) const {
    return shared + Config::kOffsetQ + stage * TileQ::kBytes;
  }
  __device__ __forceinline__ uint32_t s_dout(int stage) const {
    return shared + Config::kOffsetDo + stage * TileQ::kBytes;
  }

  __device__ __forceinline__ void start_kv(const KvTile& tile, int kv_head) const {
    const KvPair<const T>& kv = p.kv.of(tile.region);
    load_rows<TileKv, kBlockN, kThreads>(shared, kv.k.at(tile.row, kv_head), kv.k.row_stride, 0, tile.valid,
                                         p.shape.head_dim);
    load_rows<TileKv, kBlockN, kThreads>(shared + Config::kOffsetV, kv.v.at(tile.row, kv_head), kv.v.row_stride, 0,
                                         tile.valid, p.shape.head_dim_v);
  }

  // Loads Q, dO and the row statistics of a step. Foreign rows become zero, because they are
  // operands of dK and dV.
  __device__ __forceinline__ void start_queries(const BackwardStep& step, int stage) const {
    const int row = step.m_block * kBlockM;
    const int low = step.first_row(kBlockM, Pack{}), high = step.end_row(kBlockM, Pack{});
    load_rows<TileQ, kBlockM, kThreads>(s_q(stage), p.q.at(row, step.pack), p.q.row_stride, low, high,
                                        p.shape.head_dim);
    load_rows<TileQ, kBlockM, kThreads>(s_dout(stage), p.dout.at(row, step.pack), p.dout.row_stride, low, high,
                                        p.shape.head_dim_v);
    if (threadIdx.x < kBlockM) {
      const int r = threadIdx.x;
      const bool read = r >= low && r < high;
      const int64_t index = p.statistics.index_in_pack(step.pack, row + r);
      const uint32_t slot = shared + stage * Config::kStatBytes + r * 4;
      ptx::cp_async_4(slot + Config::kOffsetLse, p.statistics.lse_log2 + index, read);
      ptx::cp_async_4(slot + Config::kOffsetDelta, p.statistics.delta + index, read);
    }
    ptx::cp_async_commit();
  }

  // Computes P and dS of a step, rounded, into shared memory.
  __device__ __forceinline__ void scores(const BackwardStep& step, const KvTile& tile, int stage) const {
    const int warp_row = FragS::warp_row(warp), warp_col = FragS::warp_col(warp);
    typename FragS::Accumulator s, dp;
    matmul_nt(s, s_q(stage), shared, warp_row, warp_col);
    matmul_nt(dp, s_dout(stage), shared + Config::kOffsetV, warp_row, warp_col);

    cap_scores(s, p.shape.softcap);
    const int row0 = warp_row + lane / 4, col0 = warp_col + lane % 4 * 2;
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    const float* stats = reinterpret_cast<const float*>(shared_bytes() + stage * Config::kStatBytes);
#pragma unroll
    for (int i = 0; i < FragS::kM16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float lse_log2 = stats[Config::kOffsetLse / 4 + row0 + i * 16 + half * 8];
#pragma unroll
        for (int j = 0; j < FragS::kN8; ++j)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e)
            s[i][j][e] = exp2_approx(s[i][j][e] * scale_log2 - lse_log2);
      }
    if (needs_mask(tile, step.range, step.m_block, kBlockM, kBlockN)) {
      const int first_row = step.m_block * kBlockM;
      const Visibility sees = p.shape.sees;
      const auto first = [&](int row) { return first_column(tile, step.range, first_row + row, sees); };
      const auto end = [&](int row) { return end_column(tile, step.range, first_row + row); };
      const auto mask = [&](typename FragS::Accumulator& x) {
        if (sees.has_window()) return mask_fragment(x, row0, col0, 0.f, first, end);
        mask_fragment(x, row0, col0, 0.f, end);
      };
      mask(s);
      mask(dp);
    }
    store_accumulator<TileP, T>(shared + Config::kOffsetP, warp_row, warp_col, s, 1.f, lane);
    if (p.shape.softcap.exists()) {
#pragma unroll
      for (int i = 0; i < FragS::kM16; ++i) {
        const float* lse = stats + Config::kOffsetLse / 4 + row0 + i * 16;
        multiply_by_slope(s[i], {lse[0], lse[8]}, p.shape.softcap);
      }
    }
#pragma unroll
    for (int i = 0; i < FragS::kM16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float delta = stats[Config::kOffsetDelta / 4 + row0 + i * 16 + half * 8];
#pragma unroll
        for (int j = 0; j < FragS::kN8; ++j)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - delta);
      }
    store_accumulator<TileP, T>(shared + Config::kOffsetDs, warp_row, warp_col, dp, 1.f, lane);
  }

  // acc = A B^T of a query tile and a KV tile, both row-major over the head dimension.
  __device__ __forceinline__ void matmul_nt(typename FragS::Accumulator& acc, uint32_t a_tile, uint32_t b_tile,
                                            int row, int col) const {
    const uint32_t a_base = rows_first_address<TileQ>(a_tile + row * TileQ::kRowBytes, lane);
    const uint32_t b_base = columns_first_address<TileKv>(b_tile + col * TileKv::kRowBytes, lane);
    clear(acc);
    warp_matmul<T, kHeadDim / 16>(
        acc, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4(a, TileQ::at(a_base, i, k)); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4(b, TileKv::at(b_base, j, k)); });
  }

  // acc += X^T Y, where X is P or dS and Y is dO or Q.
  __device__ __forceinline__ void accumulate_kv(typename FragKv::Accumulator& acc, uint32_t x, uint32_t y) const {
    const int row16 = FragKv::warp_row(warp) / 16, col16 = FragKv::warp_col(warp) / 16;
    const uint32_t x_base = columns_first_address<TileP>(x, lane);
    const uint32_t y_base = rows_first_address<TileQ>(y, lane);
    warp_matmul<T, kBlockM / 16>(
        acc, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4_trans(a, TileP::at(x_base, k, row16 + i)); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, TileQ::at(y_base, k, col16 + j)); });
  }

  // Adds dQ of the step to the sums of its query tile.
  __device__ __forceinline__ void add_dq(const BackwardStep& step) const {
    const int col16 = FragQ::warp_col(warp) / 16;
    const uint32_t ds_base = rows_first_address<TileP>(
        shared + Config::kOffsetDs + FragQ::warp_row(warp) * TileP::kRowBytes, lane);
    const uint32_t k_base = rows_first_address<TileKv>(shared, lane);
    typename FragQ::Accumulator dq;
    clear(dq);
    warp_matmul<T, kBlockN / 16>(
        dq, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4(a, TileP::at(ds_base, i, k)); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, TileKv::at(k_base, k, col16 + j)); });
    if (step.has_foreign_rows(kBlockM)) {
      // dS of foreign rows is zero, but K may hold what those rows must not see: 0 * NaN is NaN.
      mask_fragment(dq, FragQ::warp_row(warp) + lane / 4, 0, 0.f, [&](int row) {
        return row >= step.first_row(kBlockM, Pack{}) && row < step.end_row(kBlockM, Pack{}) ? kHeadDim : 0;
      });
    }
    const int64_t m_blocks = ceil_div(p.shape.q_rows, kBlockM);
    FragQ::template reduce_add<kThreads>(p.dq_sum + (step.pack * m_blocks + step.m_block) * (kBlockM * kHeadDim), dq);
  }

  // Writes dK (scaled) or dV of a whole tile, staged in the shared memory of K and V, which are no
  // longer read.
  __device__ __forceinline__ void store_gradient(const typename FragKv::Accumulator& acc, float scale, uint32_t staging,
                                                 const TensorView<T>& view, int head_dim, const KvTile& tile,
                                                 int kv_head) const {
    store_accumulator<TileKv, T>(staging, FragKv::warp_row(warp), FragKv::warp_col(warp), acc, scale, lane);
    __syncthreads();
    store_rows<TileKv, kBlockN, kThreads>(view.at(tile.row, kv_head), view.row_stride, staging, tile.valid, head_dim);
  }

  static __device__ __forceinline__ uint8_t* shared_bytes() {
    extern __shared__ __align__(128) uint8_t bytes[];
    return bytes;
  }
};

template <typename T, class Config, bool kComputeDq>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm80_backward(const __grid_constant__ BackwardParams<T> p) {
  using Block = BackwardBlock<T, Config>;
  constexpr int kStages = Config::kStages;
  __shared__ KvBlock work;
  __shared__ BackwardStep steps[3];
  bool exists = false;
  if (threadIdx.x == 0) {
    exists = work.load(p.work, p.nodes, p.shape, Pack{}, Config::kBlockM, Config::kBlockN);
    if (exists) {
      work.start_walk();
      work.take_step(steps[0]);
      work.take_step(steps[1]);
    }
  }
  if (!__syncthreads_or(exists)) return;

  const Block block{p, ptx::shared_address(Block::shared_bytes())};
  typename Block::FragKv::Accumulator dk, dv;
  clear(dk);
  clear(dv);
  block.start_kv(work.tile, work.kv_head);
  block.start_queries(steps[0], 0);
  for (int now = 0, stage = 0; steps[now].valid; now = following(now)) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // tiles are loaded; the buffers of the last step are free
    const BackwardStep &step = steps[now], &next = steps[following(now)];
    if (kStages == 2 && next.valid) block.start_queries(next, stage ^ 1);
    if (threadIdx.x == 0) work.take_step(steps[following(following(now))]);
    block.scores(step, work.tile, stage);
    __syncthreads();  // P and dS are written
    block.accumulate_kv(dv, block.shared + Config::kOffsetP, block.s_dout(stage));
    block.accumulate_kv(dk, block.shared + Config::kOffsetDs, block.s_q(stage));
    if (kStages == 1) {
      __syncthreads();  // all warps are done with Q and dO
      if (next.valid) block.start_queries(next, 0);
    }
    if (kComputeDq) block.add_dq(step);
    if (kStages == 2) stage ^= 1;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // all warps are done with K and V

  if (work.slot >= 0) {
    constexpr int kTileFloats = Config::kBlockN * Config::kHeadDim;
    float* slot = p.dkv_slots + int64_t{work.slot} * (2 * kTileFloats);
    Block::FragKv::store_fp32(slot, dk, block.warp, block.lane);
    Block::FragKv::store_fp32(slot + kTileFloats, dv, block.warp, block.lane);
    return;
  }
  const KvPair<T>& out = p.dkv.of(work.tile.region);
  const ProblemShape& shape = p.shape;
  block.store_gradient(dk, shape.softmax_scale, block.shared, out.k, shape.head_dim, work.tile, work.kv_head);
  block.store_gradient(dv, 1.f, block.shared + Config::kOffsetV, out.v, shape.head_dim_v, work.tile, work.kv_head);
}

}  // namespace dualkv::sm80
