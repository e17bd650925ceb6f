// Random pauses in front of every barrier, in builds that look for races (DUALKV_JITTER=1, tests/jitter.py): whoever
// relies on another being early or late by chance, and not on a barrier, then gets wrong results soon.
#pragma once

#include <cstdint>

namespace dualkv::ptx {

#ifdef DUALKV_JITTER

constexpr uint32_t kJitterEpoch = 1 << 13;  // ns

__device__ __forceinline__ uint32_t scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Sleeps up to 2 microseconds. How long depends on the warp, never on the lane: what follows may need whole warps.
// Every warp is quick in some epochs and slow in others, so that each role at times lags far behind the others, which
// pauses drawn one by one would average out. No branches: products are in flight here.
__device__ __forceinline__ void jitter() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  const uint32_t warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const uint32_t mood = scramble(static_cast<uint32_t>(now / kJitterEpoch) ^ scramble(warp));
  const uint32_t draw = scramble(static_cast<uint32_t>(clock64()) ^ mood);
  __nanosleep((draw & 1023) >> (mood % 8));  // of an argument t, 0 to 2 t are slept
}

#else

__device__ __forceinline__ void jitter() {}

#endif

}  // namespace dualkv::ptx
