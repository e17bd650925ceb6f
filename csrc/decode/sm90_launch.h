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
// maps: tiles of branches are loaded by tensor maps. At 256, where no other block hides a load,
// that took 5 to 25% longer; at 64 and of latents it was not measured.
//
// Latents (docs/notes/decode.md has the bounds): a tile is K and V, and as many keys as products of
// scores need to read no more than they multiply. Three warpgroups share 64 rows.
struct DecodeTiles {
  HeadDims of;
  int stages_q, stages_kv, blocks, consumers = 1;
  bool scores_ahead = false, maps = false;
  int latents = 0;  // of a tile
};
constexpr DecodeTiles kDecodeTiles[] = {
    {.of = {64, 64}, .stages_q = 2, .stages_kv = 3, .blocks = 2},
    {.of = {128, 128}, .stages_q = 2, .stages_kv = 2, .blocks = 2, .scores_ahead = true, .maps = true},
    {.of = {256, 256}, .stages_q = 1, .stages_kv = 2, .blocks = 1, .consumers = 2},
    {.of = {576, 512}, .stages_q = 1, .stages_kv = 2, .blocks = 1, .consumers = 3, .maps = true, .latents = 64},
};
template <int kHeadDim, int kHeadDimV>
consteval int decode_block_n(int latents) {
  if constexpr (kHeadDimV < kHeadDim) return latents;
  else return ForwardConfig<kHeadDim, kHeadDimV>::kBlockN;
}

// Registers of a thread that loads, that multiplies or, with latents, makes scores or outputs.
struct DecodeRegisters {
  int of, producer, consumer, scores = 0, outputs = 0;
};
constexpr DecodeRegisters kDecodeRegisters[] = {
    {.of = 1, .producer = 64, .consumer = 192},
    {.of = 2, .producer = 40, .consumer = 232},
    {.of = 3, .producer = 40, .consumer = 0, .scores = 120, .outputs = 176},
};

template <int kHeadDim_, int kHeadDimV_ = kHeadDim_>
struct DecodeConfig {
  static constexpr DecodeTiles kTiles = row_of(kDecodeTiles, HeadDims{kHeadDim_, kHeadDimV_});
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockN = decode_block_n<kHeadDim, kHeadDimV>(kTiles.latents);
  static constexpr bool kLatents = kTiles.latents > 0;
  static constexpr int kParts = kLatents ? 2 : 1;  // of a tile of K, with a barrier each
  static constexpr int kStagesQ = kTiles.stages_q, kStagesKv = kTiles.stages_kv, kWorkSlots = 2;
  static constexpr int kBlocks = kTiles.blocks, kConsumers = kTiles.consumers;
  static constexpr int kRows = (kLatents ? 1 : kConsumers) * kDecodeRows, kThreads = (1 + kConsumers) * kWarpgroup;
  // Warps that are done with queries when they have the scores, and with tiles when they have P V.
  static constexpr int kScoreWarps = 4 * (kLatents ? 1 : kConsumers), kOutputWarps = 4 * (kLatents ? 2 : kConsumers);
  static constexpr bool kScoresAhead = kTiles.scores_ahead, kMaps = kTiles.maps;
  // A lone block of two warpgroups has more registers than its threads can take.
  static constexpr bool kMovesRegisters = kBlocks * (1 + kConsumers) > 2;
  static constexpr DecodeRegisters kRegisters = row_of(kDecodeRegisters, kConsumers);
  using TileQ = SmemTile<kRows, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kOffsetK = kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetV = kLatents ? kOffsetK : kOffsetK + kStagesKv * TileKv::kBytes;
  static constexpr int kOffsetP = kOffsetV + kStagesKv * TileKv::kBytes;
  static constexpr int kTileBytes = kOffsetP + (kLatents ? kWarpgroup * 16 + kDecodeRows * kBlockN * 2 : 0);
  static constexpr int kRestBytes = 448;
  static constexpr int kSharedBytes = kTileBytes + 1024;  // the block aligns its tiles itself
  // A multiprocessor has 228 KB, of which it keeps 1 KB a block.
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024, "blocks must fit a Hopper multiprocessor");
  static_assert(!kMovesRegisters || kBlocks * kWarpgroup *
                                            (kRegisters.producer + (kLatents ? 0 : kConsumers) * kRegisters.consumer +
                                             kRegisters.scores + 2 * kRegisters.outputs) <=
                                        64 * 1024,
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

template <int kHeadDim, int kHeadDimV = kHeadDim>
bool register_decode() {
  return for_element_types([](auto element) {
    using T = decltype(element);
    using Config = DecodeConfig<kHeadDim, kHeadDimV>;
    const auto run = [](const DecodeParams<T>& p, cudaStream_t stream) {
      const auto kernel =
          p.shape.softcap.exists() ? dualkv_sm90_decode<T, Config, true> : dualkv_sm90_decode<T, Config, false>;
      launch(kernel, Config::kBlocks * p.shape.num_sms, Config::kThreads, Config::kSharedBytes, stream, p,
             Config::kMaps ? decode_maps(p) : DecodeMaps{});
    };
    const TileInfo tiles{Config::kRows, Config::kBlockN, Config::kSharedBytes};
    add_kernel<DecodeKernel<T>>({Arch::sm90, {kHeadDim, kHeadDimV}, tiles}, {run, Config::kBlocks});
  });
}

}  // namespace dualkv::sm90

#define DUALKV_SM90_DECODE(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_decode<__VA_ARGS__>()
