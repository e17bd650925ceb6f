// dQ: fp32 sums in the fragment order of backward.h -> rows in the element type, scaled and rounded once.
#pragma once

#include "sm80/fragment_grid.h"

namespace dualkv::sm80 {

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    dualkv_convert_dq_sm80(const __grid_constant__ ConvertDqParams<T> p) {
  using Frag = FragmentGrid<typename Config::GridQ, Config::kBlockM, Config::kHeadDim>;
  using TileQ = typename Config::TileQ;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t tile = ptx::shared_address(shared);
  const int m_blocks = ceil_div(p.shape.q_rows, Config::kBlockM);
  const int head = blockIdx.x / m_blocks, m_block = blockIdx.x % m_blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  typename Frag::Accumulator dq;
  Frag::template load<Config::kThreads>(
      p.dq_sum + static_cast<int64_t>(blockIdx.x) * (Config::kBlockM * Config::kHeadDim), dq);
  store_accumulator<TileQ, T>(tile, Frag::warp_row(warp), Frag::warp_col(warp), dq, p.shape.softmax_scale, lane);
  __syncthreads();
  const int row = m_block * Config::kBlockM;
  store_rows<TileQ, Config::kBlockM, Config::kThreads>(p.dq.at(row, head), p.dq.row_stride, tile,
                                                       p.shape.q_rows - row, p.shape.head_dim);
}

}  // namespace dualkv::sm80
