// Bulk copies between global and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dualkv::ptx {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Loads the box at (column, head, row) of a packed (row, head, column) tensor; zeros outside the tensor.
__device__ __forceinline__ void tma_load_3d(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int column,
                                            int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}

}  // namespace dualkv::ptx
