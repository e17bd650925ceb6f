// SPDX-License-Identifier: BSD-3-Clause
// Tensor maps on the host: plain numbers. Stands in for the toolkit's header of this name.
#pragma once

#include <string>

#include "cuda_runtime_api.h"

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  const uint8_t* data;
  uint64_t sizes[3], strides[2];  // strides in bytes, of dimensions 1 and 2
  uint32_t box[3];
  uint32_t element_bytes;  // 0: no map
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  // What the driver refuses.
  bool is_valid = rank == 3 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * 2 == 128;
  for (int i = 0; i < 3; ++i) is_valid &= sizes[i] > 0 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
  for (int i = 0; i < 2; ++i) is_valid &= strides[i] > 0 && strides[i] % 16 == 0;
  if (!is_valid) return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<const uint8_t*>(data), {sizes[0], sizes[1], sizes[2]}, {strides[0], strides[1]},
          {box[0], box[1], box[2]}, 2};
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** pointer, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  *pointer = std::string(name) == "cuTensorMapEncodeTiled" ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
