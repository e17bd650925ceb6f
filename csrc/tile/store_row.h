// SPDX-License-Identifier: BSD-3-Clause
// Stores of accumulators straight to memory, row by row.
#pragma once

#include "tile/numerics.h"

namespace dualkv {

// Transposes 4 x 4 words in a quad: word i of thread t becomes word t of thread i. A thread then
// holds 8 neighbouring columns of an accumulator's row instead of 4 times 2.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? other : words[i];
    words[i + 1] = odd ? words[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + 2], 2);
    words[i] = upper ? other : words[i];
    words[i + 2] = upper ? words[i + 2] : other;
  }
}

// Stores a row of accumulators, scaled, to columns [column, end) of `out`, 64 bytes at a time. A
// quad of threads holds it, in half `half` of its elements.
template <typename T, int kN8>
__device__ __forceinline__ void store_row(const float (&acc)[kN8][4], int half, float scale, T* out, int column, int end,
                                          int lane) {
  const int first = column + lane % 4 * 8;  // this thread's first column
#pragma unroll
  for (int j = 0; j < kN8; j += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack2<T>(acc[j + i][2 * half] * scale, acc[j + i][2 * half + 1] * scale);
    transpose_in_quad(words, lane);
    if (first + j * 8 >= end) continue;
    *reinterpret_cast<uint4*>(out + first + j * 8) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace dualkv
