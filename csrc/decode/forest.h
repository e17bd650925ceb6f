// SPDX-License-Identifier: BSD-3-Clause
// The forest of requests that share tiles, its branches, and an order of queries in which the rows
// below each branch are neighbours. One block of kListThreads threads makes it.
//
// A request's children share more tiles with it than it does with its own parent; its branches end
// where its children leave it. Its own queries come first, then its children, those that share most
// first, each with all below it:
//
//     request 0   | branch 2   | branch 1     | leaf            queries of 0, 1 and 2, 3
//     request 1                               | leaf            branch 1: those of 0, 1 and 2
//     request 2                               | leaf            branch 2: all
//     request 3                | leaf
#pragma once

#include "decode/block_sort.h"
#include "decode/shared_prefixes.h"

namespace dualkv {

constexpr int kMostLevels = 256;  // of a tree; requests of a deeper one are several trees

// Arrays of `requests` numbers. Branches count from 1 on; 0 is none.
struct Forest {
  static constexpr int kArrays = 14;

  int requests;
  int branches = 0;  // none included
  int *parents, *tiles;         // of a request; -1: a root
  int *rows, *queries;          // the first row of its own queries, and how many they are
  int *keys, *cuts;
  int* subtree;                 // queries of all below it and its own; then its place
  int *joins, *nearest;         // branch that ends where it leaves its parent, and that at which its leaf ends
  int *before, *children;       // sum of `subtree` before it and before its first child, by parents and tiles
  int *heads, *ends, *arrivals; // of a branch: a child, the sum behind its last one, items that hand over to it

  __device__ Forest(int requests_, int* memory) : requests(requests_) {
    for (int** array : {&parents, &tiles, &rows, &queries, &keys, &cuts, &subtree, &joins, &nearest, &before,
                        &children, &heads, &ends, &arrivals}) {
      *array = memory;
      memory += requests;
    }
  }

  __device__ int shareable_keys(int request) const {
    return dualkv::shareable_keys(queries[request], cuts[request], keys[request]);
  }
  __device__ int place(int request) const { return subtree[request]; }
  // How many splits an item of its leaf folds; 0: each has its own. `before` is not in use then.
  __device__ int& folds(int request) const { return before[request]; }
  __device__ int next_of_leaf(int request) const { return nearest[request] ? nearest[request] : joins[request]; }

  // Whose pages a branch reads.
  __device__ int reader(int branch) const { return parents[heads[branch]]; }
  __device__ int end_tile(int branch) const { return tiles[heads[branch]]; }
  __device__ bool has_sibling(int branch) const {
    return branch + 1 < branches && reader(branch + 1) == reader(branch);
  }
  __device__ int first_tile(int branch) const {
    return has_sibling(branch) ? end_tile(branch + 1) : tiles[reader(branch)];
  }
  __device__ int next_of_branch(int branch) const {
    return has_sibling(branch) ? branch + 1 : joins[reader(branch)];
  }
  __device__ int queries_of_branch(int branch) const {
    return queries[reader(branch)] + difference(ends[branch], children[reader(branch)]);
  }

