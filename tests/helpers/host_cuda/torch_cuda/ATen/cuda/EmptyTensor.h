// SPDX-License-Identifier: BSD-3-Clause
// New tensors of the extension, on the host and full of NaN. Stands in for torch's header of this name.
#pragma once

#include <torch/python.h>

#include <cstring>

namespace at::detail {

inline Tensor empty_cuda(IntArrayRef sizes, ScalarType type, c10::Device device, std::nullopt_t) {
  const Tensor made = at::empty(sizes, TensorOptions().dtype(type).device(device));
  if (made.nbytes()) std::memset(made.data_ptr(), 0xff, made.nbytes());
  return made;
}

}  // namespace at::detail
