// dK and dV of the tiles whose queries were split among several blocks: fp32 parts, summed in a fixed order, scaled
// and rounded once.
#include "core/numerics.h"
#include "dispatch.h"
#include "kernels/kernels.h"

namespace dualkv {
namespace {

constexpr int kThreads = 256;
// Of a tile, by one block: a few split tiles then keep all multiprocessors reading.
constexpr int kRows = 16;

// Rows of dK (`index` 0) or dV (1) of one tile and KV head.
template <typename T>
__device__ void sum_parts(const ConvertDkvParams<T>& p, const SplitTile& split, int index, int kv_head, int first_row) {
  const KvTile tile = owner_of(p.layout, split.region, split.owner, split.n_block, p.block_n).tile;
  const KvPair<T>& out = p.dkv.of(tile.region);
  const TensorView<T>& view = index == 0 ? out.k : out.v;
  const float scale = index == 0 ? p.shape.softmax_scale : 1.f;

  const int64_t tile_floats = static_cast<int64_t>(p.block_n) * p.padded_head_dim;
  const float* first_part = p.dkv_slots + (2 * (int64_t{split.slot} + kv_head) + index) * tile_floats;
  const int64_t stride = 2 * tile_floats * p.shape.num_kv_heads;  // of parts
  const int quads = p.shape.head_dim / 4, rows = min(kRows, tile.valid - first_row);
  for (int i = threadIdx.x; i < rows * quads; i += kThreads) {
    const int row = first_row + i / quads, col = i % quads * 4;
    const float* source = first_part + row * p.padded_head_dim + col;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int part = 0; part < split.parts; ++part, source += stride) {
      const float4 v = *reinterpret_cast<const float4*>(source);
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    *reinterpret_cast<uint2*>(view.at(tile.row + row, kv_head) + col) =
        make_uint2(pack2<T>(sum.x * scale, sum.y * scale), pack2<T>(sum.z * scale, sum.w * scale));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) convert_dkv_context(const __grid_constant__ ConvertDkvParams<T> p) {
  const int row_blocks = ceil_div(p.block_n, kRows), heads = p.shape.num_kv_heads;
  const int64_t places = int64_t{*p.work.count} * heads * row_blocks * 2;
  for (int64_t place = blockIdx.x; place < places; place += gridDim.x) {
    const int64_t tile = place / 2 / row_blocks;
    sum_parts(p, p.work.items[tile / heads], static_cast<int>(place % 2), static_cast<int>(tile % heads),
              static_cast<int>(place / 2 % row_blocks) * kRows);
  }
}

}  // namespace

template <typename T>
void convert_dkv(const ConvertDkvParams<T>& p, cudaStream_t stream) {
  const int64_t most = int64_t{p.work.capacity} * p.shape.num_kv_heads * ceil_div(p.block_n, kRows) * 2;
  if (most == 0) return;
  // Only the device knows how many tiles are split: often none, and then a grid for the most possible takes 7 us to exit.
  const int64_t resident = int64_t{p.shape.num_sms} * (2048 / kThreads);
  convert_dkv_context<T><<<static_cast<unsigned>(most < resident ? most : resident), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError());
}

template void convert_dkv(const ConvertDkvParams<__half>&, cudaStream_t);
template void convert_dkv(const ConvertDkvParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace dualkv
