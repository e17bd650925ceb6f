// SPDX-License-Identifier: BSD-3-Clause
// Launches that write node tables.
#include "dispatch.h"
#include "kernels/node_tables.h"

namespace dualkv {
namespace {

__global__ void dualkv_sequence_nodes(const SequenceNodesArgs a) {
  write_sequence_nodes(a, blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void __launch_bounds__(kTreeThreads) dualkv_tree_nodes(const TreeNodesArgs a) { write_tree_nodes(a); }

}  // namespace

void build_sequence_nodes(const SequenceNodesArgs& args, cudaStream_t stream) {
  const int threads = max_int(args.num_sequences, args.num_groups);
  if (threads == 0) return;
  dualkv_sequence_nodes<<<ceil_div(threads, 128), 128, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

void build_tree_nodes(const TreeNodesArgs& args, cudaStream_t stream) {
  if (args.num_nodes == 0) return;
  dualkv_tree_nodes<<<1, kTreeThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
