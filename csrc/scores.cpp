// SPDX-License-Identifier: BSD-3-Clause
// Calls of scores of rows of logits.
#include "guarded.h"
#include "kernels/scores.h"
#include "problem.h"

namespace dualkv {
namespace {

// Runs `body` for logits of their element type.
template <class Body>
void with_logits(const DualkvLogits& given, Body body) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    body(Logits<T>{static_cast<const T*>(given.data), given.rows, given.columns, given.row_stride});
  };
  switch (given.element) {
    case DUALKV_BFLOAT16: return run(__nv_bfloat16{});
    case DUALKV_FLOAT16: return run(__half{});
    case DUALKV_FLOAT32: return run(float{});
  }
  throw std::invalid_argument("logits: expected bfloat16, float16 or float32");
}

template <typename T>
ScoreArgs<T> score_args(const Logits<T>& logits, const DualkvLogits& given, const DualkvScores& scores) {
  return {logits, given.targets, static_cast<float>(given.temperature),
          static_cast<float>(1.4426950408889634 / given.temperature), static_cast<float>(scores.elsewhere),
          scores.normalizer, scores.chosen, scores.entropy};
}

template <typename T>
ScoreGradientArgs<T> score_gradient_args(const Logits<T>& logits, const DualkvLogits& given,
                                         const DualkvScoreGradient& gradient) {
  return {logits, given.targets, static_cast<float>(given.temperature), static_cast<float>(1.0 / given.temperature),
          gradient.normalizer, gradient.d_logps, gradient.entropy, gradient.d_entropy,
          static_cast<T*>(gradient.d_logits)};
}

}  // namespace
}  // namespace dualkv

using namespace dualkv;

int dualkv_score_rows(int32_t device, void* stream, const DualkvLogits* logits, const DualkvScores* scores) {
  return guarded([&] {
    Device::select(device).check();
    with_logits(*logits, [&](const auto& rows) {
      score_rows(score_args(rows, *logits, *scores), static_cast<cudaStream_t>(stream));
    });
    count_launch("dualkv_score_rows");
  });
}

int dualkv_score_rows_gradient(int32_t device, void* stream, const DualkvLogits* logits,
                               const DualkvScoreGradient* gradient) {
  return guarded([&] {
    Device::select(device).check();
    with_logits(*logits, [&](const auto& rows) {
      score_rows_gradient(score_gradient_args(rows, *logits, *gradient), static_cast<cudaStream_t>(stream));
    });
    count_launch("dualkv_score_gradient");
  });
}
