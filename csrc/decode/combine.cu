// SPDX-License-Identifier: BSD-3-Clause
// A warp has a row of one head, and a lane the same columns of each of its splits.
#include "decode/combine.h"

#include "decode/early_launch.h"
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
  const float* const statistics = a.states.statistics + first * 8 + lane % 4;
  const float2* const states = reinterpret_cast<const float2*>(a.states.out + first * kHeadDim) + lane * kOwn;
  const float scale_log2 = a.shape.softmax_scale * kLog2e;
  OnlineSoftmax<1> softmax;  // each lane of a quad has one of the four sums
  float &top = softmax.row_max[0][0], &sum = softmax.row_sum[0][0];
  const int last = splits - 1;
  top = statistics[last * 8 + 4], sum = statistics[last * 8];
  float2 out[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) out[j] = states[last * (kHeadDim / 2) + j];
#pragma unroll 4
  for (int i = last - 1; i >= 0; --i) {
    const StateFold fold(top, statistics[i * 8 + 4], scale_log2);
    top = fold.top, sum = fold(sum, statistics[i * 8]);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const float2 pair = states[i * (kHeadDim / 2) + j];
      out[j].x = fold(out[j].x, pair.x), out[j].y = fold(out[j].y, pair.y);
    }
  }
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
  constexpr int kMostPairs = state_pairs(Arch::sm90, kHeadDim);
  const auto kernel =
      args.pairs > 1 ? &dualkv_decode_combine<T, kHeadDim, kMostPairs> : &dualkv_decode_combine<T, kHeadDim, 1>;
  launch_early(kernel, blocks, kWarps * 32, 0, args, stream);
}

}  // namespace

template <typename T>
void combine_splits(const DecodeCombineArgs<T>& args, cudaStream_t stream) {
  switch (args.shape.head_dim_v) {
    case 64: return launch_combine<T, 64>(args, stream);
    case 128: return launch_combine<T, 128>(args, stream);
    case 256: return launch_combine<T, 256>(args, stream);
    default: return launch_combine<T, 512>(args, stream);
  }
}
template void combine_splits(const DecodeCombineArgs<__half>&, cudaStream_t);
template void combine_splits(const DecodeCombineArgs<__nv_bfloat16>&, cudaStream_t);

}  // namespace dualkv
