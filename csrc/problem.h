// A call as the launches see it: its tensors, checked and ready to be read by kernels, and the shapes.
#pragma once

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/python.h>

#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>

#include "check.h"
#include "dispatch.h"

namespace dualkv {

using at::Tensor;

// Every entry begins with it: a guard for a q that is not on a GPU would fail with an error that names no argument.
inline c10::cuda::CUDAGuard device_guard(const Tensor& q) {
  check_queries(q);
  return c10::cuda::CUDAGuard(q.device());
}

// New tensors, straight from the caching allocator: going through the dispatcher costs several microseconds each, and a
// call makes a dozen.
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

// Copies move 16 bytes, and tensor maps know no stride of zero: a tensor whose rows do not start on 16 bytes, or that
// was expanded, is copied once. The tensor has been checked to have 3 dimensions.
inline Tensor aligned(const Tensor& t) {
  const auto stride_ok = [&](int dim) { return t.size(dim) == 1 || (t.stride(dim) > 0 && t.stride(dim) % 8 == 0); };
  const bool strides_ok = t.numel() == 0 || (stride_ok(0) && stride_ok(1) && t.stride(2) == 1);
  const bool base_ok = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  return strides_ok && base_ok ? t : t.clone(at::MemoryFormat::Contiguous);
}

// Rows [begin, begin + count) of a tensor (rows, heads, head_dim). Prompts and responses may share one: a view of each
// would be a tensor of its own, and a backward would make eight.
struct Rows {
  Tensor tensor;
  int64_t begin, count;

  Rows(const Tensor& t) : Rows(t, 0, t.dim() > 0 ? t.size(0) : 0) {}
  Rows(const Tensor& t, int64_t begin, int64_t count) : tensor(t), begin(begin), count(count) {}

  // The stride of a size-1 dimension is arbitrary and never used.
  template <typename T>
  TensorView<T> view() const {
    const int64_t row_stride = tensor.size(0) > 1 ? tensor.stride(0) : 0;
    return {static_cast<T*>(tensor.data_ptr()) + begin * row_stride, row_stride,
            tensor.size(1) > 1 ? tensor.stride(1) : 0};
  }
  Rows aligned() const { return {dualkv::aligned(tensor), begin, count}; }
};

template <typename T>
TensorView<T> view_of(const Tensor& t) {
  return Rows(t).view<T>();
}

// What kernels need to know of a GPU; the driver is asked once.
struct Device {
  int major, minor, num_sms, shared_bytes;  // `shared_bytes`: the most that a block may have

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
    const Device device{attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrComputeCapabilityMinor),
                        attribute(cudaDevAttrMultiProcessorCount),
                        attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
    return known.emplace(index, device).first->second;
  }
};

// DUALKV_MAX_SHARED_BYTES lets a large GPU run the kernels of a small one: for tests.
inline int shared_limit_override() {
  const char* value = std::getenv("DUALKV_MAX_SHARED_BYTES");
  return value ? std::atoi(value) : std::numeric_limits<int>::max();
}

inline int* int_pointer(const Tensor& t) { return static_cast<int*>(t.data_ptr()); }

struct Keys {
  Rows k_context, v_context, k_decoded, v_decoded;

  template <typename T>
  KvRegions<T> regions() const {
    return {{k_context.view<T>(), v_context.view<T>()}, {k_decoded.view<T>(), v_decoded.view<T>()}};
  }
};

// Everything about a call that does not depend on the direction. Whoever makes one has a device_guard: q is checked.
struct Problem {
  Tensor q;
  Keys kv;
  Tensor segments, groups;
  ProblemShape shape;
  int capability, shared_limit;
  cudaStream_t stream;

  Problem(const Tensor& q_in, const Keys& kv_in, const Tensor& segments_in, const Tensor& groups_in,
          double softmax_scale, bool causal)
      : q(q_in), kv(kv_in), segments(segments_in), groups(groups_in) {
    const Tensor& keys = kv.k_context.tensor;
    check_beside(keys, "k_context", q);
    const int64_t heads = q.size(1), kv_heads = keys.size(1);
    check_argument(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "k_context", kv_heads,
                   "a number of heads that divides ", heads);
    check_argument(q.size(2) > 0 && q.size(2) % 8 == 0, "q", q.size(2), "a head dim that is a multiple of 8");
    check_packed(q, "q", q, -1, heads);
    check_pair("k_context", kv.k_context, "v_context", kv.v_context, kv_heads);
    check_pair("k_decoded", kv.k_decoded, "v_decoded", kv.v_decoded, kv_heads);
    check_table(segments, "segments", q, kSegmentColumns);
    check_table(groups, "groups", q, kGroupColumns);
    check_argument(softmax_scale > 0, "softmax_scale", softmax_scale, "a positive number");

    const Device& device = Device::current();
    capability = device.major;
    TORCH_CHECK(capability >= 8, "flash_attn_dualkv needs a GPU of compute capability 8.0 or newer, got ",
                device.major, ".", device.minor);
    shared_limit = std::min(device.shared_bytes, shared_limit_override());
    stream = c10::cuda::getCurrentCUDAStream();
    q = aligned(q);
    kv = {kv.k_context.aligned(), kv.v_context.aligned(), kv.k_decoded.aligned(), kv.v_decoded.aligned()};
    shape = {static_cast<int>(q.size(0)),
             static_cast<int>(heads),
             static_cast<int>(kv_heads),
             static_cast<int>(q.size(2)),
             static_cast<float>(softmax_scale),
             causal,
             device.num_sms};
  }

  GroupLayout layout() const {
    return {int_pointer(segments),
            int_pointer(groups),
            static_cast<int>(segments.size(0)),
            static_cast<int>(groups.size(0)),
            {shape.q_rows, static_cast<int>(kv.k_context.count), static_cast<int>(kv.k_decoded.count)}};
  }

  bool is_empty() const { return segments.size(0) == 0 || q.size(0) == 0; }

 private:
  void check_pair(const char* k_name, const Rows& k, const char* v_name, const Rows& v, int64_t heads) const {
    check_packed(k.tensor, k_name, q, -1, heads);
    check_packed(v.tensor, v_name, q, -1, heads);
    check_argument(v.count == k.count, v_name, v.count, k.count, " rows");
  }
};

}  // namespace dualkv
