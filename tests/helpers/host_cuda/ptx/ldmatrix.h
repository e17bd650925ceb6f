// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/ldmatrix.h on the host.
#pragma once

#include "shared_memory.h"

namespace dualkv::ptx {

// Row `row` of tile `tile`, as the threads of the warp gave its address.
template <class Of>
uint16_t* matrix_row(Of of, int tile, int row) {
  return reinterpret_cast<uint16_t*>(host_cuda::shared_pointer(of(tile * 8 + row)->address, 16, 16));
}

struct MatrixLoad {
  uint32_t address;
  uint32_t* words;
};

template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], uint32_t address) {
  MatrixLoad mine{address, r};
  host_cuda::together(0xffffffffu, mine, "ldmatrix", [](auto of) {
    for (int lane = 0; lane < 32; ++lane)
      for (int tile = 0; tile < 4; ++tile) {
        uint16_t halves[2];
        for (int i = 0; i < 2; ++i) {
          const int row = lane / 4, column = lane % 4 * 2 + i;
          halves[i] = kTransposed ? matrix_row(of, tile, column)[row] : matrix_row(of, tile, row)[column];
        }
        of(lane)->words[tile] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
      }
  });
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices<true>(r, address); }

}  // namespace dualkv::ptx
