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
constexpr int shared_limit(Footprint footprint) { return (footprint == Footprint::full ? 163 : 99) * 1024; }
// A bound of the static part: the geometry of the block.
constexpr int kStaticSharedBytes = 256;

template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kBlocksPerSm_>
struct ForwardTiles {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpM = kBlockM / kWarps;
  static constexpr bool kSumsDq = false;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = TileQ::kBytes + 2 * TileKv::kBytes;
  static_assert(kWarpM % 16 == 0, "a warp owns whole 16-row blocks");
};

// 32 query rows a warp where the registers allow: each K and V fragment then serves two products.
template <int kHeadDim, Footprint kFootprint>
struct ForwardConfig;
template <>
struct ForwardConfig<64, Footprint::full> : ForwardTiles<64, 128, 128, 4, 2> {};
template <>
struct ForwardConfig<96, Footprint::full> : ForwardTiles<96, 128, 64, 4, 2> {};
template <>
struct ForwardConfig<128, Footprint::full> : ForwardTiles<128, 128, 64, 4, 2> {};
template <>
struct ForwardConfig<192, Footprint::full> : ForwardTiles<192, 128, 64, 8, 1> {};
template <>
struct ForwardConfig<256, Footprint::full> : ForwardTiles<256, 128, 64, 8, 1> {};
template <>
struct ForwardConfig<256, Footprint::compact> : ForwardTiles<256, 64, 64, 4, 1> {};

// How 8 warps share a product: kRows x kCols warps over its result.
template <int kRows_, int kCols_>
struct WarpGrid {
  static constexpr int kRows = kRows_, kCols = kCols_;
};

template <int kHeadDim_, int kBlockM_, int kBlockN_, int kStages_, class GridS_, class GridKv_, class GridQ_>
struct BackwardWarpTiles {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kStages = kStages_;
  static constexpr int kWarps = GridS_::kRows * GridS_::kCols, kThreads = kWarps * 32;
  static constexpr bool kSumsDq = true;
  using GridS = GridS_;    // S, dP: kBlockM x kBlockN
  using GridKv = GridKv_;  // dK, dV: kBlockN x kHeadDim
  using GridQ = GridQ_;    // dQ: kBlockM x kHeadDim
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

template <int kHeadDim, Footprint kFootprint>
struct BackwardConfig;
template <>
struct BackwardConfig<64, Footprint::full>
    : BackwardWarpTiles<64, 128, 128, 2, WarpGrid<4, 2>, WarpGrid<4, 2>, WarpGrid<4, 2>> {};
template <>
struct BackwardConfig<96, Footprint::full>
    : BackwardWarpTiles<96, 64, 128, 2, WarpGrid<2, 4>, WarpGrid<8, 1>, WarpGrid<4, 2>> {};
template <>
struct BackwardConfig<128, Footprint::full>
    : BackwardWarpTiles<128, 64, 128, 2, WarpGrid<2, 4>, WarpGrid<2, 4>, WarpGrid<2, 4>> {};
template <>
struct BackwardConfig<192, Footprint::full>
    : BackwardWarpTiles<192, 64, 64, 2, WarpGrid<4, 2>, WarpGrid<2, 4>, WarpGrid<2, 4>> {};
template <>
struct BackwardConfig<256, Footprint::full>
    : BackwardWarpTiles<256, 64, 64, 1, WarpGrid<4, 2>, WarpGrid<2, 4>, WarpGrid<2, 4>> {};
template <>
struct BackwardConfig<64, Footprint::compact>
    : BackwardWarpTiles<64, 64, 128, 2, WarpGrid<2, 4>, WarpGrid<4, 2>, WarpGrid<2, 4>> {};
template <>
struct BackwardConfig<96, Footprint::compact>
    : BackwardWarpTiles<96, 64, 64, 2, WarpGrid<4, 2>, WarpGrid<4, 2>, WarpGrid<4, 2>> {};
template <>
struct BackwardConfig<128, Footprint::compact>
    : BackwardWarpTiles<128, 64, 64, 1, WarpGrid<4, 2>, WarpGrid<2, 4>, WarpGrid<2, 4>> {};
template <>
struct BackwardConfig<192, Footprint::compact>
    : BackwardWarpTiles<192, 64, 32, 1, WarpGrid<4, 2>, WarpGrid<2, 4>, WarpGrid<2, 4>> {};
template <>
struct BackwardConfig<256, Footprint::compact>
    : BackwardWarpTiles<256, 32, 32, 1, WarpGrid<2, 2>, WarpGrid<2, 2>, WarpGrid<2, 2>> {};

// dQ alone keeps Q and dO and streams K and V.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kBlocksPerSm_>
struct BackwardDqTiles {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpM = kBlockM / kWarps;
  static constexpr bool kSumsDq = false;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = 2 * TileQ::kBytes + 2 * TileKv::kBytes;
  static_assert(kWarpM % 16 == 0, "a warp owns whole 16-row blocks");
};

template <int kHeadDim, Footprint kFootprint>
struct BackwardDqConfig;
template <>
struct BackwardDqConfig<64, Footprint::full> : BackwardDqTiles<64, 128, 64, 4, 2> {};
template <>
struct BackwardDqConfig<96, Footprint::full> : BackwardDqTiles<96, 128, 32, 4, 2> {};
template <>
struct BackwardDqConfig<128, Footprint::full> : BackwardDqTiles<128, 128, 32, 4, 2> {};
template <>
struct BackwardDqConfig<192, Footprint::full> : BackwardDqTiles<192, 128, 64, 8, 1> {};
template <>
struct BackwardDqConfig<256, Footprint::full> : BackwardDqTiles<256, 64, 64, 4, 1> {};
template <>
struct BackwardDqConfig<192, Footprint::compact> : BackwardDqTiles<192, 64, 64, 4, 1> {};
template <>
struct BackwardDqConfig<256, Footprint::compact> : BackwardDqTiles<256, 64, 32, 4, 1> {};

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
