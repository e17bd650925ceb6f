// SPDX-License-Identifier: BSD-3-Clause
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

// Ordinary writes need a fence before the copy engine or a product of a warpgroup may touch the
// same bytes: without it they find NaN, or leave it. Of each chunk of 16 bytes: the thread, counted
// from 1, that has written there since its last fence.
constexpr int kChunk = 16;
inline uint16_t unfenced[sizeof(shared_memory) / kChunk];
inline std::map<unsigned, std::vector<uint32_t>> unfenced_of;  // chunks of each thread
inline const bool resets_fences = reset_between_blocks([] {
  std::memset(unfenced, 0, sizeof(unfenced));
  unfenced_of.clear();
});

// Where an ordinary instruction writes `bytes`.
inline uint8_t* written_pointer(uint32_t address, size_t bytes, size_t alignment) {
  uint8_t* pointer = shared_pointer(address, bytes, alignment);
  const uint32_t chunk = address / kChunk;
  if (unfenced[chunk] != threadIdx.x + 1) unfenced_of[threadIdx.x].push_back(chunk);
  unfenced[chunk] = static_cast<uint16_t>(threadIdx.x + 1);
  return pointer;
}

inline void fence_own_writes() {
  std::vector<uint32_t>& chunks = unfenced_of[threadIdx.x];
  for (const uint32_t chunk : chunks) {
    if (unfenced[chunk] == threadIdx.x + 1) unfenced[chunk] = 0;
  }
  chunks.clear();
}

// What the copy engine or a product reads of a chunk.
inline const uint8_t* read_behind_fences(uint32_t address) {
  alignas(kChunk) static const uint64_t nothing[2] = {~uint64_t{0}, ~uint64_t{0}};
  return unfenced[address / kChunk] ? reinterpret_cast<const uint8_t*>(nothing) : shared_memory + address;
}

// What the copy engine leaves in a chunk: 16 bytes, or zeros without a source.
inline void write_behind_fences(uint32_t address, const uint8_t* source) {
  const bool is_fenced = unfenced[address / kChunk] == 0;
  uint8_t* to = shared_memory + address;
  is_fenced && source ? std::memcpy(to, source, kChunk) : std::memset(to, is_fenced ? 0 : 0xff, kChunk);
}

// The place of an address in tiles of 128-byte rows whose 16-byte chunks are permuted.
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
