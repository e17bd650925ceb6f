// What every row of a packed micro-batch holds, from a few numbers for each prompt and response. The specification is
// PackedRow in flash_attn_dualkv/data/batch.py, which computes the same by PyTorch's operators.
#pragma once

#include "kernels/kernels.h"

namespace dualkv {

constexpr int kPackThreads = 256;

// Rows and scored tokens `first`, `first + step` and so on of a run.
__device__ inline void write_packed_run(const PackRowsArgs& a, const PackedRun& run, int64_t first, int64_t step) {
  for (int64_t i = first; i < run.length; i += step) {
    const int64_t row = run.row + i, token = run.source + i;
    const bool is_padding = run.node < 0;
    a.input_ids[row] = is_padding ? kPaddingToken : a.tokens[token];
    a.position_ids[row] = is_padding ? 0 : run.position + i;
    a.labels[row] = i < run.labelled ? a.tokens[token + 1] : kIgnoredLabel;
    a.multiplicity[row] = run.multiplicity;
  }
  for (int64_t i = first; i < run.scored_len; i += step) {
    const int64_t place = run.scored + i;
    a.token_index[place] = i == 0 ? run.first_row : run.row + run.shift + i - 1;
    a.targets[place] = a.tokens[run.target + i];
    a.padded_index[place] = run.padded + i;
    a.jagged_index[place] = run.target - 1 + i;
  }
  if (first != 0 || run.node < 0) return;
  int* const node = a.nodes + int64_t{run.node} * kNodeColumns;
  const int row = static_cast<int>(run.row), length = static_cast<int>(run.length);
  const int position = static_cast<int>(run.position);
  node[0] = node[3] = row, node[1] = node[4] = length, node[2] = node[5] = position;
  node[6] = run.parent, node[7] = run.subtree_end;
  if (run.sample < 0) return;
  if (run.sample == 0) a.jagged_offsets[0] = 0;
  a.jagged_offsets[run.sample + 1] = run.target + run.scored_len;
}

}  // namespace dualkv
