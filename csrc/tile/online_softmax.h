// SPDX-License-Identifier: BSD-3-Clause
// Online softmax over KV tiles, on accumulator fragments of mma m16n8: a thread holds rows lane / 4
// (half 0) and lane / 4 + 8 (half 1) of each 16-row block, and two neighbouring columns of each
// 8-column block.
#pragma once

#include <math_constants.h>

#include <cfloat>

#include "core/platform.h"
#include "tile/numerics.h"

namespace dualkv {

// Maximum and sum over the 4 threads that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Online softmax with a lazy maximum. Whatever is subtracted divides out at the end, and a
// probability of 2^8 rounds as well as one of 1, so that the maximum is raised only where a score
// exceeds it by more than a factor of 2^kSlackLog2 (0: exact maximum). This saves rescaling, which
// a warp does for all of its 16 rows if one of them moved: with random scores and 40 tiles, an
// exact maximum moves in some row at 3 of 4 tiles.
template <int kM16, int kSlackLog2 = 0>
struct OnlineSoftmax {
  float row_max[kM16][2];  // of unscaled scores; may lag by the slack
  float row_sum[kM16][2];  // of this thread's columns; summed over the quad at the end

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[i][half] = -CUDART_INF_F;
        row_sum[i][half] = 0.f;
      }
  }

  // Raises the maximum where new scores exceed it by more than the slack. Earlier sums and products
  // must then be multiplied by `rescale`. Returns false if that is 1 for every row of the warp.
  template <int kN8>
  __device__ __forceinline__ bool raise_maximum(const float (&s)[kM16][kN8][4], float scale_log2,
                                                float (&rescale)[kM16][2]) {
    const float slack = fminf(kSlackLog2 / scale_log2, FLT_MAX);  // finite if the scale underflows
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = row_max[i][half];
#pragma unroll
        for (int j = 0; j < kN8; ++j) top = fmaxf(top, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
        top = quad_max(top);
        const bool raised = top > (kSlackLog2 > 0 ? row_max[i][half] + slack : row_max[i][half]);
        moved |= raised;
        if (kSlackLog2 > 0) top = raised ? top : row_max[i][half];
        rescale[i][half] = exp2_approx(__fmul_rn(__fsub_rn(row_max[i][half], finite(top)), scale_log2));
        row_max[i][half] = top;
      }
    return __any_sync(0xffffffffu, moved);
  }

  // Turns scores into unnormalised probabilities exp2((s - max) * scale_log2) and adds them to the
  // sum, which is multiplied by `rescale` before. The arithmetic is spelled out: whether the
  // compiler makes one fma of a product and a sum depends on the code around it, and decoding
  // promises the bits of the forward.
  template <int kN8>
  __device__ __forceinline__ void exponentiate(float (&s)[kM16][kN8][4], float scale_log2,
                                               const float (&rescale)[kM16][2]) {
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = __fmul_rn(finite(row_max[i][half]), scale_log2);
#pragma unroll
        for (int j = 0; j < kN8; ++j)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            float& p = s[i][j][e];
            float& sum = row_sum[i][half];
            p = exp2_approx(__fmaf_rn(p, scale_log2, -shift));
            sum = j == 0 && e == 2 * half ? __fmaf_rn(sum, rescale[i][half], p) : __fadd_rn(sum, p);
          }
      }
  }

  // The same in two steps, where `rescale` would take registers until then. Other bits: a family of
  // kernels does it one way everywhere.
  __device__ __forceinline__ void rescale_sum(const float (&rescale)[kM16][2]) {
#pragma unroll
    for (int i = 0; i < kM16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[i][half] = __fmul_rn(row_sum[i][half], rescale[i][half]);
  }
  // Also the first tile of a row that has no sum yet.
  template <int kN8>
  __device__ __forceinline__ void exponentiate(float (&s)[kM16][kN8][4], float scale_log2) {
    float rescale[kM16][2];
#pragma unroll
    for (int i = 0; i < kM16; ++i) rescale[i][0] = rescale[i][1] = 1.f;
    exponentiate(s, scale_log2, rescale);
  }

  // -inf (no key seen so far) as 0: -inf - -inf would be NaN.
  static __device__ __forceinline__ float finite(float top) { return top == -CUDART_INF_F ? 0.f : top; }

  // Finishes a row. A sink is one more scaled score without a value (-inf: no sink). Returns the
  // factor of the output, 1 / sum, or 0 for a row without keys. `lse` is the natural log of the
  // sum, -inf without keys and sink.
  __device__ __forceinline__ float finish(int i, int half, float softmax_scale, float sink, float& lse) {
    const float top = __fmul_rn(row_max[i][half], softmax_scale), joined_top = fmaxf(top, sink);
    const bool empty = joined_top == -CUDART_INF_F;
    const float share = expf(__fsub_rn(top, joined_top));  // 1 unless the sink is larger
    const float sum = __fmaf_rn(quad_sum(row_sum[i][half]), share, expf(__fsub_rn(sink, joined_top)));
    lse = empty ? -CUDART_INF_F : __fadd_rn(joined_top, logf(sum));
    return empty ? 0.f : share / sum;
  }
};

// How the state of a row over some keys joins the total of others: all sums, element by element.
// The arithmetic is spelled out, so that who does it changes no bit.
struct StateFold {
  float top;  // the new maximum
  float of_total, of_state;

  __device__ __forceinline__ StateFold(float total_top, float state_top, float scale_log2)
      : top(fmaxf(total_top, state_top)) {
    const float finite_top = OnlineSoftmax<1>::finite(top);
    of_total = exp2_approx(__fmul_rn(__fsub_rn(total_top, finite_top), scale_log2));
    of_state = exp2_approx(__fmul_rn(__fsub_rn(state_top, finite_top), scale_log2));
  }
  __device__ __forceinline__ float operator()(float total, float state) const {
    return __fmaf_rn(state, of_state, __fmul_rn(total, of_total));
  }
};

template <int kM16, int kO8>
__device__ __forceinline__ void scale_rows(float (&o)[kM16][kO8][4], const float (&factor)[kM16][2]) {
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int j = 0; j < kO8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][j][e] *= factor[i][e / 2];
}

}  // namespace dualkv
