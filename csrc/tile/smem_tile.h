// SPDX-License-Identifier: BSD-3-Clause
// Tiles in shared memory, and the accumulator fragments that are written through them.
#pragma once

#include "core/platform.h"
#include "ptx/memory.h"
#include "tile/numerics.h"

namespace dualkv {

// Tile of kRows x kCols 16-bit elements in panels of 64 columns (128-byte rows) or, where 64 does
// not divide kCols, of 32 columns (64-byte rows). The 16-byte chunks of a row are permuted by its
// index (swizzle), so that the 8 rows of an ldmatrix tile, or of a fragment store, are in different
// banks.
template <int kRows_, int kCols_>
struct SmemTile {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static_assert(kCols % 32 == 0, "tiles are made of panels of 32 or 64 columns");
  static_assert(kRows % 16 == 0, "the permutation has a period of 8 rows and products take 16");
  static constexpr int kPanelCols = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kCols / kPanelCols;
  static constexpr int kPanelChunks = kPanelCols / 8;
  static constexpr int kRowBytes = kPanelCols * 2;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kRows * kCols * 2;

  // Byte offset of 16-byte chunk `chunk` of row `row` in panel 0.
  static __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    const int twist = kPanelCols == 64 ? row & 7 : (row >> 1) & 3;
    return row * kRowBytes + ((chunk ^ twist) << 4);
  }

  // Moves an address in column block 0 to the 16-column block `col16`.
  static __device__ __forceinline__ uint32_t column(uint32_t address, int col16) {
    constexpr int kBlocks = kPanelCols / 16;
    return (address ^ ((col16 % kBlocks) << 5)) + (col16 / kBlocks) * kPanelBytes;
  }

  static __device__ __forceinline__ uint32_t at(uint32_t address, int row16, int col16) {
    return column(address, col16) + row16 * (16 * kRowBytes);
  }
};

template <int kN8>
__device__ __forceinline__ void clear(float (&acc)[kN8][4]) {
#pragma unroll
  for (int j = 0; j < kN8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[j][e] = 0.f;
}

template <int kM16, int kN8>
__device__ __forceinline__ void clear(float (&acc)[kM16][kN8][4]) {
#pragma unroll
  for (int i = 0; i < kM16; ++i) clear(acc[i]);
}

// Rounds the accumulators of two neighbouring n8 tiles into the A fragment of one k16 step.
template <typename T>
__device__ __forceinline__ void accumulator_to_a(const float (&left)[4], const float (&right)[4], uint32_t (&a)[4]) {
  a[0] = pack2<T>(left[0], left[1]);
  a[1] = pack2<T>(left[2], left[3]);
  a[2] = pack2<T>(right[0], right[1]);
  a[3] = pack2<T>(right[2], right[3]);
}

// Rounds an accumulator into a tile. (row, col) is the warp's first element, multiples of 16 and 8.
template <class Tile, typename T, int kM16, int kN8>
__device__ __forceinline__ void store_accumulator(uint32_t tile, int row, int col, const float (&acc)[kM16][kN8][4],
                                                  float scale, int lane) {
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      const int chunk = col / 8 + j;
      const uint32_t panel = tile + (chunk / Tile::kPanelChunks) * Tile::kPanelBytes + (lane & 3) * 4;
      const int r = row + i * 16 + (lane >> 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared_32(panel + Tile::chunk_offset(r + 8 * half, chunk % Tile::kPanelChunks),
                             pack2<T>(acc[i][j][2 * half] * scale, acc[i][j][2 * half + 1] * scale));
      }
    }
}

// Writes the first `rows` rows and `head_dim` columns of a tile to memory, 16 bytes at a time;
// `row_at(row)` is the address of a row. Rows after these belong to another sequence and must not
// be written.
template <class Tile, int kRows, int kThreads, class RowAt>
__device__ __forceinline__ void store_rows_at(RowAt row_at, uint32_t tile, int rows, int head_dim, int thread) {
  constexpr int kChunks = Tile::kPanels * Tile::kPanelChunks;
  for (int index = thread; index < kRows * kChunks; index += kThreads) {
    const int row = index / kChunks, chunk = index % kChunks;
    if (row >= rows || chunk * 8 >= head_dim) continue;
    const uint32_t shared = tile + (chunk / Tile::kPanelChunks) * Tile::kPanelBytes +
                            Tile::chunk_offset(row, chunk % Tile::kPanelChunks);
    *reinterpret_cast<uint4*>(row_at(row) + chunk * 8) = ptx::load_shared_128(shared);
  }
}

// Writes rows at a constant stride.
template <class Tile, int kRows, int kThreads, typename T>
__device__ __forceinline__ void store_rows(T* row0, int64_t row_stride, uint32_t tile, int rows, int head_dim,
                                           int thread = threadIdx.x) {
  store_rows_at<Tile, kRows, kThreads>([&](int row) { return row0 + row * row_stride; }, tile, rows, head_dim, thread);
}

}  // namespace dualkv
