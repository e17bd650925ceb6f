// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/cp_async.h on the host. A copy happens when the thread orders it or when it waits for
// it, as is drawn.
#pragma once

#include <deque>

#include "ptx/mbarrier.h"

namespace dualkv::ptx {

struct AsyncCopies {
  std::deque<std::vector<std::function<void()>>> groups;  // committed, the oldest first
  std::vector<std::function<void()>> open;
};
inline std::map<unsigned, AsyncCopies> async_copies;  // of each thread
inline const bool resets_copies = host_cuda::reset_between_blocks([] { async_copies.clear(); });

inline void cp_async(uint32_t shared, const void* global, bool read, int bytes) {
  uint8_t* to = host_cuda::shared_pointer(shared, bytes, bytes);
  if (reinterpret_cast<uintptr_t>(global) % bytes) host_cuda::fail("a copy that is not aligned");
  const auto copy = [=] { read ? std::memcpy(to, global, bytes) : std::memset(to, 0, bytes); };
  if (host_cuda::draw(2)) return static_cast<void>(copy());
  async_copies[threadIdx.x].open.push_back(copy);
}

inline void cp_async_16(uint32_t shared, const void* global, bool read) { cp_async(shared, global, read, 16); }
inline uint64_t evict_first() { return 1; }
inline uint64_t evict_normally() { return 0; }
inline void cp_async_16(uint32_t shared, const void* global, bool read, uint64_t) {
  cp_async_16(shared, global, read);
}
inline void cp_async_4(uint32_t shared, const void* global, bool read) { cp_async(shared, global, read, 4); }

inline void cp_async_commit() {
  AsyncCopies& copies = async_copies[threadIdx.x];
  copies.groups.push_back(std::exchange(copies.open, {}));
}

template <int kPending>
inline void cp_async_wait() {
  AsyncCopies& copies = async_copies[threadIdx.x];
  for (; copies.groups.size() > kPending; copies.groups.pop_front()) {
    for (const auto& copy : copies.groups.front()) copy();
  }
}

// Copies happen at any time before the arrival.
inline void cp_async_arrive(uint32_t barrier) {
  AsyncCopies& copies = async_copies[threadIdx.x];
  std::vector<std::function<void()>> all = std::exchange(copies.open, {});
  for (auto& group : std::exchange(copies.groups, {})) all.insert(all.end(), group.begin(), group.end());
  host_cuda::defer([all, &reached = barrier_at(barrier)] {
    for (const auto& copy : all) copy();
    reached.arrive();
  });
}

}  // namespace dualkv::ptx
