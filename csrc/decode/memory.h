// SPDX-License-Identifier: BSD-3-Clause
// The memory of a decoding plan, which the caller keeps from step to step. It begins as zeros.
#pragma once

#include "core/plan_decode.h"
#include "decode/plan.h"
#include "problem.h"
#include "work_lists.h"

namespace dualkv {

// Where everything lies. What only sizes decide comes from the plan's limits, so that addresses
// stay the same for as long as the plan lives.
struct DecodeMemory {
  DecodePlanArgs plan{};
  DecodeProgress progress{};
  DecodeStates states{};
  int64_t bytes = 0;

  // `blocks`: of a launch.
  DecodeMemory(const DualkvDecodePlan& asked, const TileInfo& tiles, int blocks) {
    check(asked);
    const int block_m = tiles.block_m, block_n = tiles.block_n;
    Scratch scratch(asked.memory);
    const int requests = static_cast<int>(asked.max_requests), rows = static_cast<int>(asked.max_queries);
    const int kv_heads = static_cast<int>(asked.num_kv_heads);
    const int heads_per_group = static_cast<int>(asked.num_heads) / kv_heads;
    // Leaves: the last item of a request, and of the rows in none, may have less than block_m
    // rows. Branches: as many again for each of up to kLevels levels of sharing; if they do not fit
    // nothing is shared. A path has as many pieces as splits, and one more for each level.
    const int leaves = requests + 1 + static_cast<int>(int64_t{rows} * heads_per_group / block_m);
    plan.owners = scratch.take<unsigned long long>(asked.num_pages);
    plan.step = scratch.take<unsigned>(1);
    progress.next = scratch.take(1), progress.exits = scratch.take(1);
    progress.branches = requests;
    progress.arrived = scratch.take(int64_t{requests} * kv_heads);
    for (int** array : {&plan.parents, &plan.shared_columns}) *array = scratch.take(requests);
    plan.forest = scratch.take(int64_t{kForestInts} * requests);
    DecodeLists& lists = plan.lists;
    const bool chooses = asked.split_keys < 0;
    const int64_t split_keys = chooses ? decode_split_keys(asked.max_keys, dims_of(asked)) : asked.split_keys;
    plan.splits = {static_cast<int>(ceil_div(split_keys, int64_t{block_n}))};
    states.per_row = most_splits(asked, plan.splits, block_n);
    lists.alone_capacity = leaves, lists.shared_capacity = leaves * (states.per_row + kLevels);
    lists.shared = scratch.take<DecodeItem>(lists.shared_capacity);
    lists.alone = scratch.take<DecodeItem>(lists.alone_capacity);
    lists.counts = scratch.take(2);
    lists.queries = scratch.take(rows), lists.splits = scratch.take(plan.splits.divide() ? rows : 0);
    const int64_t most_states = int64_t{rows} * asked.num_heads * states.per_row;
    states.out = scratch.take<float>(most_states * asked.head_dim_v);
    states.statistics = scratch.take<float>(most_states * 8);
    bytes = scratch.used();

    plan.requests = {{asked.block_table, asked.table_stride, static_cast<int>(asked.requests),
                      static_cast<int>(asked.columns), static_cast<int>(asked.num_pages),
                      static_cast<int>(asked.page_size)},
                     asked.seqlens, asked.cu_seqlens_q, asked.boundaries,
                     asked.parents, asked.shared_pages, static_cast<int>(asked.queries)};
    plan.block_m = block_m, plan.block_n = block_n;
    plan.heads_per_group = heads_per_group;
    plan.blocks = ceil_div(blocks, kv_heads);
  }

  static constexpr int kLevels = 4;

  static HeadDims dims_of(const DualkvDecodePlan& asked) {
    return {static_cast<int>(asked.head_dim), static_cast<int>(asked.head_dim_v)};
  }

 private:
  // Low and own ones may each have one that is not full; the tile of the cut counts for both.
  static int most_splits(const DualkvDecodePlan& asked, DecodeSplits splits, int block_n) {
    const int tiles = ceil_div(static_cast<int>(asked.max_keys), block_n) + 1;
    return splits.divide() ? ceil_div(tiles, splits.tiles) + 1 : 1;
  }

  // Numbers that the kernels keep in 32 bits.
  static void check(const DualkvDecodePlan& asked) {
    const auto expect = [](int64_t value, int64_t most, const char* what, int64_t least = 0) {
      if (value >= least && value <= most) return;
      throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(least) + " to " +
                                  std::to_string(most) + ", got " + std::to_string(value));
    };
    expect(asked.max_requests, kMostRequests, "max_requests");
    expect(asked.requests, asked.max_requests, "requests");
    expect(asked.queries, asked.max_queries, "queries");
    expect(asked.num_pages, INT_MAX, "num_pages", 1);
    expect(asked.max_keys, kMostKeys, "max_keys");
    expect(asked.split_keys, kMaxPosition, "split_keys", -1);
    expect(asked.columns * asked.page_size, asked.max_keys, "keys of a request, pages times their size");
    expect(asked.requests * asked.columns, INT_MAX, "entries of the block table");
    expect(asked.max_queries * asked.num_heads, kMostRows, "max_queries times num_heads");
  }
  static constexpr int64_t kMostRows = int64_t{1} << 30;
  static constexpr int64_t kMostKeys = int64_t{1} << 25;  // PagedRows::fetch is exact for so many
};

}  // namespace dualkv
