// SPDX-License-Identifier: BSD-3-Clause
// The launch of a kernel with dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.h"

namespace dualkv {

template <class Kernel, typename... Params>
void launch(Kernel kernel, int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
            const Params&... params) {
  if (blocks == 0) return;
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params...);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
