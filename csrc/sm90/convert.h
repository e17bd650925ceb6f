// SPDX-License-Identifier: BSD-3-Clause
// Converts what the backward left in fp32 to the element type, scaled and rounded once: the sums of
// dQ, in the fragment order of backward.h, and the parts of split tiles of dK and dV.
#pragma once

#include "kernels/convert_dkv.h"
#include "params.h"
#include "sm90/config.h"

namespace dualkv::sm90 {

// Converts query tile `index`. Tiles are counted over the first pack of heads, then the next.
template <typename T, class Config>
__device__ __forceinline__ void convert_dq(const ConvertParams<T>& p, int index) {
  using TileQ = typename Config::TileQ;
  constexpr int kThreads = Config::kConsumers * kWarpgroup;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t tile = ptx::shared_address(shared);
  const Pack heads = p.heads;
  const int queries = heads.queries(Config::kBlockM), m_blocks = ceil_div(p.shape.q_rows, queries);
  const int head = heads.rows(index / m_blocks), query = index % m_blocks * queries;
  const int group = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;

  float dq[1][Config::kDqCols / 8][4];
  const float* sum = p.dq_sum + static_cast<int64_t>(index) * (Config::kBlockM * Config::kHeadDim) +
                     group * (Config::kDqBytes / 4) + thread * 4;
#pragma unroll
  for (int j = 0; j < Config::kDqCols / 8; ++j) {
    const float4 v = *reinterpret_cast<const float4*>(sum + j * kWarpgroup * 4);
    dq[0][j][0] = v.x, dq[0][j][1] = v.y, dq[0][j][2] = v.z, dq[0][j][3] = v.w;
  }
  const int row = Config::kSplitRows ? group * 64 : 0, col = Config::kSplitRows ? 0 : group * Config::kDqCols;
  store_accumulator<TileQ, T>(tile, row + thread / 32 * 16, col, dq, p.shape.softmax_scale, thread % 32);
  __syncthreads();
  const auto row_at = [&](int row) { return p.dq.at(query + heads.queries(row), head + heads.of_row(row)); };
  const int rows = heads.rows(min_int(p.shape.q_rows - query, queries));
  store_rows_at<TileQ, Config::kBlockM, kThreads>(row_at, tile, rows, p.shape.head_dim, threadIdx.x);
}

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kConsumers* kWarpgroup)
    dualkv_convert_sm90(const __grid_constant__ ConvertParams<T> p, int dkv_blocks) {
  const int index = blockIdx.x;
  if (index < dkv_blocks) return convert_dkv_context(p, index, dkv_blocks);
  if constexpr (Config::kSumsDq) convert_dq<T, Config>(p, index - dkv_blocks);
}

}  // namespace dualkv::sm90
