// SPDX-License-Identifier: BSD-3-Clause The vocabulary of argument checks: every failure names the
// argument, what was expected and what was got.
#pragma once

#include <torch/python.h>

#include <string>

#include "core/nodes.h"

namespace dualkv {

// The text of a failure is made of `expected`, one part after the other, and `got`; where all is
// well, no text is.
template <class Got, class... Expected>
void check_argument(bool ok, const char* name, const Got& got, const Expected&... expected) {
  TORCH_CHECK_VALUE(ok, name, ": expected ", expected..., ", got ", got);
}

// Device, type and rank: what must hold before anything reads sizes, strides or data.
inline void check_queries(const at::Tensor& q) {
  check_argument(q.is_cuda(), "q", q.device(), "a CUDA tensor");
  TORCH_CHECK_TYPE(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                   "q: expected float16 or bfloat16, got ", q.scalar_type());
  check_argument(q.dim() == 3, "q", q.dim(), "3 dimensions (rows, heads, head_dim)");
}

inline void check_beside(const at::Tensor& t, const char* name, const at::Tensor& q) {
  check_argument(t.device() == q.device(), name, t.device(), "a tensor on the device of q");
  TORCH_CHECK_TYPE(t.scalar_type() == q.scalar_type(), name, ": expected ", q.scalar_type(), " like q, got ",
                   t.scalar_type());
  check_argument(t.dim() == 3, name, t.dim(), "3 dimensions (rows, heads, head_dim)");
}

inline void check_packed(const at::Tensor& t, const char* name, const at::Tensor& like, int64_t rows, int64_t heads,
                         int64_t head_dim) {
  check_beside(t, name, like);
  check_argument(rows < 0 || t.size(0) == rows, name, t.size(0), rows, " rows");
  check_argument(t.size(1) == heads, name, t.size(1), heads, " heads");
  check_argument(t.size(2) == head_dim, name, t.size(2), "the head dim ", head_dim);
  check_argument(t.size(0) < kMaxPosition, name, t.size(0), "fewer than 2^30 rows");
}

inline void check_table(const at::Tensor& t, const char* name, const at::Tensor& like, int64_t columns) {
  check_argument(t.device() == like.device(), name, t.device(), "a tensor on the device of q");
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, ": expected int32, got ", t.scalar_type());
  check_argument(t.dim() == 2 && t.size(1) == columns && t.is_contiguous(), name, t.sizes(), "a contiguous (rows, ",
                 columns, ") table");
}

inline void check_statistics(const at::Tensor& t, const char* name, const at::Tensor& q) {
  check_argument(t.device() == q.device(), name, t.device(), "a tensor on the device of q");
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, ": expected float32, got ", t.scalar_type());
  check_argument(t.dim() == 2 && t.size(0) == q.size(1) && t.size(1) == q.size(0), name, t.sizes(),
                 "shape (heads, rows of q)");
}

}  // namespace dualkv
