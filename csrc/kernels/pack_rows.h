// What every row of a packed micro-batch holds, from a few numbers for each prompt and response. The specification is
// PackedRow in flash_attn_dualkv/data/batch.py, which computes the same by PyTorch's operators.
#pragma once

#include "kernels/kernels.h"

namespace dualkv {

constexpr int kPackThreads = 256;

// Rows and scored tokens `first`, `first + step` and so on of a run.
__device__ inline void write_packed_run(const PackRowsArgs& a, const PackedRun& run, int first, int step) {
  const int labelled = run.sample < 0 ? 0 : run.length - a.unlabelled;
  for (int64_t i = first; i < run.length; i += step) {
    const int64_t row = int64_t{run.row} + i;
    const int64_t* const token = a.tokens + run.source + i;
    const bool is_padding = run.node < 0;
    a.input_ids[row] = is_padding ? kPaddingToken : *token;
    a.position_ids[row] = is_padding ? 0 : run.position + i;
    a.labels[row] = i < labelled ? token[1] : kIgnoredLabel;
    a.multiplicity[row] = run.multiplicity;
  }
  const int64_t target = int64_t{run.source} + a.shift, padded = int64_t{run.sample} * a.longest_response;
  for (int64_t i = first; i < run.scored_len; i += step) {
    const int64_t place = int64_t{run.scored} + i;
    a.token_index[place] = i == 0 ? run.first_row : run.row + a.shift + i - 1;
    a.targets[place] = a.tokens[target + i];
    a.padded_index[place] = padded + i;
    a.jagged_index[place] = target - 1 + i;
  }
  if (first != 0 || run.node < 0) return;
  int* const node = a.nodes + int64_t{run.node} * kNodeColumns;
  node[0] = node[3] = run.row, node[1] = node[4] = run.length, node[2] = node[5] = run.position;
  node[6] = run.parent, node[7] = run.node + 1 + (run.parent < 0 ? run.multiplicity : 0);
  if (run.sample < 0) return;
  if (run.sample == 0) a.jagged_offsets[0] = 0;
  a.jagged_offsets[run.sample + 1] = target + run.scored_len;
}

}  // namespace dualkv
