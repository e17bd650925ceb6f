// SPDX-License-Identifier: BSD-3-Clause
// Copies of keys, which lie in pages, and of queries into tiles of decoding. The first
// kDecodeThreads threads of a block order them, asynchronously, 16 bytes at a time; the caller
// waits for them.
#pragma once

#include "decode/kernel_params.h"
#include "ptx/cp_async.h"
#include "tile/smem_tile.h"

namespace dualkv {

// A tile, and the page table's entry for the lane-th 16 rows of pages that it touches. It is read a
// step before it is needed, and nothing is computed from it until then: threads issue in order, and
// would wait for it.
struct FetchedPages {
  DecodeTile tile;
  int entry, row;  // row: the first of the 16 in its page
};
// The same with the offsets of that row in K and in V.
struct LocatedPages {
  DecodeTile tile;
  int64_t k, v;
};

// Some of the columns of a tile, in the order in which they are meant: kCount turns of a thread, or
// panels. All of them are:
template <int kCount_>
struct AllTurns {
  static constexpr int kCount = kCount_;
  DUALKV_HD static constexpr int turn(int i) { return i; }
};

// A thread copies one 16-byte chunk of every kRowsAtOnce-th row, or, where threads are no multiple
// of the chunks of a row, one of each of its panels.
template <typename T, class TileQ, class TileKv>
struct PagedRows {
  static constexpr int kRowChunks = TileKv::kCols / 8;
  static constexpr int kChunks = kDecodeThreads % kRowChunks == 0 ? kRowChunks : TileKv::kPanelChunks;
  static constexpr int kTurns = kRowChunks / kChunks, kRowsAtOnce = kDecodeThreads / kChunks;
  static constexpr int kQuerySteps = kDecodeRows / kRowsAtOnce;

  const DecodeParams<T>& p;
  const int lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
  const int slabs = p.table.page_size / kPageRows;
  const float slabs_inverse = 1.f / slabs;

  __device__ __forceinline__ FetchedPages fetch(int request, const DecodeTile& tile) const {
    return fetch(request, tile, lane);
  }
  // The same for the 16 rows of this number.
  __device__ __forceinline__ FetchedPages fetch(int request, const DecodeTile& tile, int number) const {
    const int slab = tile.position / kPageRows + number;
    // Exact below 2^21 slabs, which DecodeMemory asks for, and a fifth of an integer division.
    const int column = static_cast<int>((slab + 0.5f) * slabs_inverse);
    return {tile, p.table.entry(request, column), (slab - column * slabs) * kPageRows};
  }
  __device__ __forceinline__ LocatedPages locate(const FetchedPages& at) const {
    const int page = p.table.page_of(at.entry);
    return {at.tile, page * p.k.page_stride + at.row * p.k.row_stride,
            page * p.v.page_stride + at.row * p.v.row_stride};
  }

  // The first of the 16 among the rows of all pages, which are so many a page.
  __device__ __forceinline__ int row_of(const FetchedPages& at, int64_t rows_of_page) const {
    return static_cast<int>(p.table.page_of(at.entry) * rows_of_page) + at.row;
  }

  // Keys of an item that folds leave the L2 cache before its state does.
  __device__ __forceinline__ static uint64_t policy_of(const DecodeItem& item) {
    return item.folds > 0 ? ptx::evict_first() : ptx::evict_normally();
  }
  template <class Turns = AllTurns<kTurns>>
  __device__ __forceinline__ void copy_k(uint32_t tile, const LocatedPages& at, int kv_head, uint64_t policy) const {
    copy<Turns>(tile, p.k, at.k, at.tile, kv_head, policy);
  }
  __device__ __forceinline__ void copy_v(uint32_t tile, const LocatedPages& at, int kv_head, uint64_t policy) const {
    copy<AllTurns<kTurns>>(tile, p.v, at.v, at.tile, kv_head, policy);
  }

  // Rows of q that the thread copies of the item's rows from `first` on, kRowsAtOnce apart.
  template <int kSteps>
  __device__ __forceinline__ void find_queries(const DecodeItem& item, int (&rows)[kSteps], int first = 0) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first + row0 + i * kRowsAtOnce;
      rows[i] = row < item.rows ? p.query(item.row + row) : 0;
    }
  }
  // Rows after the item's keep what they had: they are computed and never stored.
  template <int kSteps>
  __device__ __forceinline__ void copy_queries(uint32_t tile, const DecodeItem& item, int kv_head,
                                               const int (&rows)[kSteps], int first = 0) const {
    const int heads = p.shape.heads_per_group();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first + row0 + i * kRowsAtOnce;
      if (row >= item.rows) continue;
      const T* const source = p.q.at(rows[i], kv_head * heads + (item.row + row) % heads) + chunk * 8;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        ptx::cp_async_16(place<TileQ>(tile, row) + turn * TileQ::kPanelBytes, source + turn * TileQ::kPanelCols, true);
      }
    }
  }

 private:
  template <class Tile>
  __device__ __forceinline__ uint32_t place(uint32_t tile, int row) const {
    return tile + chunk / Tile::kPanelChunks * Tile::kPanelBytes + Tile::chunk_offset(row, chunk % Tile::kPanelChunks);
  }

  // Goes along the 16-row slabs of pages, which the tile's rows need not begin with: a thread's row
  // in the tile, and with it its place in the swizzle, is the same in every slab but for the slab's
  // number. So a copy takes six instructions, where addresses row by row took 26: one warp a
  // scheduler issues 10 copies of a tile, and their latency was longer than that of memory. Rows of
  // a page after the last key are never read: the tile gets zeros for them.
  template <class Turns>
  __device__ __forceinline__ void copy(uint32_t tile, const PagedTensor<const T>& from, int64_t offset,
                                       const DecodeTile& keys, int kv_head, uint64_t policy) const {
    constexpr int kCopies = kPageRows / kRowsAtOnce;  // of a slab, by each thread
    const int first_row = row0 - keys.position % kPageRows;
    const T* const source = from.data + kv_head * from.head_stride + chunk * 8 + row0 * from.row_stride;
    uint32_t places[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) places[i] = place<TileKv>(tile, first_row + i * kRowsAtOnce);
#pragma unroll
    for (int slab = 0; slab <= TileKv::kRows / kPageRows; ++slab) {
      const T* row_source = source + __shfl_sync(0xffffffffu, offset, slab);
#pragma unroll
      for (int i = 0; i < kCopies; ++i, row_source += kRowsAtOnce * from.row_stride) {
        const int row = first_row + slab * kPageRows + i * kRowsAtOnce;
        if (static_cast<unsigned>(row) >= TileKv::kRows) continue;
#pragma unroll
        for (int j = 0; j < Turns::kCount; ++j) {
          const int turn = Turns::turn(j);
          const uint32_t to = places[i] + slab * (kPageRows * TileKv::kRowBytes) + turn * TileKv::kPanelBytes;
          ptx::cp_async_16(to, row_source + turn * TileKv::kPanelCols, row < keys.valid, policy);
        }
      }
    }
  }
};

}  // namespace dualkv
