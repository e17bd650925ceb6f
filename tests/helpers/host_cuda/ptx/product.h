// SPDX-License-Identifier: BSD-3-Clause
// What tensor cores compute: products of 16-bit floats, 16 of them and the sum so far added exactly
// and truncated to fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>

namespace dualkv::ptx {

inline float truncated(double value) {
  const float nearest = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof(bits));
  bits -= std::fabs(static_cast<double>(nearest)) > std::fabs(value);  // the next one towards zero
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename T>
float element(uint32_t word, int index) {
  const uint16_t bits = static_cast<uint16_t>(word >> 16 * index);
  T value;
  std::memcpy(&value, &bits, sizeof(bits));
  return host_cuda::to_float(value);
}

}  // namespace dualkv::ptx
