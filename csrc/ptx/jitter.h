// Random pauses in front of every barrier, in builds that look for races (DUALKV_JITTER=1, tests/jitter.py): whoever
// relies on another being early or late by chance, and not on a barrier, then gets wrong results soon.
#pragma once

#include <cstdint>

namespace dualkv::ptx {

#ifdef DUALKV_JITTER

// Both sleep up to 2 microseconds: of an argument t of __nanosleep, 0 to 2 t. How long depends on the warp, never on the
// lane, because what follows may need whole warps. There are no branches and few registers: products are in flight here,
// and where registers run out the compiler lets products wait for each other, so that a race with them cannot show.

// Every warp is quick in some epochs of 8192 cycles and slow in others, so that each role at times lags far behind the
// others, which pauses drawn one by one would average out.
__device__ __forceinline__ void jitter() {
  uint32_t now, warp;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  const uint32_t mood = ((now >> 13) + warp) * 0x9e3779b1u >> 29;
  __nanosleep(now * 0xc2b2ae3du >> 22 >> mood);
}

// Where the clock cannot be read without spills: as long as block, warp, barrier and parity say.
__device__ __forceinline__ void jitter(uint32_t barrier, int parity) {
  const uint32_t seed = blockIdx.x * 57 + threadIdx.x / 32 * 97 + barrier * 5 + parity * 389;
  __nanosleep(seed * 0xc2b2ae3du >> 22);
}

#else

__device__ __forceinline__ void jitter() {}
__device__ __forceinline__ void jitter(uint32_t, int) {}

#endif

}  // namespace dualkv::ptx
