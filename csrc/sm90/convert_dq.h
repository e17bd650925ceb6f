// dQ: fp32 sums in the fragment order of backward.h -> rows in the element type, scaled and rounded once.
#pragma once

#include "params.h"
#include "sm90/config.h"

namespace dualkv::sm90 {

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kConsumers* kWarpgroup)
    dualkv_convert_dq_sm90(const __grid_constant__ ConvertDqParams<T> p) {
  using TileQ = typename Config::TileQ;
  constexpr int kThreads = Config::kConsumers * kWarpgroup;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t tile = ptx::shared_address(shared);
  const int m_blocks = ceil_div(p.shape.q_rows, Config::kBlockM);
  const int head = blockIdx.x / m_blocks, m_block = blockIdx.x % m_blocks;
  const int group = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;

  float dq[1][Config::kDqCols / 8][4];
  const float* sum = p.dq_sum + static_cast<int64_t>(blockIdx.x) * (Config::kBlockM * Config::kHeadDim) +
                     group * (Config::kDqBytes / 4) + thread * 4;
#pragma unroll
  for (int j = 0; j < Config::kDqCols / 8; ++j) {
    const float4 v = *reinterpret_cast<const float4*>(sum + j * kWarpgroup * 4);
    dq[0][j][0] = v.x, dq[0][j][1] = v.y, dq[0][j][2] = v.z, dq[0][j][3] = v.w;
  }
  const int row = Config::kSplitRows ? group * 64 : 0, col = Config::kSplitRows ? 0 : group * Config::kDqCols;
  store_accumulator<TileQ, T>(tile, row + thread / 32 * 16, col, dq, p.shape.softmax_scale, thread % 32);
  __syncthreads();
  const int first = m_block * Config::kBlockM;
  store_rows<TileQ, Config::kBlockM, kThreads>(p.dq.at(first, head), p.dq.row_stride, tile, p.shape.q_rows - first,
                                               p.shape.head_dim);
}

}  // namespace dualkv::sm90
