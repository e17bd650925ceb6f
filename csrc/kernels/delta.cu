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

// kLanes neighbouring threads share a row of one head.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) dualkv_delta(const __grid_constant__ DeltaParams<T> p) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t row = index / p.shape.num_heads;
  const int head = static_cast<int>(index % p.shape.num_heads);
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
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (row >= p.statistics.padded_rows || lane != 0) return;
  float lse_log2 = 0.f;
  if (row < p.shape.q_rows) {
    const int64_t at = head * static_cast<int64_t>(p.shape.q_rows) + row;
    if (p.dlse) sum -= p.dlse[at];
    if (p.lse[at] != -CUDART_INF_F) lse_log2 = p.lse[at] * kLog2e;
  }
  p.statistics.lse_log2[p.statistics.index(head, row)] = lse_log2;
  p.statistics.delta[p.statistics.index(head, row)] = sum;
}

template <typename T, int kLanes>
void launch(const DeltaParams<T>& p, cudaStream_t stream) {
  const int64_t threads = p.statistics.padded_rows * p.shape.num_heads * kLanes;
  if (threads == 0) return;
  dualkv_delta<T, kLanes><<<static_cast<unsigned>(ceil_div<int64_t>(threads, kThreads)), kThreads, 0, stream>>>(p);
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
