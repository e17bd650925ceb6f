// SPDX-License-Identifier: BSD-3-Clause
// A call as the launches see it: views of its tensors, its shapes, and the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "api.h"
#include "built_for.h"
#include "core/explain.h"
#include "dispatch.h"

namespace dualkv {

// A GPU of this machine; the driver is asked once.
struct Device {
  Gpu gpu;
  int minor;      // of its compute capability
  bool has_code;  // in this build

  // Makes the device the current one of this library's CUDA runtime, which is not the caller's own.
  static const Device& select(int index) {
    static std::mutex mutex;
    static std::map<int, Device> known;
    const std::lock_guard<std::mutex> lock(mutex);
    if (known.empty()) check_driver();
    check_cuda(cudaSetDevice(index));
    const auto found = known.find(index);
    return found != known.end() ? found->second : known.emplace(index, of(index)).first->second;
  }

  // Throws std::runtime_error where this build has no kernels for it.
  void check() const {
    const std::string capability = std::to_string(gpu.capability) + "." + std::to_string(minor);
    if (gpu.capability < 8) {
      throw std::runtime_error("flash_attn_dualkv needs a GPU of compute capability 8.0 or newer, got " + capability);
    }
    if (has_code) return;
    throw std::runtime_error("flash_attn_dualkv was built for compute capability " DUALKV_BUILD_ARCHS
                             " and newer, got " + capability + "; reinstall from source with DUALKV_ARCHS=\"" +
                             std::to_string(gpu.capability) + std::to_string(minor) +
                             "\", or several such as \"80;90\"");
  }

 private:
  static void check_driver() {
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver));
    const auto release = [](int version) {
      return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    };
    if (driver / 1000 >= CUDART_VERSION / 1000) return;
    throw std::runtime_error("flash_attn_dualkv was built with CUDA " + release(CUDART_VERSION) +
                             ", and this driver runs CUDA " + (driver ? release(driver) : "not at all") +
                             "; update the driver, or install a build with the driver's CUDA");
  }

  static Device of(int index) {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, index));
      return value;
    };
    const int major = attribute(cudaDevAttrComputeCapabilityMajor), minor = attribute(cudaDevAttrComputeCapabilityMinor);
    // Two transfers of so many bits a clock, which is in kHz.
    const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
    const double gigabytes_per_s = 2e-6 / 8 * bits * attribute(cudaDevAttrMemoryClockRate);
    return {{major, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
             gigabytes_per_s},
            minor, is_built_for(10 * major + minor, DUALKV_BUILD_ARCHS, DUALKV_BUILD_PTX)};
  }
};

// The card of that name, a row of core/tuning.h.
inline Gpu gpu_named(const char* argument, const std::string& name) {
  try {
    return tuning_named(name).gpu;
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(argument) + ": " + error.what());
  }
}

// What the policy sees of the card: DUALKV_GPU names another one, DUALKV_MAX_SHARED_BYTES grants a
// block no more shared memory, and DUALKV_MAX_SMS leaves it no more multiprocessors, so that tests
// of any GPU can take the choices of all.
inline Gpu seen_by_policy(Gpu gpu) {
  const char* const name = std::getenv("DUALKV_GPU");
  if (name && *name) gpu = gpu_named("DUALKV_GPU", name);
  const char* const bytes = std::getenv("DUALKV_MAX_SHARED_BYTES");
  if (bytes) gpu.shared_bytes = std::min(gpu.shared_bytes, std::atoi(bytes));
  const char* const sms = std::getenv("DUALKV_MAX_SMS");
  if (sms) gpu.num_sms = std::min(gpu.num_sms, std::max(std::atoi(sms), 1));
  return gpu;
}

// The same of a device, whose own kernels and memory the choices need.
inline Gpu seen_by_policy(const Device& device) {
  Gpu gpu = seen_by_policy(device.gpu);
  gpu.shared_bytes = std::min(gpu.shared_bytes, device.gpu.shared_bytes);
  if (gpu.capability == 9 && device.gpu.capability != 9) {
    throw std::invalid_argument(std::string("DUALKV_GPU: expected a card whose kernels this GPU runs, got ") +
                                tuning_of(gpu).name);
  }
  return gpu;
}

// Whether DUALKV_KERNELS asks for the portable kernels where there are others. For tests and
// benchmarks.
inline bool wants_portable_kernels() {
  const char* const wanted = std::getenv("DUALKV_KERNELS");
  const bool portable = wanted && std::string(wanted) == "sm80";
  if (wanted && !portable && std::string(wanted) != "sm90") {
    throw std::invalid_argument(std::string("DUALKV_KERNELS: expected sm80 or sm90, got ") + wanted);
  }
  return portable;
}

inline int window_of(const DualkvOptions& options) {
  return options.window_left < 0 || options.window_left >= kNoWindow ? kNoWindow
                                                                     : static_cast<int>(options.window_left);
}

// What `make` plans for a call. Where no kernel serves its head dims, the error names the argument
// that has the larger one: `qk` or `v`.
template <class Make>
auto planned(const Call& call, Make make, const char* qk = "q", const char* v = "v") {
  try {
    return make(call);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(call.dims.v > call.dims.qk ? v : qk) + ": " + error.what());
  }
}

// The stride of a size-1 dimension is arbitrary and never used.
template <typename T>
TensorView<T> view_of(const DualkvTensor& t) {
  return {static_cast<T*>(t.data), t.rows > 1 ? t.row_stride : 0, t.heads > 1 ? t.head_stride : 0};
}

// Keys and values, or their gradients, of both regions.
template <typename T>
KvRegions<T> regions_of(const DualkvTensor& k, const DualkvTensor& v, const DualkvTensor& k_decoded,
                        const DualkvTensor& v_decoded) {
  return {{view_of<T>(k), view_of<T>(v)}, {view_of<T>(k_decoded), view_of<T>(v_decoded)}};
}

// Everything about a call that does not depend on the direction.
struct Problem {
  const DualkvCall& asked;
  Gpu gpu;  // as the policy sees it
  ProblemShape shape;
  NodeTable nodes;
  cudaStream_t stream;

  explicit Problem(const DualkvCall& call) : asked(call), stream(static_cast<cudaStream_t>(call.stream)) {
    const Device& device = Device::select(call.device);
    device.check();
    gpu = seen_by_policy(device);
    const DualkvOptions& options = call.options;
    shape = {static_cast<int>(call.q.rows),
             static_cast<int>(call.q.heads),
             static_cast<int>(call.k.heads),
             static_cast<int>(call.q.head_dim),
             static_cast<int>(call.v.head_dim),
             static_cast<float>(options.softmax_scale),
             {options.causal != 0, window_of(options)},
             {options.softmax_scale, options.softcap},
             gpu.num_sms};
    nodes = {call.nodes,
             static_cast<int>(call.num_nodes),
             {shape.q_rows, static_cast<int>(call.k.rows), static_cast<int>(call.k_decoded.rows)}};
  }

  Call call() const {
    return {{shape.head_dim, shape.head_dim_v}, shape.num_heads, shape.num_kv_heads, shape.q_rows,
            nodes.extents.all_key_rows(), nodes.num_nodes, asked.options.mean_keys, shape.sees,
            shape.softcap.exists(), asked.options.deterministic != 0, wants_portable_kernels()};
  }

  template <typename T>
  TensorView<const T> q() const {
    return view_of<const T>(asked.q);
  }
  template <typename T>
  KvRegions<const T> kv() const {
    return regions_of<const T>(asked.k, asked.v, asked.k_decoded, asked.v_decoded);
  }
};

}  // namespace dualkv
