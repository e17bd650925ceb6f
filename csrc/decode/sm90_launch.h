// SPDX-License-Identifier: BSD-3-Clause
// Tiles and launches of the sm90 kernels of decoding, and the macro by which an instance file
// builds and registers one of them.
#pragma once

#include "decode/sm90.h"
#include "sm90/launch.h"

namespace dualkv::sm90 {

// Decode: the tiles of the forward, because their keys decide the bits of a row. Two blocks share a
// multiprocessor where they fit, so that one loads while the other waits for states.
//
// kScoresAhead_: scores of the next tile are computed during the softmax of this one, as far as
// registers go. A lone walk is bound by latency.
template <int kHeadDim_, int kStagesQ_, int kStagesKv_, int kBlocks_, bool kScoresAhead_ = false>
struct DecodeTiles {
  static constexpr bool kScoresAhead = kScoresAhead_;
  static constexpr int kHeadDim = kHeadDim_, kBlockN = ForwardConfig<kHeadDim, kHeadDim>::kBlockN;
  static constexpr int kStagesQ = kStagesQ_, kStagesKv = kStagesKv_, kWorkSlots = 2, kBlocks = kBlocks_;
  static constexpr int kThreads = 2 * kWarpgroup;
  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;
  using TileQ = SmemTile<kDecodeRows, kHeadDim>;
  using TileKv = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kOffsetK = kStagesQ * TileQ::kBytes;
  static constexpr int kOffsetV = kOffsetK + kStagesKv * TileKv::kBytes;
  static constexpr int kTileBytes = kOffsetV + kStagesKv * TileKv::kBytes;
  static constexpr int kRestBytes = 448;
  static constexpr int kSharedBytes = kTileBytes + 1024;  // the block aligns its tiles itself
  // A multiprocessor has 228 KB, of which it keeps 1 KB a block.
  static_assert(kBlocks * (kSharedBytes + 1024) <= 228 * 1024, "blocks must fit a Hopper multiprocessor");
  static_assert(kProducerRegisters + kConsumerRegisters == 256, "two blocks have all registers");
};

template <int kHeadDim>
struct DecodeConfig;
template <>
struct DecodeConfig<64> : DecodeTiles<64, 2, 3, 2> {};
template <>
struct DecodeConfig<128> : DecodeTiles<128, 2, 2, 2, true> {};
template <>
struct DecodeConfig<256> : DecodeTiles<256, 1, 2, 1> {};

template <int kHeadDim>
constexpr KernelTraits decode_traits() {
  using Config = DecodeConfig<kHeadDim>;
  return {Arch::sm90, {kHeadDim, kHeadDim}, {kDecodeRows, Config::kBlockN, Config::kSharedBytes}};
}

template <typename T, class Config, bool kSoftcap>
void launch_decode_blocks(const DecodeParams<T>& p, cudaStream_t stream) {
  launch(dualkv_sm90_decode<T, Config, kSoftcap>, Config::kBlocks * p.shape.num_sms, Config::kThreads,
         Config::kSharedBytes, stream, p);
}

template <int kHeadDim>
bool register_decode() {
  return for_element_types([](auto element) {
    using T = decltype(element);
    using Config = DecodeConfig<kHeadDim>;
    const auto run = [](const DecodeParams<T>& p, cudaStream_t stream) {
      p.shape.softcap.exists() ? launch_decode_blocks<T, Config, true>(p, stream)
                               : launch_decode_blocks<T, Config, false>(p, stream);
    };
    add_kernel<DecodeKernel<T>>(decode_traits<kHeadDim>(), {{run}, Config::kBlocks});
  });
}

}  // namespace dualkv::sm90

#define DUALKV_SM90_DECODE(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_decode<__VA_ARGS__>()
