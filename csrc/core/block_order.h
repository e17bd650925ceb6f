// SPDX-License-Identifier: BSD-3-Clause
// The tile scheduler of the backward kernels: the order of their thread blocks. A block takes one
// item of the work list (a KV tile, or a part of its queries) for one KV head and walks the queries
// that see it. The order has two aims:
//
// - Longest first, so that all multiprocessors end at about the same time.
// - Blocks that walk the same queries run at the same time, so that these Q, dO and dQ are read
//   from L2 and not from DRAM. The card runs at its power limit, and DRAM traffic takes power from
//   tensor cores.
//
// Three words say how it is made.
//
// Cost class: items are sorted into classes of cost, each a factor of two wide, longest first.
// Class 0 holds the long walks, as a rule those of the contexts' tiles; the tiles of responses are
// in later ones. Within a class items come in raster order.
//
//     cost    longest         longest / 2         longest / 4         longest / 8
//             |     class 0     |     class 1     |     class 2     |   ...
//
// Wave: as many blocks as there are multiprocessors, on each of which one block runs. When a block
// ends, the next one of the grid takes its place. All tiles of a KV head walk the same queries, so
// class 0 takes as many KV heads at a time as a wave holds whole, or one that is longer than a
// wave. Here 132 multiprocessors, 32 tiles and KV heads A to H:
//
//       | A0 B0 C0 D0 | A1 B1 C1 D1 | ... | A31 B31 C31 D31 | then E0 F0 G0 H0 | ... | H31 |
//         then the later classes, class by class
//
// Raster order: the items of a KV head in the order in which their walks begin, from the last query
// to the first: a node, then the subtrees of its children, the last child first. Parts of long
// tiles (slices, core/schedule.h) begin at the border at which they were cut. Blocks that run
// together then belong to the nodes above one place, and pass it at about the same time:
//
//     queries    root  .  a  .  b  .  .  c          blocks in the order of the grid
//     root       <--------------------------|       all begin at the end,
//     c                           <---------|       deeper nodes with fewer queries end first,
//     b                  <--------|                 and these take their places
//     a             <----|
//
// Classes serve a few long walks over the same queries, such as those of one prompt's tiles. Where
// class 0 is no more than half of the work (many sequences, responses longer than prompts, trees),
// or where tiles are split, its blocks would walk the queries of many nodes, and of several KV
// heads. There heads come one after the other, most of them in raster order throughout ("local"
// heads); only for the last heads, so that long blocks do not start at the end, classes stay. Where
// paths have far more tiles than there are multiprocessors, the nodes above a place do not run
// together, and local heads are better in the order of the table (has_wide_paths).
//
// Deterministic sums of dQ: a KV tile adds its part of a query's dQ behind the tile before it on
// the query's path, which the same queries see. The block of that tile must be earlier in the grid,
// and should be well ahead of those that wait for it. So all walks are backward, from a common end;
// an item's cost is the rows of its node's subtree, of which no tile has more than the one before;
// parts are cut at the same rows for all tiles; and the grid is class by class, and head by head.
// In raster order responses would stand beside their prompt, and wait for it: 3 times as long where
// 16 prompts of two tiles have 8 responses each.
#pragma once

#include "core/platform.h"