  // Sums of queries over a deep forest may wrap; their differences do not.
  __device__ static int difference(int end, int begin) {
    return static_cast<int>(static_cast<unsigned>(end) - static_cast<unsigned>(begin));
  }
};

// Reads what is known of the requests before they are compared. Whether some offset is smaller than
// the one before: requests would have rows in common, so that none has any.
__device__ inline bool load_requests(const DecodePlanArgs& a, Forest& f) {
  bool is_wrong = false;
  for_each(f.requests, [&](int i) {
    f.rows[i] = a.requests.first_query(i), f.queries[i] = f.subtree[i] = a.requests.queries(i);
    f.keys[i] = a.requests.keys(i), f.cuts[i] = a.requests.cut(i);
    f.nearest[i] = f.arrivals[i] = 0;
    is_wrong |= a.requests.cu_seqlens_q && a.requests.first_query(i + 1) < f.rows[i];
  });
  if (!__syncthreads_or(is_wrong)) return false;
  for_each(f.requests, [&](int i) { f.queries[i] = f.subtree[i] = 0; });
  __syncthreads();
  return true;
}

// Finds the whole tiles that each request shares with the one that it follows, and climbs to the
// nearest ancestor that shares fewer tiles with its own parent: what a request shares with its
// parent, and the parent with the grandparent, the request shares with the grandparent. Every
// kMostLevels-th request below a root becomes one. Then sums the queries below each request.
__device__ inline void climb(const DecodePlanArgs& a, Forest& f) {
  int* const follows = f.before;  // which is not in use yet
  for_each(f.requests, [&](int i) {
    const int parent = a.parent(i), columns = a.shared_pages(i);  // read at the same time
    const int keys = parent < 0 ? 0 : min_int(f.shareable_keys(i), f.shareable_keys(parent));
    f.tiles[i] = min_int(columns * a.requests.table.page_size, keys) / a.block_n;
    follows[i] = f.tiles[i] > 0 ? parent : -1;
  });
  __syncthreads();
  for_each(f.requests, [&](int i) {
    int parent = follows[i];
    while (parent >= 0 && f.tiles[i] <= f.tiles[parent]) parent = follows[parent];
    f.parents[i] = parent;
  });
  __syncthreads();
  int* const levels = f.before;
  bool is_deep = false;
  for_each(f.requests, [&](int i) {
    int level = 0;
    for (int above = f.parents[i]; above >= 0; above = f.parents[above]) ++level;
    levels[i] = level, is_deep |= level >= kMostLevels;
  });
  if (__syncthreads_or(is_deep)) {
    for_each(f.requests, [&](int i) {
      if (levels[i] % kMostLevels == 0) f.parents[i] = -1, f.tiles[i] = 0;
    });
    __syncthreads();
  }
  for_each(f.requests, [&](int i) {
    for (int above = f.parents[i]; above >= 0; above = f.parents[above]) atomicAdd(&f.subtree[above], f.queries[i]);
  });
  __syncthreads();
}

// A key of requests: by parent, then by tiles, most first.
struct Sibling {
  uint64_t key;

  __device__ static Sibling of(const Forest& f, int i) {
    return {static_cast<uint64_t>(f.parents[i] + 1) << 48 | static_cast<uint64_t>(INT_MAX - f.tiles[i]) << 16 |
            static_cast<unsigned>(i)};
  }
  __device__ int request() const { return static_cast<int>(key & 0xffff); }
  __device__ int parent() const { return static_cast<int>(key >> 48) - 1; }
  __device__ bool has_parent_of(Sibling other) const { return key >> 48 == other.key >> 48; }
  __device__ bool has_branch_of(Sibling other) const { return key >> 16 == other.key >> 16; }
};

// Numbers the branches: children of one parent that share equally many tiles. Roots are none.
__device__ inline void number_branches(Forest& f, uint64_t* keys, uint64_t* spare, int64_t* sums) {
  constexpr int kShift = 48;  // the number is above the sum of queries
  for_each(f.requests, [&](int i) { keys[i] = Sibling::of(f, i).key; });
  sort_keys(keys, spare, f.requests);
  const auto starts = [&](int i) { return i == 0 || !Sibling{keys[i]}.has_branch_of({keys[i - 1]}); };
  const int64_t total = running_sums(
      f.requests, sums,
      [&](int i) { return static_cast<int64_t>(starts(i)) << kShift | f.subtree[Sibling{keys[i]}.request()]; },
      [&](int i, int64_t before, int64_t sum) {
        const Sibling one{keys[i]};
        const int branch = static_cast<int>(sum >> kShift) - 1, request = one.request();
        f.joins[request] = branch, f.before[request] = static_cast<int>(before);
        if (one.parent() >= 0 && !one.has_parent_of({keys[i - 1]})) {
          f.nearest[one.parent()] = branch, f.children[one.parent()] = static_cast<int>(before);
        }
        if (starts(i)) f.heads[branch] = request;
        if (i + 1 == f.requests || starts(i + 1)) f.ends[branch] = static_cast<int>(sum);
      });
  f.branches = static_cast<int>(total >> kShift);
}

// Every request reads all of its tiles.
__device__ inline void forget_branches(Forest& f) {
  __syncthreads();
  for_each(f.requests, [&](int i) { f.nearest[i] = f.joins[i] = 0; });
  f.branches = 1;
  __syncthreads();
}

// Where each request's queries begin in the order of rows.
__device__ inline void find_places(Forest& f) {
  for_each(f.requests, [&](int i) {
    int place = 0, request = i;
    for (int parent; (parent = f.parents[request]) >= 0; request = parent) {
      place += Forest::difference(f.before[request], f.children[parent]) + f.queries[parent];
    }
    f.subtree[i] = place + f.before[request];
  });
  __syncthreads();
}

}  // namespace dualkv
