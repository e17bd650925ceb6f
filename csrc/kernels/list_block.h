// SPDX-License-Identifier: BSD-3-Clause
// Building blocks of work lists, which are made on the device, where the lengths are. Lists are
// small (thousands of items), so that one block makes a list by counting sort: count the items of
// each bin, turn counts into offsets, and write the items, longest first.
#pragma once

#include "core/schedule.h"
#include "kernels/kernels.h"

namespace dualkv {

constexpr int kListThreads = 1024;  // of every block of such a launch
constexpr int kBins = 1024;  // of the forward list, by cost
// Bins of the backward list per cost class: one for 32 neighbouring items, which one warp writes in
// order. With more than 16K items (2M keys) several warps share a bin, and the order of its items
// varies.
constexpr int kTileBins = 512;

// Inclusive sum over the threads of a block. `scratch` holds one value per warp. 64 bits: with
// hostile offsets every node may span all rows.
__device__ inline int64_t block_inclusive_sum(int64_t value, int64_t* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t left = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += left;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int64_t total = scratch[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total += left;
    }
    scratch[lane] = total;
  }
  __syncthreads();
  const int64_t result = value + (warp > 0 ? scratch[warp - 1] : 0);
  __syncthreads();
  return result;
}

// Shared state of a block that builds a list.
struct ListBlock {
  int64_t warp_sums[32];
  int bins[max_int(kBins, kCostClasses * kTileBins)];
  int carry, alternating;
  int longest_path, longest_tile;                  // keys, steps
  int long_tiles, shortest_tile;                   // of the tiles that would be split: number, steps
  int most_parts;                                  // of a tile
  int heaviest;                                    // steps of one node's tiles that take more than half of the longest
  int longest, longest_leaf;                       // costs of items, and of those of leaves
  int widest;                                      // of class 0: tiles whose walks have a common end
  unsigned long long total_steps, long_steps, used_slots, class_steps[kCostClasses];
};

// offsets[i] = sum of count(0 .. i-1), at most `capacity`: with hostile offsets nodes overlap and
// may have more tiles than the tensors.
template <class Count>
__device__ inline void exclusive_offsets(ListBlock& block, int n, int capacity, int* offsets, Count count) {
  if (threadIdx.x == 0) block.carry = 0;
  __syncthreads();
  for (int first = 0; first < n; first += kListThreads) {
    const int index = first + threadIdx.x;
    const int64_t sum = block.carry + block_inclusive_sum(index < n ? count(index) : 0, block.warp_sums);
    const int offset = static_cast<int>(min(sum, static_cast<int64_t>(capacity)));
    __syncthreads();
    if (index < n) offsets[index + 1] = offset;
    if (threadIdx.x == kListThreads - 1) block.carry = offset;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[0] = 0;
  __syncthreads();
}

// Returns i with offsets[i] <= index < offsets[i + 1].
__device__ inline int find_owner(const int* offsets, int n, int index) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= index ? low : high) = middle;
  }
  return low;
}

// Turns counts per bin into offsets.
template <int kCount>
__device__ inline void bins_to_places(ListBlock& block) {
  static_assert(kCount % kListThreads == 0, "every thread takes as many bins");
  constexpr int kOwn = kCount / kListThreads;
  int* own = block.bins + threadIdx.x * kOwn;
  int sum = 0;
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  int place = static_cast<int>(block_inclusive_sum(sum, block.warp_sums)) - sum;
  for (int i = 0; i < kOwn; ++i) {
    const int count = own[i];
    own[i] = place;
    place += count;
  }
  __syncthreads();
}

}  // namespace dualkv
