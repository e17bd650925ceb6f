// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes per head dimension, for two sizes of multiprocessor: a block may have 163 KB of shared
// memory on an A100 and 99 KB on sm_86, sm_89 and sm_120. Where the full configuration exceeds 99
// KB there is a compact one as well.
#pragma once

#include <vector>

#include "core/kernel_traits.h"
#include "sm80/tile.h"

namespace dualkv::sm80 {

enum class Footprint { full, compact };
constexpr Footprint kCompact = Footprint::compact;
constexpr int shared_limit(Footprint footprint) { return (footprint == Footprint::full ? 163 : 99) * 1024; }
// A bound of the static part: the geometry of the block.
constexpr int kStaticSharedBytes = 256;

// What tiles are for.
struct TilesOf {
  int head_dim;
  Footprint footprint = Footprint::full;

  bool operator==(const TilesOf&) const = default;
};

// Tiles of blocks that own queries and stream K and V.
struct QueryTiles {
  TilesOf of;
  int block_m, block_n, warps, blocks_per_sm;
};

// kOperands: tiles of queries that stay, Q or Q and dO.
template <QueryTiles kTiles, int kOperands>
struct QueryConfig {
  static constexpr int kHeadDim = kTiles.of.head_dim, kBlockM = kTiles.block_m, kBlockN = kTiles.block_n;
  static constexpr int kWarps = kTiles.warps, kThreads = kWarps * 32, kBlocksPerSm = kTiles.blocks_per_sm;
  static constexpr int kWarpM = kBlockM / kWarps;
  static constexpr bool kSumsDq = false;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = kOperands * TileQ::kBytes + 2 * TileKv::kBytes;
  static_assert(kWarpM % 16 == 0, "a warp owns whole 16-row blocks");
};

// 32 query rows a warp where the registers allow: each K and V fragment then serves two products.
constexpr QueryTiles kForwardTiles[] = {
    {.of = {64}, .block_m = 128, .block_n = 128, .warps = 4, .blocks_per_sm = 2},
    {.of = {96}, .block_m = 128, .block_n = 64, .warps = 4, .blocks_per_sm = 2},
    {.of = {128}, .block_m = 128, .block_n = 64, .warps = 4, .blocks_per_sm = 2},
    {.of = {192}, .block_m = 128, .block_n = 64, .warps = 8, .blocks_per_sm = 1},
    {.of = {256}, .block_m = 128, .block_n = 64, .warps = 8, .blocks_per_sm = 1},
    {.of = {256, kCompact}, .block_m = 64, .block_n = 64, .warps = 4, .blocks_per_sm = 1},
};
template <int kHeadDim, Footprint kFootprint>
struct ForwardConfig : QueryConfig<row_of(kForwardTiles, {kHeadDim, kFootprint}), 1> {};

constexpr QueryTiles kBackwardDqTiles[] = {
    {.of = {64}, .block_m = 128, .block_n = 64, .warps = 4, .blocks_per_sm = 2},
    {.of = {96}, .block_m = 128, .block_n = 32, .warps = 4, .blocks_per_sm = 2},
    {.of = {128}, .block_m = 128, .block_n = 32, .warps = 4, .blocks_per_sm = 2},
    {.of = {192}, .block_m = 128, .block_n = 64, .warps = 8, .blocks_per_sm = 1},
    {.of = {256}, .block_m = 64, .block_n = 64, .warps = 4, .blocks_per_sm = 1},
    {.of = {192, kCompact}, .block_m = 64, .block_n = 64, .warps = 4, .blocks_per_sm = 1},
    {.of = {256, kCompact}, .block_m = 64, .block_n = 32, .warps = 4, .blocks_per_sm = 1},
};
template <int kHeadDim, Footprint kFootprint>
struct BackwardDqConfig : QueryConfig<row_of(kBackwardDqTiles, {kHeadDim, kFootprint}), 2> {};

// How the warps of a block share a product: kRows x kCols of them over its result.
template <int kRows_, int kCols_>
struct WarpGrid {
  static constexpr int kRows = kRows_, kCols = kCols_;
};

// `s`, `kv`, `q`: rows and columns of warps over S and dP, over dK and dV, and over dQ.
struct BackwardTiles {
  TilesOf of;
  int block_m, block_n, stages;
  int s[2], kv[2], q[2];
};
constexpr BackwardTiles kBackwardTiles[] = {
    {.of = {64}, .block_m = 128, .block_n = 128, .stages = 2, .s = {4, 2}, .kv = {4, 2}, .q = {4, 2}},
    {.of = {96}, .block_m = 64, .block_n = 128, .stages = 2, .s = {2, 4}, .kv = {8, 1}, .q = {4, 2}},
    {.of = {128}, .block_m = 64, .block_n = 128, .stages = 2, .s = {2, 4}, .kv = {2, 4}, .q = {2, 4}},
    {.of = {192}, .block_m = 64, .block_n = 64, .stages = 2, .s = {4, 2}, .kv = {2, 4}, .q = {2, 4}},
    {.of = {256}, .block_m = 64, .block_n = 64, .stages = 1, .s = {4, 2}, .kv = {2, 4}, .q = {2, 4}},
    {.of = {64, kCompact}, .block_m = 64, .block_n = 128, .stages = 2, .s = {2, 4}, .kv = {4, 2}, .q = {2, 4}},
    {.of = {96, kCompact}, .block_m = 64, .block_n = 64, .stages = 2, .s = {4, 2}, .kv = {4, 2}, .q = {4, 2}},
    {.of = {128, kCompact}, .block_m = 64, .block_n = 64, .stages = 1, .s = {4, 2}, .kv = {2, 4}, .q = {2, 4}},
    {.of = {192, kCompact}, .block_m = 64, .block_n = 32, .stages = 1, .s = {4, 2}, .kv = {2, 4}, .q = {2, 4}},
    {.of = {256, kCompact}, .block_m = 32, .block_n = 32, .stages = 1, .s = {2, 2}, .kv = {2, 2}, .q = {2, 2}},
};

template <int kHeadDim_, Footprint kFootprint>
struct BackwardConfig {
  static constexpr BackwardTiles kTiles = row_of(kBackwardTiles, {kHeadDim_, kFootprint});
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kTiles.block_m, kBlockN = kTiles.block_n;
  static constexpr int kStages = kTiles.stages;
  static constexpr bool kSumsDq = true;
  using GridS = WarpGrid<kTiles.s[0], kTiles.s[1]>;     // S, dP: kBlockM x kBlockN
  using GridKv = WarpGrid<kTiles.kv[0], kTiles.kv[1]>;  // dK, dV: kBlockN x kHeadDim
  using GridQ = WarpGrid<kTiles.q[0], kTiles.q[1]>;     // dQ: kBlockM x kHeadDim
  static constexpr int kWarps = GridS::kRows * GridS::kCols, kThreads = kWarps * 32;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  using TileP = SmemTile<kBlockM, kBlockN>;
  static constexpr int kStatBytes = kBlockM * 4;
  static constexpr int kOffsetV = TileKv::kBytes;
  static constexpr int kOffsetQ = 2 * TileKv::kBytes;
  static constexpr int kOffsetDo = kOffsetQ + kStages * TileQ::kBytes;
  static constexpr int kOffsetP = kOffsetDo + kStages * TileQ::kBytes;
  static constexpr int kOffsetDs = kOffsetP + TileP::kBytes;
  static constexpr int kOffsetLse = kOffsetDs + TileP::kBytes;
  static constexpr int kOffsetDelta = kOffsetLse + kStages * kStatBytes;
  static constexpr int kSharedBytes = kOffsetDelta + kStages * kStatBytes;
  static_assert(GridKv::kRows * GridKv::kCols == kWarps && GridQ::kRows * GridQ::kCols == kWarps, "all warps work");
};

template <class Config>
KernelTraits traits_of() {
  KernelTraits traits{Arch::sm80, {Config::kHeadDim, Config::kHeadDim}};
  traits.tiles = {Config::kBlockM, Config::kBlockN, Config::kSharedBytes + kStaticSharedBytes};
  traits.sums_dq = Config::kSumsDq;
  return traits;
}

// Calls add(config) for the full configuration of a direction and, where that exceeds the small
// multiprocessors, for the compact one.
template <template <int, Footprint> class Config, int kHeadDim, class Add>
void each_footprint(Add add) {
  using Full = Config<kHeadDim, Footprint::full>;
  static_assert(Full::kSharedBytes + kStaticSharedBytes <= shared_limit(Footprint::full), "must fit an A100");
  add(Full{});
  if constexpr (Full::kSharedBytes + kStaticSharedBytes > shared_limit(Footprint::compact)) {
    using Compact = Config<kHeadDim, Footprint::compact>;
    static_assert(Compact::kSharedBytes + kStaticSharedBytes <= shared_limit(Footprint::compact),
                  "must fit the multiprocessors with 99 KB");
    add(Compact{});
  }
}

// The traits of all kernels of a direction for one head dim, the preferred one first.
template <template <int, Footprint> class Config, int kHeadDim>
std::vector<KernelTraits> all_traits() {
  std::vector<KernelTraits> found;
  each_footprint<Config, kHeadDim>([&](auto config) { found.push_back(traits_of<decltype(config)>()); });
  return found;
}

}  // namespace dualkv::sm80
