// SPDX-License-Identifier: BSD-3-Clause
// Softcap: a score s becomes c tanh(s / c), before the mask.
#pragma once

#include "core/platform.h"

namespace dualkv {

// Limits of the cap. Above the maximum, the rounding of tanh (2^-22 of the cap) would show in
// 16-bit results; below the minimum, the rounding of the scores (3e-6) would, because
// softcap_slope() recovers tanh from them.
constexpr double kMaxSoftcap = 1000, kMinSoftcap = 0.01;

// Constants of c tanh(s / c), where s = softmax_scale * product. tanh(x) = 1 - 2 / (1 + e^2x) takes
// two special-function instructions and is exact to 2^-23 of c; tanh.approx is exact to 2^-11 only.
struct Softcap {
  float bound = 0.f;    // c / softmax_scale, the bound of the products; 0: no softcap
  float rate = 0.f;     // 2 log2(e) softmax_scale / c: e^2x = 2^(rate * product)
  float inverse = 0.f;  // 1 / (c log2(e))

  Softcap() = default;
  Softcap(double softmax_scale, double cap) {
    if (cap <= 0) return;
    constexpr double kLog2eExactly = 1.4426950408889634;
    bound = static_cast<float>(cap / softmax_scale);
    rate = static_cast<float>(2 * kLog2eExactly * softmax_scale / cap);
    inverse = static_cast<float>(1 / (cap * kLog2eExactly));
  }

  DUALKV_HD bool exists() const { return bound > 0.f; }
};

}  // namespace dualkv
