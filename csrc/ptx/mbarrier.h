// SPDX-License-Identifier: BSD-3-Clause
// mbarrier: a counter in shared memory on which threads and bulk copies arrive, and threads wait by
// phase parity.
#pragma once

#include <cstdint>

#include "ptx/jitter.h"

namespace dualkv::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  jitter();
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` that copies still have to deliver before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  jitter();
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Returns once the phase of the given parity is over.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  jitter(barrier, parity);
  asm volatile(
      "{\n.reg .pred done;\n"
      "retry:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra retry;\nfinished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace dualkv::ptx
