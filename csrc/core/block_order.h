// The order of the thread blocks of a backward kernel. What it must bring about: long blocks first, so that the last to end
// end together; and side by side those that walk the same Q, dO and dQ, which then stay in L2. The card runs at its power
// limit, and DRAM takes a part of it.
#pragma once

#include "core/platform.h"

namespace dualkv {

// A list of owners falls into classes of cost, each a factor of two wide; the last holds whatever is shorter. Within a
// class items keep their order, owner after owner.
constexpr int kCostClasses = 12;

DUALKV_HD int cost_class(int cost, int longest) {
  int index = 0;
  while (index < kCostClasses - 1 && cost <= longest >> (index + 1)) ++index;
  return index;
}

// The same where the bounds of classes are fractions of `longest_here`: the tiles of responses then fall into few classes,
// of which each reads all queries of the responses once.
DUALKV_HD int cost_class_within(int cost, int longest_here, int longest) {
  return min_int(cost_class(longest_here, longest) + cost_class(cost, longest_here), kCostClasses - 1);
}

// A list in this order, beside its items.
struct BackwardOrder {
  int begin[kCostClasses + 1];  // begin[c] is the first item of class c, begin[kCostClasses] the number of items
  int alternating;              // bit c: walks in class c change their direction from wave to wave
  int fillers;                  // blocks of the later classes behind every round of the first
  int parts;                    // of each tile in the first class, if its rounds go by parts; or 1
};

// The first class holds the long walks, as a rule those of the contexts: of every KV head, or of each part of its queries,
// one for every tile. It runs in rounds of a few whole sets of walks over the same queries.
struct Round {
  int walks, waves;  // a wave is a block a multiprocessor
  int free;          // multiprocessors that it leaves without a block, over all its waves
};

DUALKV_HD Round round_of(int tiles, int num_sms) {
  const int walks = max_int(1, num_sms / max_int(tiles, 1)), waves = ceil_div(walks * tiles, num_sms);
  return Round{walks, waves, waves * num_sms - walks * tiles};
}

// Whether rounds of the parts of a KV head, instead of all its blocks, end in time: the last may be nearly empty, and
// `longest` is what it takes.
DUALKV_HD bool rounds_fit(int tiles, int num_walks, int longest, int64_t total_steps, int num_sms) {
  const Round round = round_of(tiles, num_sms);
  return int64_t{ceil_div(num_walks, round.walks)} * round.waves * longest * num_sms <= total_steps;
}

// As many blocks of the later classes as keep the free multiprocessors busy for a round, so that the walks of the next
// begin together; otherwise a few of its blocks begin a wave early, and everything is read twice. `shortest` is the cost
// of an item of the first class, `mean` of one of the second, `supply` the number of blocks of all later classes.
DUALKV_HD int fillers_of(int tiles, int shortest, int mean, int64_t supply, int num_walks, int num_sms) {
  constexpr int kBlockCost = 8;  // what a block takes beside its steps, in steps: about 18 us
  const Round round = round_of(tiles, num_sms);
  // A few blocks a walk need no rounds, and there is never enough to do for many free multiprocessors.
  if (5 * tiles < num_sms || 3 * round.free > num_sms) return 0;
  // Rather one too few: the long blocks that follow must not wait.
  const int64_t fillers = static_cast<int64_t>(round.free) * (shortest / (mean + kBlockCost));
  return fillers * ceil_div(num_walks, round.walks) <= supply ? static_cast<int>(fillers) : 0;
}

// Whether the blocks of an owner are so many that they begin one after another, where those of a wave take the places of
// the wave before. `items` of it are in the class; in the first one, all walks of a round begin together.
DUALKV_HD bool begins_in_waves(int items, int num_sms) { return 3 * items >= num_sms; }

// Whether the first class changes its direction from wave to wave. Not where tiles are split: parts are counted along the
// walk, and those of a tile may be of several waves. `widest`: the most tiles of an owner.
DUALKV_HD bool first_class_alternates(int tiles, int widest, bool split, int num_walks, int num_sms) {
  return !split && begins_in_waves(widest * min_int(round_of(tiles, num_sms).walks, num_walks), num_sms);
}

// The item and KV head of a thread block. Within a later class the items of one head come first, then those of the next.
struct BackwardPlace {
  int item, kv_head;  // item -1: a surplus block
  // Blocks that walk the same queries should be at the same ones. These have a common end, and causality lets them begin
  // later for every next tile. Blocks that begin together, a first wave or the few tiles of a short owner, walk back from
  // the end. They finish one after another, so that those that take their places begin in the order in which their
  // queries do: they walk forward.
  bool reversed;
};

DUALKV_HD bool is_reversed(const BackwardOrder& order, int c, int wave) {
  return !(order.alternating >> c & 1) || wave % 2 == 0;
}

// Place `index` among the blocks of class `c`; its wave is that of the middle of its head.
DUALKV_HD BackwardPlace place_in_class(const BackwardOrder& order, int c, int index, int num_sms) {
  const int begin = order.begin[c], items = order.begin[c + 1] - begin, kv_head = index / items;
  return BackwardPlace{begin + index % items, kv_head, is_reversed(order, c, (kv_head * items + items / 2) / num_sms)};
}

DUALKV_HD BackwardPlace backward_place(int block, const BackwardOrder& order, int num_kv_heads, int num_sms) {
  if (block >= order.begin[kCostClasses] * num_kv_heads) return BackwardPlace{-1, 0, false};
  const int items = order.begin[1], tiles = items / order.parts, all_walks = num_kv_heads * order.parts;
  const Round round = round_of(tiles, num_sms);
  const int round_blocks = round.walks * tiles + order.fillers;
  const int this_round = min_int(block / round_blocks, ceil_div(all_walks, round.walks) - 1);
  const int index = block - this_round * round_blocks;
  const int walks_before = this_round * round.walks, walks = min_int(round.walks, all_walks - walks_before);
  if (index < walks * tiles) {
    // All walks of a tile, then those of the next: the longest blocks of a wave follow the shortest of the one before, so
    // that two waves end together. Walk after walk, 4 waves over 64 tiles of 8 K causal keys end 12% later.
    const int walk = walks_before + index % walks;
    const int wave = order.fillers > 0 ? this_round * round.waves + index / num_sms
                                       : (2 * walks_before + walks) * tiles / 2 / num_sms;
    return BackwardPlace{index / walks * order.parts + walk % order.parts, walk / order.parts,
                         is_reversed(order, 0, wave)};
  }
  // Behind the last round comes whatever is left.
  const int later = num_kv_heads * items + this_round * order.fillers + index - walks * tiles;
  int low = 1, high = kCostClasses;  // the last class that begins at or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (order.begin[middle] * num_kv_heads <= later ? low : high) = middle;
  }
  return place_in_class(order, low, later - order.begin[low] * num_kv_heads, num_sms);
}

}  // namespace dualkv
