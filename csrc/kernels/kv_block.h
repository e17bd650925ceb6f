// SPDX-License-Identifier: BSD-3-Clause
// A block that owns a KV tile of one KV head and walks the queries that see it.
#pragma once

#include "params.h"

namespace dualkv {

// One query tile of one pack of heads, seen from the KV tile of the block.
struct BackwardStep {
  QueryRange range;
  int m_block, pack;
  bool valid;  // false: the walk was over before this step
  bool last;

  // Rows of a tile of `queries` queries, each for the heads of a pack.
  DUALKV_HD int first_row(int queries, Pack heads) const { return heads.rows(first_own_row(range, m_block, queries)); }
  DUALKV_HD int end_row(int queries, Pack heads) const { return heads.rows(end_own_row(range, m_block, queries)); }
  DUALKV_HD bool has_foreign_rows(int queries) const { return dualkv::has_foreign_rows(range, m_block, queries); }
};

// The block's work. It lives in shared memory, because accumulators and fragments need every
// register: one thread walks, the others read.
struct KvBlock {
  KvTile tile;
  int kv_head;
  int slot;  // where the fp32 partial sums of a split tile go; -1: the block owns the whole tile
  // With deterministic sums of dQ: this block's item, and the one that adds its part first, or -1.
  int index, before;
  QueryWalk walk;

  // Finds the block's item and everything but the first step of its walk, for which start_walk()
  // reads nodes one after another: that takes time in which K and V can already be on their way.
  // False where the grid is larger than the list. `column_blocks` blocks of the grid, which are
  // neighbours, take the same item. A query tile has block_m rows.
  __device__ __forceinline__ bool load(const WorkList<BackwardItem>& work, const NodeTable& nodes,
                                       const ProblemShape& shape, Pack heads, int block_m, int block_n,
                                       int column_blocks = 1) {
    // A block that waits for others must know that they have begun, and CUDA promises no order.
    const int block = work.next ? atomicAdd(work.next, 1) : static_cast<int>(blockIdx.x) / column_blocks;
    const BackwardPlace place = backward_place(block, *work.order, shape.num_kv_heads,
                                               tiles_at_a_time(shape.num_sms, column_blocks));
    if (place.item < 0) return false;
    kv_head = place.kv_head;
    const BackwardItem item = work.items[place.in_local_order ? work.in_local_order[place.item] : place.item];
    tile = nodes.kv_tile(nodes.node(item.node), item.n_block, block_n);
    slot = item.slot < 0 ? -1 : item.slot + kv_head;
    index = place.item, before = item.before;
    walk.table = nodes;
    walk.tile = tile;
    walk.block_m = heads.queries(block_m);
    walk.heads = heads.queries(shape.heads_per_group());
    walk.sees = shape.sees;
    // Neighbouring tiles, which run at the same time, see nearly the same queries of a window, each
    // a few steps later than the one before. Pack by pack there are fewer steps between them, and
    // the queries are still in the L2 cache: 5 to 8% at 4 packs. Where walks are long they meet in
    // the cache anyway, and it costs up to 2%.
    walk.head_major = shape.sees.has_window() && walk.heads >= 4;
    // With a window nodes that do not see the tile are skipped from the front only: 28 of them,
    // asked one by one, take 10 us.
    walk.cursor = subtree_of(nodes, item.node, place.reversed && !shape.sees.has_window());
    walk.head = item.first_step;
    walk.remaining = item.num_steps;
    return true;
  }

  __device__ __forceinline__ void start_walk() {
    const NodeCursor nodes = walk.cursor;
    walk.start(nodes, walk.head, walk.remaining);
  }

  // Writes the current step of the walk and moves on to the next.
  __device__ __forceinline__ void take_step(BackwardStep& step) {
    step.range = walk.range;
    step.m_block = walk.m_block;
    step.pack = kv_head * walk.heads + walk.head;
    step.valid = !walk.done();
    if (!walk.done()) walk.next();
    step.last = walk.done();
  }
};

}  // namespace dualkv
