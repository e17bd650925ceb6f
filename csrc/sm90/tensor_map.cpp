// SPDX-License-Identifier: BSD-3-Clause
#include "sm90/tensor_map.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "dispatch.h"

namespace dualkv::sm90 {
namespace {

// The driver's function, reached through the runtime: no link to libcuda.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(pointer);
  }();
  return function;
}

}  // namespace

template <typename T>
CUtensorMap make_tensor_map(const TensorView<const T>& view, int rows, int heads, int head_dim, int box_rows,
                            int box_heads) {
  CUtensorMap map{};
  if (rows == 0) return map;
  // The stride of a dimension of size 1 is zero here, which a map does not accept and never uses.
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride ? stride * sizeof(T) : 16); };
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {bytes(view.head_stride), bytes(view.row_stride)};
  const cuuint32_t box[3] = {kPanelCols, static_cast<cuuint32_t>(box_heads),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status = encode_function()(
      &map, std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<T*>(view.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed: " + std::to_string(status));
  return map;
}

template CUtensorMap make_tensor_map(const TensorView<const __half>&, int, int, int, int, int);
template CUtensorMap make_tensor_map(const TensorView<const __nv_bfloat16>&, int, int, int, int, int);

}  // namespace dualkv::sm90
