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

// Registers a thread of kernels with that many consumer warpgroups, after the producer's has given
// some of its own to them. The backward kernels need every register.
struct RegisterShare {
  int of, producer, consumer;
};
constexpr RegisterShare kForwardRegisters[] = {{.of = 2, .producer = 40, .consumer = 232},
                                               {.of = 3, .producer = 32, .consumer = 160}};
constexpr RegisterShare kBackwardRegisters{.of = 2, .producer = 24, .consumer = 240};

// Tiles of blocks that own queries and stream K and V. `sharers` warpgroups share 64 queries: each
// computes their scores, and its part of the columns of what is summed. No warpgroup has registers
// for 64 rows of 512 columns.
struct QueryTiles {
  HeadDims of;
  int consumers = 2, block_n, stages_q = 1, stages_k = 2, stages_v = 2, sharers = 1;
};

// kHeadDim is that of Q and K, kHeadDimV that of V, O and dO. kOperands: tiles of queries that
// stay, Q or Q and dO.
template <QueryTiles kTiles_, int kOperands>
struct QueryConfig {
  static constexpr QueryTiles kTiles = kTiles_;
  static constexpr int kHeadDim = kTiles.of.qk, kHeadDimV = kTiles.of.v, kBlockN = kTiles.block_n;
  static constexpr int kStagesQ = kTiles.stages_q, kStagesK = kTiles.stages_k, kStagesV = kTiles.stages_v;
  static constexpr int kConsumers = kTiles.consumers, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kSharers = kTiles.sharers, kBlockM = 64 * kConsumers / kSharers;
  static constexpr bool kIsForward = kOperands == 1, kPacksHeads = kIsForward || kSharers == 1;
  // Slices are of the queries, where packs of heads divide 64. Nodes may share a query tile, a slice
  // at least for each; not tried with two slices.
  static constexpr int kSlices = kIsForward ? kBlockM / 64 : 1;
  static constexpr int kSiblings = kSlices == kMostSiblings ? kSlices : 1;
  static constexpr RegisterShare kRegisters = kIsForward ? row_of(kForwardRegisters, kConsumers) : kBackwardRegisters;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  static constexpr int kOffsetDo = kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetK = kOffsetDo + (kOperands - 1) * kStagesQ * TileDo::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStagesK * TileK::kBytes;
  static constexpr int kOffsetBarriers = kOffsetV + kStagesV * TileV::kBytes;
  // The block aligns its tiles to 1024 bytes itself. Steps and items take the rest.
  static constexpr int kSharedBytes = kOffsetBarriers + kBarrierBytes + 1024;
  static constexpr int kBytesOfSteps = !kIsForward ? 512 : kSiblings > 1 ? 1536 : 1088;
  static_assert(kSharedBytes + kBytesOfSteps <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
  static_assert((kRegisters.producer + kConsumers * kRegisters.consumer) * kWarpgroup <= 64 * 1024,
                "setmaxnreg would wait for ever");
};

constexpr QueryTiles kForwardTiles[] = {
    {.of = {64, 64}, .consumers = 3, .block_n = 128, .stages_q = 2},
    {.of = {128, 128}, .consumers = 3, .block_n = 80},
    {.of = {192, 128}, .consumers = 3, .block_n = 80},
    {.of = {192, 192}, .consumers = 2, .block_n = 96},
    {.of = {256, 256}, .consumers = 2, .block_n = 80},
    {.of = {512, 512}, .consumers = 2, .block_n = 48, .stages_v = 1, .sharers = 2},
};
template <int kHeadDim, int kHeadDimV>
struct ForwardConfig : QueryConfig<row_of(kForwardTiles, {kHeadDim, kHeadDimV}), 1> {};

// For windows that are shorter than a tile: with d = 64, 24 queries of 8 heads and a window of 128
// see 151 keys together.
constexpr QueryTiles kNarrowForwardTiles[] = {
    {.of = {64, 64}, .consumers = 3, .block_n = 80, .stages_q = 2},
};
template <int kHeadDim, int kHeadDimV>
struct NarrowForwardConfig
    : QueryConfig<row_of(kNarrowForwardTiles, {kHeadDim, kHeadDimV}, &ForwardConfig<kHeadDim, kHeadDimV>::kTiles),
                  1> {};

// dQ alone: a block owns 128 queries of one head, or 64 that its warpgroups share. A tile of K is
// held longer than one of V: it serves S of its step and dQ, which is issued together with S of the
// next.
constexpr QueryTiles kBackwardDqTiles[] = {
    {.of = {64, 64}, .block_n = 128, .stages_q = 2, .stages_k = 3},
    {.of = {128, 128}, .block_n = 128, .stages_k = 3},
    {.of = {192, 128}, .block_n = 96, .stages_k = 3, .stages_v = 1},
    {.of = {192, 192}, .block_n = 80},
    {.of = {256, 256}, .block_n = 64, .stages_v = 1},
    {.of = {512, 512}, .block_n = 32, .stages_v = 1, .sharers = 2},
};
template <int kHeadDim, int kHeadDimV>
struct BackwardDqConfig : QueryConfig<row_of(kBackwardDqTiles, {kHeadDim, kHeadDimV}), 2> {};

// For short walks. At d = 64 as in the forward: 16 queries of 8 heads and a window of 128 see 143
// keys. At d = 128 there is room for the queries of the next item too.
constexpr QueryTiles kNarrowBackwardDqTiles[] = {
    {.of = {64, 64}, .block_n = 80, .stages_q = 2, .stages_k = 3},
    {.of = {128, 128}, .block_n = 64, .stages_q = 2, .stages_k = 3},
};
template <int kHeadDim, int kHeadDimV>
struct NarrowBackwardDqConfig
    : QueryConfig<row_of(kNarrowBackwardDqTiles, {kHeadDim, kHeadDimV}, &BackwardDqConfig<kHeadDim, kHeadDimV>::kTiles),
                  2> {};

// Tiles of blocks that own keys, and stages of what lies in shared memory: Q, dO, dS, P and dQ.
// Where dQ is summed, 64 keys a warpgroup, dS lies there, and dQ if it goes to its sums from there
// and not from registers. Wide heads leave dQ to its own kernel and have one warpgroup for each of
// dK and dV, which hand over P. Above 256 `column_blocks` blocks share a KV tile: each sums its
// part of the columns of both gradients.
struct BackwardTiles {
  HeadDims of;
  int block_m, block_n, stages_q, stages_do, stages_ds = 0, stages_p = 0, stages_dq = 0, column_blocks = 1;
  // Sums of dQ have an instance that leaves out no steps (core/tuning.h, every_step_node).
  bool has_every_step = false;
};
// Q serves S of the next step and dK of this one while the one after is loaded: three stages, where
// there is room.
constexpr BackwardTiles kBackwardTiles[] = {
    {.of = {64, 64}, .block_m = 128, .block_n = 128, .stages_q = 3, .stages_do = 2, .stages_ds = 2, .stages_dq = 1},
    {.of = {128, 128}, .block_m = 64, .block_n = 128, .stages_q = 3, .stages_do = 2, .stages_ds = 3, .stages_dq = 1,
     .has_every_step = true},
    {.of = {192, 128}, .block_m = 64, .block_n = 128, .stages_q = 3, .stages_do = 2, .stages_ds = 2},
    {.of = {192, 192}, .block_m = 64, .block_n = 64, .stages_q = 3, .stages_do = 3, .stages_p = 2},
    {.of = {256, 256}, .block_m = 64, .block_n = 64, .stages_q = 2, .stages_do = 2, .stages_p = 2},
    {.of = {512, 512}, .block_m = 32, .block_n = 64, .stages_q = 2, .stages_do = 1, .column_blocks = 2},
};

template <int kHeadDim_, int kHeadDimV_>
struct BackwardConfig {
  static constexpr BackwardTiles kTiles = row_of(kBackwardTiles, {kHeadDim_, kHeadDimV_});
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kTiles.block_m, kBlockN = kTiles.block_n;
  static constexpr int kConsumers = 2, kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kStagesQ = kTiles.stages_q, kStagesDo = kTiles.stages_do, kStagesDs = kTiles.stages_ds;
  static constexpr int kStagesP = kTiles.stages_p, kStagesDq = kTiles.stages_dq;
  static constexpr int kColumnBlocks = kTiles.column_blocks, kColumns = kHeadDim / kColumnBlocks;
  static constexpr bool kSumsDq = kStagesDs > 0;
  // The geometry of a step is read once more when its Q has been left: dQ leaves one step later.
  static constexpr int kSteps = kSumsDq ? 2 * kStagesQ : kStagesQ;
  static constexpr RegisterShare kRegisters = kBackwardRegisters;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileDo = SmemTile<kBlockM, kHeadDimV>;
  using TileK = SmemTile<kBlockN, kHeadDim>;
  using TileV = SmemTile<kBlockN, kHeadDimV>;
  using TileDs = SmemTile<kBlockN, kBlockM>;  // transposed: rows are keys
  static constexpr int kBytesP = kBlockM * kBlockN * 2;
  static_assert(kHeadDim >= kHeadDimV, "parts of dV lie in slots as wide as those of dK");
  static_assert(kColumnBlocks == 1 || kBlockN <= kHeadDim - kColumns, "P of a step takes the place of columns of Q");
  // dQ of a query tile: a warpgroup computes 64 rows of it, or all rows and half of the columns.
  static constexpr bool kSplitRows = kBlockM == 128;
  static constexpr int kDqCols = kHeadDim * kBlockM / 128;
  static constexpr int kDqBytes = 64 * kDqCols * 4;  // a warpgroup's share, fp32
  static_assert(!kSumsDq || kBlockM == 64 || kBlockM == 128, "two warpgroups share a dQ tile");
  static_assert(!kSumsDq || kDqCols % (kStagesDq > 0 ? 64 : 32) == 0,
                "a product's columns of dQ are whole panels of K, or within one");

