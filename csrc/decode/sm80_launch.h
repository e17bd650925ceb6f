// SPDX-License-Identifier: BSD-3-Clause
// Tiles and launches of the sm80 kernels of decoding, and the macro by which an instance file
// builds and registers one of them.
#pragma once

#include "decode/sm80.h"
#include "sm80/launch.h"

namespace dualkv::sm80 {

// KV tiles of the forward, because their keys decide the bits of a row.
template <int kHeadDim, Footprint kFootprint>
struct DecodeConfig
    : QueryConfig<QueryTiles{.of = {kHeadDim},
                             .block_m = kDecodeRows,
                             .block_n = ForwardConfig<kHeadDim, Footprint::full>::kBlockN,
                             .warps = kDecodeThreads / 32,
                             .blocks_per_sm = kHeadDim == 64 ? 2 : kHeadDim == 128 ? 3 : 1},
                  1> {};
static_assert(ForwardConfig<256, Footprint::compact>::kBlockN == DecodeConfig<256, Footprint::full>::kBlockN,
              "both forwards have the tiles of decode");

template <typename T, class Config>
DecodeKernel<T> decode_kernel() {
  const auto run = [](const DecodeParams<T>& p, cudaStream_t stream) {
    launch(dualkv_sm80_decode<T, Config>, int64_t{Config::kBlocksPerSm} * p.shape.num_sms, Config::kThreads,
           Config::kSharedBytes, stream, p);
  };
  return {run, Config::kBlocksPerSm};
}

}  // namespace dualkv::sm80

#define DUALKV_SM80_DECODE(head_dim) DUALKV_SM80_REGISTER(DecodeKernel, DecodeConfig, head_dim, decode_kernel)
