// SPDX-License-Identifier: BSD-3-Clause
// Lists of items of a decoding step, from its forest. One block of kListThreads threads makes them.
#pragma once

#include "core/plan_decode.h"
#include "decode/forest.h"

namespace dualkv {

// Rows of q that are in no request: those before the first and behind the last. Their items have no
// tiles, so that their results are those of a row without keys.
struct Padding {
  int place;           // behind the requests' queries
  int before, end, rows;  // rows [0, before) and those from `end` on

  __device__ Padding(const DecodeRequests& all, bool is_wrong) {
    const bool has_requests = all.count() > 0 && !is_wrong;
    const int last = all.count() - 1;
    before = has_requests ? all.first_query(0) : all.q_rows;
    end = has_requests ? all.first_query(last) + all.queries(last) : all.q_rows;
    rows = before + all.q_rows - end, place = end - before;
  }
  __device__ int row(int index) const { return index < before ? index : end + index - before; }
};

// Leaves and branches in the order of the list, each with its items. Tiles that are left on a path
// are all below the first: a branch that ends at tile T has T of them.
struct DecodeOrder {
  const DecodePlanArgs& a;
  Forest& f;
  int* in_order;                      // units: a leaf is its request, a branch comes behind all leaves
  int *shared_begins, *alone_begins;  // first item of a unit
  int units = 0, shared_items = 0, alone_items = 0;

  // Leaves do not depend on what is shared.
  __device__ void sort_leaves(uint64_t* leaves, uint64_t* spare) const {
    for_each(f.requests, [&](int i) { leaves[i] = key_of(i, tiles_of_leaf(i)); });
    sort_keys(leaves, spare, f.requests);
  }

  // Leaves come before branches with equally many tiles, which may be those that they hand over to.
  // `spare` is free again before the order is written, which may lie there.
  __device__ void sort(const uint64_t* leaves, uint64_t* branches, uint64_t* spare) {
    const int count = max_int(f.branches - 1, 0);
    for_each(count, [&](int i) { branches[i] = key_of(f.requests + 1 + i, f.end_tile(1 + i)); });
    sort_keys(branches, spare, count);
    for_each(f.requests, [&](int i) { in_order[i + keys_below(branches, count, leaves[i])] = unit_of(leaves[i]); });
    for_each(count, [&](int i) { in_order[i + keys_below(leaves, f.requests, branches[i])] = unit_of(branches[i]); });
    units = f.requests + count;
    for_each(units, [&](int i) {
      const int unit = i < f.requests ? i : i + 1;
      const int next = is_leaf(unit) ? f.next_of_leaf(unit) : f.next_of_branch(branch_of(unit));
      if (!next) return;
      atomicAdd(&f.arrivals[next], row_tiles(unit));
      if (goes_on(unit, f.end_tile(next))) atomicOr(&f.arrivals[next], kWaits);
    });
    __syncthreads();
  }

  __device__ void choose_folds(int64_t* sums) const {
    running_sums(
        units, sums,
        [&](int i) {
          const int unit = in_order[units - 1 - i];
          return int64_t{row_tiles(unit)} * walk_of(unit);
        },
        [&](int i, int64_t behind, int64_t) {
          const int unit = in_order[units - 1 - i];
          if (!is_leaf(unit)) return;
          const int splits = all_splits(unit) - a.splits.low(first_tile(unit));
          f.folds(unit) = splits >= kFewestFolds && keeps_blocks_busy(behind, a.blocks, walk_of(unit)) ? splits : 0;
        });
  }

