// SPDX-License-Identifier: BSD-3-Clause
// The blocks that build work lists and tables of nodes, run on the host.
#include "shim_problem.h"

#include <algorithm>
#include <vector>

#include "core/border_tiles.h"
#include "core/dq_semaphore.h"
#include "kernels/backward_list.h"
#include "kernels/clear_rows.h"
#include "kernels/forward_list.h"
#include "kernels/node_tables.h"

using namespace dualkv;

namespace {

constexpr int kSlabRows = 4;
using Gathering = PathWalk<BorderTiles<kSlabRows>>;

// What a step shows: the slabs of a border tile, or the tile.
std::vector<int> shown(const Gathering& walk, const KvStep& step, int block_n) {
  const KvTile& tile = step.tile;
  std::vector<int> all{static_cast<int>(tile.region), tile.valid, step.full_pos, static_cast<int>(step.full_span)};
  if (tile.region != Region::borders) {
    all.insert(all.end(), {tile.row, tile.kv_pos});
    return all;
  }
  for (int slab = 0; slab < block_n / kSlabRows; ++slab) {
    const BorderSlab& one = walk.borders.at(tile.row + slab);
    all.insert(all.end(), {one.row, one.keys});
  }
  return all;
}

// A step of the walk of an item, and what its slices are told.
struct ToldStep {
  std::vector<int> shown;
  int flags;
};

using ForwardTile = SiblingTile<kMostSiblings>;

std::vector<ToldStep> walk_of_item(const Problem& p, const ForwardTile& tile, Gathering& walk) {
  std::vector<ToldStep> steps;
  walk_siblings(tile, walk, p.table(), p.block_n, p.block_m, p.sees(), [&](const KvStep& step) {
    steps.push_back({shown(walk, step, p.block_n), step.last});
  });
  return steps;
}

// Whether a slice meets the tiles that it meets in a query tile of its node alone, and is told
// where they are interrupted: neither too late nor, unless keys of other siblings may come, too
// early.
bool meets_its_tiles(const Problem& p, const std::vector<ToldStep>& steps, int slice, bool others_follow,
                     const Node& node, const QueryTile& alone, Gathering& walk) {
  const int bit = 1 << slice;
  const auto is_seen = [&](const ToldStep& step) { return !(step.flags & slice_flags::hidden(bit)); };
  size_t next = 0;
  const auto skip = [&] {
    while (next < steps.size() && !is_seen(steps[next])) ++next;
  };
  walk.start(p.table(), node, alone, p.block_n, p.sees());
  while (true) {
    const KvStep step = walk.step(p.table(), p.block_n, p.block_m, p.sees());
    skip();
    if (next == steps.size() || steps[next].shown != shown(walk, step, p.block_n)) return false;
    const bool is_last = steps[next].flags & slice_flags::kLast;
    const bool ends = steps[next].flags & slice_flags::ends(bit), goes_on = !is_last && is_seen(steps[next + 1]);
    if (is_last != (next + 1 == steps.size()) || is_last != static_cast<bool>(step.last)) return false;
    if (!ends && !goes_on) return false;
    if (ends && goes_on && !others_follow) return false;
    ++next;
    if (step.last) return true;
    walk.next(p.table(), p.block_n, p.sees());
  }
}

}  // namespace

