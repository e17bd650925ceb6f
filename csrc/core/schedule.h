// SPDX-License-Identifier: BSD-3-Clause
// The unit of work of a thread block and its cost. Lists of these are built on the device
// (kernels/*_list.h), longest first: the hardware starts blocks in the order of the grid, so that
// short ones fill the gaps at the end.
//
// Forward: an item is a query tile; its cost is the keys that it sees, in tiles.
//
// Backward: an item is a KV tile of a node. A step is one query tile of one query head; the tile's
// steps are all that see it, from the rows of the node's subtree, so that long prompts with many
// responses make items of very unequal cost. A tile with too many steps is split into parts, each
// an item of its own:
//
//     prompt tile 0   |== part 2 ==|== part 1 ==|== part 0 ==|   each sums dK and dV into its fp32
//     prompt tile 1     |= part 2 =|== part 1 ==|== part 0 ==|   slot; convert_dkv_context sums
//     response 0                  |--- tile 0 ---|               a whole tile writes its own dK, dV
//                       queries ->
//
// A part costs a round trip through fp32, so that tiles stay whole where the list is balanced
// without splitting them (stay_whole).
#pragma once

#include "core/block_order.h"
#include "core/path_walk.h"
#include "core/query_walk.h"

namespace dualkv {

// A query tile of one node or of siblings; every query head, or pack of heads, takes the same list.
struct ForwardItem {
  int node;
  int m_block;  // negative: the last rows of the node and those of siblings (core/siblings.h)
};

// A KV tile, or a part of its queries; every KV head takes the same list.
struct BackwardItem {
  int node, n_block;
  int first_step, num_steps;  // of the tile's QueryWalk
  int slot;    // of the fp32 partial sums of a split tile; -1: this item owns the whole tile
  int before;  // with deterministic sums of dQ: the item that adds its part first; -1: none does
};

// A tile whose queries were split: `parts` slots starting at `slot`, summed in order by
// convert_dkv_context.
struct SplitTile {
  int node, n_block;
  int slot, parts;
};

// Query heads of one KV head that share a query tile of `tile_rows` rows: with pack = 4, rows 0 to
// 3 are query 0 of heads 0 to 3, row 4 is query 1 of head 0. A response of 20 queries then fills 80
// rows of a tile instead of 20. The largest pack that divides the heads of the group and leaves at
// most an eighth of the tile's rows unused.
DUALKV_HD int packed_heads(int heads_per_group, int tile_rows) {
  constexpr int kMaxPack = 16;
  int best = 1;
  for (int pack = 2; pack <= kMaxPack && pack <= heads_per_group; ++pack) {
    const bool fits = heads_per_group % pack == 0 && tile_rows % pack <= tile_rows / 8;
    if (fits) best = pack;
  }
  return best;
}

// What a query tile holds: `queries` queries, each for the `heads` query heads of a pack. They are
// loaded in `slices` equal parts, each as soon as who reads it has done with the tile before.
struct QueryTiling {
  int queries, heads;
  int slices = 1;

  DUALKV_HD int slice_queries() const { return queries / slices; }
};

// A pack of 2^log2 heads, in kernels that have no time to divide.
struct Pack {
  int log2 = 0;