  // False where the shared list has no room for all, and `padding` items.
  __device__ bool count(int64_t* sums, int padding) {
    if (a.splits.divide()) choose_folds(sums);
    constexpr int kShift = 27;  // items of leaves are fewer than 2^27, those of branches may be many more
    const int64_t total = running_sums(
        units, sums,
        [&](int i) {
          const int unit = in_order[i];
          return int64_t{items_of(unit)} << kShift | (is_leaf(unit) ? row_tiles(unit) : 0);
        },
        [&](int i, int64_t before, int64_t) {
          shared_begins[i] = static_cast<int>(before >> kShift);
          alone_begins[i] = static_cast<int>(before & ((1 << kShift) - 1));
        });
    shared_items = static_cast<int>(total >> kShift);
    alone_items = static_cast<int>(total & ((1 << kShift) - 1));
    return (total >> kShift) + padding <= a.lists.shared_capacity;
  }

  // Row tiles of a piece are neighbours in the list, so that all but one find keys in the cache.
  __device__ DecodeItem shared_item(int index) const {
    const int place = place_of(shared_begins, index), unit = in_order[place], tiles = row_tiles(unit);
    const int number = items_of(unit) - 1 - (index - shared_begins[place]);  // the longest walk of a leaf first
    return is_leaf(unit) ? leaf(unit, number % tiles, number / tiles)
                         : branch(branch_of(unit), number % tiles, number / tiles);
  }

  __device__ DecodeItem alone_item(int index) const {
    const int place = place_of(alone_begins, index), request = in_order[place];
    return whole_leaf(request, row_tiles(request) - 1 - (index - alone_begins[place]));
  }

  __device__ DecodeItem padding_item(const Padding& padding, int index) const {
    DecodeItem item{0, padding.place * a.heads_per_group, 0, 0, 0, 0, 0, 0, -1, 0, -1, -1};
    take_rows(item, padding.rows, index);
    return item;
  }

  __device__ int row_tiles_for(int queries) const {
    return static_cast<int>(ceil_div(int64_t{queries} * a.heads_per_group, int64_t{a.block_m}));
  }
  // How many states of a request's rows are to be combined.
  __device__ int combined_states(int request) const {
    const int states = a.splits.divide() ? all_splits(request) - folded_away(request) : 1;
    return states > 1 ? states : 0;
  }

 private:
  __device__ static uint64_t key_of(int unit, int tiles) {
    return static_cast<uint64_t>(INT_MAX - tiles) << 32 | static_cast<unsigned>(unit);
  }
  __device__ static int unit_of(uint64_t key) { return static_cast<int>(key & 0xffffffff); }
  __device__ bool is_leaf(int unit) const { return unit < f.requests; }
  __device__ int branch_of(int unit) const { return unit - f.requests; }
  __device__ int row_tiles(int unit) const {
    return row_tiles_for(is_leaf(unit) ? f.queries[unit] : f.queries_of_branch(branch_of(unit)));
  }
  __device__ int own_tiles(int request) const { return ceil_div(f.keys[request] - f.cuts[request], a.block_n); }
  __device__ int whole_tiles(int request) const { return f.cuts[request] / a.block_n; }
  __device__ int tiles_of_leaf(int request) const {
    return own_tiles(request) + ceil_div(f.cuts[request], a.block_n);
  }
  // Where a leaf ends and its branch begins.
  __device__ int first_tile(int request) const {
    const int next = f.next_of_leaf(request);
    return next ? f.end_tile(next) : 0;
  }
  __device__ int walk_of(int unit) const {
    return is_leaf(unit) ? tiles_of_leaf(unit) - first_tile(unit)
                         : f.end_tile(branch_of(unit)) - f.first_tile(branch_of(unit));
  }
  __device__ int low_splits(int request) const { return a.splits.low(whole_tiles(request)); }
  __device__ int all_splits(int request) const { return low_splits(request) + a.splits.own(own_tiles(request)); }
  // Splits whose states an item adds to that of another one.
  __device__ int folded_away(int request) const { return max_int(f.folds(request) - 1, 0); }

