// Masks on accumulator fragments: in each row, all elements from the first invisible column on are replaced.
#pragma once

#include "core/platform.h"

namespace dualkv {

// Replaces every element whose column is not below its row's limit. `limit(row)` counts the visible columns of a
// row; (row0, col0) is this thread's first element.
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

// The same for a transposed fragment, whose rows are keys and whose columns are queries: replaces every element by zero
// whose row is not below its column's limit. `limit(column)` counts the visible rows of a column.
template <int kN8, class Limit>
__device__ __forceinline__ void mask_transposed(float (&x)[kN8][4], int row0, int col0, Limit limit) {
#pragma unroll
  for (int j = 0; j < kN8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int rows = limit(col0 + j * 8 + e) - row0;
      if (rows <= 0) x[j][e] = 0.f;
      if (rows <= 8) x[j][2 + e] = 0.f;
    }
}

}  // namespace dualkv
