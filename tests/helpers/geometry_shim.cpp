// SPDX-License-Identifier: BSD-3-Clause
// The geometry header for the tests: calls the functions that the kernels call and records what
// they visit. It adds no geometry of its own. Every visit is checked against the tensors' extents
// before it is recorded.
#include <cstdint>
#include <deque>
#include <initializer_list>

#include "built_for.h"
#include "core/border_tiles.h"
#include "shim_problem.h"

using namespace dualkv;

namespace {

struct Record {
  uint8_t* seen;  // (heads, q_rows, key_rows + decoded_rows): how often each pair was visible
  int64_t steps, empty_steps, needless_masks, wrong_unmasked, out_of_range;
  int64_t blind_tiles, wrong_order, endless;           // of walks along a path
  int64_t border_tiles, wrong_borders;                 // of those that gather
  int64_t ranges, bad_parts, short_parts, wrong_own_rows, wrong_key_rows;  // of walks over queries
};

bool inside(const Problem& p, const KvTile& tile) {
  const int rows = tile.region == Region::keys ? p.key_rows : p.decoded_rows;
  if (rows == 0 && p.key_rows + p.decoded_rows > 0) return false;  // there may be no such tensor
  return tile.row >= 0 && tile.valid >= 0 && tile.valid <= p.block_n && int64_t{tile.row} + tile.valid <= rows;
}

struct Columns {
  int first, end;

