// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/stmatrix.h on the host.
#pragma once

#include "ptx/ldmatrix.h"

namespace dualkv::ptx {

inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  struct {
    uint32_t address;
    const uint32_t* words;
  } mine{address, r};
  host_cuda::written_pointer(address, 16, 16);
  host_cuda::together(0xffffffffu, mine, "stmatrix", [](auto of) {
    for (int lane = 0; lane < 32; ++lane)
      for (int tile = 0; tile < 4; ++tile)
        for (int i = 0; i < 2; ++i) {
          matrix_row(of, tile, lane / 4)[lane % 4 * 2 + i] = static_cast<uint16_t>(of(lane)->words[tile] >> 16 * i);
        }
  });
}

}  // namespace dualkv::ptx
