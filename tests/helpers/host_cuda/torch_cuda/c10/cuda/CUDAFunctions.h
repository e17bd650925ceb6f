// SPDX-License-Identifier: BSD-3-Clause
// Copies between two places on the host. Stands in for torch's header of this name.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>

namespace c10::cuda {

inline void memcpy_and_sync(void* to, const void* from, int64_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
}

}  // namespace c10::cuda
