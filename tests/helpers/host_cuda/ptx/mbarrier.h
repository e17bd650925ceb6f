// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/mbarrier.h on the host.
#pragma once

#include "shared_memory.h"

namespace dualkv::ptx {

using host_cuda::TransactionBarrier;

inline TransactionBarrier& barrier_at(uint32_t barrier) { return host_cuda::shared_at<TransactionBarrier>(barrier); }

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  barrier_at(barrier) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void mbarrier_init_fence() {}

inline void mbarrier_arrive(uint32_t barrier) { barrier_at(barrier).arrive(); }

inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  barrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_wait(uint32_t barrier, int parity) {
  const TransactionBarrier& waited = barrier_at(barrier);
  host_cuda::wait_until("an mbarrier", [&waited, parity] { return waited.phase != static_cast<uint32_t>(parity); });
}

}  // namespace dualkv::ptx
