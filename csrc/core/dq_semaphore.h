// SPDX-License-Identifier: BSD-3-Clause
// The semaphore of deterministic sums of dQ (core/block_order.h): the block of a KV tile adds its
// part of a query tile's dQ when the block of the tile before it on the path has added its own.
#pragma once

#include <climits>
#include <cstdint>

#include "core/platform.h"

namespace dualkv {

// What a block publishes: a number that grows along every walk, because the rows of a subtree lie
// in the order of the table. Query tiles come from the last to the first; of a tile that a walk
// visits twice, first the range that comes later; then packs of heads.
struct DqSemaphore {
  static constexpr uint64_t kOver = ~uint64_t{0};  // the walk has ended
  static constexpr int kPackBits = 20;
  static constexpr uint32_t kPacks = (1u << kPackBits) - 1;
  uint32_t tile, within;

  // `own_begin`: the first row of the query tile that belongs to the step's range.
  DUALKV_HD DqSemaphore(int m_block, int own_begin, int pack)
      : tile(INT_MAX - m_block), within((255u - own_begin) << kPackBits | pack) {}

  DUALKV_HD uint64_t number() const { return uint64_t{tile} << 32 | within; }

  // Whether a walk that sees the same queries, and maybe more of the tile, has added its part of
  // this step: `done` is what it published last.
  DUALKV_HD bool is_over(uint64_t done) const {
    const uint32_t done_tile = static_cast<uint32_t>(done >> 32), done_within = static_cast<uint32_t>(done);
    return done_tile > tile || (done_tile == tile && done_within >> kPackBits >= within >> kPackBits &&
                                (done_within & kPacks) >= (within & kPacks));
  }
};

}  // namespace dualkv
