// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/memory.h on the host.
#pragma once

#include "shared_memory.h"

namespace dualkv::ptx {

inline uint32_t shared_address(const void* pointer) {
  const ptrdiff_t address = static_cast<const uint8_t*>(pointer) - host_cuda::shared_memory;
  if (address < 0 || address >= static_cast<ptrdiff_t>(host_cuda::shared_end)) host_cuda::fail("no dynamic shared memory");
  return static_cast<uint32_t>(address);
}

inline void store_shared_32(uint32_t address, uint32_t value) {
  std::memcpy(host_cuda::written_pointer(address, 4, 4), &value, 4);
}
inline void store_shared_128(uint32_t address, const uint4& v) {
  std::memcpy(host_cuda::written_pointer(address, 16, 16), &v, 16);
}

inline uint4 load_shared_128(uint32_t address) {
  uint4 v;
  std::memcpy(&v, host_cuda::shared_pointer(address, 16, 16), 16);
  return v;
}

inline void load_shared_float4(float (&v)[4], uint32_t address) {
  std::memcpy(v, host_cuda::shared_pointer(address, 16, 16), 16);
}
inline void store_shared_float4(uint32_t address, const float (&v)[4]) {
  std::memcpy(host_cuda::written_pointer(address, 16, 16), v, 16);
}

inline void reduce_add_v4(float* address, const float (&v)[4]) {
  if (reinterpret_cast<uintptr_t>(address) % 16) host_cuda::fail("four floats that are not aligned");
  for (int i = 0; i < 4; ++i) address[i] += v[i];
}

// Blocks run one after the other: what a block waits for is there, or never will be.
inline uint64_t load_published(const uint64_t* address) {
  host_cuda::wait_until("a block before it", [address] { return *address != 0; });
  return *address;
}
inline void publish(uint64_t* address, uint64_t value) { *address = value; }

inline void arrive(int* counter) { ++*counter; }
inline void wait_arrived(const int* counter, int arrivals) {
  host_cuda::wait_until("items of blocks before it", [counter, arrivals] { return *counter >= arrivals; });
}

}  // namespace dualkv::ptx
