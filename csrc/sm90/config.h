// SPDX-License-Identifier: BSD-3-Clause
// Tile sizes per head dimension on Hopper: 227 KB of shared memory, one block a multiprocessor.
#pragma once

#include "core/kernel_traits.h"
#include "core/siblings.h"
#include "tile/smem_tile.h"

namespace dualkv::sm90 {

constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kWarpgroup = 128;
constexpr int kBarrierBytes = 320;  // of kernels that own query tiles

// Registers a thread, after the producer's warpgroup has given some of its own to the consumers.
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

// kHeadDim is that of Q and K, kHeadDimV that of V, O and dO. kSharers_ warpgroups share 64
// queries: each computes their scores, and its part of the columns of what is summed. No warpgroup
// has registers for 64 rows of 512 columns.
template <int kHeadDim_, int kHeadDimV_, int kConsumers_, int kBlockN_, int kStagesQ_ = 1, int kSharers_ = 1,
          int kStagesV_ = 2>
struct ForwardTiles {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockN = kBlockN_, kSharers = kSharers_;
  static constexpr int kBlockM = 64 * kConsumers_ / kSharers;
  static constexpr int kStagesQ = kStagesQ_, kStagesK = 2, kStagesV = kStagesV_;
  static constexpr int kConsumers = kConsumers_, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kSlices = kBlockM / 64;  // of the queries, where packs of heads divide 64
  // Nodes that may share a query tile, a slice at least for each. Not tried with two slices.
  static constexpr int kSiblings = kSlices == kMostSiblings ? kSlices : 1;
  using Registers = RegisterShare<kConsumers>;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  static constexpr int kOffsetK = kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStagesK * TileK::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + kStagesV * TileV::kBytes;
  // The block aligns its tiles to 1024 bytes itself.
  static constexpr int kSharedBytes = kOffsetBarriers + kBarrierBytes + 1024;
  // Steps and items take the rest.
  static_assert(kSharedBytes + (kSiblings > 1 ? 1536 : 1088) <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
  static_assert((Registers::kProducer + kConsumers * Registers::kConsumer) * kWarpgroup <= 64 * 1024,
                "setmaxnreg would wait for ever");
};

template <int kHeadDim, int kHeadDimV>
struct ForwardConfig;
template <>
struct ForwardConfig<64, 64> : ForwardTiles<64, 64, 3, 128, 2> {};
template <>
struct ForwardConfig<128, 128> : ForwardTiles<128, 128, 3, 80> {};
template <>
struct ForwardConfig<192, 128> : ForwardTiles<192, 128, 3, 80> {};
template <>
struct ForwardConfig<192, 192> : ForwardTiles<192, 192, 2, 96> {};
template <>
struct ForwardConfig<256, 256> : ForwardTiles<256, 256, 2, 80> {};
template <>
struct ForwardConfig<512, 512> : ForwardTiles<512, 512, 2, 48, 1, 2, 1> {};

// For windows that are shorter than a tile: with d = 64, 24 queries of 8 heads and a window of 128
// see 151 keys together.
template <int kHeadDim, int kHeadDimV>
struct NarrowForwardConfig : ForwardConfig<kHeadDim, kHeadDimV> {};
template <>
struct NarrowForwardConfig<64, 64> : ForwardTiles<64, 64, 3, 80, 2> {};

// The backward kernels need every register.
struct BackwardRegisters {
  static constexpr int kProducer = 24, kConsumer = 240;
  static_assert((kProducer + 2 * kConsumer) * kWarpgroup <= 64 * 1024, "setmaxnreg would wait for ever");
};

// Backward with a stationary KV tile, 64 rows a consumer warpgroup. kStagesDq_: whether dQ goes to
// its sums through shared memory; else it goes from registers.
template <int kHeadDim_, int kHeadDimV_, int kBlockM_, bool kStagesDq_ = true>
struct BackwardWarpgroupTiles {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockM = kBlockM_, kBlockN = 128;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr bool kSumsDq = true, kStagesDq = kStagesDq_;
  static constexpr int kColumnBlocks = 1;
  // Q serves S of the next step and dK of this one while the one after is loaded.
  static constexpr int kStagesQ = 3, kStagesDo = 2, kStagesDs = kStagesDq && kBlockM == 64 ? kStagesQ : 2;
  // The geometry of a step is read once more when its Q has been left: dQ leaves one step later.
  static constexpr int kSteps = 2 * kStagesQ;
  using Registers = BackwardRegisters;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  static_assert(kHeadDim >= kHeadDimV, "parts of dV lie in slots as wide as those of dK");
  using TileDs = SmemTile<kBlockN, kBlockM>;  // transposed: rows are keys
  // dQ of a query tile: a warpgroup computes 64 rows of it, or all rows and half of the columns.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr int kDqCols = kHeadDim * kBlockM / 128;
  static constexpr int kDqBytes = 64 * kDqCols * 4;  // a warpgroup's share, fp32
  static_assert(kBlockM == 64 || kBlockM == 128, "two warpgroups share a dQ tile");
  static_assert(kDqCols % (kStagesDq ? 64 : 32) == 0,
                "a product's columns of dQ are whole panels of K, or within one");