  // Items of a row tile.
  __device__ int pieces_of(int unit) const {
    if (!a.splits.divide()) return 1;
    return is_leaf(unit) ? a.splits.own(own_tiles(unit)) + low_pieces(unit) - folded_away(unit)
                         : a.splits.between(f.first_tile(branch_of(unit)), f.end_tile(branch_of(unit)));
  }
  // A leaf without tiles in a split that others of its branch have begun hands over an empty state.
  __device__ int low_pieces(int request) const {
    const int next = f.next_of_leaf(request);
    return max_int(a.splits.between(first_tile(request), whole_tiles(request)), next && waits(next));
  }
  __device__ int items_of(int unit) const { return row_tiles(unit) * pieces_of(unit); }

  // Whether the branch that ends at `tile` goes on with states of a unit that it follows.
  __device__ bool goes_on(int unit, int tile) const {
    if (!a.splits.divide()) return true;
    return !a.splits.begin_at(tile) && (!is_leaf(unit) || whole_tiles(unit) > tile);
  }
  static constexpr int kWaits = 1 << 30;  // beside the arrivals of a branch
  __device__ bool waits(int branch) const { return f.arrivals[branch] & kWaits; }

  // Place of the unit with an item. Most units have one item.
  __device__ int place_of(const int* begins, int item) const {
    const bool has_one_each = item + 1 < units && begins[item] == item && begins[item + 1] == item + 1;
    return has_one_each ? item : find_owner(begins, units, item);
  }

  __device__ void take_rows(DecodeItem& item, int queries, int number) const {
    const int first = number * a.block_m;
    item.row += first, item.rows = min_int(a.block_m, queries * a.heads_per_group - first);
  }
  __device__ DecodeItem rows_of(int request, int queries, int number) const {
    DecodeItem item{request, f.place(request) * a.heads_per_group, 0, 0, 0, 0, 0, 0, -1, 0, -1, -1};
    take_rows(item, queries, number);
    return item;
  }

  // Keys behind the last query are in no tile, also where that comes before the cut.
  __device__ DecodeItem whole_leaf(int request, int number) const {
    DecodeItem item = rows_of(request, f.queries[request], number);
    const int row = number * a.block_m, position = f.keys[request] - f.queries[request];
    item.q_pos = position + row / a.heads_per_group;
    item.keys = max_int(position + (row + item.rows - 1) / a.heads_per_group + 1, 0);
    item.cut = min_int(f.cuts[request], item.keys);
    item.end = ceil_div(item.cut, a.block_n);
    return item;
  }

  __device__ DecodeItem leaf(int request, int number, int piece) const {
    DecodeItem item = whole_leaf(request, number);
    const int next = f.next_of_leaf(request);
    item.first = first_tile(request);
    if (!a.splits.divide()) {
      item.signals = next - 1;
      return item;
    }
    item.cut = f.cuts[request];
    const int folds = f.folds(request), low = low_splits(request), own = folds ? 1 : a.splits.own(own_tiles(request));
    const int lowest = low - low_pieces(request), first_own = folds ? a.splits.low(item.first) : low;
    const int split = piece < own ? first_own + piece : lowest + piece - own;
    if (combined_states(request)) item.split = split;
    if (folds && piece < own) {
      item.folds = folds;
      return item;
    }
    if (split * a.splits.tiles < item.first) item.signals = next - 1;
    return a.splits.part(item, split, a.block_n);
  }

  __device__ DecodeItem branch(int branch, int number, int piece) const {
    const int request = f.reader(branch), first = f.first_tile(branch), end = f.end_tile(branch);
    const int next = f.next_of_branch(branch);
    DecodeItem item = rows_of(request, f.queries_of_branch(branch), number);
    item.q_pos = kMaxPosition, item.first = first, item.end = end, item.signals = next - 1;
    if (a.splits.divide()) divide(item, first, end, piece, next);
    item.cut = item.keys = item.end * a.block_n;
    if (item.end == end && waits(branch)) item.waits = branch - 1, item.arrivals = f.arrivals[branch] & ~kWaits;
    return item;
  }

