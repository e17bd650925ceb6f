// SPDX-License-Identifier: BSD-3-Clause
// A call as the launches see it: its tensors, checked and ready to be read by kernels, and the
// shapes.
#pragma once

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/python.h>

#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>

#include "built_for.h"
#include "check.h"
#include "core/explain.h"
#include "dispatch.h"

namespace dualkv {

using at::Tensor;

// Every entry begins with it: a guard for a q that is not on a GPU would fail with an error that
// names no argument.
inline c10::cuda::CUDAGuard device_guard(const Tensor& q) {
  check_queries(q);
  return c10::cuda::CUDAGuard(q.device());
}

// New tensors, straight from the caching allocator: going through the dispatcher costs several
// microseconds each, and a call makes a dozen.
inline Tensor uninitialised(const Tensor& beside, at::IntArrayRef sizes, at::ScalarType type) {
  return Tensor(at::detail::empty_cuda(sizes, type, beside.device(), std::nullopt));
}

inline void fill_zeros(const Tensor& t) {
  check_cuda(cudaMemsetAsync(t.data_ptr(), 0, t.nbytes(), c10::cuda::getCurrentCUDAStream()));
}

// For calls without work: otherwise the launches write every element.
inline Tensor zeros(const Tensor& beside, at::IntArrayRef sizes, at::ScalarType type) {
  const Tensor t = uninitialised(beside, sizes, type);
  fill_zeros(t);
  return t;
}

// Copies move 16 bytes, and tensor maps know no stride of zero: a tensor whose rows do not start on
// 16 bytes, or that was expanded, is copied once. The tensor has been checked to have 3 dimensions.
inline Tensor aligned(const Tensor& t) {
  const auto stride_ok = [&](int dim) { return t.size(dim) == 1 || (t.stride(dim) > 0 && t.stride(dim) % 8 == 0); };
  const bool strides_ok = t.numel() == 0 || (stride_ok(0) && stride_ok(1) && t.stride(2) == 1);
  const bool base_ok = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  return strides_ok && base_ok ? t : t.clone(at::MemoryFormat::Contiguous);
}

// The stride of a size-1 dimension is arbitrary and never used.
template <typename T>
TensorView<T> view_of(const Tensor& t) {
  return {static_cast<T*>(t.data_ptr()), t.size(0) > 1 ? t.stride(0) : 0, t.size(1) > 1 ? t.stride(1) : 0};
}

// A GPU of this machine; the driver is asked once.
struct Device {
  Gpu gpu;
  int minor;      // of its compute capability
  bool has_code;  // in this build

  static const Device& current() {
    static std::mutex mutex;
    static std::map<int, Device> known;
    const int index = c10::cuda::current_device();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(index);
    if (found != known.end()) return found->second;
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, index));
      return value;
    };
    const int major = attribute(cudaDevAttrComputeCapabilityMajor), minor = attribute(cudaDevAttrComputeCapabilityMinor);
    // Two transfers of so many bits a clock, which is in kHz.
    const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
    const double gigabytes_per_s = 2e-6 / 8 * bits * attribute(cudaDevAttrMemoryClockRate);
    const Device device{{major, attribute(cudaDevAttrMultiProcessorCount),
                         attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), gigabytes_per_s},
                        minor, is_built_for(10 * major + minor, DUALKV_BUILD_ARCHS, DUALKV_BUILD_PTX)};
    return known.emplace(index, device).first->second;
  }
};

// The card of that name, a row of core/tuning.h.
inline Gpu gpu_named(const char* argument, const std::string& name) {
  try {
    return tuning_named(name).gpu;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, argument, ": ", error.what());
  }
}

// What the policy sees of the card: DUALKV_GPU names another one, and DUALKV_MAX_SHARED_BYTES
// grants a block no more shared memory, so that tests of any GPU can take the choices of all.
inline Gpu seen_by_policy(Gpu gpu) {
  const char* const name = std::getenv("DUALKV_GPU");
  if (name && *name) gpu = gpu_named("DUALKV_GPU", name);
  const char* const bytes = std::getenv("DUALKV_MAX_SHARED_BYTES");
  if (bytes) gpu.shared_bytes = std::min(gpu.shared_bytes, std::atoi(bytes));
  return gpu;
}

// Whether DUALKV_KERNELS asks for the portable kernels where there are others. For tests and
// benchmarks.
inline bool wants_portable_kernels() {
  const char* const wanted = std::getenv("DUALKV_KERNELS");
  const bool portable = wanted && std::string(wanted) == "sm80";
  TORCH_CHECK_VALUE(!wanted || portable || std::string(wanted) == "sm90", "DUALKV_KERNELS: expected sm80 or sm90, got ",
                    wanted);
  return portable;
}

inline int* int_pointer(const Tensor& t) { return static_cast<int*>(t.data_ptr()); }

// Keys and values (or their gradients): in one pair of tensors, or in two.
struct Keys {
  Tensor k, v;
  std::optional<Tensor> k_decoded, v_decoded;

  template <typename T>
  KvRegions<T> regions() const {
    return {{view_of<T>(k), view_of<T>(v)},
            k_decoded ? KvPair<T>{view_of<T>(*k_decoded), view_of<T>(*v_decoded)} : KvPair<T>{}};
  }
  int64_t decoded_rows() const { return k_decoded ? k_decoded->size(0) : 0; }
  int64_t rows() const { return k.size(0) + decoded_rows(); }

