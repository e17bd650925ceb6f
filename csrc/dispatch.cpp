#include "dispatch.h"

#include <mutex>
#include <set>

namespace dualkv {

std::string describe(const HeadDims& dims) {
  const std::string qk = std::to_string(dims.qk);
  return dims.qk == dims.v ? qk : qk + " (v: " + std::to_string(dims.v) + ")";
}

std::string describe(const std::vector<HeadDims>& dims) {
  std::string text;
  for (const HeadDims& one : dims) text += (text.empty() ? "" : ", ") + describe(one);
  return text.empty() ? "none" : text;
}

std::string too_wide(Arch arch, const HeadDims& wanted, const std::vector<HeadDims>& built) {
  constexpr HeadDims kPortable{256, 256};
  const std::string of_build = "head dim " + describe(wanted) + " is larger than every one in this build (" +
                               describe(built) + ")";
  if (arch == Arch::sm80 && !kPortable.hold(wanted)) {
    return of_build + " of the portable kernels, which this call takes: above 256 there are kernels for Hopper alone, up to "
                      "512, in builds whose DUALKV_ARCHS has 90 and whose DUALKV_HEAD_DIMS has 512";
  }
  return of_build + "; reinstall with DUALKV_HEAD_DIMS covering it";
}

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
