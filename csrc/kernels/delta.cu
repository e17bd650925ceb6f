// The row statistics of the backward: delta = rowsum(dO * O) - dLSE, what every dP of a row is measured against, and the
// LSE in units of log 2.
#include <math_constants.h>

#include "core/numerics.h"
#include "dispatch.h"
#include "kernels/kernels.h"

namespace dualkv {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // 16 bytes a thread and load
constexpr int kHeads = 4;     // a block's, all in flight at a time

// kLanes neighbouring threads share a row of one head. A block takes a few rows, so that what it writes, head after head,
// is contiguous.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) dualkv_delta(const __grid_constant__ DeltaParams<T> p) {
  constexpr int kRows = kThreads / kLanes;
  __shared__ float sums[kHeads][kRows];
  const int lane = threadIdx.x % kLanes, own_row = threadIdx.x / kLanes, first_head = blockIdx.y * kHeads;
  const int heads = min(kHeads, p.shape.num_heads - first_head);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const bool inside = first_row + own_row < p.shape.q_rows && lane * kElements < p.shape.head_dim;
#pragma unroll 4
  for (int i = 0; i < heads; ++i) {
    float sum = 0.f;
    if (inside) {
      const int64_t row = first_row + own_row;
      const uint4 out = *reinterpret_cast<const uint4*>(p.out.at(row, first_head + i) + lane * kElements);
      const uint4 dout = *reinterpret_cast<const uint4*>(p.dout.at(row, first_head + i) + lane * kElements);
      const uint32_t a[4] = {out.x, out.y, out.z, out.w}, b[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = unpack2<T>(a[j]), y = unpack2<T>(b[j]);
        sum += x.x * y.x + x.y * y.y;
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) sums[i][own_row] = sum;
  }
  __syncthreads();
  for (int index = threadIdx.x; index < heads * kRows; index += kThreads) {
    const int head = first_head + index / kRows;
    const int64_t row = first_row + index % kRows;
    float delta = sums[index / kRows][index % kRows], lse_log2 = 0.f;
    if (row < p.shape.q_rows) {
      const int64_t at = head * static_cast<int64_t>(p.shape.q_rows) + row;
      if (p.dlse) delta -= p.dlse[at];
      if (p.lse[at] != -CUDART_INF_F) lse_log2 = p.lse[at] * kLog2e;
    }
    p.statistics.lse_log2[p.statistics.index(head, row)] = lse_log2;
    p.statistics.delta[p.statistics.index(head, row)] = delta;
  }
}

template <typename T, int kLanes>
void launch(const DeltaParams<T>& p, cudaStream_t stream) {
  constexpr int kRows = kThreads / kLanes;
  static_assert(RowStatistics::kPadding % kRows == 0, "blocks end where the statistics do");
  const dim3 blocks(static_cast<unsigned>(p.statistics.padded_rows / kRows), ceil_div(p.shape.num_heads, kHeads));
  if (blocks.x == 0) return;
  dualkv_delta<T, kLanes><<<blocks, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError());
}

}  // namespace

template <typename T>
void compute_delta(const DeltaParams<T>& p, cudaStream_t stream) {
  if (p.shape.head_dim <= 8 * kElements) return launch<T, 8>(p, stream);
  if (p.shape.head_dim <= 16 * kElements) return launch<T, 16>(p, stream);
  return launch<T, 32>(p, stream);
}

template void compute_delta(const DeltaParams<__half>&, cudaStream_t);
template void compute_delta(const DeltaParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace dualkv
