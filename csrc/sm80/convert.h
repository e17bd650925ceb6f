// SPDX-License-Identifier: BSD-3-Clause
// Converts what the backward left in fp32 to the element type, scaled and rounded once: the sums of
// dQ, in fragment order (fragment_grid.h), and the parts of split tiles of dK and dV.
#pragma once

#include "kernels/convert_dkv.h"
#include "sm80/fragment_grid.h"

namespace dualkv::sm80 {

// Converts query tile `index`. Tiles are counted over the first head, then the next.
template <typename T, class Config>
__device__ __forceinline__ void convert_dq(const ConvertParams<T>& p, int index) {
  using Frag = FragmentGrid<typename Config::GridQ, Config::kBlockM, Config::kHeadDim>;
  using TileQ = typename Config::TileQ;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t tile = ptx::shared_address(shared);
  const int m_blocks = ceil_div(p.shape.q_rows, Config::kBlockM);
  const int head = index / m_blocks, m_block = index % m_blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  typename Frag::Accumulator dq;
  Frag::template load<Config::kThreads>(
      p.dq_sum + static_cast<int64_t>(index) * (Config::kBlockM * Config::kHeadDim), dq);
  store_accumulator<TileQ, T>(tile, Frag::warp_row(warp), Frag::warp_col(warp), dq, p.shape.softmax_scale, lane);
  __syncthreads();
  const int row = m_block * Config::kBlockM;
  store_rows<TileQ, Config::kBlockM, Config::kThreads>(p.dq.at(row, head), p.dq.row_stride, tile,
                                                       p.shape.q_rows - row, p.shape.head_dim);
}

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads)
    dualkv_convert_sm80(const __grid_constant__ ConvertParams<T> p, int dkv_blocks) {
  const int index = blockIdx.x;
  if (index < dkv_blocks) return convert_dkv_context(p, index, dkv_blocks);
  convert_dq<T, Config>(p, index - dkv_blocks);
}

}  // namespace dualkv::sm80