  static constexpr int kOffsetV = TileK::kBytes;
  static constexpr int kOffsetQ = kOffsetV + TileV::kBytes;
  static constexpr int kOffsetDo = kOffsetQ + kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetDs = kOffsetDo + kStagesDo * TileDo::kBytes;
  static constexpr int kOffsetP = kOffsetDs + kStagesDs * TileDs::kBytes;
  static constexpr int kOffsetDq = kOffsetP + kStagesP * kBytesP;
  static constexpr int kOffsetLse = kOffsetDq + kStagesDq * kConsumers * kDqBytes;
  static constexpr int kOffsetDelta = kOffsetLse + kStagesQ * kBlockM * 4;
  static constexpr int kOffsetBarriers = kOffsetDelta + kStagesDo * kBlockM * 4;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kSharedBytes = kOffsetBarriers + kBarrierBytes + 1024;
  static_assert(kSharedBytes + 512 <= kMaxSharedBytes, "must fit a Hopper multiprocessor");
};

// Traits of kernels that own queries, whose list of query tiles serves wide and narrow KV tiles.
template <class Config, class Narrow>
constexpr KernelTraits query_traits() {
  const auto tiles_of = [](auto config) {
    using Tiles = decltype(config);
    return TileInfo{Tiles::kBlockM, Tiles::kBlockN, Tiles::kSharedBytes, Tiles::kPacksHeads};
  };
  static_assert(Narrow::kBlockM == Config::kBlockM, "the list of query tiles serves both");
  KernelTraits traits{Arch::sm90, Config::kTiles.of, tiles_of(Config())};
  if constexpr (Narrow::kBlockN < Config::kBlockN) traits.narrow = tiles_of(Narrow());
  traits.siblings = Config::kSiblings;
  return traits;
}

template <class Config>
constexpr KernelTraits backward_traits() {
  return {.arch = Arch::sm90,
          .dims = Config::kTiles.of,
          .tiles = {Config::kBlockM, Config::kBlockN, Config::kSharedBytes, true, Config::kColumnBlocks},
          .sums_dq = Config::kSumsDq,
          .orders_dq = Config::kStagesDq > 0,
          .has_every_step = Config::kTiles.has_every_step};
}

}  // namespace dualkv::sm90
