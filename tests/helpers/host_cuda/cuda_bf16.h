// SPDX-License-Identifier: BSD-3-Clause
// bfloat16 on the host. Stands in for the toolkit's header of this name.
#pragma once

#include <cstring>

#include "cuda_runtime_api.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

namespace host_cuda {

inline float to_float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// To nearest, ties to even.
inline void from_float(float value, __nv_bfloat16& result) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  result.bits = value != value ? 0x7fff : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace host_cuda

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  __nv_bfloat162 result;
  host_cuda::from_float(x, result.x), host_cuda::from_float(y, result.y);
  return result;
}
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {host_cuda::to_float(v.x), host_cuda::to_float(v.y)}; }
