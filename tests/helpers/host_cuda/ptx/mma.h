// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/mma.h on the host.
#pragma once

#include "ptx/product.h"
#include "threads.h"

namespace dualkv::ptx {

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } mine{d, a, {b0, b1}};
  host_cuda::together(0xffffffffu, mine, "mma", [](auto of) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, k = lane % 4 * 2;
      for (int i = 0; i < 2; ++i) {
        for (int part = 0; part < 4; ++part) {
          left[row + part % 2 * 8][k + part / 2 * 8 + i] = element<T>(of(lane)->a[part], i);
        }
        for (int part = 0; part < 2; ++part) right[k + part * 8 + i][row] = element<T>(of(lane)->b[part], i);
      }
    }
    for (int row = 0; row < 16; ++row) {
      const auto held = [&](int column) -> float& { return of(row % 8 * 4 + column / 2)->d[row / 8 * 2 + column % 2]; };
      double sums[8];
      for (int column = 0; column < 8; ++column) sums[column] = held(column);
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column) sums[column] += static_cast<double>(left[row][k]) * right[k][column];
      for (int column = 0; column < 8; ++column) held(column) = truncated(sums[column]);
    }
  });
}

}  // namespace dualkv::ptx
