// SPDX-License-Identifier: BSD-3-Clause
#include "dispatch.h"

#include <mutex>
#include <set>

namespace dualkv {

namespace {

struct LaunchCounts {
  std::mutex mutex;
  std::map<std::string, int64_t> of_kernel;
};

LaunchCounts& counts() {
  static LaunchCounts all;
  return all;
}

}  // namespace

void count_launch(const std::string& kernel) {
  const std::lock_guard<std::mutex> lock(counts().mutex);
  ++counts().of_kernel[kernel];
}

std::map<std::string, int64_t> launch_counts() {
  const std::lock_guard<std::mutex> lock(counts().mutex);
  return counts().of_kernel;
}

void allow_shared_bytes(const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> allowed;
  int device = 0;
  check_cuda(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({device, kernel})) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.insert({device, kernel});
}

}  // namespace dualkv
