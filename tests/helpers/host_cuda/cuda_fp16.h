// SPDX-License-Identifier: BSD-3-Clause
// float16 on the host. Stands in for the toolkit's header of this name.
#pragma once

#include "cuda_runtime_api.h"

struct __half {
  _Float16 value;
};
struct alignas(4) __half2 {
  __half x, y;
};

namespace host_cuda {

inline float to_float(__half half) { return static_cast<float>(half.value); }
inline void from_float(float value, __half& result) { result.value = static_cast<_Float16>(value); }

}  // namespace host_cuda

inline __half2 __floats2half2_rn(float x, float y) {
  return {{static_cast<_Float16>(x)}, {static_cast<_Float16>(y)}};
}
inline float2 __half22float2(__half2 v) { return {host_cuda::to_float(v.x), host_cuda::to_float(v.y)}; }
