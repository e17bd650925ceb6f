// SPDX-License-Identifier: BSD-3-Clause
// With whom a request shares its first tiles. Every request claims the pages of the keys that it
// may share; of all claims on a page that of the first request counts. A request follows the owner
// of the last page before the first that it owns itself, for as many pages as both have in common:
//
//     request 0   | 7 | 3 | 9 |             owns 7 3 9
//     request 1   | 7 | 3 | 9 | 4 | 5 |     owns 4 5, follows 0 for three pages
//     request 2   | 7 | 3 | 9 | 4 | 8 |     owns 8, follows 1 for four pages
#pragma once

#include "decode/plan.h"

namespace dualkv {

// Keys that others may read for a request: those before its cut that all its queries see.
DUALKV_HD int shareable_keys(int queries, int cut, int keys) {
  // Without a branch, in which compilers would read the last operands: one read after the other.
  return max_int(min_int(cut, keys - queries + 1), 0) * min_int(queries, 1);
}
DUALKV_HD int shareable_keys(const DecodeRequests& all, int request) {
  return shareable_keys(all.queries(request), all.cut(request), all.keys(request));
}

// Claims of a step; those of the first request and column are the largest.
struct Claims {
  unsigned step, columns;

  DUALKV_HD unsigned long long of(int request, int column) const {
    return static_cast<unsigned long long>(step) << 32 | ~(static_cast<unsigned>(request) * columns + column);
  }
  DUALKV_HD int request(unsigned long long claim) const {
    return static_cast<int>(~static_cast<unsigned>(claim) / columns);
  }
};

// The plan counts its steps when it is done.
__device__ inline Claims claims_of(const DecodePlanArgs& a) {
  return {*a.step + 1, static_cast<unsigned>(a.requests.table.columns)};
}

__device__ inline bool is_page(const PageTable& table, int entry) { return entry >= 0 && entry < table.num_pages; }

__device__ inline void claim_page(const DecodePlanArgs& a, int request, int column) {
  const PageTable& table = a.requests.table;
  if (request >= a.requests.count() || column >= table.columns) return;
  // All is read at the same time.
  const Claims claims = claims_of(a);
  const int before = max_int(request - 1, 0);
  const int entry = table.entry(request, column), entry_before = table.entry(before, column);
  const int keys = shareable_keys(a.requests, request), keys_before = shareable_keys(a.requests, before);
  const int position = column * table.page_size;
  if (position >= keys || !is_page(table, entry)) return;
  // Siblings are often neighbours: whose neighbour has the larger claim on the page needs none.
  if (before < request && position < keys_before && entry == entry_before) return;
  atomicMax(&a.owners[entry], claims.of(request, column));
}

constexpr int kPrefixThreads = 128;  // of the block of a request
constexpr int kColumnsAtATime = 4;   // of a thread

// Entries of neighbouring columns of a request, some in each thread.
struct Columns {
  static constexpr int kCount = kPrefixThreads * kColumnsAtATime;

  int begin;
  int entries[kColumnsAtATime];

  __device__ Columns(const PageTable& table, int request, int begin_) : begin(begin_) {
#pragma unroll
    for (int i = 0; i < kColumnsAtATime; ++i) {
      entries[i] = column(i) < table.columns ? table.entry(request, column(i)) : -1;
    }
  }
  __device__ int column(int i) const { return begin + i * kPrefixThreads + static_cast<int>(threadIdx.x); }
};

// The first of a request's columns [0, count) for which `holds`, or `count`; `columns` are the
// first ones. The block calls it once with each type of `holds`, as that has its shared memory.
template <class Holds>
__device__ inline int find_column(const PageTable& table, int request, Columns columns, int count, Holds holds) {
  constexpr int kWarps = kPrefixThreads / 32;
  __shared__ int firsts[2][kWarps];
  for (int turn = 0;; turn ^= 1) {
    int first = count;
#pragma unroll
    for (int i = kColumnsAtATime - 1; i >= 0; --i) {
      // Without a branch, so that what `holds` reads for all columns is read at the same time.
      const bool is_found = holds(columns.column(i), columns.entries[i]);
      if (is_found && columns.column(i) < count) first = columns.column(i);
    }
    first = __reduce_min_sync(0xffffffffu, first);
    if (threadIdx.x % 32 == 0) firsts[turn][threadIdx.x / 32] = first;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) first = min_int(first, firsts[turn][warp]);
    const int next = columns.begin + Columns::kCount;
    if (first < count || next >= count) return first;
    columns = Columns(table, request, next);
  }
}

// Parent of a request and the number of columns that both share. Runs as one block; calls
// wait() before it reads what the claims' launch wrote.
template <class Wait>
__device__ inline void find_prefix(const DecodePlanArgs& a, int request, Wait wait) {
  const PageTable& table = a.requests.table;
  const Claims claims = claims_of(a);
  const Columns columns(table, request, 0);
  const int shareable = ceil_div(shareable_keys(a.requests, request), table.page_size);
  wait();
  const auto claim_on = [&](int entry) { return a.owners[clamp_int(entry, 0, table.num_pages - 1)]; };
  const int own = find_column(table, request, columns, shareable, [&](int column, int entry) {
    return claim_on(entry) == claims.of(request, column) && is_page(table, entry);
  });
  const int last = own > 0 ? table.entry(request, own - 1) : -1;  // claimed in this step, if it is a page
  const int parent = is_page(table, last) ? claims.request(claim_on(last)) : -1;
  int common = 0;
  if (parent >= 0 && parent < request) {
    common = find_column(table, request, columns, own, [&](int column, int entry) {
      return entry != table.entry(parent, column);
    });
  }
  if (threadIdx.x > 0) return;
  a.parents[request] = common > 0 ? parent : -1;
  a.shared_columns[request] = common;
}

}  // namespace dualkv