  // One tensor made of each of them.
  template <class Make>
  Keys each(Make make) const {
    return {make(k), make(v), k_decoded ? std::optional(make(*k_decoded)) : std::nullopt,
            v_decoded ? std::optional(make(*v_decoded)) : std::nullopt};
  }
};

// The arguments of every call beside its tensors; flash_attn_dualkv/reference.py says what they
// mean.
struct Options {
  double softmax_scale;
  bool causal;
  int64_t window_left;  // negative: no window
  double softcap;       // 0: none
  int64_t mean_keys;    // that a row sees on average: the backward's plan depends on it, no result does
  bool deterministic;   // whether gradients are bit-identical from run to run

  int window() const {
    return window_left < 0 || window_left >= kNoWindow ? kNoWindow : static_cast<int>(window_left);
  }
};

// Everything about a call that does not depend on the direction. Whoever makes one has a
// device_guard: q is checked.
struct Problem {
  Tensor q;
  Keys kv;
  Tensor nodes;
  ProblemShape shape;
  Gpu gpu;  // as the policy sees it
  cudaStream_t stream;

  Problem(const Tensor& q_in, const Keys& kv_in, const Tensor& nodes_in, const Options& options)
      : q(q_in), kv(kv_in), nodes(nodes_in) {
    check_beside(kv.k, "k", q);
    const int64_t heads = q.size(1), kv_heads = kv.k.size(1);
    check_argument(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "k", kv_heads,
                   "a number of heads that divides ", heads);
    check_argument(q.size(2) > 0 && q.size(2) % 8 == 0, "q", q.size(2), "a head dim that is a multiple of 8");
    check_packed(q, "q", q, -1, heads, q.size(2));
    check_beside(kv.v, "v", q);
    const int64_t head_dim_v = kv.v.size(2);
    check_argument(head_dim_v > 0 && head_dim_v % 8 == 0, "v", head_dim_v, "a head dim that is a multiple of 8");
    check_pair("k", kv.k, "v", kv.v, kv_heads, head_dim_v);
    TORCH_CHECK_VALUE(kv.k_decoded.has_value() == kv.v_decoded.has_value(),
                      "v_decoded: expected together with k_decoded, got only one of them");
    if (kv.k_decoded) check_pair("k_decoded", *kv.k_decoded, "v_decoded", *kv.v_decoded, kv_heads, head_dim_v);
    check_argument(kv.rows() < kMaxPosition, "k_decoded", kv.rows(), "fewer than 2^30 rows together with k");
    check_table(nodes, "nodes", q, kNodeColumns);
    check_argument(options.softmax_scale > 0, "softmax_scale", options.softmax_scale, "a positive number");
    check_argument(options.softcap == 0 || (options.softcap >= kMinSoftcap && options.softcap <= kMaxSoftcap), "softcap",
                   options.softcap, "0, or a number from ", kMinSoftcap, " to ", kMaxSoftcap);

    const Device& device = Device::current();
    const int major = device.gpu.capability;
    TORCH_CHECK(major >= 8, "flash_attn_dualkv needs a GPU of compute capability 8.0 or newer, got ", major, ".",
                device.minor);
    TORCH_CHECK(device.has_code, "flash_attn_dualkv was built for compute capability " DUALKV_BUILD_ARCHS " and newer, got ",
                major, ".", device.minor, "; reinstall with DUALKV_ARCHS=\"", major, device.minor,
                "\", or several such as \"80;90\"");
    gpu = seen_by_policy(device.gpu);
    gpu.shared_bytes = std::min(gpu.shared_bytes, device.gpu.shared_bytes);
    TORCH_CHECK_VALUE(gpu.capability != 9 || major == 9, "DUALKV_GPU: expected a card whose kernels this GPU runs, got ",
                      tuning_of(gpu).name, " on compute capability ", major, ".", device.minor);
    stream = c10::cuda::getCurrentCUDAStream();
    q = aligned(q);
    kv = kv.each(aligned);
    shape = {static_cast<int>(q.size(0)),
             static_cast<int>(heads),
             static_cast<int>(kv_heads),
             static_cast<int>(q.size(2)),
             static_cast<int>(head_dim_v),
             static_cast<float>(options.softmax_scale),
             {options.causal, options.window()},
             {options.softmax_scale, options.softcap},
             gpu.num_sms};
  }

  NodeTable table() const {
    return {int_pointer(nodes),
            static_cast<int>(nodes.size(0)),
            {shape.q_rows, static_cast<int>(kv.k.size(0)), static_cast<int>(kv.decoded_rows())}};
  }

  Call call(const Options& options) const {
    return {{shape.head_dim, shape.head_dim_v}, shape.num_heads, shape.num_kv_heads, shape.q_rows,
            static_cast<int>(kv.rows()), static_cast<int>(nodes.size(0)), options.mean_keys, shape.sees,
            shape.softcap.exists(), options.deterministic, wants_portable_kernels()};
  }

  // Nobody sees a key.
  bool is_empty() const { return nodes.size(0) == 0 || q.size(0) == 0 || kv.rows() == 0; }

 private:
  void check_pair(const char* k_name, const Tensor& k, const char* v_name, const Tensor& v, int64_t heads,
                  int64_t head_dim_v) const {
    check_packed(k, k_name, q, -1, heads, q.size(2));
    check_packed(v, v_name, q, k.size(0), heads, head_dim_v);
  }
};

}  // namespace dualkv
