// SPDX-License-Identifier: BSD-3-Clause
// Scores of target tokens from rows of logits, and the gradient of the logits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace dualkv {

// (rows, columns) in device memory, on any address of an element; the columns are contiguous.
template <typename T>
struct Logits {
  const T* data;
  int64_t rows, columns, row_stride;
};

// Pointers to one number a row. z = logits / temperature; all numbers are those of a row's columns.
template <typename T>
struct ScoreArgs {
  Logits<T> logits;
  const int64_t* targets;  // columns
  float temperature;       // above 0
  float factor;            // log2(e) / temperature
  float elsewhere;         // `chosen` of a target that is none of the columns
  float* normalizer;       // logsumexp of z
  float* chosen;           // z of the target
  float* entropy;          // of the softmax; or null
};

// Reads the logits once. A row's bits depend on its logits, temperature and target alone.
template <typename T>
void score_rows(const ScoreArgs<T>& args, cudaStream_t stream);

// `normalizer` and `entropy` may be those of a vocabulary of which the columns are a part.
template <typename T>
struct ScoreGradientArgs {
  Logits<T> logits;
  const int64_t* targets;
  float temperature, inverse;  // 1 / temperature
  const float *normalizer, *d_logps;
  const float *entropy, *d_entropy;  // the second may be null, then nobody reads the first
  T* d_logits;                       // (rows, columns), contiguous
};

template <typename T>
void score_rows_gradient(const ScoreGradientArgs<T>& args, cudaStream_t stream);

}  // namespace dualkv
