// SPDX-License-Identifier: BSD-3-Clause
// Rows of a decoding item as the threads that multiply hold them: 16 of them a warp, in
// accumulators of m16 products. Masks, the states that pass from item to item, and the results.
// Groups of warps share the rows of a wide O, and each has its part of the columns.
#pragma once

#include "decode/paged_rows.h"
#include "ptx/memory.h"
#include "tile/mask.h"
#include "tile/online_softmax.h"
#include "tile/store_row.h"

namespace dualkv {

// kHeadDim: of O. kThreads: threads that multiply, in kSharers groups that share the rows. In sm90
// kernels the kDecodeThreads that load come before them.
template <typename T, int kHeadDim, Arch kArch, int kThreads = kDecodeThreads, int kSharers = 1>
struct DecodeRows {
  static constexpr int kTogether = state_pairs(kArch, kHeadDim);
  static constexpr int kColumns = kHeadDim / kSharers, kGroup = kThreads / kSharers;

  using Output = float[1][kColumns / 8][4];

  const DecodeParams<T>& p;
  const int thread = threadIdx.x - (kArch == Arch::sm90 ? kDecodeThreads : 0), lane = threadIdx.x % 32;
  const int thread_of_rows = kSharers > 1 ? thread % kGroup : thread;
  const int column0 = kSharers > 1 ? __shfl_sync(0xffffffffu, thread / kGroup, 0) * kColumns : 0;
  const int row0 = thread_of_rows / 32 * 16 + lane / 4;  // this thread's first row, and 8 after it the other
  int slot[2];  // of the thread's rows: row of q * num_heads + head; -1: none

  __device__ __forceinline__ void find(const DecodeItem& item, int kv_head) {
    const int heads = p.shape.heads_per_group();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + half * 8, head = kv_head * heads + (item.row + row) % heads;
      slot[half] = row < item.rows ? p.query(item.row + row) * p.shape.num_heads + head : -1;
    }
  }

  template <int kN8>
  __device__ __forceinline__ void mask(float (&s)[1][kN8][4], const DecodeItem& item, const DecodeTile& keys) const {
    const Visibility sees = p.shape.sees;
    const KvTile tile{Region::keys, 0, keys.position, keys.valid};
    const bool hides_end = end_column(tile, item.q_pos, sees) < kN8 * 8;
    if (!hides_end && !sees.has_window()) return;
    const int heads = p.shape.heads_per_group(), offset = item.row % heads;
    const auto position = [&](int row) { return item.q_pos + (offset + row) / heads; };
    const auto first = [&](int row) { return first_column(tile, position(row), sees); };
    const auto end = [&](int row) { return end_column(tile, position(row), sees); };
    if (hides_end) mask_fragment(s, row0, lane % 4 * 2, -CUDART_INF_F, end);
    if (sees.has_window() && first(item.rows - 1) > 0) mask_front(s, row0, lane % 4 * 2, -CUDART_INF_F, first);
  }