  // Piece of tiles [first, end): those of a split. Only its lowest tiles are gone on with.
  __device__ void divide(DecodeItem& item, int first, int end, int piece, int next) const {
    const int split = first / a.splits.tiles + piece;
    item.split = split;
    item.first = max_int(first, split * a.splits.tiles);
    item.end = min_int(end, (split + 1) * a.splits.tiles);
    item.signals = a.splits.begin_at(item.first) ? -1 : next - 1;
  }
};

// A thread writes the few rows of its request; many rows of one are the warp's.
__device__ inline void write_queries(const DecodePlanArgs& a, const DecodeOrder& order, const Padding& padding) {
  constexpr int kFew = 8;
  constexpr unsigned kAll = 0xffffffffu;
  const Forest& f = order.f;
  const int lane = threadIdx.x % 32;
  const auto write = [&](int place, int row, int splits) {
    a.lists.queries[place] = row;
    if (a.splits.divide()) a.lists.splits[row] = splits;
  };
#pragma unroll 1
  for (int first = threadIdx.x - lane; first < f.requests; first += kListThreads) {
    const int request = min_int(first + lane, f.requests - 1);
    const int place = f.place(request), row = f.rows[request], splits = order.combined_states(request);
    const int queries = first + lane < f.requests ? f.queries[request] : 0;
    const bool has_few = queries <= kFew;
    for (int query = 0; has_few && query < queries; ++query) write(place + query, row + query, splits);
    for (unsigned others = __ballot_sync(kAll, !has_few); others; others &= others - 1) {
      const int source = __ffs(others) - 1, end = __shfl_sync(kAll, queries, source);
      const int to = __shfl_sync(kAll, place, source), from = __shfl_sync(kAll, row, source);
      const int count = __shfl_sync(kAll, splits, source);
      for (int query = lane; query < end; query += 32) write(to + query, from + query, count);
    }
  }
  for_each(padding.rows, [&](int i) { write(padding.place + i, padding.row(i), 0); });
}

static_assert(kForestInts == Forest::kArrays + 4, "units are at most twice as many as requests, and have two numbers");

// `keys` is memory for kSortedKeys of each request. Calls wait() before it reads or writes what
// other launches of the step do.
constexpr int kSortedKeys = 3;
template <class Wait>
__device__ inline void build_decode_lists(const DecodePlanArgs& a, uint64_t* keys, int* memory, Wait wait) {
  __shared__ int64_t sums[kRunningSums];
  const int requests = a.requests.count();
  const unsigned step = *a.step;
  uint64_t *const leaves = keys, *const siblings = leaves + requests, *const spare = siblings + requests;
  int* const begins = memory + int64_t{Forest::kArrays} * requests;
  Forest f(requests, memory);
  DecodeOrder order{a, f, reinterpret_cast<int*>(spare), begins, begins + 2 * requests};
  const Padding padding(a.requests, load_requests(a, f));
  order.sort_leaves(leaves, spare);
  wait();
  climb(a, f);
  number_branches(f, siblings, spare, sums);
  find_places(f);
  const int padding_items = order.row_tiles_for(padding.rows);
  order.sort(leaves, siblings, spare);
  if (!order.count(sums, padding_items)) {
    forget_branches(f);
    order.sort(leaves, siblings, spare);
    order.count(sums, padding_items);
  }
  const DecodeLists& lists = a.lists;
  const int shared_items = order.shared_items;
  for_each(shared_items, [&](int i) { lists.shared[i] = order.shared_item(i); });
  // By the last threads, while the first ones write the shared list.
  for (int i = kListThreads - 1 - threadIdx.x; i < order.alone_items; i += kListThreads) {
    lists.alone[i] = order.alone_item(i);
  }
  for_each(padding_items, [&](int i) {
    lists.alone[order.alone_items + i] = lists.shared[shared_items + i] = order.padding_item(padding, i);
  });
  write_queries(a, order, padding);
  if (threadIdx.x > 0) return;
  lists.counts[0] = shared_items + padding_items, lists.counts[1] = order.alone_items + padding_items;
  *a.step = step + 1;
}

}  // namespace dualkv
