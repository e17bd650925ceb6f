// dK and dV of the tiles whose queries were split among several blocks: fp32 parts, summed in a fixed order, scaled
// and rounded once.
#include "core/numerics.h"
#include "dispatch.h"
#include "kernels/kernels.h"

namespace dualkv {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ void sum_parts(const ConvertDkvParams<T>& p, const SplitTile& split, const KvTile& tile, int kv_head,
                          int which, const TensorView<T>& view, float scale) {
  const int64_t tile_floats = static_cast<int64_t>(p.block_n) * p.padded_head_dim;
  const int pairs = p.shape.head_dim / 2;
  for (int index = threadIdx.x; index < tile.valid * pairs; index += kThreads) {
    const int row = index / pairs, col = index % pairs * 2;
    float2 sum = make_float2(0.f, 0.f);
    for (int part = 0; part < split.parts; ++part) {
      const int64_t slot = split.slot + static_cast<int64_t>(part) * p.shape.num_kv_heads + kv_head;
      const float* source = p.dkv_slots + (2 * slot + which) * tile_floats + row * p.padded_head_dim + col;
      const float2 v = *reinterpret_cast<const float2*>(source);
      sum.x += v.x;
      sum.y += v.y;
    }
    *reinterpret_cast<uint32_t*>(view.at(tile.row + row, kv_head) + col) = pack2<T>(sum.x * scale, sum.y * scale);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) convert_dkv_context(const __grid_constant__ ConvertDkvParams<T> p) {
  const int index = blockIdx.x / p.shape.num_kv_heads, kv_head = blockIdx.x % p.shape.num_kv_heads;
  if (index >= *p.work.count) return;
  const SplitTile split = p.work.items[index];
  const KvTile tile = owner_of(p.layout, split.region, split.owner, split.n_block, p.block_n).tile;
  const KvPair<T>& out = p.dkv.of(tile.region);
  sum_parts(p, split, tile, kv_head, 0, out.k, p.shape.softmax_scale);
  sum_parts(p, split, tile, kv_head, 1, out.v, 1.f);
}

}  // namespace

template <typename T>
void convert_dkv(const ConvertDkvParams<T>& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.work.capacity) * p.shape.num_kv_heads;
  if (blocks == 0) return;
  convert_dkv_context<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError());
}

template void convert_dkv(const ConvertDkvParams<__half>&, cudaStream_t);
template void convert_dkv(const ConvertDkvParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace dualkv
