// SPDX-License-Identifier: BSD-3-Clause
// Tiles as wgmma and TMA see them, products of a warpgroup over them, and pipeline barriers.
#pragma once

#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/warpgroup.h"
#include "ptx/wgmma.h"
#include "sm90/config.h"
#include "tile/smem_tile.h"
#include "tile/store_row.h"

namespace dualkv::sm90 {

// wgmma descriptor of an operand in 128-byte swizzled rows, `offset` bytes into a tile. Groups of 8
// rows are 1024 bytes apart; the panel stride matters where the columns are the M or N dimension.
// Only the low word varies, by an addition: a descriptor costs one instruction after the first of
// its tile.
template <class Tile>
__device__ __forceinline__ uint64_t descriptor(uint32_t tile, uint32_t offset) {
  static_assert(Tile::kPanelCols == 64, "128-byte swizzle");
  const uint32_t high = (1u << 30) | (1024 >> 4);
  const uint32_t low = (tile >> 4) | (static_cast<uint32_t>(Tile::kPanelBytes >> 4) << 16);
  return (static_cast<uint64_t>(high) << 32) | (low + (offset >> 4));
}

// Operand whose K dimension is along the columns of a tile: step k of 16.
template <class Tile>
__device__ __forceinline__ uint64_t along_columns(uint32_t tile, int k) {
  return descriptor<Tile>(tile, (k / 4) * Tile::kPanelBytes + (k % 4) * 32);
}

// Operand whose K dimension is along the rows of a tile.
template <class Tile>
__device__ __forceinline__ uint64_t along_rows(uint32_t tile, int k) {
  return descriptor<Tile>(tile, k * (16 * Tile::kRowBytes));
}

// Address of a tile from a column on, a multiple of 8. Inside a panel, a product must not read past
// that panel.
template <class Tile>
__device__ __forceinline__ uint32_t from_column(uint32_t tile, int column) {
  return tile + column / Tile::kPanelCols * Tile::kPanelBytes + column % Tile::kPanelCols * 2;
}

// Rows of X times rows of Y over all columns: S or dP. Tensor cores truncate what they add to a
// sum, 16 products at a time. For more than 256 columns the result is the sum of three shorter
// sums, so that it is as exact as for heads half as wide. kBeside: how many of the additional sums
// fit in registers.
template <typename T, class TileX, class TileY, int kN8, int kBeside = 2>
struct RowProducts {
  static constexpr int kSteps = TileX::kCols / 16, kSums = TileX::kCols > 256 ? 3 : 1;
  static constexpr int kStepsOfSum = ceil_div(kSteps, kSums);
  float beside[kSums > 1 ? kBeside : 1][kN8][4];

  // Issues the products; the caller commits. If not all sums fit in registers nothing else may be
  // in flight: issue() then waits for two sums before it issues the third. Columns may be taken in
  // another order, and before(sum) wait for those of a sum.
  __device__ __forceinline__ void issue(float (&acc)[kN8][4], uint32_t x, uint32_t y) {
    issue(acc, x, y, [](int step) { return step; }, [](int) {});
  }
  template <class Order, class Before>
  __device__ __forceinline__ void issue(float (&acc)[kN8][4], uint32_t x, uint32_t y, Order order, Before before) {
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) {
      before(sum);
      if (sum > kBeside) {
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        take(acc);
        ptx::wgmma_fence();
      }
#pragma unroll
      for (int step = sum * kStepsOfSum; step < kSteps && step < (sum + 1) * kStepsOfSum; ++step) {
        ptx::Wgmma<T, kN8 * 8>::template ss<0, 0>(sum == 0 ? acc : beside[(sum - 1) % kBeside],
                                                  along_columns<TileX>(x, order(step)),
                                                  along_columns<TileY>(y, order(step)), step > sum * kStepsOfSum);
      }
    }
  }

  // Adds the partial sums, after the wait for them.
  __device__ __forceinline__ void take(float (&acc)[kN8][4]) {
    ptx::pin(acc);
    if constexpr (kSums > 1) {
#pragma unroll
      for (int i = 0; i < kBeside; ++i) {
        ptx::pin(beside[i]);
#pragma unroll
        for (int j = 0; j < kN8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[j][e] += beside[i][j][e];
      }
    }
  }
};

// Returns `address` (step >> 30 is 0), which the compiler does not know. Otherwise it computes the
// descriptors of a constant tile once, before the loop, and spills them.
__device__ __forceinline__ uint32_t varying(uint32_t address, int step) { return address + (step >> 30); }

// Position in a ring of buffers: stage, and the phase parity that mbarriers need.
template <int kStages>
struct PipelineState {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  __device__ __forceinline__ PipelineState next() const {
    PipelineState state = *this;
    state.advance();
    return state;
  }
  __device__ __forceinline__ PipelineState previous() const {
    return stage > 0 ? PipelineState{stage - 1, phase} : PipelineState{kStages - 1, phase ^ 1};
  }

  // Position in a ring of kSize places: as many as stages, or twice as many.
  template <int kSize>
  __device__ __forceinline__ int place() const {
    static_assert(kSize == kStages || kSize == 2 * kStages, "places of whole turns");
    return kSize == kStages ? stage : stage + phase * kStages;
  }
};

// Full and empty barriers of one pipeline buffer, between the producer (a thread, or several warps)
// and the consumer warps.
struct PipelineBarrier {
  uint32_t barrier;  // two mbarriers: full, empty

  __device__ __forceinline__ uint32_t full() const { return barrier; }
  __device__ __forceinline__ uint32_t empty() const { return barrier + 8; }

  __device__ __forceinline__ void init(int consumer_warps, int producers = 1) const {
    ptx::mbarrier_init(full(), producers);
    ptx::mbarrier_init(empty(), consumer_warps);
  }
  // Producer. In the first phase the buffer is empty.
  __device__ __forceinline__ void wait_empty(int phase) const { ptx::mbarrier_wait(empty(), phase ^ 1); }
  __device__ __forceinline__ void expect(int bytes) const { ptx::mbarrier_arrive_expect(full(), bytes); }
  // Producers that are warps: each warp arrives.
  __device__ __forceinline__ void announce(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(full());
  }
  // Consumers: each warp arrives.
  __device__ __forceinline__ void wait_full(int phase) const { ptx::mbarrier_wait(full(), phase); }
  __device__ __forceinline__ void release(int lane) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty());
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
