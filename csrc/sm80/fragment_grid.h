// SPDX-License-Identifier: BSD-3-Clause
// Elements of a result that a grid of warps shares: which warp and thread holds which.
#pragma once

#include "sm80/config.h"

namespace dualkv::sm80 {

template <class Grid, int kRows, int kCols>
struct FragmentGrid {
  static_assert(kRows % (Grid::kRows * 16) == 0 && kCols % (Grid::kCols * 16) == 0, "warps hold 16x16 blocks");
  static constexpr int kWarpRows = kRows / Grid::kRows, kWarpCols = kCols / Grid::kCols;
  static constexpr int kM16 = kWarpRows / 16, kN8 = kWarpCols / 8;
  using Accumulator = float[kM16][kN8][4];

  static __device__ __forceinline__ int warp_row(int warp) { return warp / Grid::kCols * kWarpRows; }
  static __device__ __forceinline__ int warp_col(int warp) { return warp % Grid::kCols * kWarpCols; }

  // Adds an accumulator to sums in "fragment order", in which every access of a warp is contiguous.
  // On sm_90, which adds 4 floats an instruction, the 4 floats of a thread's fragment are
  // neighbours; elsewhere the same float of neighbouring threads.
  template <int kThreads>
  static __device__ __forceinline__ void reduce_add(float* sum, const Accumulator& acc) {
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int j = 0; j < kN8; ++j) {
        float* block = sum + (i * kN8 + j) * 4 * kThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        ptx::reduce_add_v4(block + threadIdx.x * 4, acc[i][j]);
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) atomicAdd(block + e * kThreads + threadIdx.x, acc[i][j][e]);
#endif
      }
  }

  template <int kThreads>
  static __device__ __forceinline__ void load(const float* sum, Accumulator& acc) {
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int j = 0; j < kN8; ++j) {
        const float* block = sum + (i * kN8 + j) * 4 * kThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        const float4 v = *reinterpret_cast<const float4*>(block + threadIdx.x * 4);
        acc[i][j][0] = v.x, acc[i][j][1] = v.y, acc[i][j][2] = v.z, acc[i][j][3] = v.w;
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = block[e * kThreads + threadIdx.x];
#endif
      }
  }

  // Stores row-major fp32, two neighbours at a time.
  static __device__ __forceinline__ void store_fp32(float* matrix, const Accumulator& acc, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int j = 0; j < kN8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row(warp) + i * 16 + half * 8 + lane / 4;
          const int col = warp_col(warp) + j * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(matrix + row * kCols + col) =
              make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
        }
  }
};

}  // namespace dualkv::sm80
