// SPDX-License-Identifier: BSD-3-Clause
// Sort and running sums by one block of kListThreads threads.
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

// The smallest power of two that is not below `count`, 2 at least.
DUALKV_HD int sorted_size(int count) {
  int size = 2;
  while (size < count) size *= 2;
  return size;
}

// Sorts keys, a power of two of them, in ascending order: a bitonic network. Of strides up to 32 a
// warp's 32 pairs are 64 neighbouring keys, which no other warp touches, so that few stages need the
// whole block to meet.
__device__ inline void sort_keys(uint64_t* keys, int count) {
  const bool is_busy = static_cast<int>(threadIdx.x) / 32 * 32 < count / 2;
  __syncthreads();
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < count / 2; pair += kListThreads) {
        const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
        const uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ((low & size) == 0)) keys[low] = b, keys[high] = a;
      }
      const int next = stride > 1 ? stride / 2 : size;  // stride
      if (stride > 32 || next > 32) {
        __syncthreads();
      } else if (is_busy) {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

constexpr int kRunningSums = 33;  // values that running_sums() keeps in shared memory

// Calls use(i, sum of value(0 .. i-1), sum of value(0 .. i)) for every i in [0, count), one a thread.
// Returns the sum of all; what `use` wrote is then visible to the block.
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