  DUALKV_HD int heads() const { return 1 << log2; }
  DUALKV_HD int rows(int queries) const { return queries << log2; }
  DUALKV_HD int queries(int rows) const { return rows >> log2; }
  DUALKV_HD int of_row(int row) const { return row & (heads() - 1); }  // which of the heads
};

// The largest pack that divides the heads of a KV head.
inline Pack largest_pack(int heads_per_group) {
  constexpr int kMostLog2 = 4;
  Pack pack;
  while (pack.log2 < kMostLog2 && heads_per_group % (2 << pack.log2) == 0) ++pack.log2;
  return pack;
}

// The keys that a query tile sees, in tiles; one where it sees none, because it writes its rows.
DUALKV_HD int forward_cost(const Node& n, int m_block, int block_m, int block_n, Visibility sees) {
  const QueryTile q = query_tile(n, m_block, block_m);
  const int keys = n.kv_pos0 + n.kv_len, end = sees.causal ? clamp_int(q.q_pos + q.rows, 0, keys) : keys;
  return max_int(ceil_div(end - sees.first_key(q.q_pos), block_n), 1);
}

// What a block with a query tile takes: an item of the list, for a head (or pack of heads).
struct QueryPlace {
  int item, group;
};

// How many of the last heads take turns. With 8 items a multiprocessor the time at the end is less
// than a hundredth. No more than 8 heads: what was measured with 86 items a head.
DUALKV_HD int heads_in_turn(int items, int groups, int num_sms) {
  constexpr int kItemsPerSm = 8, kMost = 8;
  return min_int(groups, min_int(ceil_div(kItemsPerSm * num_sms, items), kMost));
}

// Place of block `index` among those of `groups` heads, or packs, that take the same list. Blocks
// that run together read the same K and V: head by head, all items of one and then of the next. The
// last heads take turns, an item each. Alone the last one would begin its longest item when the one
// before it ends: with 86 items a head that leaves 3.4% of the multiprocessors' time idle.
DUALKV_HD QueryPlace query_place(int index, int items, int groups, int num_sms) {
  const int turns = heads_in_turn(items, groups, num_sms), first = groups - turns;
  const int group = index / items, rest = index - first * items;
  if (group < first) return {index - group * items, group};
  return {rest / turns, first + rest % turns};
}

// Columns of the tiles that `queries` of one tile visit with a window, in a long run of keys.
inline int window_columns(Visibility sees, int queries, int block_n) {
  return ceil_div(sees.window + queries, block_n) * block_n;
}

DUALKV_HD int owned_tiles(const Node& n, int block_n) { return ceil_div(n.kv_len, block_n); }

// Whether other nodes see the keys of a node.
DUALKV_HD bool has_children(const Node& n, int index) { return n.subtree_end > index + 1; }

// No legal problem comes near this many steps an owner; overlapping hostile offsets are cut off
// here.
constexpr int kMaxSteps = 1 << 30;

// Steps of a tile of node `owner`.
DUALKV_HD int tile_steps(const NodeTable& table, int owner, const KvTile& tile, int block_m, int packs_per_group,
                         Visibility sees) {
  const int64_t tiles = count_query_tiles(table, owner, tile, block_m, sees);
  return static_cast<int>(tiles < kMaxSteps / packs_per_group ? tiles * packs_per_group : kMaxSteps);
}

// How many KV tiles run at the same time where each takes as many blocks as its columns are divided
// among.
DUALKV_HD int tiles_at_a_time(int num_sms, int column_blocks) {
  return column_blocks > 1 ? max_int(num_sms / column_blocks, 1) : num_sms;
}

// A shorter part is not worth its fp32 round trip: 32 steps take tens of microseconds.
constexpr int kMinPartSteps = 32;
// With parts of at most total / (4 x SMs) steps the last block of every simulated shape ends within
// 10% of the ideal time.
constexpr int kPartsPerSm = 4;

DUALKV_HD int part_limit(int64_t total_steps, int num_sms) {
  const int64_t limit = ceil_div<int64_t>(total_steps, static_cast<int64_t>(kPartsPerSm) * num_sms);
  if (limit < kMinPartSteps) return kMinPartSteps;
  return static_cast<int>(limit < kMaxSteps ? limit : kMaxSteps);
}

// The tiles with more steps than a limit.
struct LongTiles {
  int64_t count, steps;  // over all KV heads
  int longest, shortest;
};

// Whether the tiles that `limit` would split may stay whole: if those that one multiprocessor gets,
// one a wave, take no more steps than its part of the total, kPartsPerSm x limit; shorter items
// fill the rest. How many steps these are: a wave takes `longest`, but where costs are spread
// evenly (the tiles of a causal context: the mean is no more than that of longest and shortest) the
// longest of every second wave follow the shortest of the wave before, and two waves take longest +
// shortest. Whole tiles save the sum of parts: 1.3% at 28 x 4K x 2K.
DUALKV_HD bool stay_whole(const LongTiles& tiles, int limit, int num_sms) {
  const int64_t waves = ceil_div<int64_t>(tiles.count, num_sms), pair = int64_t{tiles.longest} + tiles.shortest;
  const auto about = [](int64_t most) { return most + most / 64; };
  const bool even = 2 * tiles.steps <= about(pair * tiles.count);
  const int64_t end = even ? waves / 2 * pair + waves % 2 * tiles.longest : waves * tiles.longest;
  return end <= about(int64_t{kPartsPerSm} * limit);
}

// The fewest KV heads of which some are local where tiles are split: with fewer the last one, which
// is not, is too much of the work. A tree of rollouts takes 3% less time with three heads, a comb
// up to 2% more with two.
constexpr int kFewestLocalHeads = 3;

// The most steps of a part where tiles are split so that KV heads can be local
// (core/block_order.h), or 0 where that takes more than four parts, or short ones: each costs a
// block and an fp32 round trip. `head_time`: of one KV head on all multiprocessors.
DUALKV_HD int local_part_limit(int longest, int64_t head_time, int num_kv_heads) {
  const int64_t limit = 6 * head_time / 5;
  const bool is_worth_it = limit >= 4 * kMinPartSteps && longest <= 4 * limit && num_kv_heads >= kFewestLocalHeads;
  return is_worth_it && limit < longest ? static_cast<int>(limit) : 0;
}

// Slices of the queries at which long tiles are cut, so that the parts of many tiles that begin at
// one border run together. `rows` of the queries, in the order of the table, and `width` steps;
// both 0: tiles are whole.
struct Slices {
  int width, rows;
  int least;  // a part has at least so many steps, and fewer than width + 2 * least
};

// Slices of at least `steps` steps. A part that is shorter than width / share is not worth it.
DUALKV_HD Slices slices_of(int steps, int share, int block_m, int packs_per_group) {
  const int tiles = max_int(ceil_div(steps, packs_per_group), 1), width = tiles * packs_per_group;
  return Slices{width, min_int(tiles, kMaxSteps / block_m) * block_m, max_int(width / share, kMinPartSteps)};
}

// The parts of a tile: steps [begin(part), begin(part + 1)) of its walk.
struct TileCuts {
  int parts, first, width, steps;

