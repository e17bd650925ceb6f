// Dynamic shared memory, at 32-bit addresses, and the barriers in it.
#pragma once

#include <cstring>

#include "threads.h"

namespace host_cuda {

constexpr size_t kSharedBytes = 227 * 1024;
constexpr uint32_t kSharedBegin = 1024 + 128;  // behind static shared memory, on the one boundary that kernels ask for
alignas(1024) inline uint8_t shared_memory[kSharedBegin + kSharedBytes];
inline size_t shared_end = 0;

inline uint8_t* dynamic_shared() { return shared_memory + kSharedBegin; }

// Every 16-bit float and every 32-bit float becomes NaN.
inline void poison_shared(size_t bytes) {
  if (bytes > kSharedBytes) throw std::runtime_error("more shared memory than a multiprocessor has");
  shared_end = kSharedBegin + bytes;
  std::memset(dynamic_shared(), 0xff, bytes);
}

// `bytes` at an address, which lies on a boundary of `alignment`.
inline uint8_t* shared_pointer(uint32_t address, size_t bytes, size_t alignment) {
  if (address < kSharedBegin || address + bytes > shared_end) {
    fail(std::to_string(bytes) + " bytes at " + std::to_string(address) + " are not in shared memory");
  }
  if (address % alignment) fail("shared address " + std::to_string(address) + " is not aligned");
  return shared_memory + address;
}

template <typename T>
T& shared_at(uint32_t address) {
  return *reinterpret_cast<T*>(shared_pointer(address, sizeof(T), sizeof(T)));
}

// Of an address in tiles of 128-byte rows whose 16-byte chunks are permuted.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// mbarrier: phases end when all arrivals and all announced bytes have come.
struct TransactionBarrier {
  uint16_t arrivals, pending;  // of each phase, and still to come
  uint32_t phase : 1;
  int32_t bytes : 31;

  void end_phase() {
    if (pending > 0 || bytes != 0) return;
    pending = arrivals;
    phase ^= 1;
  }
  void arrive() {
    if (pending == 0 || arrivals == 0) fail("an mbarrier with more arrivals than it was made for");
    --pending;
    end_phase();
  }
  void complete(int copied) {
    bytes -= copied;
    end_phase();
  }
};
static_assert(sizeof(TransactionBarrier) == 8);

}  // namespace host_cuda
