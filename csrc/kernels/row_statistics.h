// SPDX-License-Identifier: BSD-3-Clause
// Row statistics of the backward: delta = rowsum(dO * O) - dLSE, which is subtracted from every dP
// of a row, and the LSE in units of log 2.
#pragma once

#include <math_constants.h>

#include "params.h"
#include "tile/numerics.h"

namespace dualkv {

// Rows of one head per warp. Their statistics are contiguous, and no warp waits for another.
constexpr int kStatisticsRows = 16;
static_assert(RowStatistics::kPadding % kStatisticsRows == 0, "warps end where the statistics do");

DUALKV_HD int64_t statistics_warps(const ProblemShape& shape, const RowStatistics& statistics) {
  return statistics.padded_rows / kStatisticsRows * shape.num_heads;
}

// Dot product of two times 8 elements.
template <typename T>
__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = unpack2<T>(a[i]), v = unpack2<T>(b[i]);
    sum += u.x * v.x + u.y * v.y;
  }
  return sum;
}

// Computes the statistics of rows first_row .. first_row + 15 of a head. kLanes neighbouring
// threads read a row, 16 bytes each, in kReads reads.
template <int kLanes, int kReads = 1, typename T>
__device__ __forceinline__ void store_warp_statistics(const RowStatisticsParams<T>& p, int head, int64_t first_row) {
  constexpr int kElements = 8, kRowsAtATime = 32 / kLanes, kPasses = kStatisticsRows / kRowsAtATime;
  constexpr int kInFlight = 4 / kReads;  // passes with loads in flight
  const int lane = threadIdx.x % 32;
  float delta = 0.f;  // of row first_row + lane
#pragma unroll 1
  for (int first = 0; first < kPasses; first += kInFlight) {
    uint4 out[kReads][kInFlight], dout[kReads][kInFlight];
#pragma unroll
    for (int read = 0; read < kReads; ++read)
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int64_t row = first_row + (first + i) * kRowsAtATime + lane / kLanes;
        const int element = (read * kLanes + lane % kLanes) * kElements;
        const bool inside = row < p.shape.q_rows && element < p.shape.head_dim_v;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        out[read][i] = inside ? *reinterpret_cast<const uint4*>(p.out.at(row, head) + element) : zero;
        dout[read][i] = inside ? *reinterpret_cast<const uint4*>(p.dout.at(row, head) + element) : zero;
      }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      float sum = dot<T>(out[0][i], dout[0][i]);
#pragma unroll
      for (int read = 1; read < kReads; ++read) sum += dot<T>(out[read][i], dout[read][i]);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      const float mine = __shfl_sync(0xffffffffu, sum, lane % kRowsAtATime * kLanes);
      if (lane / kRowsAtATime == first + i) delta = mine;
    }
  }
  if (lane >= kStatisticsRows) return;
  const int64_t row = first_row + lane;
  float lse_log2 = 0.f;
  if (row < p.shape.q_rows) {
    const int64_t at = head * static_cast<int64_t>(p.shape.q_rows) + row;
    if (p.dlse) delta -= p.dlse[at];
    if (p.lse[at] != -CUDART_INF_F) lse_log2 = p.lse[at] * kLog2e;
  }
  p.statistics.lse_log2[p.statistics.index(head, row)] = lse_log2;
  p.statistics.delta[p.statistics.index(head, row)] = delta;
}

// Computes the statistics of all rows, by `warps` warps, of which this is number `warp`.
// Neighbouring warps take neighbouring heads of the same rows, which are neighbours in memory.
template <typename T>
__device__ void store_statistics(const RowStatisticsParams<T>& p, int64_t warp, int64_t warps) {
  const int64_t all = statistics_warps(p.shape, p.statistics);
  for (; warp < all; warp += warps) {
    const int head = static_cast<int>(warp % p.shape.num_heads);
    const int64_t first_row = warp / p.shape.num_heads * kStatisticsRows;
    if (p.shape.head_dim_v <= 64) {
      store_warp_statistics<8>(p, head, first_row);
    } else if (p.shape.head_dim_v <= 128) {
      store_warp_statistics<16>(p, head, first_row);
    } else if (p.shape.head_dim_v <= 256) {
      store_warp_statistics<32>(p, head, first_row);
    } else {
      store_warp_statistics<32, 2>(p, head, first_row);
    }
  }
}

}  // namespace dualkv
