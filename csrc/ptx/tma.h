// SPDX-License-Identifier: BSD-3-Clause
// Bulk copies between global and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dualkv::ptx {

// Loads the box at (column, head, row) of a packed (row, head, column) tensor; zeros outside the
// tensor.
__device__ __forceinline__ void tma_load_3d(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column,
                                            int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}

// Loads `bytes` contiguous bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(reinterpret_cast<uint64_t>(global)), "r"(bytes), "r"(barrier)
               : "memory");
}

// Adds `bytes` contiguous bytes of floats to global memory, as part of this thread's current group
// of bulk copies.
__device__ __forceinline__ void bulk_reduce_add(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   reinterpret_cast<uint64_t>(global)),
               "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns once this thread's groups are complete.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Returns once they have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace dualkv::ptx
