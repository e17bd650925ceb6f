// Tiles as wgmma and the copy engine see them, and products of a warpgroup over them.
#pragma once

#include "core/smem_tile.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/warpgroup.h"
#include "ptx/wgmma.h"

namespace dualkv::sm90 {

// Descriptor of an operand made of 128-byte swizzled rows. Groups of 8 rows lie 1024 bytes apart; `panel_bytes` is
// the distance of panels of 64 columns, which matters where the columns are the M or N dimension.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int panel_bytes) {
  return (static_cast<uint64_t>(1) << 62) | (static_cast<uint64_t>(1024 >> 4) << 32) |
         (static_cast<uint64_t>(panel_bytes >> 4) << 16) | ((address & 0x3ffff) >> 4);
}

// Operand whose K dimension runs along the columns of a tile: the k-th step of 16.
template <class Tile>
__device__ __forceinline__ uint64_t along_columns(uint32_t tile, int k) {
  static_assert(Tile::kPanelCols == 64, "128-byte swizzle");
  return descriptor(tile + (k / 4) * Tile::kPanelBytes + (k % 4) * 32, Tile::kPanelBytes);
}

// Operand whose K dimension runs along the rows of a tile.
template <class Tile>
__device__ __forceinline__ uint64_t along_rows(uint32_t tile, int k) {
  static_assert(Tile::kPanelCols == 64, "128-byte swizzle");
  return descriptor(tile + k * (16 * Tile::kRowBytes), Tile::kPanelBytes);
}

// One mbarrier a stage, and the phase its user is in.
struct PipelineState {
  int stage = 0, phase = 0;

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Loads rows [row, row + kRows) of one head, panel by panel, onto one barrier.
template <class Tile>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap& map, uint32_t barrier, int head, int row) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::tma_load_3d(tile + panel * Tile::kPanelBytes, map, barrier, panel * Tile::kPanelCols, head, row);
  }
}

}  // namespace dualkv::sm90
