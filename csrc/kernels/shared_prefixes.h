// SPDX-License-Identifier: BSD-3-Clause
// With whom a request shares its first tiles. Every request claims the pages of the keys that it may
// share; of all claims on a page that of the first request counts. A request follows the owner of
// the last page before the first that it owns itself, for as many pages as both have in common:
//
//     request 0   | 7 | 3 | 9 |             owns 7 3 9
//     request 1   | 7 | 3 | 9 | 4 | 5 |     owns 4 5, follows 0 for three pages
//     request 2   | 7 | 3 | 9 | 4 | 8 |     owns 8, follows 1 for four pages
#pragma once

#include "kernels/decode_plan.h"

namespace dualkv {

// Keys that others may read for a request: those before its cut that all its queries see.
DUALKV_HD int shareable_keys(const DecodeRequests& all, int request) {
  const int queries = all.queries(request);
  return queries > 0 ? max_int(min_int(all.cut(request), all.keys(request) - queries + 1), 0) : 0;
}
DUALKV_HD int shareable_columns(const DecodeRequests& all, int request) {
  return ceil_div(shareable_keys(all, request), all.table.page_size);
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
  if (column >= table.columns) return;
  const int entry = table.entry(request, column);  // read while the lengths are
  if (column >= shareable_columns(a.requests, request) || !is_page(table, entry)) return;
  atomicMax(&a.owners[entry], claims_of(a).of(request, column));
}

constexpr int kPrefixThreads = 128;  // of the block of a request
constexpr int kColumnsAtATime = 4;   // of a thread

// The first of the columns [0, count) for which `holds`, or `count`. `found` is shared memory that
// the block does not use again.
template <class Holds>
__device__ inline int find_column(int count, int& found, Holds holds) {
  if (threadIdx.x == 0) found = count;
  __syncthreads();
  for (int begin = 0; begin < count; begin += kPrefixThreads * kColumnsAtATime) {
    int first = count;
#pragma unroll
    for (int i = kColumnsAtATime - 1; i >= 0; --i) {
      const int column = begin + i * kPrefixThreads + threadIdx.x;
      // Without a branch, so that all columns are read at the same time.
      const bool is_found = holds(min_int(column, count - 1));
      if (is_found && column < count) first = column;
    }
    first = __reduce_min_sync(0xffffffffu, first);
    if (threadIdx.x % 32 == 0 && first < count) atomicMin(&found, first);
    if (__syncthreads_or(first < count)) break;
  }
  return found;
}

// Parent of a request and the number of whole tiles that both share. Runs as one block.
__device__ inline void find_prefix(const DecodePlanArgs& a, int request) {
  __shared__ int first_own, first_other;
  const PageTable& table = a.requests.table;
  const Claims claims = claims_of(a);
  const auto claim_on = [&](int entry) { return a.owners[clamp_int(entry, 0, table.num_pages - 1)]; };
  const int own = find_column(shareable_columns(a.requests, request), first_own, [&](int column) {
    const int entry = table.entry(request, column);
    return claim_on(entry) == claims.of(request, column) && is_page(table, entry);
  });
  const int last = own > 0 ? table.entry(request, own - 1) : -1;  // the request claims it too, in this step
  int parent = is_page(table, last) ? claims.request(claim_on(last)) : -1, tiles = 0;
  if (parent >= 0 && parent < request) {
    const int common = find_column(own, first_other, [&](int column) {
      return table.entry(request, column) != table.entry(parent, column);
    });
    const int keys = min_int(shareable_keys(a.requests, request), shareable_keys(a.requests, parent));
    tiles = min_int(common * table.page_size, keys) / a.block_n;
  }
  if (threadIdx.x > 0) return;
  a.parents[request] = tiles > 0 ? parent : -1;
  a.shared_tiles[request] = tiles;
}

}  // namespace dualkv
