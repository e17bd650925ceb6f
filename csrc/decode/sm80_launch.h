// SPDX-License-Identifier: BSD-3-Clause
// Tiles and launches of the sm80 kernels of decoding, and the macro by which an instance file
// builds and registers one of them.
#pragma once

#include "decode/sm80.h"
#include "sm80/launch.h"

namespace dualkv::sm80 {

// Decode: KV tiles of the forward, because their keys decide the bits of a row.
template <int kHeadDim_, int kBlocksPerSm_>
struct DecodeTiles {
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kDecodeRows;
  static constexpr int kBlockN = ForwardConfig<kHeadDim, Footprint::full>::kBlockN;
  static constexpr int kThreads = kDecodeThreads, kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kSumsDq = false;
  using TileQ = SmemTile<kBlockM, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = TileQ::kBytes + 2 * TileKv::kBytes;
};

template <int kHeadDim, Footprint kFootprint>
struct DecodeConfig;
template <>
struct DecodeConfig<64, Footprint::full> : DecodeTiles<64, 2> {};
template <>
struct DecodeConfig<128, Footprint::full> : DecodeTiles<128, 3> {};
template <>
struct DecodeConfig<256, Footprint::full> : DecodeTiles<256, 1> {};
static_assert(ForwardConfig<256, Footprint::compact>::kBlockN == DecodeConfig<256, Footprint::full>::kBlockN,
              "both forwards have the tiles of decode");

template <typename T, class Config>
DecodeKernel<T> decode_kernel() {
  const auto run = [](const DecodeParams<T>& p, cudaStream_t stream) {
    launch(dualkv_sm80_decode<T, Config>, int64_t{Config::kBlocksPerSm} * p.shape.num_sms, Config::kThreads,
           Config::kSharedBytes, stream, p);
  };
  return {{run}, Config::kBlocksPerSm};
}

}  // namespace dualkv::sm80

#define DUALKV_SM80_DECODE(head_dim) DUALKV_SM80_REGISTER(DecodeKernel, DecodeConfig, head_dim, decode_kernel)
