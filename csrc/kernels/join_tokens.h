// The tokens of many samples in one tensor, and what tells their prompts apart.
#pragma once

#include "kernels/kernels.h"

namespace dualkv {

constexpr int kJoinThreads = 256;

// Different tokens at one place have different hashes.
__device__ inline uint64_t hash_token(int64_t token, int64_t place) {
  uint64_t hash = (static_cast<uint64_t>(token) ^ static_cast<uint64_t>(place) * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  hash ^= hash >> 32;
  return hash * 0x94d049bb133111ebu;
}

// Tokens `first`, `first + step` and so on of a part, from every thread of a block.
template <typename T>
__device__ inline void join_part(const TokenParts& parts, int part, int first, int step, int64_t* joined,
                                 TokenNews* news) {
  __shared__ TokenNews of_warps[kJoinThreads / 32];
  const T* const tokens = static_cast<const T*>(parts.tokens[part]);
  const bool compares = parts.like[part] != nullptr;
  const T* const like = compares ? static_cast<const T*>(parts.like[part]) : tokens;
  const int64_t begin = parts.begins[part], length = parts.begins[part + 1] - begin;
  TokenNews found = kNoNews;
  for (int64_t i = first; i < length; i += step) {
    const int64_t token = static_cast<int64_t>(tokens[i]);
    joined[begin + i] = token;
    found.add({token, token, hash_token(token, i), !compares || like[i] != tokens[i]});
  }
  for (int bits = 16; bits > 0; bits /= 2) {
    const auto theirs = [&](auto value) { return __shfl_xor_sync(0xffffffffu, value, bits); };
    found.add({theirs(found.smallest), theirs(found.largest), theirs(found.hash), theirs(found.differs)});
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kJoinThreads / 32; ++warp) found.add(of_warps[warp]);
  *news = found;
}

}  // namespace dualkv
