// SPDX-License-Identifier: BSD-3-Clause
// Plain shared and global memory accesses that C++ cannot express.
#pragma once

#include <cstdint>

#include "ptx/jitter.h"

namespace dualkv::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared_32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_128(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void load_shared_float4(float (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_float4(uint32_t address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// Adds four floats to 16 aligned bytes, without a result. Needs sm_90.
__device__ __forceinline__ void reduce_add_v4(float* address, const float (&v)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
}

// Semaphore: reads a number that another block publishes. What that block did before is then
// visible, also to the bulk copies that follow.
__device__ __forceinline__ uint64_t load_published(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return value;
}
// Semaphore: publishes a number, for copies after bulk_wait(). Without the release, which takes a
// microsecond, additions of other blocks do come before this block's.
__device__ __forceinline__ void publish(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// A counter in global memory on which threads of any block arrive, once. What an arriving thread's
// block did before a barrier is visible to the waiting thread's block behind one.
__device__ __forceinline__ void arrive(int* counter) {
  jitter();
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait_arrived(const int* counter, int arrivals) {
  jitter();
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < arrivals);
}

}  // namespace dualkv::ptx
