// The unit of work of a thread block and its cost. Lists of these are built on the device (kernels/work_list.cu),
// longest first, so that a plain grid in list order is balanced by the hardware.
#pragma once

#include "core/kv_regions.h"

namespace dualkv {

// A query tile of one sequence; every query head, or pack of heads, takes the same list.
struct ForwardItem {
  int segment;
  int m_block;
};

// A list of owners falls into classes of cost: four make a factor of two, and the last holds whatever is shorter. Classes
// twice as wide cost up to 4% of the makespan (simulated: 32 responses of 32 to 256 tokens to a prompt of 8K); half as
// wide, they win 2% there in the simulation and nothing on an H200, and at 28 x 16K x 2K lose 0.5%.
constexpr int kCostClasses = 17;

// A KV tile, or a part of its queries; every KV head takes the same list.
struct BackwardItem {
  Region region;
  int owner;  // the group of a context tile, the segment of a decoded one
  int n_block;
  int first_step, num_steps;  // of the owner's QueryWalk
  int slot;                   // where the fp32 partial sums of a split tile go; -1: this item owns the whole tile
};

// A tile whose queries were split: `parts` slots starting at `slot`, summed in order by convert_dkv_context.
struct SplitTile {
  Region region;
  int owner;
  int n_block;
  int slot, parts;
};

// Query heads of one KV head that share a query tile of `tile_rows` rows, row r being query r / pack of head r % pack:
// short responses then waste few rows. The pack divides the heads of the group and leaves at most an eighth of the
// rows unused.
DUALKV_HD int packed_heads(int heads_per_group, int tile_rows) {
  constexpr int kMaxPack = 16;
  int best = 1;
  for (int pack = 2; pack <= kMaxPack && pack <= heads_per_group; ++pack) {
    const bool fits = heads_per_group % pack == 0 && tile_rows % pack <= tile_rows / 8;
    if (fits) best = pack;
  }
  return best;
}

DUALKV_HD int forward_cost(const Segment& s, int m_block, int block_m, int block_n, bool causal) {
  return visible_kv_tiles(s, query_tile(s, m_block, block_m), block_n, causal);
}

// The item and KV head of a thread block. Within a class the items of one head come first, then those of the next:
// blocks that run together then walk the same Q, dO and dQ, which stay in L2. With the heads of each item side by side,
// 72% of the accesses hit L2 instead of 82%, and DRAM moved 11.1 GB instead of 7.0 (8 x 4K x 2K on an H200).
struct BackwardPlace {
  int item, kv_head;  // item -1: a surplus block
  // Owners whose queries end together should also begin together. Longest first, blocks that begin together (a first
  // wave) do so if they walk back from the common end, and then finish one after another; blocks that take their
  // places begin in that order, as causality makes their queries begin: they walk forward, and end together. Of the
  // 7.0 GB this saves another 0.9.
  bool reversed;
};

// class_begin[c] is the first item of class c, class_begin[kCostClasses] the number of items.
DUALKV_HD BackwardPlace backward_place(int block, const int* class_begin, int num_kv_heads, int num_sms) {
  int low = 0, high = kCostClasses;  // the last class that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (class_begin[middle] * num_kv_heads <= block ? low : high) = middle;
  }
  const int begin = class_begin[low], items = class_begin[low + 1] - begin, index = block - begin * num_kv_heads;
  if (index >= items * num_kv_heads) return BackwardPlace{-1, 0, false};
  const int kv_head = index / items, wave = (kv_head * items + items / 2) / num_sms;
  return BackwardPlace{begin + index % items, kv_head, wave % 2 == 0};
}

// The sequences whose queries an owner visits.
struct Owner {
  KvTile tile;
  int segment_begin, segment_end;
};

DUALKV_HD Owner owner_of(const GroupLayout& layout, Region region, int owner, int n_block, int block_n) {
  if (region == Region::context) {
    const Group group = layout.group(owner);
    return Owner{context_tile(group, n_block, block_n), group.segment_begin, group.segment_end};
  }
  return Owner{decoded_tile(layout.segment(owner), n_block, block_n), owner, owner + 1};
}

// KV tiles of owner `index`, where groups come first and segments after them.
DUALKV_HD int owned_tiles(const GroupLayout& layout, int index, int block_n) {
  if (index < layout.num_groups) return ceil_div(layout.group(index).context_len, block_n);
  return ceil_div(layout.segment(index - layout.num_groups).decoded_len, block_n);
}

// No legal problem comes near this many steps an owner; overlapping hostile offsets are cut off here.
constexpr int kMaxSteps = 1 << 30;

DUALKV_HD int owner_steps(const GroupLayout& layout, const Owner& owner, int block_m, int heads_per_group,
                          bool causal) {
  const int64_t tiles =
      count_query_tiles(layout, owner.segment_begin, owner.segment_end, owner.tile, block_m, causal);
  return static_cast<int>(tiles < kMaxSteps / heads_per_group ? tiles * heads_per_group : kMaxSteps);
}

// A split part is worth its fp32 round trip only above this many steps (tens of microseconds).
constexpr int kMinPartSteps = 32;
// Parts of at most total / (4 x SMs) steps bring the makespan of every simulated shape within 10% of ideal.
constexpr int kPartsPerSm = 4;

DUALKV_HD int part_limit(int64_t total_steps, int num_sms) {
  const int64_t limit = ceil_div<int64_t>(total_steps, static_cast<int64_t>(kPartsPerSm) * num_sms);
  if (limit < kMinPartSteps) return kMinPartSteps;
  return static_cast<int>(limit < kMaxSteps ? limit : kMaxSteps);
}

DUALKV_HD int part_count(int steps, int limit) { return steps > limit ? ceil_div(steps, limit) : 1; }

DUALKV_HD int part_begin(int steps, int parts, int part) {
  return static_cast<int>(static_cast<int64_t>(steps) * part / parts);
}

// A split tile has fewer than 2 x steps / limit parts, so all of them together, over all KV heads, need fewer than
// 2 x total / limit slots. The total is bounded as if every sequence saw every tile with all rows: shapes are all
// the host knows.
inline int slot_capacity(int64_t tile_capacity, int64_t num_segments, int64_t q_rows, int block_m, int num_heads,
                         int num_sms) {
  const double total_steps = static_cast<double>(tile_capacity) * num_segments * (q_rows / block_m + 2) * num_heads;
  const double by_balance = 2.0 * kPartsPerSm * num_sms, by_size = 2.0 * total_steps / kMinPartSteps;
  return static_cast<int>(by_size < by_balance ? by_size : by_balance);
}

}  // namespace dualkv
