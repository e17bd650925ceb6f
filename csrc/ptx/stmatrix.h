// SPDX-License-Identifier: BSD-3-Clause
// stmatrix: one warp stores four 8x8 tiles of 16-bit elements to shared memory, lane l giving the
// address of row l % 8 of tile l / 8.
#pragma once

#include <cstdint>

namespace dualkv::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace dualkv::ptx
