// Tiles that hold what the ancestors on a path leave over. A node of 128 keys takes two tiles of 80, and 32 rows of the
// second belong to nobody: on a path of 64 such turns a fifth of the work is for nothing. So a walk puts the last keys of
// its ancestors aside, in slabs of 16 rows, and visits them together as soon as they fill a tile, here cc, b and aa:
//
//     path    root |  0  |  1  |aa|   turn |  2  |b|   turn |  3  |cc|   own node |  4  |  5|
//     walk            7     6                 4                3                     2     1 (diagonal)
//                      5: |ccbaa|
//
// Slabs wait in the order of the walk, so that border tiles depend on the path alone, as all others do. Only walks whose
// queries see all keys above their node have them (with a window the last query of a tile decides for all of them), and only
// where there may be something to gain: what the topmost node leaves over has a tile by itself if nothing else waits. So a
// prompt with its responses never has one.
#pragma once

#include "core/nodes.h"

namespace dualkv {

// Rows of one node: the first may be any row, all others follow it in storage. Counted over both tensors of keys.
struct BorderSlab {
  int row;
  int keys;  // rows from the first on that are keys; 0: the slab only fills a tile
};

// Which rows of a border tile are keys.
struct alignas(16) KeyBits {
  static constexpr int kMaxRows = 128;
  uint32_t words[kMaxRows / 32];

  DUALKV_HD bool has(int row) const { return words[row / 32] >> row % 32 & 1; }
};

template <int kRows_>
struct BorderTiles {
  static constexpr int kRows = kRows_;  // of a slab
  // The slabs of a tile whose values are still to be loaded, and fewer than two tiles' that wait, those of the next tile
  // among them.
  static constexpr int kPlaces = 32;
  static constexpr bool has_place_for(int block_n) {
    return block_n % kRows == 0 && 3 * block_n <= kPlaces * kRows && block_n <= KeyBits::kMaxRows;
  }

  BorderSlab* slabs;  // kPlaces, used in turn
  bool gathers;
  int begin, end;  // the slabs that wait, counted along the walk

  DUALKV_HD BorderSlab& at(int slab) const { return slabs[static_cast<unsigned>(slab) % kPlaces]; }

  // `last_pos`: logical position of the walk's last query.
  DUALKV_HD void start(const Node& own, int last_pos, Visibility sees) {
    gathers = sees.first_key(last_pos) == 0 && (!sees.causal || sees_ancestors(own));
    begin = end = 0;
  }

  DUALKV_HD bool waiting() const { return begin < end; }
  // Whether a border tile is the walk's current one.
  DUALKV_HD bool ready(int block_n) const { return end - begin >= block_n / kRows; }

  // Puts aside the keys of an ancestor that fill no tile, unless they make as many slabs as a tile has.
  DUALKV_HD bool take_tail(const Node& n, int block_n, bool has_more) {
    const int keys = n.kv_len % block_n;
    if (!gathers || keys == 0 || keys > block_n - kRows || !(has_more || waiting())) return false;
    for (int first = 0; first < keys; first += kRows) {
      at(end++) = {n.kv_begin + n.kv_len - keys + first, min_int(keys - first, kRows)};
    }
    return true;
  }

  // Where the path ends before a tile is full: slabs without keys, at a row that exists.
  DUALKV_HD void fill(int block_n) {
    const int row = at(end - 1).row;
    while (!ready(block_n)) at(end++) = {row, 0};
  }

  DUALKV_HD KvStep step(int block_n, bool is_path_over) const {
    const int slabs_of_tile = block_n / kRows;
    bool is_full = true;
    for (int i = 0; i < slabs_of_tile; ++i) is_full &= at(begin + i).keys == kRows;
    return KvStep{KvTile{Region::borders, begin % kPlaces, 0, is_full ? block_n : kScattered},
                  is_full ? INT_MIN : INT_MAX, is_full ? UINT_MAX : 0u, is_path_over && end - begin == slabs_of_tile};
  }

  DUALKV_HD void next(int block_n) { begin += block_n / kRows; }

  // Of a border tile, by the place of its first slab.
  DUALKV_HD KeyBits key_bits(int place, int block_n) const {
    KeyBits bits{};
    for (int i = 0; i < block_n / kRows; ++i) {
      const int first = i * kRows;
      bits.words[first / 32] |= ((1u << at(place + i).keys) - 1) << first % 32;
    }
    return bits;
  }
};

}  // namespace dualkv
