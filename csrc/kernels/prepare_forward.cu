// SPDX-License-Identifier: BSD-3-Clause
// Preparation of the forward, in one launch: the work list of query tiles, and the rows in none of
// them.
#include <math_constants.h>

#include "dispatch.h"
#include "kernels/clear_rows.h"
#include "kernels/forward_list.h"

namespace dualkv {
namespace {

__device__ void clear_queries(const ForwardListArgs& a, int first) {
  const int rows = a.nodes.extents.q_rows;
  clear_unowned(a.nodes, first, rows, query_rows, [&](int row) {
    clear_row(a.rows, row, threadIdx.x % 32, 32);
    if (!a.lse) return;
    for (int head = threadIdx.x % 32; head < a.num_heads; head += 32) {
      a.lse[static_cast<int64_t>(head) * rows + row] = -CUDART_INF_F;
    }
  });
}

__global__ void __launch_bounds__(kListThreads) dualkv_prepare_forward(const ForwardListArgs a) {
  if (blockIdx.x == 0) return build_forward_list(a);
  clear_queries(a, (blockIdx.x - 1) * kClearedRows);
}

}  // namespace

void prepare_forward(const ForwardListArgs& args, cudaStream_t stream) {
  dualkv_prepare_forward<<<1 + clearing_blocks(args.nodes.extents.q_rows), kListThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
