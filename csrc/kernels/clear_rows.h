// SPDX-License-Identifier: BSD-3-Clause
// Clears the rows of an output that belong to no node, in blocks next to the one that builds the
// work list.
#pragma once

#include "kernels/list_block.h"

namespace dualkv {

// Rows per clearing block. It reads every node to find the rows that are owned.
constexpr int kClearedRows = 256;
inline int clearing_blocks(int rows) { return ceil_div(rows, kClearedRows); }

// Packed rows [begin, end).
struct RowRun {
  int begin, end;
};

// Rows owned by a node; exactly one block writes each.
__device__ inline RowRun query_rows(const Node& n) { return RowRun{n.q_begin, n.q_begin + n.q_len}; }
__device__ inline RowRun key_rows(const Node& n) { return RowRun{n.kv_begin, n.kv_begin + n.kv_len}; }

// Calls clear(row), by a whole warp, for each row of [first, first + kClearedRows) that is in no
// rows_of(node).
template <class RowsOf, class Clear>
__device__ inline void clear_unowned(const NodeTable& nodes, int first, int rows, RowsOf rows_of, Clear clear) {
  __shared__ bool owned[kClearedRows];
  for (int i = threadIdx.x; i < kClearedRows; i += kListThreads) owned[i] = false;
  __syncthreads();
  for (int i = threadIdx.x; i < nodes.num_nodes; i += kListThreads) {
    const RowRun run = rows_of(nodes.node(i));
    for (int row = max(run.begin, first); row < min(run.end, first + kClearedRows); ++row) owned[row - first] = true;
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < min(kClearedRows, rows - first); i += kListThreads / 32) {
    if (!owned[i]) clear(first + i);
  }
  __syncthreads();
}

// Clears a row by `threads` threads, of which this is number `thread`.
__device__ inline void clear_row(const ClearedRows& rows, int row, int64_t thread, int64_t threads) {
  uint4* data = reinterpret_cast<uint4*>(static_cast<char*>(rows.data) + row * rows.row_bytes);
  for (int64_t i = thread; i < rows.row_bytes / 16; i += threads) data[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace dualkv