namespace dualkv {

constexpr int kCostClasses = 12;  // the last one holds whatever is shorter

// Class c holds the costs in (longest / 2^(c + 1), longest / 2^c]. Class 0 is never empty: not
// where nothing costs anything either, because no query sees a key.
DUALKV_HD int cost_class(int cost, int longest) {
  int index = 0;
  while (index < kCostClasses - 1 && cost < longest && cost <= longest >> (index + 1)) ++index;
  return index;
}

// The same with bounds that are fractions of `longest_here`, the longest cost of tiles of this kind
// (contexts, responses). Each class reads all queries of the responses once, and bounds that are
// fractions of the contexts' longest could lie just below the longest of the responses, and make
// one class more.
DUALKV_HD int cost_class_within(int cost, int longest_here, int longest) {
  return min_int(cost_class(longest_here, longest) + cost_class(cost, longest_here), kCostClasses - 1);
}

// The order of a list: where its classes begin, and how the grid takes them.
struct BackwardOrder {
  int begin[kCostClasses + 1];  // the first item of each class, and the number of items
  int alternating;              // bit c: walks in class c change their direction from wave to wave
  int local_heads;  // KV heads of which all items come before the other heads, in raster order
  int by_head;      // not 0: class 0 comes head by head too
  int ordered;      // not 0: classes are all that the grid is made of, and every walk is backward
};

// KV heads of which class 0 runs together: those that a wave holds whole, or one.
DUALKV_HD int heads_of_wave(int tiles, int num_sms) { return max_int(1, num_sms / max_int(tiles, 1)); }

// Whether heads are to be local where tiles are whole. `steps` and `first_class_steps` of a KV
// head: all, and those of class 0. Walks that are short compared to the time of a head come from
// many nodes too.
DUALKV_HD bool is_spread(int64_t steps, int64_t first_class_steps, int longest, int64_t head_time) {
  return 100 * first_class_steps <= 55 * steps || 5 * int64_t{longest} <= 3 * head_time;
}

// Whether local heads come in the order of the table. Simulated, trees with 218 and 535 tiles on a
// mean path read 20 and 24% less so than in raster order; with 69 tiles 1.7 times as much.
DUALKV_HD bool has_wide_paths(int longest_path, int block_n, int num_sms) {
  return longest_path / block_n > 2 * num_sms;
}

// How many are local then. The others must take longer than the longest block, which may be the
// last of a local head.
DUALKV_HD int local_heads_of(int longest, int64_t head_time, int num_kv_heads) {
  const int64_t others = head_time > 0 ? ceil_div<int64_t>(6 * int64_t{longest}, 5 * head_time) : num_kv_heads;
  return 2 * others <= num_kv_heads ? num_kv_heads - max_int(static_cast<int>(others), 1) : 0;
}

// Which way a block walks its queries. Blocks that walk the same queries should be at the same ones
// at the same time. Causality hides the first queries from later tiles, so that walks of one KV
// head have a common end and begin one after the other. Blocks that start together, as in a first
// wave, therefore walk backward, from the end. They are done one after the other, the last tile
// first, and the blocks of the next wave start in their places one after the other, tile 0 first:
// in the order in which their queries begin. These walk forward.
//
//     queries    0 . . . . . . . . . . . end        one wave later, as places become free
//     tile 0     <------------------------|         tile 0   |------------------------>
//     tile 1         <--------------------|         tile 1       |-------------------->
//     tile 2             <----------------|         tile 2           |---------------->
//
// An owner with a few tiles fills no wave: its blocks start together in any wave and always walk
// backward. This is whether one has enough: `items` of it are in the class. In class 0 owners whose
// walks have a common end count as one, and the heads of a wave together.
DUALKV_HD bool begins_in_waves(int items, int num_sms) { return 3 * items >= num_sms; }

// Whether class 0 changes its direction from wave to wave. `widest`: the most tiles of which the
// walks have a common end.
DUALKV_HD bool first_class_alternates(int tiles, int widest, int num_kv_heads, int num_sms) {
  return begins_in_waves(widest * min_int(heads_of_wave(tiles, num_sms), num_kv_heads), num_sms);
}

// What a thread block does.
struct BackwardPlace {
  int item, kv_head;  // item -1: nothing, the grid is larger than the list
  bool reversed;      // the walk is backward
  bool in_local_order = false;  // `item` counts items in the order of local heads, not of the list
};

DUALKV_HD bool is_reversed(const BackwardOrder& order, int c, int wave) {
  return !(order.alternating >> c & 1) || wave % 2 == 0;
}

// Block `index` of a later class, where all items of one KV head come first, then those of the
// next. All blocks of a head walk in one direction: that of the wave in which the middle one is.
DUALKV_HD BackwardPlace place_in_class(const BackwardOrder& order, int c, int index, int num_sms) {
  const int begin = order.begin[c], items = order.begin[c + 1] - begin, kv_head = index / items;
  return BackwardPlace{begin + index % items, kv_head, is_reversed(order, c, (kv_head * items + items / 2) / num_sms)};
}

// Where classes come one after the other, from class `low` on, each with all heads.
DUALKV_HD BackwardPlace place_in_classes(const BackwardOrder& order, int low, int block, int num_kv_heads, int num_sms) {
  int high = kCostClasses;  // the last class that begins at or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (order.begin[middle] * num_kv_heads <= block ? low : high) = middle;
  }
  return place_in_class(order, low, block - order.begin[low] * num_kv_heads, num_sms);
}

// Block `block` of those of `num_kv_heads` heads that come in cost classes.
DUALKV_HD BackwardPlace place_by_cost(int block, const BackwardOrder& order, int num_kv_heads, int num_sms) {
  const int tiles = order.begin[1];
  if (block >= num_kv_heads * tiles) return place_in_classes(order, 1, block, num_kv_heads, num_sms);
  const int together = order.by_head ? 1 : heads_of_wave(tiles, num_sms), first = block / (together * tiles) * together;
  const int heads = min_int(together, num_kv_heads - first), index = block - first * tiles;
  // Tile 0 of all heads, then tile 1: the longest blocks of a wave then take the places of the
  // shortest of the wave before, and two waves end together. Head after head, 4 waves over 64 tiles
  // of 8K causal keys end 12% later.
  const int wave = (2 * first + heads) * tiles / 2 / num_sms;
  return BackwardPlace{index / heads, first + index % heads, is_reversed(order, 0, wave)};
}

DUALKV_HD BackwardPlace backward_place(int block, const BackwardOrder& order, int num_kv_heads, int num_sms) {
  const int items = order.begin[kCostClasses];
  if (block >= items * num_kv_heads) return BackwardPlace{-1, 0, false};
  if (order.ordered) return place_in_classes(order, 0, block, num_kv_heads, num_sms);
  // Blocks of nodes that end together begin at that end.
  if (block < order.local_heads * items) return BackwardPlace{block % items, block / items, true, true};
  BackwardPlace place =
      place_by_cost(block - order.local_heads * items, order, num_kv_heads - order.local_heads, num_sms);
  place.kv_head += order.local_heads;
  return place;
}

}  // namespace dualkv
