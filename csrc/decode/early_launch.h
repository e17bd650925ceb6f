// SPDX-License-Identifier: BSD-3-Clause
// Launches that begin before the one in front of them in the stream has ended.
#pragma once

#include "dispatch.h"

namespace dualkv {

__device__ inline void let_next_launch_in() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// The end of the launch before, whose writes are then visible.
__device__ inline void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Launches a kernel that waits for the end of the launch before it, if code and driver can; PTX of
// older GPUs does not wait.
template <class Args>
void launch_early(void (*kernel)(const Args), int blocks, int threads, int bytes, const Args& args,
                  cudaStream_t stream) {
  cudaFuncAttributes code;
  check_cuda(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel)));
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver));
  constexpr int kCapturesEarlyLaunches = 12030;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(blocks), config.blockDim.x = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes), config.stream = stream;
  config.attrs = &early, config.numAttrs = code.ptxVersion >= 90 && driver >= kCapturesEarlyLaunches;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace dualkv
