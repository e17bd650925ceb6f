// SPDX-License-Identifier: BSD-3-Clause
// What the kernels of decoding receive: pages, the plan's memory, and a call.
#pragma once

#include "core/kernel_traits.h"
#include "decode/geometry.h"
#include "params.h"

namespace dualkv {

// Which pages hold the keys of a request. Contents are clamped at every read: wrong entries give
// wrong numbers, never an access outside the cache.
struct PageTable {
  const int* entries;  // (requests, columns)
  int64_t stride;
  int requests, columns;
  int num_pages, page_size;  // a multiple of kPageRows

  DUALKV_HD int entry(int request, int column) const {
    return entries[clamp_int(request, 0, requests - 1) * stride + clamp_int(column, 0, columns - 1)];
  }
  DUALKV_HD int page_of(int entry) const { return clamp_int(entry, 0, num_pages - 1); }
  DUALKV_HD int page(int request, int column) const { return page_of(entry(request, column)); }
  DUALKV_HD int most_keys() const { return columns * page_size; }
};

constexpr int kPageRows = 16;  // pages are multiples of it

// K or V of a paged cache. Strides are in elements.
template <typename T>
struct PagedTensor {
  T* data;
  int64_t page_stride, row_stride, head_stride;
};

// Requests of a step. Values inside are clamped where they are read.
struct DecodeRequests {
  PageTable table;
  const int* seqlens;       // (requests): keys, those of the queries included
  const int* cu_seqlens_q;  // (requests + 1); null: one query each
  const int* boundaries;    // (requests): where each request's keys are cut; null: nowhere
  // (requests): whose first pages a request has too, and how many; null: the plan looks for them.
  const int *parents, *shared_pages;
  int q_rows;               // rows of q

  DUALKV_HD int count() const { return table.requests; }
  DUALKV_HD int keys(int request) const { return clamp_int(seqlens[request], 0, table.most_keys()); }
  DUALKV_HD int first_query(int request) const {
    return clamp_int(cu_seqlens_q ? cu_seqlens_q[request] : request, 0, q_rows);
  }
  DUALKV_HD int queries(int request) const {
    const int end = clamp_int(cu_seqlens_q ? cu_seqlens_q[request + 1] : request + 1, 0, q_rows);
    return max_int(end - first_query(request), 0);
  }
  DUALKV_HD int cut(int request) const {
    return clamp_int((boundaries ? boundaries : seqlens)[request], 0, keys(request));  // one read, no branch
  }
};

// Lists of items in the plan's memory, longest remaining path first, so that an item comes after
// all that hand states over to it.
struct DecodeLists {
  DecodeItem* shared;  // leaves and branches
  DecodeItem* alone;   // leaves that go to position 0, for windows
  int* counts;         // of both
  int* queries;        // (q_rows): rows of q in the order in which the rows of items count them
  int* splits;         // (q_rows): how many states of each row of q are to be combined
  int shared_capacity, alone_capacity;
};

// What a launch leaves as it found it: all zero.
struct DecodeProgress {
  int* next;     // item that a block takes
  int* exits;    // blocks that are done
  int* arrived;  // (branches, KV heads): items that have handed their states over
  int branches;  // room for them
};

// The states of a row, one for each split or for all that an item folds: between its items, and at
// its end. A row's slot is row of q * num_heads + head.
struct DecodeStates {
  float* out;         // (slots, per_row, head dim): not normalised, in the order of a thread's registers
  float* statistics;  // (slots, per_row, 8): four sums, each a thread's, and four times the maximum
  int per_row;        // the most splits of a row
};

// Pairs of columns that a thread moves at a time: two where registers allow it.
constexpr int state_pairs(Arch arch, int head_dim_v) { return arch == Arch::sm90 && head_dim_v <= 256 ? 2 : 1; }

template <typename T>
struct DecodeParams {
  ProblemShape shape;
  PageTable table;
  TensorView<const T> q;
  PagedTensor<const T> k, v;
  TensorView<T> out;
  float* lse;          // (num_heads, q_rows)
  const float* sinks;  // (num_heads), or null
  const DecodeItem* items;
  const int* count;
  const int* queries;
  DecodeProgress progress;
  DecodeStates states;
  DecodeSplits splits;

  // Row of q of a row of items.
  DUALKV_HD int query(int row) const {
    return clamp_int(queries[row / shape.heads_per_group()], 0, shape.q_rows - 1);
  }
  DUALKV_HD float sink(int head) const { return sinks ? sinks[head] : -INFINITY; }
};

}  // namespace dualkv