  static constexpr int kOffsetV = TileK::kBytes;
  static constexpr int kOffsetQ = kOffsetV + TileV::kBytes;
  static constexpr int kOffsetDo = kOffsetQ + kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetDs = kOffsetDo + kStagesDo * TileDo::kBytes;
  static constexpr int kOffsetDq = kOffsetDs + kStagesDs * TileDs::kBytes;
  static constexpr int kOffsetLse = kOffsetDq + (kStagesDq ? kConsumers * kDqBytes : 0);
  static constexpr int kOffsetDelta = kOffsetLse + kStagesQ * kBlockM * 4;
  static constexpr int kOffsetBarriers = kOffsetDelta + kStagesDo * kBlockM * 4;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kSharedBytes = kOffsetBarriers + kBarrierBytes + 1024;
  static_assert(kSharedBytes + 512 <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
};

// dK and dV of wide heads: a KV tile of 64 rows, one warpgroup for each of the two sums.
template <int kHeadDim_, int kHeadDimV_, int kStages_>
struct BackwardWideTiles {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockM = 64, kBlockN = 64;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr bool kSumsDq = false;
  static constexpr int kColumnBlocks = 1;
  static constexpr int kStagesQ = kStages_, kStagesDo = kStages_, kSteps = kStagesQ;
  using Registers = BackwardRegisters;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  static_assert(kHeadDim >= kHeadDimV, "parts of dV lie in slots as wide as those of dK");
  static constexpr int kBytesP = kBlockM * kBlockN * 2;  // of two buffers
  static constexpr int kOffsetV = TileK::kBytes;
  static constexpr int kOffsetQ = kOffsetV + TileV::kBytes;
  static constexpr int kOffsetDo = kOffsetQ + kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetP = kOffsetDo + kStagesDo * TileDo::kBytes;
  static constexpr int kOffsetLse = kOffsetP + 2 * kBytesP;
  static constexpr int kOffsetDelta = kOffsetLse + kStagesQ * kBlockM * 4;
  static constexpr int kOffsetBarriers = kOffsetDelta + kStagesDo * kBlockM * 4;
  static constexpr int kSharedBytes = kOffsetBarriers + 256 + 1024;
  static_assert(kSharedBytes + 512 <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
};

// dK and dV of heads wider than 256: a KV tile of 64 rows for kColumnBlocks_ blocks. Each sums its
// part of the columns of both gradients, one warpgroup for each.
template <int kHeadDim_, int kColumnBlocks_, int kBlockM_>
struct BackwardColumnTiles {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim, kBlockM = kBlockM_, kBlockN = 64;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr bool kSumsDq = false;
  static constexpr int kColumnBlocks = kColumnBlocks_, kColumns = kHeadDim / kColumnBlocks;
  // Q serves S, and dK a good deal later.
  static constexpr int kStagesQ = 2, kStagesDo = 1, kSteps = kStagesQ;
  using Registers = BackwardRegisters;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = TileQ;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = TileK;
  static_assert(kBlockN <= kHeadDim - kColumns, "P of a step takes the place of columns of Q");
  static constexpr int kOffsetV = TileK::kBytes;
  static constexpr int kOffsetQ = kOffsetV + TileV::kBytes;
  static constexpr int kOffsetDo = kOffsetQ + kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetLse = kOffsetDo + kStagesDo * TileDo::kBytes;
  static constexpr int kOffsetDelta = kOffsetLse + kStagesQ * kBlockM * 4;
  static constexpr int kOffsetBarriers = kOffsetDelta + kStagesDo * kBlockM * 4;
  static constexpr int kSharedBytes = kOffsetBarriers + 256 + 1024;
  static_assert(kSharedBytes + 512 <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
};

// dQ alone: a block owns 128 queries of one head, or 64 that its warpgroups share, and streams
// K and V. A tile of K is held longer than one of V: it serves S of its step and dQ, which is
// issued together with S of the next.
template <int kHeadDim_, int kHeadDimV_, int kBlockN_, int kStagesK_, int kStagesV_, int kStagesQ_ = 1, int kSharers_ = 1>
struct BackwardDqTiles {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockN = kBlockN_, kSharers = kSharers_;
  static constexpr int kStagesQ = kStagesQ_, kStagesK = kStagesK_, kStagesV = kStagesV_;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup, kBlockM = 64 * kConsumers / kSharers;
  static constexpr int kSlices = 1, kSiblings = 1;
  static constexpr bool kPacksHeads = kSharers == 1;
  using Registers = BackwardRegisters;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  static constexpr int kOffsetDo = kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetK = kOffsetDo + kStagesQ * TileDo::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStagesK * TileK::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + kStagesV * TileV::kBytes;
  static constexpr int kSharedBytes = kOffsetBarriers + kBarrierBytes + 1024;
  static_assert(kSharedBytes + 512 <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
};

template <int kHeadDim, int kHeadDimV>
struct BackwardDqConfig;
template <>
struct BackwardDqConfig<64, 64> : BackwardDqTiles<64, 64, 128, 3, 2, 2> {};
template <>
struct BackwardDqConfig<128, 128> : BackwardDqTiles<128, 128, 128, 3, 2> {};
template <>
struct BackwardDqConfig<192, 128> : BackwardDqTiles<192, 128, 96, 3, 1> {};
template <>
struct BackwardDqConfig<192, 192> : BackwardDqTiles<192, 192, 80, 2, 2> {};
template <>
struct BackwardDqConfig<256, 256> : BackwardDqTiles<256, 256, 64, 2, 1> {};
template <>
struct BackwardDqConfig<512, 512> : BackwardDqTiles<512, 512, 32, 2, 1, 1, 2> {};

// For short walks. At d = 64 as in the forward: 16 queries of 8 heads and a window of 128 see 143
// keys. At d = 128 there is room for the queries of the next item too.
template <int kHeadDim, int kHeadDimV>
struct NarrowBackwardDqConfig : BackwardDqConfig<kHeadDim, kHeadDimV> {};
template <>
struct NarrowBackwardDqConfig<64, 64> : BackwardDqTiles<64, 64, 80, 3, 2, 2> {};
template <>
struct NarrowBackwardDqConfig<128, 128> : BackwardDqTiles<128, 128, 64, 3, 2, 2> {};

template <int kHeadDim, int kHeadDimV>
struct BackwardConfig;
template <>
struct BackwardConfig<64, 64> : BackwardWarpgroupTiles<64, 64, 128> {};
template <>
struct BackwardConfig<128, 128> : BackwardWarpgroupTiles<128, 128, 64> {};
template <>
struct BackwardConfig<192, 128> : BackwardWarpgroupTiles<192, 128, 64, false> {};
template <>
struct BackwardConfig<192, 192> : BackwardWideTiles<192, 192, 3> {};
template <>
struct BackwardConfig<256, 256> : BackwardWideTiles<256, 256, 2> {};
template <>
struct BackwardConfig<512, 512> : BackwardColumnTiles<512, 2, 32> {};

// Whether sums of dQ have an instance that leaves out no steps (core/tuning.h, every_step_node).
template <int kHeadDim, int kHeadDimV>
constexpr bool kHasEveryStep = false;
template <>
inline constexpr bool kHasEveryStep<128, 128> = true;

template <class Config>
constexpr TileInfo tile_info(bool packs_heads = true, int column_blocks = 1) {
  return {Config::kBlockM, Config::kBlockN, Config::kSharedBytes, packs_heads, column_blocks};
}

template <int kHeadDim, int kHeadDimV>
constexpr KernelTraits forward_traits() {
  using Config = ForwardConfig<kHeadDim, kHeadDimV>;
  using Narrow = NarrowForwardConfig<kHeadDim, kHeadDimV>;
  KernelTraits traits{Arch::sm90, {kHeadDim, kHeadDimV}, tile_info<Config>()};
  static_assert(Narrow::kBlockM == Config::kBlockM, "the list of query tiles serves both");
  if constexpr (Narrow::kBlockN < Config::kBlockN) traits.narrow = tile_info<Narrow>();
  traits.siblings = Config::kSiblings;
  return traits;
}

template <int kHeadDim, int kHeadDimV>
constexpr KernelTraits backward_traits() {
  using Config = BackwardConfig<kHeadDim, kHeadDimV>;
  KernelTraits traits{Arch::sm90, {kHeadDim, kHeadDimV}, tile_info<Config>(true, Config::kColumnBlocks)};
  traits.sums_dq = Config::kSumsDq;
  if constexpr (Config::kSumsDq) traits.orders_dq = Config::kStagesDq;
  traits.has_every_step = kHasEveryStep<kHeadDim, kHeadDimV>;
  return traits;
}

template <int kHeadDim, int kHeadDimV>
constexpr KernelTraits backward_dq_traits() {
  using Config = BackwardDqConfig<kHeadDim, kHeadDimV>;
  using Narrow = NarrowBackwardDqConfig<kHeadDim, kHeadDimV>;
  KernelTraits traits{Arch::sm90, {kHeadDim, kHeadDimV}, tile_info<Config>(Config::kPacksHeads)};
  if constexpr (Narrow::kBlockN < Config::kBlockN) traits.narrow = tile_info<Narrow>(Narrow::kPacksHeads);
  return traits;
}

}  // namespace dualkv::sm90
