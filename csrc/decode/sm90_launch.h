// SPDX-License-Identifier: BSD-3-Clause
// Tiles and launches of the sm90 kernels of decoding, and the macro by which an instance file
// builds and registers one of them.
#pragma once

#include "decode/sm90.h"
#include "sm90/launch.h"

namespace dualkv::sm90 {

// KV tiles are those of the forward, because their keys decide the bits of a row. Two blocks share
// a multiprocessor where they fit, so that one loads while the other waits for states. Where only
// one fits, two warpgroups multiply its tiles: 16 siblings of 6 heads have 96 rows.
//
// scores_ahead: scores of the next tile are computed during the softmax of this one, as far as
// registers go. A lone walk is bound by latency.
//
// maps: tiles of branches are loaded by tensor maps. At 256, where no other block hides a load, that
// took 5 to 25% longer; at 64 it was not measured.
struct DecodeTiles {
  int of, stages_q, stages_kv, blocks, consumers = 1;
  bool scores_ahead = false, maps = false;
};
constexpr DecodeTiles kDecodeTiles[] = {
    {.of = 64, .stages_q = 2, .stages_kv = 3, .blocks = 2},
    {.of = 128, .stages_q = 2, .stages_kv = 2, .blocks = 2, .scores_ahead = true, .maps = true},
    {.of = 256, .stages_q = 1, .stages_kv = 2, .blocks = 1, .consumers = 2},
};

constexpr RegisterShare kDecodeRegisters[] = {{.of = 1, .producer = 64, .consumer = 192},
                                              {.of = 2, .producer = 40, .consumer = 232}};

template <int kHeadDim_>
struct DecodeConfig {
  static constexpr DecodeTiles kTiles = row_of(kDecodeTiles, kHeadDim_);
  static constexpr int kHeadDim = kHeadDim_, kBlockN = ForwardConfig<kHeadDim, kHeadDim>::kBlockN;
  static constexpr int kStagesQ = kTiles.stages_q, kStagesKv = kTiles.stages_kv, kWorkSlots = 2;
  static constexpr int kBlocks = kTiles.blocks, kConsumers = kTiles.consumers;
  static constexpr int kRows = kConsumers * kDecodeRows, kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr bool kScoresAhead = kTiles.scores_ahead, kMaps = kTiles.maps;
  // A lone block of two warpgroups has more registers than its threads can take.
  static constexpr bool kMovesRegisters = kBlocks * (1 + kConsumers) > 2;
  static constexpr RegisterShare kRegisters = row_of(kDecodeRegisters, kConsumers);
  using TileQ = SmemTile<kRows, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kOffsetK = kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStagesKv * TileKv::kBytes;
  static constexpr int kTileBytes = kOffsetV + kStagesKv * TileKv::kBytes;
  static constexpr int kRestBytes = 448;
  static constexpr int kSharedBytes = kTileBytes + 1024;  // the block aligns its tiles itself
  // A multiprocessor has 228 KB, of which it keeps 1 KB a block.
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024, "blocks must fit a Hopper multiprocessor");
  static_assert(!kMovesRegisters ||
                    kBlocks * kWarpgroup * (kRegisters.producer + kConsumers * kRegisters.consumer) <= 64 * 1024,
                "setmaxnreg would wait for ever");
};

// None where a page's rows do not follow each other at a multiple of a row's stride.
template <typename T>
DecodeMaps decode_maps(const DecodeParams<T>& p) {
  DecodeMaps maps{};
  const auto rows_of = [](const PagedTensor<const T>& pages) {
    return pages.row_stride > 0 && pages.page_stride % pages.row_stride == 0 ? pages.page_stride / pages.row_stride : 0;
  };
  maps.k_rows = rows_of(p.k), maps.v_rows = rows_of(p.v);
  const int64_t most = std::max(maps.k_rows, maps.v_rows) * p.table.num_pages;
  maps.exist = maps.k_rows > 0 && maps.v_rows > 0 && most < INT_MAX;
  if (!maps.exist) return maps;
  const auto map_of = [&](const PagedTensor<const T>& pages, int64_t rows) {
    const int all = static_cast<int>(rows * (p.table.num_pages - 1)) + p.table.page_size;
    return make_tensor_map(TensorView<const T>{pages.data, pages.row_stride, pages.head_stride}, all,
                           p.shape.num_kv_heads, p.shape.head_dim, kPageRows);
  };
  maps.k = map_of(p.k, maps.k_rows), maps.v = map_of(p.v, maps.v_rows);
  return maps;
}

template <int kHeadDim>
bool register_decode() {
  return for_element_types([](auto element) {
    using T = decltype(element);
    using Config = DecodeConfig<kHeadDim>;
    const auto run = [](const DecodeParams<T>& p, cudaStream_t stream) {
      const auto kernel =
          p.shape.softcap.exists() ? dualkv_sm90_decode<T, Config, true> : dualkv_sm90_decode<T, Config, false>;
      launch(kernel, Config::kBlocks * p.shape.num_sms, Config::kThreads, Config::kSharedBytes, stream, p,
             Config::kMaps ? decode_maps(p) : DecodeMaps{});
    };
    const TileInfo tiles{Config::kRows, Config::kBlockN, Config::kSharedBytes};
    add_kernel<DecodeKernel<T>>({Arch::sm90, {kHeadDim, kHeadDim}, tiles}, {run, Config::kBlocks});
  });
}

}  // namespace dualkv::sm90

#define DUALKV_SM90_DECODE(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_decode<__VA_ARGS__>()