  int count() const { return max_int(end - max_int(first, 0), 0); }
};

// Counts that a query of one head sees a key, by their packed rows, of keys over both tensors.
void see_key(const Problem& p, Record& r, int head, int row, int64_t key) {
  if (r.seen) ++r.seen[(int64_t{head} * p.q_rows + row) * (int64_t{p.key_rows} + p.decoded_rows) + key];
}

// Counts the columns of one row. Returns how many there were.
int see(const Problem& p, Record& r, int head, int row, const KvTile& tile, Columns columns) {
  if (columns.count() == 0) return 0;
  if (row < 0 || row >= p.q_rows || columns.end > tile.valid) {
    ++r.out_of_range;
    return 0;
  }
  const int64_t first = int64_t{tile.row} + (tile.region == Region::keys ? 0 : p.key_rows);
  for (int c = max_int(columns.first, 0); c < columns.end; ++c) see_key(p, r, head, row, first + c);
  return columns.count();
}

void forward_step(const Problem& p, Record& r, const QueryTile& q, const KvStep& step) {
  const KvTile tile = step.tile;
  const bool masked = needs_mask(step, q.q_pos);
  ++r.steps;
  if (!inside(p, tile)) {
    ++r.out_of_range;
    return;
  }
  if (!masked && tile.valid < p.block_n) ++r.wrong_unmasked;
  int64_t visible = 0;
  for (int i = 0; i < q.rows; ++i) {
    const int q_pos = q.q_pos + i;
    Columns columns{0, p.block_n};
    if (masked) columns = {first_column(tile, q_pos, p.sees()), end_column(tile, q_pos, p.sees())};
    for (int head = 0; head < p.heads; ++head) visible += see(p, r, head, q.row + i, tile, columns);
  }
  if (tile.valid == 0) {
    ++r.blind_tiles;
  } else {
    r.empty_steps += visible == 0;
  }
  r.needless_masks += masked && visible == int64_t{p.heads} * q.rows * p.block_n;
}

// More steps than a walk can have.
int64_t most_steps(const Problem& p) {
  return (int64_t{ceil_div(p.key_rows + p.decoded_rows, p.block_n)} + 1) * p.num_nodes;
}

// Follows a path to its last tile. Its tiles must stand one below the other, without a gap, down to
// the first key that a query sees, and begin with it.
void forward_tile(const Problem& p, Record& r, const Node& node, int m_block) {
  const NodeTable table = p.table();
  const QueryTile q = query_tile(node, m_block, p.block_m);
  if (q.row < 0 || q.rows < 1 || q.row + q.rows > p.q_rows) ++r.out_of_range;
  const int keys = node.kv_pos0 + node.kv_len;
  int end = p.causal ? min_int(keys, q.q_pos + q.rows) : keys;  // behind what is still to be seen
  if (end <= p.sees().first_key(q.q_pos)) end = 0;
  PathWalk<> walk;
  walk.start(table, node, q, p.block_n, p.sees());
  for (int64_t visited = 1;; ++visited) {
    const KvStep step = walk.step(table, p.block_n, q.rows, p.sees());
    forward_step(p, r, q, step);
    const int reached = step.tile.kv_pos + step.tile.valid;
    r.wrong_order += visited > 1 ? reached != end : reached < end || step.tile.kv_pos >= max_int(end, 1);
    end = step.tile.kv_pos;
    r.wrong_order += step.tile.valid > 0 && end < p.sees().first_key(q.q_pos);
    if (step.last) break;
    if (visited >= most_steps(p)) {
      ++r.endless;
      break;
    }
    walk.next(table, p.block_n, p.sees());
  }
  r.wrong_order += end > p.sees().first_key(q.q_pos);
}

// A border tile: all queries see the rows of its slabs that its KeyBits call keys.
template <class Borders>
void border_step(const Problem& p, Record& r, const QueryTile& q, const KvStep& step, const Borders& borders) {
  const Extents rows = p.table().extents;
  const KeyBits bits = borders.key_bits(step.tile.row, p.block_n);
  int keys = 0;
  for (int column = 0; column < KeyBits::kMaxRows; ++column) {
    if (!bits.has(column) && column % Borders::kRows > 0) continue;
    if (column >= p.block_n) {
      r.wrong_borders += bits.has(column);
      continue;
    }
    const int first = borders.at(step.tile.row + column / Borders::kRows).row, row = first + column % Borders::kRows;
    if (first < 0 || row >= rows.all_key_rows() || rows.region_of(first) != rows.region_of(row)) {
      ++r.out_of_range;
    } else if (bits.has(column)) {
      ++keys;
      for (int i = 0; i < q.rows; ++i) {
        for (int head = 0; head < p.heads; ++head) see_key(p, r, head, q.row + i, row);
      }
    }
  }
  ++r.border_tiles;
  r.wrong_borders += keys == 0 || step.tile.valid != (keys < p.block_n ? kScattered : p.block_n);
  for (int i = 0; i < q.rows; ++i) {
    const int q_pos = q.q_pos + i;
    r.wrong_borders += needs_mask(step, q_pos) != (keys < p.block_n) || !sees_keys(step.tile, q_pos, p.sees());
  }
}

bool same(const KvStep& a, const KvStep& b) {
  return a.tile.region == b.tile.region && a.tile.row == b.tile.row && a.tile.kv_pos == b.tile.kv_pos &&
         a.tile.valid == b.tile.valid && a.full_pos == b.full_pos && a.full_span == b.full_span && a.last == b.last;
}

// A step that was published and is still to be loaded.
struct OpenStep {
  QueryTile q;
  KvStep step;
};

// Takes the steps that are loaded when only `ahead` others may be open.
template <class Borders>
void load_steps(const Problem& p, Record& r, std::deque<OpenStep>& open, size_t ahead, const Borders& borders) {
  for (; open.size() > ahead; open.pop_front()) {
    const auto& [q, step] = open.front();
    step.tile.region == Region::borders ? border_step(p, r, q, step, borders) : forward_step(p, r, q, step);
  }
}

// Follows a path on a walk that gathers borders, beside one that does not. It has no more tiles
// than that and, without a border tile, exactly the same.
template <class Borders>
void gathering_tile(const Problem& p, Record& r, const Node& node, int m_block, PathWalk<Borders>& walk,
                    std::deque<OpenStep>& open) {
  int ahead = 1;
  while (Borders::has_place_for(p.block_n, ahead + 1)) ++ahead;
  const NodeTable table = p.table();
  const QueryTile q = query_tile(node, m_block, p.block_m);
  PathWalk<> plain;
  walk.start(table, node, q, p.block_n, p.sees());
  plain.start(table, node, q, p.block_n, p.sees());
  bool is_same = true, has_borders = false, plain_ended = false, is_longer = false;
  for (int64_t visited = 1;; ++visited) {
    const KvStep step = walk.step(table, p.block_n, q.rows, p.sees());
    const KvStep other = plain.step(table, p.block_n, q.rows, p.sees());
    const bool is_border = step.tile.region == Region::borders;
    is_same &= same(step, other);
    has_borders |= is_border;
    is_longer |= plain_ended;
    plain_ended |= other.last;
    walk.next(table, p.block_n, p.sees());
    plain.next(table, p.block_n, p.sees());
    // As late as tiles may be loaded, when the walk has moved on.
    open.push_back({q, step});
    load_steps(p, r, open, ahead - 1, walk.borders);
    if (step.last) break;
    if (visited >= most_steps(p)) {
      ++r.endless;
      break;
    }
  }
  r.wrong_borders += is_same == has_borders || is_longer;
}

// One walk takes all query tiles, as that of a persistent block does.
template <int kSlabRows>
void gather(const Problem& p, Record& r) {
  BorderSlab slabs[BorderTiles<kSlabRows>::kPlaces];
  PathWalk<BorderTiles<kSlabRows>> walk{{slabs}};
  std::deque<OpenStep> open;
  for (int index = 0; index < p.num_nodes; ++index) {
    const Node node = p.table().node(index);
    for (int m_block = 0; m_block < ceil_div(node.q_len, p.block_m); ++m_block) {
      gathering_tile(p, r, node, m_block, walk, open);
    }
  }
  load_steps(p, r, open, 0, walk.borders);
}

void backward_step(const Problem& p, Record& r, const QueryWalk& walk) {
  const bool masked = needs_mask(walk.tile, walk.range, walk.m_block, p.block_m, p.block_n);
  ++r.steps;
  int64_t visible = 0;
  int own_rows = 0;
  const int first_row = walk.m_block * p.block_m, end_row = first_row + p.block_m;
  const auto columns_of = [&](int row) {
    if (!masked) return Columns{0, p.block_n};
    return Columns{first_column(walk.tile, walk.range, row, p.sees()), end_column(walk.tile, walk.range, row)};
  };
  for (int i = 0; i < p.block_m; ++i) {
    const int row = first_row + i;
    const Columns columns = columns_of(row);
    visible += see(p, r, walk.head, row, walk.tile, columns);
    // A range's own rows are those that see something.
    const bool own = i >= first_own_row(walk.range, walk.m_block, p.block_m) &&
                     i < end_own_row(walk.range, walk.m_block, p.block_m);
    r.wrong_own_rows += own != (columns.count() > 0);
    own_rows += own;
  }
  r.wrong_own_rows += has_foreign_rows(walk.range, walk.m_block, p.block_m) != (own_rows < p.block_m);
  // Transposed masks ask for the rows of a key: as many pairs in all, and the right ones at both
  // ends of each key's rows.
  int64_t seen = 0;
  for (int key = 0; key < p.block_n && masked; ++key) {
    const RowsOfKey rows = rows_of_key(walk.tile, walk.range, key, p.sees());
    const int begin = max_int(rows.begin, first_row), end = min_int(rows.end, end_row);
    if (begin >= end) continue;
    seen += end - begin;
    const auto sees_key = [&](int row) {
      const Columns columns = columns_of(row);
      return key >= columns.first && key < columns.end;
    };
    r.wrong_key_rows += !sees_key(begin) || !sees_key(end - 1);
    r.wrong_key_rows += (begin > first_row && sees_key(begin - 1)) || (end < end_row && sees_key(end));
  }
  r.wrong_key_rows += masked && seen != visible;
  // Of each half of the keys, as warpgroups have them: whether any row sees one.
  const int half = max_int(p.block_n / 2, 1);
  for (int key = 0; key < p.block_n; key += half) {
    int pairs = 0;
    for (int row = first_row; row < end_row; ++row) {
      const Columns columns = columns_of(row);
      pairs += max_int(min_int(columns.end, key + half) - max_int(columns.first, key), 0);
    }
    r.wrong_key_rows += is_hidden(walk.tile, walk.range, walk.m_block, p.block_m, key, half, p.sees()) != (pairs == 0);
  }
  r.empty_steps += visible == 0;
  r.needless_masks += masked && visible == int64_t{p.block_m} * p.block_n;
}

struct OwnedTile {
  int node;
  KvTile tile;
};

QueryWalk walk_of(const Problem& p, const OwnedTile& owned) {
  QueryWalk walk{};
  walk.table = p.table();
  walk.tile = owned.tile;
  walk.block_m = p.block_m;
  walk.heads = p.heads;
  walk.head_major = p.head_major != 0;
  walk.sees = p.sees();
  return walk;
}

// Calls body(owned, steps) for every tile that somebody owns, up to as many as the device list
// holds: overlapping hostile runs have more.
template <class Body>
void for_each_owned_tile(const Problem& p, Body body) {
  const NodeTable table = p.table();
  int64_t left = p.capacities().tiles;
  for (int index = 0; index < p.num_nodes; ++index) {
    const Node node = table.node(index);
    for (int n = 0; n < owned_tiles(node, p.block_n) && left > 0; ++n, --left) {
      const OwnedTile owned{index, table.kv_tile(node, n, p.block_n)};
      body(owned, tile_steps(table, index, owned.tile, p.block_m, p.heads, p.sees()));
    }
  }
}

void backward_tile(const Problem& p, Record& r, const OwnedTile& owned, int steps, Slices slices) {
  if (!inside(p, owned.tile) || owned.tile.valid < 1) {
    ++r.out_of_range;
    return;
  }
  const NodeCursor nodes = subtree_of(p.table(), owned.node, p.reversed != 0);
  for (NodeCursor cursor = nodes; !cursor.done();) {
    r.ranges += !next_query_range(p.table(), cursor, owned.tile, p.sees()).empty();
  }
  const TileCuts cuts = cuts_of(steps, slices.width > 0 ? owned.tile.row % slices.width + 1 : 0, slices);
  for (int part = 0; part < cuts.parts; ++part) {
    const int first = cuts.begin(part), last = cuts.begin(part + 1);
    int walked = 0;
    QueryWalk walk = walk_of(p, owned);
    for (walk.start(nodes, first, last - first); !walk.done(); walk.next(), ++walked) backward_step(p, r, walk);
    const bool is_long = slices.width > 0 && last - first >= slices.width + 2 * slices.least;
    const bool is_short = cuts.parts > 1 && last - first < slices.least;
    if (walked > last - first || is_long || is_short || (first == last && steps > 0)) ++r.bad_parts;
    if (walked < last - first) ++r.short_parts;
  }
}

}  // namespace

