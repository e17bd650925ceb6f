// SPDX-License-Identifier: BSD-3-Clause
// Tiles and launches of the sm80 kernels of decoding, and the macro by which an instance file
// builds and registers one of them.
#pragma once

#include "decode/sm80.h"
#include "sm80/launch.h"

namespace dualkv::sm80 {

// KV tiles are those of the forward, because their keys decide the bits of a row. Latents, which
// training has none of, have the widest of which two stages fit an A100.
template <int kHeadDim, int kHeadDimV>
consteval QueryTiles decode_tiles() {
  QueryTiles tiles{.of = {kHeadDim}, .block_m = kDecodeRows, .block_n = 32, .warps = kDecodeThreads / 32};
  if constexpr (kHeadDimV == kHeadDim) tiles.block_n = ForwardConfig<kHeadDim, Footprint::full>::kBlockN;
  tiles.blocks_per_sm = kHeadDim == 64 ? 2 : kHeadDim == 128 ? 3 : 1;
  return tiles;
}
static_assert(ForwardConfig<256, Footprint::compact>::kBlockN == decode_tiles<256, 256>().block_n,
              "both forwards have the tiles of decode");

// No warp has registers for 16 rows of 512 columns of O: two share them.
template <int kHeadDim, int kHeadDimV_>
struct DecodeConfig : QueryConfig<decode_tiles<kHeadDim, kHeadDimV_>(), 1> {
  static constexpr int kHeadDimV = kHeadDimV_, kSharers = kHeadDimV > 256 ? 2 : 1;
  static constexpr int kThreads = kSharers * kDecodeThreads;
  static constexpr bool kLatents = kHeadDimV < kHeadDim;
  static_assert(DecodeConfig::kSharedBytes + kStaticSharedBytes <=
                    shared_limit(kLatents ? Footprint::full : Footprint::compact),
                "must fit an A100, and but for latents the multiprocessors with 99 KB");
};

template <int kHeadDim, int kHeadDimV = kHeadDim>
bool register_decode() {
  return for_element_types([](auto element) {
    using T = decltype(element);
    using Config = DecodeConfig<kHeadDim, kHeadDimV>;
    const auto run = [](const DecodeParams<T>& p, cudaStream_t stream) {
      launch(dualkv_sm80_decode<T, Config>, int64_t{Config::kBlocksPerSm} * p.shape.num_sms, Config::kThreads,
             Config::kSharedBytes, stream, p);
    };
    KernelTraits traits = traits_of<Config>();
    traits.dims.v = kHeadDimV;
    add_kernel<DecodeKernel<T>>(traits, {run, Config::kBlocksPerSm});
  });
}

}  // namespace dualkv::sm80

#define DUALKV_SM80_DECODE(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm80::register_decode<__VA_ARGS__>()
