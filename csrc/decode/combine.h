// SPDX-License-Identifier: BSD-3-Clause
// The launch behind a decode whose rows are divided into splits.
#pragma once

#include <cuda_runtime_api.h>

#include "decode/kernel_params.h"

namespace dualkv {

template <typename T>
struct DecodeCombineArgs {
  ProblemShape shape;
  DecodeStates states;
  int pairs;          // state_pairs() of the kernels that wrote the states
  const int* splits;  // (q_rows): how many of each row; 0: its result is there
  TensorView<T> out;
  float* lse;          // (num_heads, q_rows)
  const float* sinks;  // (num_heads), or null
};

// Folds the states of each row, the last split first, so that its bits depend on its request alone.
template <typename T>
void combine_splits(const DecodeCombineArgs<T>& args, cudaStream_t stream);

}  // namespace dualkv
