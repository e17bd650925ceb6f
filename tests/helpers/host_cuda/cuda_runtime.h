// SPDX-License-Identifier: BSD-3-Clause
// Launches of kernels on the host, block after block, in place of the toolkit's header.
#pragma once

#include <type_traits>

#include "cuda_runtime_api.h"
#include "shared_memory.h"

namespace host_cuda {

inline uint64_t launches = 0;  // each has schedules of its own

// `kernel<<<blocks, threads, shared_bytes, stream>>>(params...)`, which is no call in C++.
template <typename... Params>
struct Launch {
  void (*kernel)(Params...);
  unsigned blocks, threads;
  size_t shared_bytes;

  void operator()(const std::common_type_t<Params>&... params) const {
    seed(++launches);
    gridDim = {blocks, 1, 1};
    for (unsigned block = 0; block < blocks; ++block) {
      blockIdx = {block, 1, 1};
      poison_shared(shared_bytes);
      run_block(static_cast<int>(threads), [&] { kernel(params...); });
    }
  }
};

template <typename... Params>
Launch<Params...> launch(void (*kernel)(Params...), unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t) {
  return {kernel, blocks, threads, shared_bytes};
}

}  // namespace host_cuda

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  HostIndex gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const std::common_type_t<Params>&... params) {
  host_cuda::launch(kernel, config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes, config->stream)(params...);
  return cudaSuccess;
}
