// SPDX-License-Identifier: BSD-3-Clause
// Sort and running sums by one block of kListThreads threads.
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

template <class Body>
__device__ inline void for_each(int count, Body body) {
  // Not unrolled: most code runs once, and loading it takes longer.
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kListThreads) body(i);
}

// How many of `count` sorted keys are below `key`.
__device__ inline int keys_below(const uint64_t* sorted, int count, uint64_t key) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    const bool is_below = sorted[low + half] < key;
    low = is_below ? low + half + 1 : low;
    count = is_below ? count - half - 1 : half;
  }
  return low;
}

// Sorts keys, no two of them alike, in ascending order: runs of 32 by counting, then runs are
// merged in pairs, where a key's place is that in its own run plus the number of keys below it in
// the other. The block meets once a merge; in a bitonic network, a merge is many stages.
__device__ inline void sort_keys(uint64_t* keys, uint64_t* spare, int count) {
  constexpr int kRun = 32;
  uint64_t *from = keys, *to = spare;
  const auto move_keys = [&](auto place) {  // of a key, by its present one
    __syncthreads();
    for_each(count, [&](int i) { to[place(i, from[i])] = from[i]; });
    uint64_t* const last = from;
    from = to, to = last;
  };
  move_keys([&](int i, uint64_t key) {
    const int begin = i / kRun * kRun, end = min_int(begin + kRun, count);
    int place = begin;
#pragma unroll 4
    for (int other = begin; other < end; ++other) place += from[other] < key;
    return place;
  });
  for (int run = kRun; run < count; run *= 2) {
    move_keys([&](int i, uint64_t key) {
      const int begin = i & -(2 * run), other = begin + run - (i & run);
      return begin + (i & (run - 1)) + keys_below(from + other, clamp_int(count - other, 0, run), key);
    });
  }
  if (from != keys) move_keys([](int i, uint64_t) { return i; });
  __syncthreads();
}

constexpr int kRunningSums = 33;  // values that running_sums() keeps in shared memory

// Calls use(i, sum of value(0 .. i-1), sum of value(0 .. i)) for every i in [0, count), one a
// thread. Returns the sum of all; what `use` wrote is then visible to the block.
template <class Value, class Use>
__device__ inline int64_t running_sums(int count, int64_t* scratch, Value value, Use use) {
  int64_t before = 0;
  for (int begin = 0; begin < count; begin += kListThreads) {
    const int i = begin + threadIdx.x;
    const int64_t own = i < count ? value(i) : 0, sum = before + block_inclusive_sum(own, scratch);
    if (threadIdx.x == kListThreads - 1) scratch[kRunningSums - 1] = sum;
    if (i < count) use(i, sum - own, sum);
    __syncthreads();
    before = scratch[kRunningSums - 1];
  }
  return before;
}

}  // namespace dualkv
