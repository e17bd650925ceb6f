// SPDX-License-Identifier: BSD-3-Clause
// The policy of decoding: which kernel runs, how long splits are, and which leaves fold theirs.
// Whether walks are divided is the caller's choice, because it decides what bits are equal to.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "core/kernel_traits.h"
#include "core/platform.h"

namespace dualkv {

// The kernel for head dims, which are never padded. What decides is what decides for the forward:
// with its tiles come its bits. Throws std::invalid_argument where there is none.
inline int choose_decode_kernel(const std::vector<KernelTraits>& kernels, const HeadDims& dims, const Gpu& gpu,
                                bool wants_portable) {
  const bool takes_hopper = gpu.capability == 9 && !wants_portable;
  int found = -1;
  for (int i = 0; i < static_cast<int>(kernels.size()); ++i) {
    if (kernels[i].dims != dims || kernels[i].tiles.shared_bytes > gpu.shared_bytes) continue;
    if (kernels[i].arch == Arch::sm80 || takes_hopper) found = i;  // Hopper's come last
  }
  if (found >= 0) return found;
  if (dims.qk != dims.v) {
    throw std::invalid_argument("head_dim: this build or GPU has no decode kernel for latents of " +
                                std::to_string(dims.qk) + " with values of " + std::to_string(dims.v) +
                                " (it takes 147 KB of shared memory a block: an A100's or Hopper's)");
  }
  throw std::invalid_argument("head_dim: expected one of those that this build has decode kernels for (" +
                              equal_head_dims(kernels, Arch::sm80) + "), got " + std::to_string(dims.qk));
}

// Keys of a split, of requests with up to `max_keys` of them. Reading and writing the states of 64
// rows is 6% of the traffic of 1K keys, and 22% of that of 1K latents, whose O is four times as
// wide; the most splits of a request bound the memory of its states.
constexpr int64_t decode_split_keys(int64_t max_keys, const HeadDims& dims) {
  const int64_t least_keys = dims.qk == dims.v ? 1024 : 2048;
  constexpr int64_t kMostSplits = 32;
  const int64_t keys = ceil_div(max_keys, kMostSplits);
  return keys > least_keys ? keys : least_keys;
}

// An item folds all splits that its leaf has for itself, where these are many and what comes behind
// the leaf, tiles of all rows, keeps all blocks busy for as long as its walk. The end of the list,
// and a list of few long walks, stay divided. So do leaves with two or three splits: to fold those
// of 16 x 16 x 1K takes 3% longer.
constexpr int kFewestFolds = 4;
DUALKV_HD bool keeps_blocks_busy(int64_t tiles_behind, int blocks, int walk) {
  return tiles_behind >= int64_t{blocks} * walk;
}

}  // namespace dualkv