extern "C" {

// {items, splits, slots} that the device's arrays hold, and {items} of the forward list.
void read_capacities(const Problem* p, int* out) {
  const BackwardCapacities most = p->capacities();
  out[0] = most.items, out[1] = most.splits, out[2] = most.slots;
  out[3] = forward_capacity(p->table(), p->block_m);
}

// Steps of an item's walk from the end, with the first row that each has of its query tile, their
// end, the pack of heads, and when its dQ is added.
int read_walk(const Problem* p, const BackwardItem* item, int* out, uint64_t* turns) {
  NodeTable table = p->table();
  const Node node = table.node(item->node);
  QueryWalk walk;
  walk.table = table, walk.tile = table.kv_tile(node, item->n_block, p->block_n);
  walk.block_m = p->block_m, walk.heads = p->heads, walk.head_major = false, walk.sees = p->sees();
  walk.start(subtree_of(table, item->node, true), item->first_step, item->num_steps);
  int count = 0;
  for (; !walk.done(); walk.next(), ++count) {
    const int own_begin = first_own_row(walk.range, walk.m_block, p->block_m);
    *out++ = walk.m_block * p->block_m + own_begin;
    *out++ = walk.m_block * p->block_m + end_own_row(walk.range, walk.m_block, p->block_m);
    *out++ = walk.head;
    *turns++ = DqSemaphore(walk.m_block, own_begin, walk.head).number();
  }
  return count;
}

uint64_t number_of_turn(int m_block, int own_begin, int pack) { return DqSemaphore(m_block, own_begin, pack).number(); }

// Whether a step's turn is over where another walk has come to each of `count` numbers.
void are_turns_over(int m_block, int own_begin, int pack, const uint64_t* done, int count, bool* over) {
  for (int i = 0; i < count; ++i) over[i] = DqSemaphore(m_block, own_begin, pack).is_over(done[i]);
}

// Steps of KV tile n_block of a node, without runs; -1 where it has fewer tiles.
int steps_of(const Problem* p, int index, int n_block) {
  NodeTable table = p->table();
  table.runs = {};
  const Node node = table.node(index);
  if (n_block >= owned_tiles(node, p->block_n)) return -1;
  return tile_steps(table, index, table.kv_tile(node, n_block, p->block_n), p->block_m, p->heads, p->sees());
}

// Fills items (node, n_block, first_step, num_steps, slot, before), splits (node, n_block, slot,
// parts), the runs, and for every thread block its item, KV head and direction. Returns the number
// of items; {splits, whether heads come one after the other, alternating, items of class 0, local
// heads} in `counts`.
int build_backward(const Problem* p, BackwardItem* items, SplitTile* splits, int* run_counts, int* run_begins, int* blocks,
                   int* counts) {
  const BackwardCapacities most = p->capacities();
  std::vector<int> nodes[4], tiles[4], borders[3], part_places(most.items - most.tiles), bins(most.items);
  std::vector<int> in_local_order(most.items);
  for (auto& array : nodes) array.resize(p->num_nodes + 1);
  for (auto& array : tiles) array.resize(most.tiles + 1);
  for (auto& array : borders) array.resize(ceil_div(p->q_rows, p->block_m) + most.items - most.tiles + 2);
  std::vector<BackwardItem> in_raster_order(most.items);
  BackwardOrder order{};
  BackwardListArgs args{};
  args.nodes = p->table();
  args.nodes.runs = {run_counts, run_begins};
  args.run_counts = run_counts, args.run_begins = run_begins;
  args.block_m = p->block_m, args.block_n = p->block_n, args.sees = p->sees();
  args.num_kv_heads = p->num_kv_heads, args.packs_per_group = p->heads, args.num_sms = p->num_sms;
  args.orders_dq = p->orders_dq;
  args.tile_capacity = most.tiles, args.slot_capacity = most.slots, args.query_capacity = p->q_rows;
  args.tile_offsets = nodes[0].data(), args.query_offsets = nodes[1].data(), args.node_sums = nodes[2].data();
  args.tile_begins = nodes[3].data();
  args.tile_nodes = tiles[0].data(), args.tile_steps = tiles[1].data(), args.part_offsets = tiles[2].data();
  args.first_borders = tiles[3].data(), args.part_places = part_places.data();
  args.border_parts = borders[0].data(), args.tiles_before = borders[1].data(), args.parts_before = borders[2].data();
  args.in_raster_order = in_raster_order.data(), args.item_bins = bins.data(), args.in_local_order = in_local_order.data();
  args.items = items, args.order = &order, args.splits = splits, args.split_count = counts;
  host_cuda::run_block(kListThreads, [&] { build_backward_list(args); });
  const int count = order.begin[kCostClasses];
  for (int block = 0; block < count * p->num_kv_heads; ++block) {
    const BackwardPlace place = backward_place(block, order, p->num_kv_heads, p->num_sms);
    blocks[3 * block] = place.in_local_order ? in_local_order[place.item] : place.item;
    blocks[3 * block + 1] = place.kv_head, blocks[3 * block + 2] = place.reversed;
  }
  counts[1] = order.by_head, counts[2] = order.alternating, counts[3] = order.begin[1], counts[4] = order.local_heads;
  return count;
}

// Fills items (node, m_block), their costs and the KV tiles that they visit; returns their number.
// `slice_queries`: of siblings that share tiles where there are as many as `least_tiles`.
int build_forward(const Problem* p, int slice_queries, int least_tiles, ForwardItem* items, int* costs, int* tiles) {
  std::vector<int> offsets(p->num_nodes + 1), last_tiles(p->num_nodes);
  int counters[2] = {-1, -1};
  ForwardListArgs args{};
  args.nodes = p->table();
  args.block_m = p->block_m, args.block_n = p->block_n, args.sees = p->sees();
  args.capacity = forward_capacity(args.nodes, p->block_m);
  args.slice_queries = slice_queries, args.least_tiles = least_tiles, args.last_tiles = last_tiles.data();
  args.tile_offsets = offsets.data(), args.items = items, args.count = counters, args.next = counters + 1;
  host_cuda::run_block(kListThreads, [&] { build_forward_list(args); });
  for (int i = 0; i < counters[0]; ++i) {
    costs[i] = forward_cost(args.nodes, items[i], p->block_m, p->block_n, p->sees());
    ForwardTile tile;
    tile.load(items[i], args.nodes, {p->block_m, 1, slice_queries > 0 ? kMostSiblings : 1}, 0);
    PathWalk<> walk;
    tiles[i] = 0;
    walk_siblings(tile, walk, args.nodes, p->block_n, p->block_m, p->sees(), [&](const KvStep&) { ++tiles[i]; });
  }
  return counters[1] == 0 ? counters[0] : -1;
}

// Item and head, or pack of heads, of each block.
void place_queries(int items, int groups, int num_sms, int (*places)[2]) {
  for (int block = 0; block < items * groups; ++block) {
    const QueryPlace place = query_place(block, items, groups, num_sms);
    places[block][0] = place.item, places[block][1] = place.group;
  }
}

// Adds to `rows` how many slices have each row of the queries. Returns how many slices meet other
// tiles than in a tile of their node alone; one walk takes all items, as that of a persistent block
// does.
int check_slices(const Problem* p, int slice_queries, const ForwardItem* items, int count, int* rows) {
  BorderSlab slabs[2][BorderTiles<kSlabRows>::kPlaces];
  Gathering walk{{slabs[0]}}, other{{slabs[1]}};
  int wrong = 0;
  for (int i = 0; i < count; ++i) {
    ForwardTile tile;
    tile.load(items[i], p->table(), {p->block_m, 1, kMostSiblings}, 0);
    const std::vector<ToldStep> steps = walk_of_item(*p, tile, walk);
    for (int sibling = 0; sibling < tile.siblings; ++sibling) {
      const Node& node = tile.nodes[sibling];
      const QueryTile alone = sibling_tile(items[i], node, p->block_m);
      for (int slice = 0; slice < kMostSiblings; ++slice) {
        if (!(tile.slices_of(sibling) >> slice & 1)) continue;
        const QueryTile& q = tile.of_slice(slice).q_tile;
        const int first = slice * slice_queries, end = std::min(first + slice_queries, q.rows);
        if (first >= end) continue;  // no queries
        wrong += q.q_pos - q.row != alone.q_pos - alone.row || q.row + q.rows != alone.row + alone.rows;
        for (int query = first; query < end; ++query) ++rows[q.row + query];
        wrong += !meets_its_tiles(*p, steps, slice, sibling + 1 < tile.siblings, node, alone, other);
      }
    }
  }
  return wrong;
}

// Adds to `cleared` how many threads clear each row of the queries or, otherwise, of the keys.
void clear_rows_of(const Problem* p, bool queries, int* cleared) {
  const NodeTable table = p->table();
  const int rows = queries ? p->q_rows : table.extents.all_key_rows();
  for (int first = 0; first < clearing_blocks(rows) * kClearedRows; first += kClearedRows) {
    host_cuda::run_block(kListThreads, [&] {
      clear_unowned(table, first, rows, queries ? query_rows : key_rows, [&](int row) { ++cleared[row]; });
    });
  }
}

void make_sequence_nodes(const int* cu_seqlens_q, const int* cu_seqlens_k, const int* cu_seqlens_context,
                         const int* cu_seqs_per_context, int num_sequences, int num_groups, int context_rows,
                         int* nodes) {
  const SequenceNodesArgs args{cu_seqlens_q,  cu_seqlens_k, cu_seqlens_context, cu_seqs_per_context,
                               num_sequences, num_groups,   context_rows,       nodes};
  for (int index = 0; index < max_int(num_sequences, num_groups) + 3; ++index) write_sequence_nodes(args, index);
}

void make_tree_nodes(const int* cu_seqlens, const int* parents, int num_nodes, int* nodes) {
  const TreeNodesArgs args{cu_seqlens, parents, num_nodes, nodes};
  host_cuda::run_block(kTreeThreads, [&] { write_tree_nodes(args); });
}

}  // extern "C"
