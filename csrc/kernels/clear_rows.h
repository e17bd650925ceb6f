// The rows that no item of a work list writes: blocks beside the one that builds the list clear them.
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

// What a block that clears looks after. Every row asks every sequence whether it owns it.
constexpr int kClearedRows = 256;
inline int clearing_blocks(int rows) { return ceil_div(rows, kClearedRows); }

// Calls clear(row) for those of rows [first, first + kClearedRows) that are in owned_by(segment) of no segment. A warp
// takes a row.
template <class OwnedBy, class Clear>
__device__ inline void clear_unowned(const GroupLayout& layout, int first, int rows, OwnedBy owned_by, Clear clear) {
  __shared__ bool owned[kClearedRows];
  for (int i = threadIdx.x; i < kClearedRows; i += kListThreads) owned[i] = false;
  __syncthreads();
  for (int i = threadIdx.x; i < layout.num_segments; i += kListThreads) {
    const RowRun run = owned_by(layout.segment(i));
    for (int row = max(run.begin, first); row < min(run.end, first + kClearedRows); ++row) owned[row - first] = true;
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < min(kClearedRows, rows - first); i += kListThreads / 32) {
    if (!owned[i]) clear(first + i);
  }
  __syncthreads();
}

// By `threads` threads, of which this is number `thread`.
__device__ inline void clear_row(const ClearedRows& rows, int row, int64_t thread, int64_t threads) {
  uint4* data = reinterpret_cast<uint4*>(static_cast<char*>(rows.data) + row * rows.row_bytes);
  for (int64_t i = thread; i < rows.row_bytes / 16; i += threads) data[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace dualkv
