// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/tma.h on the host. Copies happen at any time between the order and what waits for them.
#pragma once

#include <cuda.h>

#include "ptx/mbarrier.h"

namespace dualkv::ptx {

inline void tma_load_3d(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column, int head, int row) {
  if (map.element_bytes == 0) host_cuda::fail("a load through a tensor map that was never made");
  const int row_bytes = static_cast<int>(map.box[0] * map.element_bytes);
  const int bytes = row_bytes * static_cast<int>(map.box[1] * map.box[2]);
  host_cuda::shared_pointer(shared, bytes, 1024);
  // The thread may have ended by then, and its parameters with it.
  host_cuda::defer([=, map = map, &completed = barrier_at(barrier)] {
    uint32_t address = shared;
    for (int64_t r = row; r < row + int64_t{map.box[2]}; ++r) {
      for (int64_t h = head; h < head + int64_t{map.box[1]}; ++h, address += row_bytes) {
        const bool inside = r >= 0 && r < static_cast<int64_t>(map.sizes[2]) && h >= 0 &&
                            h < static_cast<int64_t>(map.sizes[1]);
        for (uint32_t chunk = 0; chunk < 8; ++chunk) {
          // Head dims are multiples of 8: a chunk exists as a whole or not at all.
          const int64_t c = int64_t{column} + chunk * 8;
          const bool exists = inside && c >= 0 && c < static_cast<int64_t>(map.sizes[0]);
          const uint8_t* from = map.data + r * map.strides[1] + h * map.strides[0] + c * 2;
          host_cuda::write_behind_fences(host_cuda::swizzled(address + chunk * 16), exists ? from : nullptr);
        }
      }
    }
    completed.complete(bytes);
  });
}

inline void check_bulk(const void* global, uint32_t shared, int bytes) {
  host_cuda::shared_pointer(shared, bytes, 16);
  if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) host_cuda::fail("a bulk copy that is not aligned");
}

inline void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  check_bulk(global, shared, bytes);
  host_cuda::defer([=, &completed = barrier_at(barrier)] {
    for (int i = 0; i < bytes; i += 16) {
      host_cuda::write_behind_fences(shared + i, static_cast<const uint8_t*>(global) + i);
    }
    completed.complete(bytes);
  });
}

inline void bulk_reduce_add(float* global, uint32_t shared, int bytes) {
  check_bulk(global, shared, bytes);
  host_cuda::defer([=] {
    for (int i = 0; i < bytes / 4; ++i) {
      global[i] += reinterpret_cast<const float*>(host_cuda::read_behind_fences(shared + i / 4 * 16))[i % 4];
    }
  });
}

inline void bulk_commit() {}
// Loads have barriers: threads that reduce order no loads.
inline void bulk_wait() {
  const int& open = host_cuda::machine.deferred_of[threadIdx.x];
  host_cuda::wait_until("its bulk reductions", [&open] { return open == 0; });
}
inline void bulk_wait_read() { bulk_wait(); }

}  // namespace dualkv::ptx
