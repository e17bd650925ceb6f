// SPDX-License-Identifier: BSD-3-Clause
// The kernels of a build. Every instance file registers its own when the library is loaded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/kernel_traits.h"
#include "params.h"

namespace dualkv {

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(status));
}

template <class Params>
using Launch = void (*)(const Params&, cudaStream_t);

// The forward with wide and with narrow KV tiles, null where there are none.
template <typename T>
struct ForwardKernel {
  Launch<ForwardParams<T>> wide, narrow = nullptr;
};

// dK, dV and, where it sums it, dQ. `convert` comes behind it and rounds what is left in fp32: the
// sums of dQ, and the parts of split tiles. `every_step`, null in most: leaves out no steps.
template <typename T>
struct BackwardKernel {
  Launch<BackwardParams<T>> launch;
  Launch<ConvertParams<T>> convert;
  Launch<BackwardParams<T>> every_step = nullptr;
};

// dQ alone, likewise with wide and with narrow KV tiles.
template <typename T>
struct BackwardDqKernel {
  Launch<BackwardDqParams<T>> wide, narrow = nullptr;
};

// Decode over pages (decode/kernel_params.h).
template <typename T>
struct DecodeParams;
template <typename T>
struct DecodeKernel {
  Launch<DecodeParams<T>> launch;
  int blocks_per_sm;
};

// Kernels of one direction and their traits, by family and head dims, small ones first; of equal
// ones the preferred first.
template <class Kernel>
struct Registry {
  std::vector<KernelTraits> traits;
  std::vector<Kernel> kernels;
};

template <class Kernel>
Registry<Kernel>& registry() {
  static Registry<Kernel> all;
  return all;
}

template <class Kernel>
void add_kernel(const KernelTraits& traits, const Kernel& kernel) {
  Registry<Kernel>& all = registry<Kernel>();
  const auto comes_before = [](const KernelTraits& a, const KernelTraits& b) {
    return a.arch != b.arch ? a.arch < b.arch : a.dims < b.dims;
  };
  const auto place = std::upper_bound(all.traits.begin(), all.traits.end(), traits, comes_before);
  all.kernels.insert(all.kernels.begin() + (place - all.traits.begin()), kernel);
  all.traits.insert(place, traits);
}

// Traits of the kernels of a direction, which are the same for all element types.
template <template <typename> class Kernel>
const std::vector<KernelTraits>& built() {
  return registry<Kernel<__nv_bfloat16>>().traits;
}

// Runs `body(T{})` for the element type of a call.
template <class Call, class Body>
auto with_element_type(const Call& call, Body body) {
  return call.is_half ? body(__half{}) : body(__nv_bfloat16{});
}

// Calls add(T()) for every element type T.
template <class Add>
bool for_element_types(Add add) {
  add(__half());
  add(__nv_bfloat16());
  return true;
}

// How often each kernel was launched, so that tests can tell that it was ours that ran.
void count_launch(const std::string& kernel);
std::map<std::string, int64_t> launch_counts();

// Lets a kernel take `bytes` of dynamic shared memory a block on the current device. The driver is
// asked once.
void allow_shared_bytes(const void* kernel, int bytes);

}  // namespace dualkv
