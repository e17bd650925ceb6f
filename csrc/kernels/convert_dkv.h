// SPDX-License-Identifier: BSD-3-Clause
// dK and dV of split tiles: adds the fp32 parts of several blocks in a fixed order (as split-KV
// combines do), scales the sum and rounds it once.
#pragma once

#include "params.h"
#include "tile/numerics.h"

namespace dualkv {

// Rows of a tile per block. Few, so that even a few split tiles keep all multiprocessors reading.
constexpr int kConvertedRows = 16;

// Sums rows of dK (`index` 0) or dV (1) of one tile and KV head.
template <typename T>
__device__ void sum_parts(const ConvertParams<T>& p, const SplitTile& split, int index, int kv_head, int first_row) {
  const KvTile tile = p.nodes.kv_tile(p.nodes.node(split.node), split.n_block, p.block_n);
  const KvPair<T>& out = p.dkv.of(tile.region);
  const TensorView<T>& view = index == 0 ? out.k : out.v;
  const float scale = index == 0 ? p.shape.softmax_scale : 1.f;

  const int64_t tile_floats = static_cast<int64_t>(p.block_n) * p.padded_head_dim;
  const float* first_part = p.dkv_slots + (2 * (int64_t{split.slot} + kv_head) + index) * tile_floats;
  const int64_t stride = 2 * tile_floats * p.shape.num_kv_heads;  // between parts
  const int quads = (index == 0 ? p.shape.head_dim : p.shape.head_dim_v) / 4;
  const int rows = min(kConvertedRows, tile.valid - first_row);
  for (int i = threadIdx.x; i < rows * quads; i += blockDim.x) {
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

// Grid size for all split tiles, whose number only the device knows. Often there are none, and a
// grid for the largest possible number would take 7 us to exit: at most as many blocks as are
// resident, each in a loop.
template <typename T>
int convert_dkv_blocks(const ConvertParams<T>& p, int threads) {
  const int64_t most = int64_t{p.splits.capacity} * p.shape.num_kv_heads * ceil_div(p.block_n, kConvertedRows) * 2;
  const int64_t resident = int64_t{p.shape.num_sms} * (2048 / threads);
  return static_cast<int>(most < resident ? most : resident);
}

// Work of block `block` of `blocks`.
template <typename T>
__device__ void convert_dkv_context(const ConvertParams<T>& p, int block, int blocks) {
  const int row_blocks = ceil_div(p.block_n, kConvertedRows), heads = p.shape.num_kv_heads;
  const int64_t places = int64_t{*p.splits.count} * heads * row_blocks * 2;
  for (int64_t place = block; place < places; place += blocks) {
    const int64_t tile = place / 2 / row_blocks;
    sum_parts(p, p.splits.items[tile / heads], static_cast<int>(place % 2), static_cast<int>(tile % heads),
              static_cast<int>(place / 2 % row_blocks) * kConvertedRows);
  }
}

}  // namespace dualkv
