// SPDX-License-Identifier: BSD-3-Clause
// Loads of tiles into shared memory with cp.async, and the warp-level product over them.
#pragma once

#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"
#include "tile/smem_tile.h"

namespace dualkv::sm80 {

// Lane addresses of ldmatrix.x4, which reads a 16x16 block as four 8x8 tiles, in the two orders
// that fragments need. "Rows first", tile 1 below tile 0: A from row-major storage, B from its
// transpose.
template <class Tile>
__device__ __forceinline__ uint32_t rows_first_address(uint32_t tile, int lane) {
  return tile + Tile::chunk_offset(lane & 15, lane >> 4);
}
// "Columns first", tile 1 to the right of tile 0: B from row-major [n][k] storage, A from its
// transpose.
template <class Tile>
__device__ __forceinline__ uint32_t columns_first_address(uint32_t tile, int lane) {
  return tile + Tile::chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
}

// acc += A B over kSteps steps of 16. load_a(k, i, regs) loads the fragment of rows 16 i, load_b(k,
// j, regs) that of columns 16 j.
template <typename T, int kSteps, int kM16, int kN8, class LoadA, class LoadB>
__device__ __forceinline__ void warp_matmul(float (&acc)[kM16][kN8][4], LoadA load_a, LoadB load_b) {
  static_assert(kN8 % 2 == 0, "B fragments are loaded 16 columns at a time");
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kM16][4];
#pragma unroll
    for (int i = 0; i < kM16; ++i) load_a(k, i, a[i]);
#pragma unroll
    for (int j = 0; j < kN8 / 2; ++j) {
      uint32_t b[4];
      load_b(k, j, b);
#pragma unroll
      for (int i = 0; i < kM16; ++i) {
        ptx::mma_m16n8k16<T>(acc[i][2 * j], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc[i][2 * j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Starts copying packed rows [row, row + kRows) of one head into a tile. Rows outside the
// tile-local range [low, high) and columns from head_dim on become zeros without being read: a
// foreign row may hold anything, and 0 * NaN is NaN.
template <class Tile, int kRows, int kThreads, typename T>
__device__ __forceinline__ void load_rows(uint32_t tile, const T* row0, int64_t row_stride, int low, int high,
                                          int head_dim) {
  constexpr int kRowsPerPass = kThreads / Tile::kPanelChunks;
  static_assert(kRowsPerPass % 8 == 0, "a thread keeps its place in the permutation from pass to pass");
  static_assert(kRows % kRowsPerPass == 0 || kRows < kRowsPerPass, "whole passes");
  const int chunk = threadIdx.x % Tile::kPanelChunks;
  const int first_row = threadIdx.x / Tile::kPanelChunks;
  if (kRows < kRowsPerPass && first_row >= kRows) return;
  const uint32_t shared = tile + Tile::chunk_offset(first_row, chunk);
  const T* global = row0 + first_row * row_stride + chunk * 8;
#pragma unroll
  for (int pass = 0; pass < (kRows + kRowsPerPass - 1) / kRowsPerPass; ++pass) {
    const int row = first_row + pass * kRowsPerPass;
    const bool row_valid = row >= low && row < high;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const bool read = row_valid && panel * Tile::kPanelCols + chunk * 8 < head_dim;
      ptx::cp_async_16(shared + panel * Tile::kPanelBytes + pass * kRowsPerPass * Tile::kRowBytes,
                       global + panel * Tile::kPanelCols, read);
    }
    global += kRowsPerPass * row_stride;
  }
}

}  // namespace dualkv::sm80
