// SPDX-License-Identifier: BSD-3-Clause
// The gradient of the sinks.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace dualkv {

struct SinkGradientArgs {
  int num_heads;
  int64_t rows;
  RowStatistics statistics;
  const float* lse;    // (num_heads, rows)
  const float* sinks;  // (num_heads)
  float* dsinks;       // (num_heads)
};

// A sink's value is 0, so each row adds its sink's probability times 0 - delta. The order of the
// sum depends on the number of rows alone.
void sink_gradient(const SinkGradientArgs& args, cudaStream_t stream);

}  // namespace dualkv
