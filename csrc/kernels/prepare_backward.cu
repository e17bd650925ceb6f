// SPDX-License-Identifier: BSD-3-Clause
// Preparation of the backward, in one launch: the work list of KV tiles, cleared rows (those in no
// item, and the sums of dQ), and the row statistics. One block builds the list; the work of the
// others hides it.
#include <algorithm>

#include "dispatch.h"
#include "kernels/backward_list.h"
#include "kernels/clear_rows.h"
#include "kernels/row_statistics.h"

namespace dualkv {
namespace {

// Clears rows from `first` on; those of k_decoded come after those of k.
__device__ void clear_keys(const BackwardListArgs& a, int first) {
  const Extents& extents = a.nodes.extents;
  clear_unowned(a.nodes, first, extents.all_key_rows(), key_rows, [&](int row) {
    const bool is_decoded = row >= extents.key_rows;
    for (const ClearedRows& cleared : is_decoded ? a.decoded : a.keys) {
      clear_row(cleared, is_decoded ? row - extents.key_rows : row, threadIdx.x % 32, 32);
    }
  });
}

// Block 0 builds the list; the others, one on every other multiprocessor, share the rest.
template <typename T>
__global__ void __launch_bounds__(kListThreads)
    dualkv_prepare_backward(const __grid_constant__ BackwardListArgs a,
                            const __grid_constant__ RowStatisticsParams<T> rows) {
  if (blockIdx.x == 0) return build_backward_list(a);
  const int index = blockIdx.x - 1, blocks = gridDim.x - 1;
  const int key_rows = a.nodes.extents.all_key_rows();
  for (int first = index * kClearedRows; first < key_rows; first += blocks * kClearedRows) clear_keys(a, first);
  clear_row(a.dq_sum, 0, int64_t{index} * kListThreads + threadIdx.x, int64_t{blocks} * kListThreads);
  constexpr int kWarps = kListThreads / 32;
  store_statistics(rows, int64_t{index} * kWarps + threadIdx.x / 32, int64_t{blocks} * kWarps);
}

}  // namespace

template <typename T>
void prepare_backward(const BackwardListArgs& args, const RowStatisticsParams<T>& rows, cudaStream_t stream) {
  const int64_t wanted = ceil_div<int64_t>(statistics_warps(rows.shape, rows.statistics), kListThreads / 32);
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, max_int(rows.shape.num_sms - 1, 1));
  dualkv_prepare_backward<T><<<1 + static_cast<unsigned>(blocks), kListThreads, 0, stream>>>(args, rows);
  check_cuda(cudaGetLastError());
}

template void prepare_backward(const BackwardListArgs&, const RowStatisticsParams<__half>&, cudaStream_t);
template void prepare_backward(const BackwardListArgs&, const RowStatisticsParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace dualkv
