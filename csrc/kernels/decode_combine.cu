// SPDX-License-Identifier: BSD-3-Clause
// A warp has a row of one head, and a lane the same columns of each of its splits.
#include "kernels/decode_combine.h"

#include "kernels/early_launch.h"
#include "tile/numerics.h"
#include "tile/online_softmax.h"

namespace dualkv {
namespace {

constexpr int kWarps = 4;

// First column of the pair at a place of a state. Pairs that a thread moves together are
// neighbours.
template <int kPairs>
__device__ __forceinline__ int column_of(int pair) {
  constexpr int kBlock = 4 * kPairs;  // of a quad
  return pair / kBlock * (2 * kBlock) + pair % kPairs * 8 + pair % kBlock / kPairs * 2;
}

template <typename T, int kHeadDim, int kPairs>
__global__ void __launch_bounds__(kWarps * 32) dualkv_decode_combine(const DecodeCombineArgs<T> a) {
  constexpr int kOwn = kHeadDim / 64;  // pairs of a lane
  wait_for_last_launch();
  const int lane = threadIdx.x % 32, slot = blockIdx.x * kWarps + threadIdx.x / 32;
  const int row = slot / a.shape.num_heads, head = slot % a.shape.num_heads;
  const int splits = row < a.shape.q_rows ? a.splits[row] : 0;
  if (splits == 0) return;
  const int64_t first = int64_t{slot} * a.states.per_row;
  const float* const statistics = a.states.statistics + first * 8;
  OnlineSoftmax<1> softmax;  // a quad has a row, and its first lane all of the sum
  float& top = softmax.row_max[0][0];
  for (int i = lane; i < splits; i += 32) top = fmaxf(top, statistics[i * 8 + 4]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));

  const float scale_log2 = a.shape.softmax_scale * kLog2e, finite_top = softmax.finite(top);
  const float2* const states = reinterpret_cast<const float2*>(a.states.out + first * kHeadDim) + lane * kOwn;
  float2 out[kOwn] = {};
  float sum = 0.f;
#pragma unroll 4
  for (int i = 0; i < splits; ++i) {
    const float4 sums = *reinterpret_cast<const float4*>(statistics + i * 8);
    const float share = exp2_approx(__fmul_rn(__fsub_rn(statistics[i * 8 + 4], finite_top), scale_log2));
    sum = __fmaf_rn(__fadd_rn(__fadd_rn(sums.x, sums.y), __fadd_rn(sums.z, sums.w)), share, sum);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const float2 pair = states[i * (kHeadDim / 2) + j];
      out[j].x = __fmaf_rn(pair.x, share, out[j].x), out[j].y = __fmaf_rn(pair.y, share, out[j].y);
    }
  }
  softmax.row_sum[0][0] = lane % 4 == 0 ? sum : 0.f;
  float lse;
  const float inverse = softmax.finish(0, 0, a.shape.softmax_scale, a.sinks ? a.sinks[head] : -CUDART_INF_F, lse);
  if (lane == 0) a.lse[static_cast<int64_t>(head) * a.shape.q_rows + row] = lse;
  T* const to = a.out.at(row, head);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int column = column_of<kPairs>(lane * kOwn + j);
    *reinterpret_cast<uint32_t*>(to + column) = pack2<T>(out[j].x * inverse, out[j].y * inverse);
  }
}

template <typename T, int kHeadDim>
void launch_combine(const DecodeCombineArgs<T>& args, cudaStream_t stream) {
  const int blocks = static_cast<int>(ceil_div(int64_t{args.shape.q_rows} * args.shape.num_heads, int64_t{kWarps}));
  launch_early(args.pairs == 2 ? &dualkv_decode_combine<T, kHeadDim, 2> : &dualkv_decode_combine<T, kHeadDim, 1>,
               blocks, kWarps * 32, 0, args, stream);
}

}  // namespace

template <typename T>
void combine_splits(const DecodeCombineArgs<T>& args, cudaStream_t stream) {
  switch (args.shape.head_dim) {
    case 64: return launch_combine<T, 64>(args, stream);
    case 128: return launch_combine<T, 128>(args, stream);
    default: return launch_combine<T, 256>(args, stream);
  }
}
template void combine_splits(const DecodeCombineArgs<__half>&, cudaStream_t);
template void combine_splits(const DecodeCombineArgs<__nv_bfloat16>&, cudaStream_t);

}  // namespace dualkv
