// SPDX-License-Identifier: BSD-3-Clause
// What the kernels receive. Row and head strides are in elements; the last dimension is contiguous.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/schedule.h"
#include "core/softcap.h"

namespace dualkv {

template <typename T>
struct TensorView {
  T* data;
  int64_t row_stride, head_stride;

  DUALKV_HD T* at(int64_t row, int head) const { return data + row * row_stride + head * head_stride; }
};

// The keys and values (or their gradients) of one region.
template <typename T>
struct KvPair {
  TensorView<T> k, v;
};

// Keys and values wherever they live: the one place where a region picks a base pointer.
template <typename T>
struct KvRegions {
  KvPair<T> keys, decoded;

  DUALKV_HD const KvPair<T>& of(Region region) const { return region == Region::keys ? keys : decoded; }
};

struct ProblemShape {
  int q_rows;
  int num_heads, num_kv_heads;
  int head_dim, head_dim_v;  // of q and k, and of v and the output
  float softmax_scale;
  Visibility sees;
  Softcap softcap;
  int num_sms;

  DUALKV_HD int heads_per_group() const { return num_heads / num_kv_heads; }
};

// A work list in device memory; its length is only known there.
template <typename Item>
struct WorkList {
  const Item* items;
  const int* count;
  int capacity;
  // A counter from which blocks take items, zero at launch; null: blockIdx is their item.
  int* next = nullptr;
  const BackwardOrder* order = nullptr;  // of a list of BackwardItem
  const int* in_local_order = nullptr;  // indices of the items in the order of local heads
};

template <typename T>
struct ForwardParams {
  ProblemShape shape;
  NodeTable nodes;
  WorkList<ForwardItem> work;
  TensorView<const T> q;
  KvRegions<const T> kv;
  TensorView<T> out;
  float* lse;          // (num_heads, q_rows)
  const float* sinks;  // (num_heads): a score that joins each softmax and has no value; or null
  int packed_heads;    // query heads that share a tile

  DUALKV_HD float sink(int head) const { return sinks ? sinks[head] : -INFINITY; }
};

// What the backward needs of every query row: lse_log2 is LSE * log2(e), or 0 for a row that sees
// no key; `delta` is rowsum(dO * O) - dLSE. Rows are padded to whole query tiles, and both are 0 in
// the padding.
struct RowStatistics {
  float* lse_log2;  // (packs, padded_rows * heads of a pack)
  float* delta;     // the same
  int64_t padded_rows;
  Pack heads;  // that share a query tile of the kernel that reads both

  static constexpr int kPadding = 128;

  // Every 16 rows are stored in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15: where queries
  // are the columns of an accumulator, these are the four of one thread, and it reads them with one
  // load.
  DUALKV_HD int64_t index_in_pack(int pack, int64_t row) const {
    const int within = row % 16;
    return (pack * padded_rows << heads.log2) + (row - within) + within % 8 / 2 * 4 + within / 8 * 2 + within % 2;
  }
  DUALKV_HD int64_t index(int head, int64_t row) const {
    return index_in_pack(head >> heads.log2, (row << heads.log2) + heads.of_row(head));
  }
};

constexpr int kDqAdders = 2;  // warps of a block, each with its part of every dQ

template <typename T>
struct BackwardParams {
  ProblemShape shape;
  NodeTable nodes;
  WorkList<BackwardItem> work;
  TensorView<const T> q, dout;
  KvRegions<const T> kv;
  KvRegions<T> dkv;
  RowStatistics statistics;
  float* dq_sum;  // (packs, q tiles, block_m * kHeadDim) in fragment order; null: no dQ
  // (slots, 2, block_n, kHeadDim): partial dK and dV of split tiles; dV may leave columns unused.
  float* dkv_slots;
  // (items, KV heads, kDqAdders), zero at launch, with deterministic sums of dQ; null: in any
  // order.
  uint64_t* dq_semaphores;

  DUALKV_HD uint64_t* dq_semaphore(int item, int kv_head, int adder) const {
    return dq_semaphores + (int64_t{item} * shape.num_kv_heads + kv_head) * kDqAdders + adder;
  }
};

// dQ alone, one owner per query tile.
template <typename T>
struct BackwardDqParams {
  ProblemShape shape;
  NodeTable nodes;
  WorkList<ForwardItem> work;
  TensorView<const T> q, dout;
  KvRegions<const T> kv;
  RowStatistics statistics;
  TensorView<T> dq;
  Pack heads;  // that share a query tile
};

// What the backward leaves in fp32: the sums of dQ (null: there are none) and the parts of split
// tiles.
template <typename T>
struct ConvertParams {
  ProblemShape shape;
  NodeTable nodes;
  const float* dq_sum;
  TensorView<T> dq;
  WorkList<SplitTile> splits;
  const float* dkv_slots;
  KvRegions<T> dkv;
  int block_n, padded_head_dim;
  Pack heads;
};

template <typename T>
struct RowStatisticsParams {
  ProblemShape shape;
  TensorView<const T> out, dout;
  const float* lse;   // (num_heads, q_rows)
  const float* dlse;  // (num_heads, q_rows), or null
  RowStatistics statistics;
};

}  // namespace dualkv