  DUALKV_HD int begin(int part) const {
    return part == 0 ? 0 : part == parts ? steps : first + (part - 1) * width;
  }
};

// `first`: the steps from the begin of the walk to the first border of a slice. A tile that nobody
// sees is an item too, of the least cost: it writes zeros.
DUALKV_HD TileCuts cuts_of(int steps, int first, Slices slices) {
  if (slices.width == 0) return TileCuts{1, steps, 1, steps};
  if (first < slices.least) first += slices.width;
  const int behind = steps - first;
  return TileCuts{behind < slices.least ? 1 : 2 + (behind - slices.least) / slices.width, first, slices.width, steps};
}

// Slots that suffice, from what the host knows: shapes. A tile that is split by its own steps has
// fewer than 2 x steps / limit parts, so that all tiles and KV heads need fewer than 2 x total /
// limit slots, and `limit` is at least total / (kPartsPerSm x SMs) and at least kMinPartSteps. The
// total is at most what it would be if every sequence saw every tile with all rows.
inline int slot_capacity(int64_t tile_capacity, int64_t num_nodes, int64_t q_rows, int block_m, int packs,
                         int num_sms) {
  const double total_steps = static_cast<double>(tile_capacity) * num_nodes * (q_rows / block_m + 2) * packs;
  const double by_balance = 2.0 * kPartsPerSm * num_sms, by_size = 2.0 * total_steps / kMinPartSteps;
  return static_cast<int>(by_size < by_balance ? by_size : by_balance);
}

// What the arrays of a list hold, known from shapes alone. A run of rows has at most one tile that
// is not full.
inline int forward_capacity(const NodeTable& table, int block_m) {
  return table.extents.q_rows / block_m + table.num_nodes;
}

struct BackwardCapacities {
  int tiles, items, splits;
  int slots;  // for fp32 parts
};

inline BackwardCapacities backward_capacities(const NodeTable& table, int block_m, int block_n, int packs,
                                              int num_kv_heads, int num_sms) {
  const int tiles = table.extents.all_key_rows() / block_n + table.num_nodes;
  const int slots = slot_capacity(tiles, table.num_nodes, table.extents.q_rows, block_m, packs, num_sms);
  return BackwardCapacities{tiles, tiles + slots / num_kv_heads, slots / (2 * num_kv_heads), slots};
}

}  // namespace dualkv
