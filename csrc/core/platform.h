// SPDX-License-Identifier: BSD-3-Clause
// Helpers by which one header serves both the device compiler and the host compiler.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DUALKV_HD __host__ __device__ __forceinline__
#else
#define DUALKV_HD inline
#endif

namespace dualkv {

template <typename Int>
DUALKV_HD constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

DUALKV_HD constexpr int min_int(int a, int b) { return a < b ? a : b; }
DUALKV_HD constexpr int max_int(int a, int b) { return a > b ? a : b; }
DUALKV_HD constexpr int clamp_int(int value, int low, int high) { return min_int(max_int(value, low), high); }

}  // namespace dualkv
