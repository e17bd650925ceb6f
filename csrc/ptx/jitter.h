// SPDX-License-Identifier: BSD-3-Clause Random pauses before every barrier, in builds that look for
// races (-DDUALKV_JITTER, tests/helpers/jitter.py). Code that is right only because some warp
// happens to be early or late then soon gives wrong results.
#pragma once

#include <cstdint>

namespace dualkv::ptx {

#ifdef DUALKV_JITTER

// Both sleep up to 2 microseconds; __nanosleep(t) takes 0 to 2 t. How long depends on the warp,
// never on the lane, because what follows may need whole warps. There are no branches and few
// registers: wgmma products are in flight here, and where registers run out the compiler waits for
// one product before the next, so that a race between them could not show.

// Every warp is quick for some 8192 cycles and slow for others, so that at times a role lags far
// behind the others. Pauses drawn one by one would average out.
__device__ __forceinline__ void jitter() {
  uint32_t now, warp;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  const uint32_t mood = ((now >> 13) + warp) * 0x9e3779b1u >> 29;
  __nanosleep(now * 0xc2b2ae3du >> 22 >> mood);
}

// For places where reading the clock would cause spills: the pause depends on block, warp, barrier
// and parity.
__device__ __forceinline__ void jitter(uint32_t barrier, int parity) {
  const uint32_t seed = blockIdx.x * 57 + threadIdx.x / 32 * 97 + barrier * 5 + parity * 389;
  __nanosleep(seed * 0xc2b2ae3du >> 22);
}

#else

__device__ __forceinline__ void jitter() {}
__device__ __forceinline__ void jitter(uint32_t, int) {}

#endif

}  // namespace dualkv::ptx
