// Tile sizes per head dimension on Hopper: 227 KB of shared memory, one block a multiprocessor.
#pragma once

#include "core/smem_tile.h"

namespace dualkv::sm90 {

constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kWarpgroup = 128;

// Registers a thread after the producer's warpgroup has given its share away.
template <int kConsumers>
struct RegisterShare;
template <>
struct RegisterShare<2> {
  static constexpr int kProducer = 40, kConsumer = 232;
};
template <>
struct RegisterShare<3> {
  static constexpr int kProducer = 32, kConsumer = 160;
};

template <int kHeadDim_, int kConsumers_, int kBlockN_>
struct ForwardTiles {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = 64 * kConsumers_, kBlockN = kBlockN_, kStages = 2;
  static constexpr int kConsumers = kConsumers_, kThreads = (kConsumers + 1) * kWarpgroup;
  using Registers = RegisterShare<kConsumers>;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kOffsetK = TileQ::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStages * TileKv::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + kStages * TileKv::kBytes;
  // The block aligns its tiles to 1024 bytes itself.
  static constexpr int kSharedBytes = kOffsetBarriers + 256 + 1024;
  static_assert(kSharedBytes + 256 <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
  static_assert((Registers::kProducer + kConsumers * Registers::kConsumer) * kWarpgroup <= 64 * 1024,
                "setmaxnreg would wait for ever");
};

template <int kHeadDim>
struct ForwardConfig;
template <>
struct ForwardConfig<64> : ForwardTiles<64, 3, 128> {};
template <>
struct ForwardConfig<128> : ForwardTiles<128, 2, 128> {};
template <>
struct ForwardConfig<192> : ForwardTiles<192, 2, 96> {};
template <>
struct ForwardConfig<256> : ForwardTiles<256, 2, 80> {};

}  // namespace dualkv::sm90