extern "C" {

// What every query tile visits, in the forward and in the dQ of the deterministic backward.
void record_forward(const Problem* p, Record* r) {
  for (int index = 0; index < p->num_nodes; ++index) {
    const Node node = p->table().node(index);
    for (int m_block = 0; m_block < ceil_div(node.q_len, p->block_m); ++m_block) forward_tile(*p, *r, node, m_block);
  }
}

// The same of a walk that gathers borders, in slabs of some rows.
void record_gathering(const Problem* p, Record* r) {
  if (p->block_n >= 64) return gather<16>(*p, *r);
  if (p->block_n >= 16) return gather<4>(*p, *r);
  gather<2>(*p, *r);
}

// What the owners of all KV tiles visit, in parts of about `width` steps, or for 0 whole.
void record_backward(const Problem* p, Record* r, int width) {
  const Slices slices{width, width * p->block_m, max_int(width / 2, 1)};
  for_each_owned_tile(*p, [&](const OwnedTile& owned, int steps) { backward_tile(*p, *r, owned, steps, slices); });
}

// Whether each node but the first continues the run of the one before.
void read_continued(const Problem* p, int* out) {
  for (int i = 1; i < p->num_nodes; ++i) out[i] = continues_run(p->table().node(i - 1), p->table().node(i));
}

// {row_begin, row_end, full_row, full_end, pos_offset} of each range of queries that see tile
// n_block of a node, if it has so many.
int read_ranges(const Problem* p, int index, int n_block, int* out) {
  const NodeTable table = p->table();
  const Node node = table.node(index);
  int count = 0;
  if (n_block >= owned_tiles(node, p->block_n)) return 0;
  const KvTile tile = table.kv_tile(node, n_block, p->block_n);
  for (NodeCursor cursor = subtree_of(table, index, p->reversed != 0); !cursor.done();) {
    const QueryRange range = next_query_range(table, cursor, tile, p->sees());
    if (range.empty()) continue;
    for (int x : {range.row_begin, range.row_end, range.full_row, range.full_end, range.pos_offset}) *out++ = x;
    ++count;
  }
  return count;
}

// Of tables in tests: fewer than an int holds.
int count_steps(const Problem* p) {
  int64_t total = 0;
  for_each_owned_tile(*p, [&](const OwnedTile&, int steps) { total += steps; });
  return static_cast<int>(total);
}

// Item, KV head and direction of a thread block, and whether items are counted in raster order;
// false for a surplus block.
int place_of(int block, const BackwardOrder* order, int num_kv_heads, int num_sms, int* out) {
  const BackwardPlace place = backward_place(block, *order, num_kv_heads, num_sms);
  out[0] = place.item, out[1] = place.kv_head, out[2] = place.reversed, out[3] = place.in_local_order;
  return place.item >= 0;
}

int cost_classes() { return kCostClasses; }

int class_of(int cost, int longest_here, int longest) { return cost_class_within(cost, longest_here, longest); }

int heads_together(int tiles, int num_sms) { return heads_of_wave(tiles, num_sms); }

bool does_first_class_alternate(int tiles, int widest, int num_kv_heads, int num_sms) {
  return first_class_alternates(tiles, widest, num_kv_heads, num_sms);
}

int pack_of(int heads_per_group, int tile_rows) { return packed_heads(heads_per_group, tile_rows); }

bool has_code_for(int capability, const char* archs, const char* ptx) { return is_built_for(capability, archs, ptx); }

}  // extern "C"
