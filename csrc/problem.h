// A call as the launches see it: its tensors, checked and ready to be read by kernels, and the shapes.
#pragma once

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/python.h>

#include <cstdlib>
#include <limits>

#include "check.h"
#include "dispatch.h"

namespace dualkv {

using at::Tensor;

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
// was expanded, is copied once.
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

inline int device_attribute(cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, c10::cuda::current_device()));
  return value;
}

// DUALKV_MAX_SHARED_BYTES lets a large GPU run the kernels of a small one: for tests.
inline int shared_limit_override() {
  const char* value = std::getenv("DUALKV_MAX_SHARED_BYTES");
  return value ? std::atoi(value) : std::numeric_limits<int>::max();
}

inline int* int_pointer(const Tensor& t) { return static_cast<int*>(t.data_ptr()); }

struct Keys {
  Tensor k_context, v_context, k_decoded, v_decoded;

  template <typename T>
  KvRegions<T> regions() const {
    return {{view_of<T>(k_context), view_of<T>(v_context)}, {view_of<T>(k_decoded), view_of<T>(v_decoded)}};
  }
};

// Everything about a call that does not depend on the direction.
struct Problem {
  Tensor q;
  Keys kv;
  Tensor segments, groups;
  ProblemShape shape;
  int capability, shared_limit;
  cudaStream_t stream;

  Problem(const Tensor& q_in, const Tensor& k_context, const Tensor& v_context, const Tensor& k_decoded,
          const Tensor& v_decoded, const Tensor& segments_in, const Tensor& groups_in, double softmax_scale,
          bool causal)
      : segments(segments_in), groups(groups_in) {
    check_argument(q_in.is_cuda(), "q", "a CUDA tensor", q_in.device());
    TORCH_CHECK_TYPE(q_in.scalar_type() == at::kHalf || q_in.scalar_type() == at::kBFloat16,
                     "q: expected float16 or bfloat16, got ", q_in.scalar_type());
    check_argument(q_in.dim() == 3, "q", "3 dimensions (rows, heads, head_dim)", q_in.dim());
    check_argument(k_context.dim() == 3, "k_context", "3 dimensions (rows, heads, head_dim)", k_context.dim());
    const int64_t heads = q_in.size(1), kv_heads = k_context.size(1);
    check_argument(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "k_context",
                   "a number of heads that divides " + std::to_string(heads), kv_heads);
    check_argument(q_in.size(2) > 0 && q_in.size(2) % 8 == 0, "q", "a head dim that is a multiple of 8", q_in.size(2));
    check_packed(q_in, "q", q_in, -1, heads);
    check_packed(k_context, "k_context", q_in, -1, kv_heads);
    check_packed(v_context, "v_context", q_in, k_context.size(0), kv_heads);
    check_packed(k_decoded, "k_decoded", q_in, -1, kv_heads);
    check_packed(v_decoded, "v_decoded", q_in, k_decoded.size(0), kv_heads);
    check_table(segments, "segments", q_in, kSegmentColumns);
    check_table(groups, "groups", q_in, kGroupColumns);
    check_argument(softmax_scale > 0, "softmax_scale", "a positive number", softmax_scale);

    capability = device_attribute(cudaDevAttrComputeCapabilityMajor);
    TORCH_CHECK(capability >= 8, "flash_attn_dualkv needs a GPU of compute capability 8.0 or newer, got ", capability,
                ".", device_attribute(cudaDevAttrComputeCapabilityMinor));
    shared_limit = std::min(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), shared_limit_override());
    stream = c10::cuda::getCurrentCUDAStream();
    q = aligned(q_in);
    kv = {aligned(k_context), aligned(v_context), aligned(k_decoded), aligned(v_decoded)};
    shape = {static_cast<int>(q.size(0)),
             static_cast<int>(heads),
             static_cast<int>(kv_heads),
             static_cast<int>(q.size(2)),
             static_cast<float>(softmax_scale),
             causal,
             device_attribute(cudaDevAttrMultiProcessorCount)};
  }

  GroupLayout layout() const {
    return {int_pointer(segments),
            int_pointer(groups),
            static_cast<int>(segments.size(0)),
            static_cast<int>(groups.size(0)),
            {shape.q_rows, static_cast<int>(kv.k_context.size(0)), static_cast<int>(kv.k_decoded.size(0))}};
  }

  bool is_empty() const { return segments.size(0) == 0 || q.size(0) == 0; }
};

}  // namespace dualkv
