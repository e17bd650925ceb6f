// SPDX-License-Identifier: BSD-3-Clause
// cp.async: copies from global to shared memory that bypass registers. `read` false writes zeros
// and reads nothing.
#pragma once

#include <cstdint>

#include "ptx/jitter.h"

namespace dualkv::ptx {

__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool read) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(read ? 16 : 0)
               : "memory");
}

// How long the L2 cache keeps what is copied: bytes that nobody reads again make way for others.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normally() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool read, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(read ? 16 : 0), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool read) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(read ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives on an mbarrier once this thread's copies so far are complete. Needs sm_90's barriers, and
// an arrival of this thread in the barrier's count.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  jitter();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace dualkv::ptx
