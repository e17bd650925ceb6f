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

// kLanes neighbouring threads share a row of one head; a block takes whole rows, so that finding row and head costs no
// 64-bit division.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) dualkv_delta(const __grid_constant__ DeltaParams<T> p, int rows_per_block) {
  const int heads = p.shape.num_heads, lane = threadIdx.x % kLanes;
  // The threads of a row leave the loop together, those of a warp need not.
  const unsigned lanes = (0xffffffffu >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * rows_per_block;
  for (int index = threadIdx.x / kLanes; index < rows_per_block * heads; index += kThreads / kLanes) {
    const int64_t row = first_row + index / heads;
    const int head = index % heads;
    float sum = 0.f;
    if (row < p.shape.q_rows && lane * kElements < p.shape.head_dim) {
      const uint4 out = *reinterpret_cast<const uint4*>(p.out.at(row, head) + lane * kElements);
      const uint4 dout = *reinterpret_cast<const uint4*>(p.dout.at(row, head) + lane * kElements);
      const uint32_t a[4] = {out.x, out.y, out.z, out.w}, b[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack2<T>(a[i]), y = unpack2<T>(b[i]);
        sum += x.x * y.x + x.y * y.y;
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(lanes, sum, step);
    if (row >= p.statistics.padded_rows || lane != 0) continue;
    float lse_log2 = 0.f;
    if (row < p.shape.q_rows) {
      const int64_t at = head * static_cast<int64_t>(p.shape.q_rows) + row;
      if (p.dlse) sum -= p.dlse[at];
      if (p.lse[at] != -CUDART_INF_F) lse_log2 = p.lse[at] * kLog2e;
    }
    p.statistics.lse_log2[p.statistics.index(head, row)] = lse_log2;
    p.statistics.delta[p.statistics.index(head, row)] = sum;
  }
}

template <typename T, int kLanes>
void launch(const DeltaParams<T>& p, cudaStream_t stream) {
  // Every thread gets two rows of a head at least, and its loads are in flight together.
  const int rows_per_block = ceil_div(2 * kThreads / kLanes, p.shape.num_heads);
  const int64_t blocks = ceil_div<int64_t>(p.statistics.padded_rows, rows_per_block);
  if (blocks == 0) return;
  dualkv_delta<T, kLanes><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, rows_per_block);
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
