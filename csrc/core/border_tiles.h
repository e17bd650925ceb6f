// SPDX-License-Identifier: BSD-3-Clause
// Border tiles hold the tails of several ancestors of a path. A node of 128 keys takes two tiles of
// 80, which wastes 32 rows: on a path of 64 such turns, a fifth of the work. So a walk sets the
// tails of ancestors aside, in slabs of 16 rows, and visits them together once they fill a tile,
// here cc, b and aa:
//
//     path    root |  0  |  1  |aa|   turn |  2  |b|   turn |  3  |cc|   own node |  4  |  5|
//     walk            7     6                 4                3                     2   1 (diag)
//                      5: |ccbaa|
//
// Slabs wait in the order of the walk, so that border tiles depend on the path alone, as all others
// do. Only tails of ancestors that all queries see in full are gathered (with a window, the last
// query of the tile decides), and only where that can save work: the tail of the topmost node keeps
// a tile of its own if no other slab waits. So a prompt with its responses never has one. A child
// without keys whose queries are among its parent's keys gathers the tails that the parent does.
#pragma once

#include "core/path_walk.h"

namespace dualkv {

// Consecutive rows of one node, starting at any row. Rows are counted over both tensors of keys.
struct BorderSlab {
  int row;
  int keys;  // leading rows that are keys; 0: padding of a tile
};

// Bit mask of the rows of a border tile that are keys.
struct alignas(16) KeyBits {
  static constexpr int kMaxRows = 128;
  uint32_t words[kMaxRows / 32];

  DUALKV_HD bool has(int row) const { return words[row / 32] >> row % 32 & 1; }
};

template <int kRows_>
struct BorderTiles {
  static constexpr int kRows = kRows_;  // rows of a slab
  static constexpr int kPlaces = 64;
  // Whether there is room for the slabs of `ahead` tiles that are still to be loaded, and for less
  // than two tiles' worth of waiting slabs, the next tile's included.
  static constexpr bool has_place_for(int block_n, int ahead) {
    return block_n % kRows == 0 && (ahead + 2) * block_n <= kPlaces * kRows && block_n <= KeyBits::kMaxRows;
  }

  BorderSlab* slabs;  // ring of kPlaces, through all walks
  int seen_end;    // position before which all queries see all keys; 0: no tails are gathered
  int begin, end;  // waiting slabs, counted along the walk

  DUALKV_HD BorderSlab& at(int slab) const { return slabs[static_cast<unsigned>(slab) % kPlaces]; }

  // `last_pos` is the logical position of the walk's last query.
  DUALKV_HD void start(const Node& own, int last_pos, Visibility sees) {
    seen_end = sees.first_key(last_pos) > 0 ? 0 : sees.causal ? own.q_pos0 : kMaxPosition;
    begin = end = end % kPlaces;
  }

  DUALKV_HD bool waiting() const { return begin < end; }
  // Whether the walk's current tile is a border tile.
  DUALKV_HD bool ready(int block_n) const { return end - begin >= block_n / kRows; }

  // Sets the tail of an ancestor aside, unless it makes as many slabs as a tile has.
  DUALKV_HD bool take_tail(const Node& n, int block_n, bool has_more) {
    const int keys = n.kv_len % block_n;
    if (n.kv_pos0 + n.kv_len > seen_end || keys == 0 || keys > block_n - kRows || !(has_more || waiting())) return false;
    for (int first = 0; first < keys; first += kRows) {
      at(end++) = {n.kv_begin + n.kv_len - keys + first, min_int(keys - first, kRows)};
    }
    return true;
  }

  // Pads the last border tile of a path with slabs without keys, at a row that exists.
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

  // Key bits of the border tile whose first slab is at `place`.
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
