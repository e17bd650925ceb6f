// SPDX-License-Identifier: BSD-3-Clause
// Masks and softcaps on accumulator fragments. A mask replaces the elements of each row that are
// after its query, those before its window, and the columns of a border tile that are not keys.
// mask_transposed() serves fragments whose rows are keys.
#pragma once

#include "core/border_tiles.h"
#include "core/softcap.h"
#include "tile/numerics.h"

namespace dualkv {

// Replaces the elements of each row from column `limit(row)` on. (row0, col0) is this thread's
// first element.
template <int kM16, int kN8, class Limit>
__device__ __forceinline__ void mask_fragment(float (&x)[kM16][kN8][4], int row0, int col0, float replacement,
                                              Limit limit) {
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int columns = limit(row0 + i * 16 + half * 8) - col0;
#pragma unroll
      for (int j = 0; j < kN8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (j * 8 + e >= columns) x[i][j][2 * half + e] = replacement;
    }
}

// Replaces the elements of each row before column `first(row)`, which a window hides.
template <int kM16, int kN8, class First>
__device__ __forceinline__ void mask_front(float (&x)[kM16][kN8][4], int row0, int col0, float replacement,
                                           First first) {
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int hidden = first(row0 + i * 16 + half * 8) - col0;
#pragma unroll
      for (int j = 0; j < kN8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (j * 8 + e < hidden) x[i][j][2 * half + e] = replacement;
    }
}

// Replaces both in one pass.
template <int kM16, int kN8, class First, class Limit>
__device__ __forceinline__ void mask_fragment(float (&x)[kM16][kN8][4], int row0, int col0, float replacement,
                                              First first, Limit limit) {
#pragma unroll
  for (int i = 0; i < kM16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + i * 16 + half * 8, hidden = first(row) - col0, columns = limit(row) - col0;
#pragma unroll
      for (int j = 0; j < kN8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (j * 8 + e >= columns || j * 8 + e < hidden) x[i][j][2 * half + e] = replacement;
    }
}

// Replaces, in all rows, the columns of a border tile that are not keys.
template <int kM16, int kN8>
__device__ __forceinline__ void mask_columns(float (&x)[kM16][kN8][4], int col0, float replacement,
                                             const KeyBits& keys) {
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    const uint32_t own = keys.words[j / 4] >> (j % 4 * 8 + col0);  // this thread's columns
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!(own >> e % 2 & 1)) {
#pragma unroll
        for (int i = 0; i < kM16; ++i) x[i][j][e] = replacement;
      }
    }
  }
}

// A product after the cap, still to be multiplied by softmax_scale.
__device__ __forceinline__ float cap_score(const Softcap& softcap, float product) {
  const float reciprocal = reciprocal_approx(1.f + exp2_approx(product * softcap.rate));
  return __fmaf_rn(-2.f * softcap.bound, reciprocal, softcap.bound);
}

// 1 - tanh^2, the derivative of the cap, at the score whose probability is
// p = 2^(score * log2(e) - lse_log2). A probability of zero has no gradient.
__device__ __forceinline__ float softcap_slope(const Softcap& softcap, float p, float lse_log2) {
  const float tanh = (log2_approx(p) + lse_log2) * softcap.inverse;
  return p > 0.f ? fmaxf(1.f - tanh * tanh, 0.f) : 0.f;
}

// Caps the scores of a fragment, where there is a softcap.
template <int kN8>
__device__ __forceinline__ void cap_scores(float (&x)[kN8][4], const Softcap& softcap) {
  if (!softcap.exists()) return;
#pragma unroll
  for (int j = 0; j < kN8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] = cap_score(softcap, x[j][e]);
}
template <int kM16, int kN8>
__device__ __forceinline__ void cap_scores(float (&x)[kM16][kN8][4], const Softcap& softcap) {
#pragma unroll
  for (int i = 0; i < kM16; ++i) cap_scores(x[i], softcap);
}

// Multiplies probabilities by the derivative of the softcap at their scores. `lse_log2` belongs to
// the thread's two rows.
template <int kN8>
__device__ __forceinline__ void multiply_by_slope(float (&p)[kN8][4], const float (&lse_log2)[2],
                                                  const Softcap& softcap) {
#pragma unroll
  for (int j = 0; j < kN8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) p[j][e] *= softcap_slope(softcap, p[j][e], lse_log2[e / 2]);
}

// Mask of a transposed fragment, whose rows are keys and whose columns are queries: zeroes each row
// outside its columns [begin, end) = `columns(row)`. Limits belong to the thread's two rows, so
// that an element takes one comparison.
template <int kN8, class Columns>
__device__ __forceinline__ void mask_transposed(float (&x)[kN8][4], int row0, int col0, Columns columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto [begin, end] = columns(row0 + half * 8);
    const int hidden = begin - col0;
    const unsigned visible = max_int(end - begin, 0);
#pragma unroll
    for (int j = 0; j < kN8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (static_cast<unsigned>(j * 8 + e - hidden) >= visible) x[j][2 * half + e] = 0.f;
  }
}

}  // namespace dualkv