  // Takes over the states of the rows. `meet` is a barrier of the threads that multiply.
  template <class Softmax, class Meet>
  __device__ __forceinline__ void take(const DecodeItem& item, int kv_head, Output& o, Softmax& softmax,
                                       Meet meet) const {
    await(item, kv_head, meet);
    take_output(item, o);
    take_statistics(item, softmax);
  }
  template <class Meet>
  __device__ __forceinline__ void await(const DecodeItem& item, int kv_head, Meet meet) const {
    if (thread == 0) {
      ptx::wait_arrived(p.progress.arrived + item.waits * p.shape.num_kv_heads + kv_head, item.arrivals);
    }
    meet();
  }
  __device__ __forceinline__ void take_output(const DecodeItem& item, Output& o) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slot[half] < 0) continue;
      const float* const from = state_of(half, item);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += kTogether) {
        const Columns columns = *reinterpret_cast<const Columns*>(from + j * 8);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          o[0][j + i][2 * half] = columns.pairs[i].x, o[0][j + i][2 * half + 1] = columns.pairs[i].y;
        }
      }
    }
  }
  template <class Softmax>
  __device__ __forceinline__ void take_statistics(const DecodeItem& item, Softmax& softmax) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slot[half] < 0) continue;
      const float* const statistics = statistics_of(half, item) + lane % 4;
      softmax.row_sum[0][half] = statistics[0], softmax.row_max[0][half] = statistics[4];
    }
  }

  // What becomes of the rows at the end of an item: results, or states for the next item, for this
  // one's next split, or for the launch that combines splits.
  template <class Softmax, class Meet>
  __device__ __forceinline__ void finish(const DecodeItem& item, int kv_head, Output& o, Softmax& softmax,
                                         Meet meet) const {
    if (item.folded > 0) fold(item, o, softmax, meet);
    if (item.signals < 0 && item.split < 0) return store(o, softmax);
    keep(item, o, softmax);
    if (item.signals < 0) return;
    meet();
    if (thread == 0) ptx::arrive(p.progress.arrived + item.signals * p.shape.num_kv_heads + kv_head);
  }

  // The last block clears what the launch has counted: the next one starts from zeros. `flag`: 16
  // bytes of shared memory that nobody needs any more.
  template <class Meet>
  __device__ __forceinline__ void leave(uint32_t flag, Meet meet) const {
    meet();
    if (thread == 0) {
      __threadfence();
      ptx::store_shared_32(flag, atomicAdd(p.progress.exits, 1) == static_cast<int>(gridDim.x) - 1);
    }
    meet();
    if (ptx::load_shared_128(flag).x == 0) return;
    const int counters = p.progress.branches * p.shape.num_kv_heads;
    for (int i = thread; i < counters; i += kThreads) p.progress.arrived[i] = 0;
    if (thread == 0) *p.progress.next = 0, *p.progress.exits = 0;
  }

 private:
  // Adds the total of the item's splits so far, which the same threads have kept. But for the
  // statistics: the first group has, and will again when all have read them.
  template <class Softmax, class Meet>
  __device__ __forceinline__ void fold(const DecodeItem& item, Output& o, Softmax& softmax, Meet meet) const {
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    if constexpr (kSharers > 1) meet();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slot[half] < 0) continue;
      const float* const from = state_of(half, item);
      const float* const statistics = statistics_of(half, item) + lane % 4;
      const StateFold fold(statistics[4], softmax.row_max[0][half], scale_log2);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += kTogether) {
        const Columns columns = *reinterpret_cast<const Columns*>(from + j * 8);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          float &x = o[0][j + i][2 * half], &y = o[0][j + i][2 * half + 1];
          x = fold(columns.pairs[i].x, x), y = fold(columns.pairs[i].y, y);
        }
      }
      softmax.row_sum[0][half] = fold(statistics[0], softmax.row_sum[0][half]);
      softmax.row_max[0][half] = fold.top;
    }
    if constexpr (kSharers > 1) meet();
  }

  template <class Softmax>
  __device__ __forceinline__ void keep(const DecodeItem& item, const Output& o, const Softmax& softmax) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (slot[half] < 0) continue;
      float* const to = state_of(half, item);
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += kTogether) {
        Columns columns;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          columns.pairs[i] = make_float2(o[0][j + i][2 * half], o[0][j + i][2 * half + 1]);
        }
        *reinterpret_cast<Columns*>(to + j * 8) = columns;
      }
      if (column0 > 0) continue;
      float* const statistics = statistics_of(half, item) + lane % 4;
      statistics[0] = softmax.row_sum[0][half], statistics[4] = softmax.row_max[0][half];
    }
  }

  template <class Softmax>
  __device__ __forceinline__ void store(const Output& o, Softmax& softmax) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = max_int(slot[half], 0) / p.shape.num_heads, head = max_int(slot[half], 0) % p.shape.num_heads;
      float lse;
      const float inverse_sum = softmax.finish(0, half, p.shape.softmax_scale, p.sink(head), lse);
      const bool has_row = slot[half] >= 0;
      if (lane % 4 == 0 && has_row && column0 == 0) p.lse[static_cast<int64_t>(head) * p.shape.q_rows + row] = lse;
      store_row<T>(o[0], half, inverse_sum, p.out.at(row, head), column0, has_row ? kHeadDim : 0, lane);
    }
  }

  // Columns that a thread moves at a time are neighbours in memory, and so are those of a quad.
  struct alignas(kTogether * 8) Columns {
    float2 pairs[kTogether];
  };
  __device__ __forceinline__ int64_t place_of(int half, const DecodeItem& item) const {
    return int64_t{slot[half]} * p.states.per_row + max_int(item.split, 0);
  }
  __device__ __forceinline__ float* state_of(int half, const DecodeItem& item) const {
    return p.states.out + place_of(half, item) * kHeadDim + column0 + lane % 4 * (kTogether * 2);
  }
  __device__ __forceinline__ float* statistics_of(int half, const DecodeItem& item) const {
    return p.states.statistics + place_of(half, item) * 8;
  }
};

}  // namespace dualkv
