// The tokens of many samples in one tensor, the smallest and the largest of them, and which prompts are that before.
#pragma once

#include "kernels/kernels.h"

namespace dualkv {

constexpr int kJoinThreads = 256;

// Tokens `first`, `first + step` and so on of a part, from every thread of a block.
template <typename T>
__device__ inline void join_part(const TokenParts& parts, int part, int first, int step, int64_t* joined,
                                 TokenNews* news) {
  __shared__ TokenNews of_warps[kJoinThreads / 32];
  const auto length_of = [&](int i) { return parts.begins[i + 1] - parts.begins[i]; };
  const T* const tokens = static_cast<const T*>(parts.tokens[part]);
  const int64_t begin = parts.begins[part], length = length_of(part);
  const bool compares = part % 2 == 0 && part >= 2 && length_of(part - 2) == length;
  const T* const before = compares ? static_cast<const T*>(parts.tokens[part - 2]) : tokens;
  TokenNews found{INT64_MAX, INT64_MIN, !compares};
  for (int64_t i = first; i < length; i += step) {
    const int64_t token = static_cast<int64_t>(tokens[i]);
    joined[begin + i] = token;
    found.smallest = token < found.smallest ? token : found.smallest;
    found.largest = token > found.largest ? token : found.largest;
    found.differs |= before[i] != tokens[i];
  }
  const auto add = [&](const TokenNews& other) {
    found.smallest = other.smallest < found.smallest ? other.smallest : found.smallest;
    found.largest = other.largest > found.largest ? other.largest : found.largest;
    found.differs |= other.differs;
  };
  for (int bits = 16; bits > 0; bits /= 2) {
    const auto theirs = [&](int64_t value) { return __shfl_xor_sync(0xffffffffu, value, bits); };
    add({theirs(found.smallest), theirs(found.largest), theirs(found.differs)});
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const TokenNews& one : of_warps) add(one);
  *news = found;
}

}  // namespace dualkv
