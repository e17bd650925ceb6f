// SPDX-License-Identifier: BSD-3-Clause
// Enough of CUDA to run kernels on the host, for tests, in place of the toolkit's header.
#pragma once

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>

#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block at a time
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)

struct alignas(8) uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// The runtime: one device, whose calls never fail.

#define CUDART_VERSION 13000

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* code, const void*) { return code->ptxVersion = 90, cudaSuccess; }

enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMemoryClockRate,
  cudaDevAttrGlobalMemoryBusWidth,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  constexpr int kHopper[] = {9, 0, 132, 227 * 1024, 3201000, 6144};
  return *value = kHopper[which], cudaSuccess;
}

// What threads do together.

inline void __syncthreads() { host_cuda::block_barriers[0].wait_for("__syncthreads", blockDim.x); }

inline bool __syncthreads_or(bool value) {
  static unsigned votes = 0;
  votes += value;
  __syncthreads();
  const bool result = votes > 0;
  __syncthreads();
  votes -= value;  // others may have voted again
  return result;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  int nothing = 0;
  host_cuda::together(mask, nothing, "__syncwarp", [](auto) {});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  struct Shuffle {
    T value;
    int source;
  } mine{value, source & 31};
  host_cuda::together(mask, mine, "a shuffle", [](auto of) {
    T values[32];
    for (int i = 0; i < 32; ++i) {
      if (of(i)) values[i] = of(i)->value;
    }
    for (int i = 0; i < 32; ++i) {
      if (of(i) && of(of(i)->source)) of(i)->value = values[of(i)->source];
    }
  });
  return mine.value;
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int source = host_cuda::lane() - distance;
  return __shfl_sync(mask, value, source < 0 ? host_cuda::lane() : source);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, host_cuda::lane() ^ bits);
}

inline long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline unsigned __match_any_sync(unsigned mask, int value) {
  unsigned equal = 0;
  for (int source = 0; source < 32; ++source) {
    equal |= static_cast<unsigned>(__shfl_sync(mask, value, source) == value) << source;
  }
  return equal & mask;
}

inline unsigned __ballot_sync(unsigned mask, bool value) { return __match_any_sync(mask, value) ^ (value ? 0 : mask); }

inline bool __any_sync(unsigned mask, bool value) {
  struct Vote {
    bool value;
  } mine{value};
  host_cuda::together(mask, mine, "a vote", [](auto of) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= of(i) && of(i)->value;
    for (int i = 0; i < 32; ++i) {
      if (of(i)) of(i)->value = any;
    }
  });
  return mine.value;
}

inline int __reduce_min_sync(unsigned mask, int value) {
  host_cuda::together(mask, value, "a minimum", [](auto of) {
    int least = INT_MAX;
    for (int i = 0; i < 32; ++i) least = of(i) ? std::min(least, *of(i)) : least;
    for (int i = 0; i < 32; ++i) {
      if (of(i)) *of(i) = least;
    }
  });
  return value;
}

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename T, typename U>
T atomicAdd(T* address, U value) {
  return std::exchange(*address, *address + static_cast<T>(value));
}

template <typename T, typename U>
T atomicOr(T* address, U value) {
  return std::exchange(*address, *address | static_cast<T>(value));
}

template <typename T, typename U>
T atomicMax(T* address, U value) {
  return std::exchange(*address, std::max(*address, static_cast<T>(value)));
}

template <typename T, typename U>
T atomicMin(T* address, U value) {
  return std::exchange(*address, std::min(*address, static_cast<T>(value)));
}

// Launches run one after the other.
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() {}

inline void __threadfence() {}  // blocks run one after the other

// Rounded one by one: products and sums are not contracted here (-ffp-contract=off).
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }

using std::max;
using std::min;
