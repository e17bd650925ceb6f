// SPDX-License-Identifier: BSD-3-Clause
// Geometry of decoding over pages. A request's keys are at positions [0, keys) and its queries are
// the last of them. Its cut divides the keys into two nodes, as a prompt and a response are in
// training, and its rows meet the tiles of both in the order of the training forward: from the
// last tile after the cut down to the cut, then from the last one before it down to position 0.
//
//     keys    0 |  0  |  1  |  2  |3|     cut | 0 |  1  |2|     queries at the end
//     walk         6     5     4   3            2    1   0
//
// Requests whose first pages are the same read the tiles that lie in them once. Rows walk their
// own tiles first (a leaf), then those that they share with others (a branch, whose rows are those
// of all requests below it), up to tile 0. Between the items of a row its state waits in memory, so
// that nothing is merged: the bits of a row do not depend on what is shared.
//
//     request 0   | branch 0: 0 1 2 3 | branch 1: 4 5 | leaf: 6 7 8 |
//     request 1   |                   |               | leaf: 6 7 |
//     request 2   |                   | leaf: 4 5 6 |
//
// Long walks may be divided: with exact="split" states reset at fixed places, and what lies between
// two of them is a split. The states of a row's splits are folded into one, the last split first,
// by the same arithmetic whoever does it. Where walks are few, each split is an item of its own of
// each leaf or branch that has tiles there, and a launch behind folds; where they are many, an item
// walks all splits that a leaf has for itself, and folds. Places and order depend on the request
// alone, so that its bits depend neither on what is shared nor on who folds.
#pragma once

#include "core/nodes.h"

namespace dualkv {

// A row of an item is a query of one of its requests and a head of the item's KV head. 128 threads
// multiply 64 rows, 16 a warp; 128 others load.
constexpr int kDecodeRows = 64, kDecodeThreads = 2 * kDecodeRows;

// A walk of a row tile over tiles of one request's pages, for every KV head.
struct alignas(16) DecodeItem {
  int request;      // whose pages are read
  int row, rows;    // row / (heads of a KV head) is a place in the order of queries, the rest a head
  int q_pos;        // position of the first row's query; kMaxPosition: all rows see all keys
  int cut, keys;    // keys [cut, keys) are tiles from the cut on; none of a branch
  int first, end;   // tiles [first, end) of those from position 0 on, which end at the cut
  int waits;        // branch whose items hand over the states of these rows; -1: they start empty
  int arrivals;     // how many items do, of each KV head
  int signals;      // branch that goes on with these rows; -1: tile 0 was the last, or there is none
  int split;        // which state of its rows it begins, goes on with, or ends; -1: they have one
  int folds;        // splits that it walks one after the other, last ones first; 0: a part of one
  int folded;       // of a part of such an item: how many of its splits are in the state already
  int unused[2];

  // Its tiles are whole and begin with a page.
  DUALKV_HD bool is_branch() const { return q_pos == kMaxPosition; }
};

// Where the states of a request's rows reset: at every `tiles`-th tile from position 0 on up to
// the last whole tile before the cut, there, and at every `tiles`-th tile from the cut on. The tile
// that the cut divides belongs to the first split behind it.
struct DecodeSplits {
  int tiles;  // of a split; 0: nothing is divided

  DUALKV_HD bool divide() const { return tiles > 0; }
  // Splits before the cut, which has so many whole tiles before it, and behind it.
  DUALKV_HD int low(int whole_tiles) const { return ceil_div(whole_tiles, tiles); }
  DUALKV_HD int own(int own_tiles) const { return max_int(ceil_div(own_tiles, tiles), 1); }
  // Splits that a walk over tiles [first, end) before the cut has a part in.
  DUALKV_HD int between(int first, int end) const { return end > first ? low(end) - first / tiles : 0; }
  DUALKV_HD bool begin_at(int tile) const { return tile % tiles == 0; }

  // What a leaf has of a split. The leaf's item has the tiles from `first` on and all own ones, and
  // the request's cut, even where its rows see no key from there on.
  DUALKV_HD DecodeItem part(const DecodeItem& leaf, int split, int block_n) const {
    const int whole_tiles = leaf.cut / block_n, own = split - low(whole_tiles), keys = tiles * block_n;
    const int seen = min_int(leaf.cut, leaf.keys), end = ceil_div(seen, block_n);
    DecodeItem item = leaf;
    item.folds = 0;
    if (own >= 0) {
      const int begin = leaf.cut + own * keys;
      item.keys = min_int(leaf.keys, begin + keys), item.cut = min_int(begin, item.keys);
      item.end = own > 0 ? 0 : end, item.first = min_int(whole_tiles, item.end);
    } else {
      item.end = min_int(min_int((split + 1) * tiles, whole_tiles), end);
      item.first = min_int(max_int(split * tiles, leaf.first), item.end);
      item.keys = item.cut = min_int(item.end * block_n, seen);
    }
    return item;
  }

  // What an item that folds walks in a step: a split. Its state becomes the item's own total, which
  // stays in memory between two of them.
  DUALKV_HD DecodeItem step(const DecodeItem& leaf, int step, int block_n) const {
    const bool is_last = step + 1 == leaf.folds;
    DecodeItem item = part(leaf, low(leaf.first) + leaf.folds - 1 - step, block_n);
    item.folds = leaf.folds, item.folded = step;
    item.split = is_last ? leaf.split : max_int(leaf.split, 0);
    return item;
  }
};

struct DecodeTile {
  int position, valid;  // of its first key, and its number of keys
};

// Tiles of an item, last ones first.
struct DecodeWalk {
  int own_begin, own_tiles, own_end;
  int low_begin, low_first, low_tiles, low_end;
  int block_n;

  DUALKV_HD DecodeWalk(const DecodeItem& item, int block_n_, Visibility sees) : block_n(block_n_) {
    // Keys before the window of the first query are dropped, as in PathWalk. Only items that share
    // nothing have windows.
    const int first_key = sees.has_window() ? sees.first_key(item.q_pos) : 0;
    own_begin = max_int(item.cut, min_int(first_key, item.keys));
    own_end = item.keys;
    own_tiles = ceil_div(own_end - own_begin, block_n);
    low_begin = min_int(first_key, item.cut);
    low_end = item.cut;
    low_first = item.first;
    low_tiles = sees.has_window() ? ceil_div(low_end - low_begin, block_n) : item.end - item.first;
  }

  DUALKV_HD int tiles() const { return own_tiles + low_tiles; }
  DUALKV_HD DecodeTile tile(int step) const {
    const bool is_own = step < own_tiles;
    const int index = is_own ? own_tiles - 1 - step : low_first + low_tiles - 1 - (step - own_tiles);
    const int position = (is_own ? own_begin : low_begin) + index * block_n;
    return {position, min_int(block_n, (is_own ? own_end : low_end) - position)};
  }
};

}  // namespace dualkv
