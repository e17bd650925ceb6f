// The vocabulary of argument checks: every failure names the argument, what was expected and what was got.
#pragma once

#include <torch/python.h>

#include <string>

#include "core/kv_regions.h"

namespace dualkv {

template <class Expected, class Got>
void check_argument(bool ok, const char* name, const Expected& expected, const Got& got) {
  TORCH_CHECK_VALUE(ok, name, ": expected ", expected, ", got ", got);
}

inline void check_packed(const at::Tensor& t, const char* name, const at::Tensor& like, int64_t rows, int64_t heads) {
  check_argument(t.is_cuda() && t.device() == like.device(), name, "a tensor on the device of q", t.device());
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), name, ": expected ", like.scalar_type(), " like q, got ",
                   t.scalar_type());
  check_argument(t.dim() == 3, name, "3 dimensions (rows, heads, head_dim)", t.dim());
  check_argument(rows < 0 || t.size(0) == rows, name, std::to_string(rows) + " rows", t.size(0));
  check_argument(t.size(1) == heads, name, std::to_string(heads) + " heads", t.size(1));
  check_argument(t.size(2) == like.size(2), name, "the head dim of q, " + std::to_string(like.size(2)), t.size(2));
  check_argument(t.size(0) < kMaxPosition, name, "fewer than 2^30 rows", t.size(0));
}

inline void check_table(const at::Tensor& t, const char* name, const at::Tensor& like, int64_t columns) {
  check_argument(t.device() == like.device(), name, "a tensor on the device of q", t.device());
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, ": expected int32, got ", t.scalar_type());
  check_argument(t.dim() == 2 && t.size(1) == columns && t.is_contiguous(), name,
                 "a contiguous (rows, " + std::to_string(columns) + ") table", t.sizes());
}

inline void check_statistics(const at::Tensor& t, const char* name, const at::Tensor& q) {
  check_argument(t.device() == q.device(), name, "a tensor on the device of q", t.device());
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, ": expected float32, got ", t.scalar_type());
  check_argument(t.dim() == 2 && t.size(0) == q.size(1) && t.size(1) == q.size(0), name, "shape (heads, rows of q)",
                 t.sizes());
}

}  // namespace dualkv
