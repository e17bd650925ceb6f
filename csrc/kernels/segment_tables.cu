// The device tables that the kernels read of every sequence and group, from the offsets that callers pass: no host
// synchronisation, and a captured graph follows new contents of cu_seqlens.
#include "dispatch.h"
#include "kernels/kernels.h"

namespace dualkv {
namespace {

__global__ void dualkv_segment_tables(const SegmentTableArgs a) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < a.num_groups) {
    int* row = a.group_table + static_cast<int64_t>(index) * kGroupColumns;
    const int begin = a.cu_seqlens_context ? a.cu_seqlens_context[index] : 0;
    const int end = a.cu_seqlens_context ? a.cu_seqlens_context[index + 1] : a.total_context;
    row[0] = begin;
    row[1] = static_cast<int>(static_cast<unsigned>(end) - static_cast<unsigned>(begin));
    row[2] = a.cu_seqs_per_context ? a.cu_seqs_per_context[index] : 0;
    row[3] = a.cu_seqs_per_context ? a.cu_seqs_per_context[index + 1] : a.num_segments;
  }
  if (index >= a.num_segments) return;
  int group = 0;
  if (a.cu_seqs_per_context) {
    // The last group that starts at or before this sequence.
    int low = 0, high = a.num_groups;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (a.cu_seqs_per_context[middle] <= index ? low : high) = middle;
    }
    group = low;
  }
  const int context_begin = a.cu_seqlens_context ? a.cu_seqlens_context[group] : 0;
  const int context_end = a.cu_seqlens_context ? a.cu_seqlens_context[group + 1] : a.total_context;
  // Unsigned: hostile offsets may wrap, but not be undefined. Every reader clamps them.
  const unsigned q_begin = a.cu_seqlens_q[index], q_len = a.cu_seqlens_q[index + 1] - q_begin;
  const unsigned decoded_begin = a.cu_seqlens_k_decoded[index];
  const unsigned decoded_len = a.cu_seqlens_k_decoded[index + 1] - decoded_begin;
  const unsigned context_len = static_cast<unsigned>(context_end) - static_cast<unsigned>(context_begin);
  int* row = a.segment_table + static_cast<int64_t>(index) * kSegmentColumns;
  row[0] = static_cast<int>(q_begin);
  row[1] = static_cast<int>(q_len);
  row[2] = static_cast<int>(context_len + decoded_len - q_len);
  row[3] = context_begin;
  row[4] = static_cast<int>(context_len);
  row[5] = static_cast<int>(decoded_begin);
  row[6] = static_cast<int>(decoded_len);
  row[7] = group;
}

}  // namespace

void build_segment_tables(const SegmentTableArgs& args, cudaStream_t stream) {
  const int rows = max_int(args.num_segments, args.num_groups);
  if (rows == 0) return;
  dualkv_segment_tables<<<ceil_div(rows, 128), 128, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
