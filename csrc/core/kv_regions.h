// The integer geometry of shared-prompt attention: which KV tiles a query tile sees, which queries see a KV tile,
// which tiles need a mask, and where the rows of a tile are stored. Plain C++: kernels and host tests call the
// same functions.
//
// Logical positions decide visibility (kv_pos <= q_pos is the whole causal rule); regions decide only where bytes
// live. The keys of a sequence are its context, at positions [0, context_len), followed by its own decoded keys, at
// positions [context_len, context_len + decoded_len). KV tiles are anchored at the start of each region, so the
// tiles a row meets, and their order, do not depend on anything else in the batch.
#pragma once

#include "core/platform.h"

namespace dualkv {

// One run of query rows with one visibility rule. `*_begin` are packed rows (storage).
struct Segment {
  int q_begin, q_len;
  int q_pos0;  // logical position of the first query row; negative when there are more queries than keys
  int context_begin, context_len;
  int decoded_begin, decoded_len;
};

// One shared context and the sequences [segment_begin, segment_end) of the segment table that see it.
struct Group {
  int context_begin, context_len;
  int segment_begin, segment_end;
};

enum class Region : int { context, decoded };

struct KvTile {
  Region region;
  int row;     // packed row of the first key: storage
  int kv_pos;  // logical position of the first key: masking
  int valid;   // keys in the tile, at most the tile size
};

// Rows of the packed tensors: what offsets are clamped to.
struct Extents {
  int q_rows, context_rows, decoded_rows;
};

constexpr int kSegmentColumns = 8;  // q_begin q_len q_pos0 context_begin context_len decoded_begin decoded_len group
constexpr int kGroupColumns = 4;    // context_begin context_len segment_begin segment_end
constexpr int kMaxPosition = 1 << 30;

DUALKV_HD void clamp_run(int& begin, int& length, int rows) {
  begin = clamp_int(begin, 0, rows);
  length = clamp_int(length, 0, rows - begin);
}

// A run: neighbouring segments whose query rows follow one another and whose first queries are at the same logical
// position, such as the responses of a group. If one of them sees all of a tile, all of them do, and a walk takes the
// whole run at once. A block that asks 32 responses one by one begins 10 us later.
struct SegmentRuns {
  const int* counts = nullptr;  // (num_segments + 1): runs that begin before segment i; null: runs were not looked for
  const int* begins = nullptr;  // (runs + 1): the first segment of each run, and the end of the last
};

DUALKV_HD bool continues_run(const Segment& before, const Segment& s) {
  return s.q_begin == before.q_begin + before.q_len && s.q_pos0 == before.q_pos0;
}

// The device tables, read through the only place that turns their values into offsets. Their contents cannot be
// checked without a host synchronisation, so every read is clamped: inconsistent tables give wrong numbers, never
// an access outside a tensor or an endless loop.
struct GroupLayout {
  const int* segment_table;  // (num_segments, kSegmentColumns)
  const int* group_table;    // (num_groups, kGroupColumns)
  int num_segments, num_groups;
  Extents extents;
  SegmentRuns runs;

  DUALKV_HD Segment segment(int index) const {
    const int* row = segment_table + static_cast<int64_t>(index) * kSegmentColumns;
    Segment s{row[0], row[1], row[2], row[3], row[4], row[5], row[6]};
    clamp_run(s.q_begin, s.q_len, extents.q_rows);
    clamp_run(s.context_begin, s.context_len, extents.context_rows);
    clamp_run(s.decoded_begin, s.decoded_len, extents.decoded_rows);
    s.q_pos0 = clamp_int(s.q_pos0, -kMaxPosition, kMaxPosition);
    return s;
  }

  DUALKV_HD Group group(int index) const {
    const int* row = group_table + static_cast<int64_t>(index) * kGroupColumns;
    Group g{row[0], row[1], row[2], row[3]};
    clamp_run(g.context_begin, g.context_len, extents.context_rows);
    g.segment_begin = clamp_int(g.segment_begin, 0, num_segments);
    g.segment_end = clamp_int(g.segment_end, g.segment_begin, num_segments);
    return g;
  }
};

// ---------------------------------------------------------------------------------------------------------------
// KV tiles

DUALKV_HD KvTile region_tile(Region region, int begin, int length, int pos0, int n_block, int block_n) {
  const int first = n_block * block_n;
  return KvTile{region, begin + first, pos0 + first, min_int(block_n, length - first)};
}

DUALKV_HD KvTile context_tile(const Group& group, int n_block, int block_n) {
  return region_tile(Region::context, group.context_begin, group.context_len, 0, n_block, block_n);
}

DUALKV_HD KvTile decoded_tile(const Segment& s, int n_block, int block_n) {
  return region_tile(Region::decoded, s.decoded_begin, s.decoded_len, s.context_len, n_block, block_n);
}

// The n-th KV tile of a sequence in order of logical position: context tiles, then decoded ones.
DUALKV_HD KvTile kv_tile(const Segment& s, int index, int block_n) {
  const int context_tiles = ceil_div(s.context_len, block_n);
  if (index < context_tiles) {
    return region_tile(Region::context, s.context_begin, s.context_len, 0, index, block_n);
  }
  return decoded_tile(s, index - context_tiles, block_n);
}

// ---------------------------------------------------------------------------------------------------------------
// Query tile -> KV tiles (forward, and dQ in deterministic mode). Query tiles are anchored at their segment.

struct QueryTile {
  int row;    // packed row of the first query
  int rows;   // queries in the tile
  int q_pos;  // logical position of the first query
};

DUALKV_HD QueryTile query_tile(const Segment& s, int m_block, int block_m) {
  const int first = m_block * block_m;
  return QueryTile{s.q_begin + first, min_int(block_m, s.q_len - first), s.q_pos0 + first};
}

// Packed rows [begin, end).
struct RowRun {
  int begin, end;
};

// The queries of a sequence that see a key: none if it has no key, and not the first ones if causality aligns more
// queries than keys at their ends.
DUALKV_HD RowRun seeing_queries(const Segment& s, bool causal) {
  const int end = s.q_begin + s.q_len;
  if (s.context_len + s.decoded_len == 0) return RowRun{end, end};
  return RowRun{s.q_begin + (causal ? clamp_int(-s.q_pos0, 0, s.q_len) : 0), end};
}

// The keys of a region that some query of the sequence sees.
DUALKV_HD RowRun seen_keys(const Segment& s, Region region, bool causal) {
  const int keys = s.context_len + s.decoded_len;
  const int seen = s.q_len == 0 ? 0 : causal ? clamp_int(s.q_pos0 + s.q_len, 0, keys) : keys;
  if (region == Region::context) return RowRun{s.context_begin, s.context_begin + min_int(seen, s.context_len)};
  return RowRun{s.decoded_begin, s.decoded_begin + max_int(seen - s.context_len, 0)};
}

// KV tiles [0, count) in kv_tile order hold every key that some row of the tile sees.
DUALKV_HD int visible_kv_tiles(const Segment& s, const QueryTile& q, int block_n, bool causal) {
  const int keys = s.context_len + s.decoded_len;
  const int kv_end = causal ? clamp_int(q.q_pos + q.rows, 0, keys) : keys;
  if (kv_end <= s.context_len) return ceil_div(kv_end, block_n);
  return ceil_div(s.context_len, block_n) + ceil_div(kv_end - s.context_len, block_n);
}

DUALKV_HD bool needs_mask(const KvTile& tile, const QueryTile& q, int block_n, bool causal) {
  return tile.valid < block_n || (causal && tile.kv_pos + block_n - 1 > q.q_pos);
}

// The same for all tiles of a sequence at once, for loops in which asking each tile is too slow: which tiles the end of
// their region cuts off, and from which tile on causality matters.
struct MaskedTiles {
  int context_tail, decoded_tail;  // -1: the region ends with a full tile
  int first_diagonal;

  DUALKV_HD bool is_tail(int index) const { return index == context_tail || index == decoded_tail; }
  DUALKV_HD bool needs_mask(int index) const { return index >= first_diagonal || is_tail(index); }
};

DUALKV_HD MaskedTiles masked_tiles(const Segment& s, const QueryTile& q, int block_n, bool causal) {
  const int context_tiles = ceil_div(s.context_len, block_n), decoded_tiles = ceil_div(s.decoded_len, block_n);
  const int seen = max_int(q.q_pos + 1, 0);  // keys that the first query sees
  int first_diagonal = seen / block_n;
  if (first_diagonal >= context_tiles) {
    first_diagonal = context_tiles + max_int(seen - s.context_len, 0) / block_n;
  }
  return MaskedTiles{s.context_len % block_n ? context_tiles - 1 : -1,
                     s.decoded_len % block_n ? context_tiles + decoded_tiles - 1 : -1,
                     causal ? first_diagonal : context_tiles + decoded_tiles};
}

// Columns [0, result) of the tile are visible to the query at logical position q_pos.
DUALKV_HD int visible_columns(const KvTile& tile, int q_pos, bool causal) {
  return causal ? min_int(tile.valid, q_pos - tile.kv_pos + 1) : tile.valid;
}

// ---------------------------------------------------------------------------------------------------------------
// KV tile -> queries (backward). Query tiles lie on one grid anchored at packed row 0, so that loops run across the
// borders of sequences and every KV tile agrees on the borders of the dQ tiles.

// Packed rows [row_begin, row_end) see at least one key of the tile; from full_row on they see all of it; before
// that, row r is at logical position r + pos_offset.
struct QueryRange {
  int row_begin, row_end;
  int full_row;
  int pos_offset;

  DUALKV_HD bool empty() const { return row_begin >= row_end; }
};

DUALKV_HD QueryRange query_range(const Segment& s, const KvTile& tile, bool causal) {
  const int first = causal ? clamp_int(tile.kv_pos - s.q_pos0, 0, s.q_len) : 0;
  const int full = causal ? clamp_int(tile.kv_pos + tile.valid - 1 - s.q_pos0, 0, s.q_len) : 0;
  return QueryRange{s.q_begin + first, s.q_begin + s.q_len, s.q_begin + full, s.q_pos0 - s.q_begin};
}

// Segments whose queries are still to be visited, from the front or, `reversed`, from the back.
struct SegmentCursor {
  int begin, end;
  bool reversed;

  DUALKV_HD bool done() const { return begin >= end; }
  DUALKV_HD int next() const { return reversed ? end - 1 : begin; }
  DUALKV_HD void advance() { reversed ? --end : ++begin; }
};

// The queries that see `tile`: of the next segment or, where they see all of it, of the rest of its run. Moves the
// cursor.
DUALKV_HD QueryRange take_segments(const GroupLayout& layout, SegmentCursor& cursor, const KvTile& tile, bool causal) {
  const int index = cursor.next();
  const Segment s = layout.segment(index);
  cursor.advance();
  if (!layout.runs.counts || (causal && tile.kv_pos + tile.valid - 1 > s.q_pos0)) return query_range(s, tile, causal);
  const int run = layout.runs.counts[index + 1] - 1;
  const int begin = max_int(layout.runs.begins[run], cursor.reversed ? cursor.begin : index);
  const int end = min_int(layout.runs.begins[run + 1], cursor.reversed ? index + 1 : cursor.end);
  (cursor.reversed ? cursor.end : cursor.begin) = cursor.reversed ? begin : end;
  const Segment first = layout.segment(begin), last = layout.segment(end - 1);
  return QueryRange{first.q_begin, last.q_begin + last.q_len, first.q_begin, first.q_pos0 - first.q_begin};
}

// The next range of queries that see `tile`, merged with the ranges behind it as long as these see all of it: for a
// context tile the responses of a group become one long range without masks. Both directions give the same ranges.
// Moves the cursor; empty when there is none left.
DUALKV_HD QueryRange next_query_range(const GroupLayout& layout, SegmentCursor& cursor, const KvTile& tile,
                                      bool causal) {
  QueryRange range{0, 0, 0, 0};
  while (!cursor.done()) {
    SegmentCursor behind = cursor;
    const QueryRange next = take_segments(layout, behind, tile, causal);
    if (!next.empty() && range.empty()) {
      range = next;
    } else if (!next.empty() && cursor.reversed) {
      if (next.row_end != range.row_begin || range.full_row != range.row_begin) break;
      range = QueryRange{next.row_begin, range.row_end, next.full_row, next.pos_offset};
    } else if (!next.empty()) {
      if (next.row_begin != range.row_end || next.full_row != next.row_begin) break;
      range.row_end = next.row_end;
    }
    cursor = behind;
  }
  return range;
}

DUALKV_HD int first_m_block(const QueryRange& range, int block_m) { return range.row_begin / block_m; }
DUALKV_HD int end_m_block(const QueryRange& range, int block_m) { return ceil_div(range.row_end, block_m); }

// Query tiles (on the grid, once per range) that an owner of `tile` visits for one query head.
DUALKV_HD int64_t count_query_tiles(const GroupLayout& layout, int segment_begin, int segment_end, const KvTile& tile,
                                    int block_m, bool causal) {
  int64_t count = 0;
  for (SegmentCursor cursor{segment_begin, segment_end, false}; !cursor.done();) {
    const QueryRange range = next_query_range(layout, cursor, tile, causal);
    if (!range.empty()) count += end_m_block(range, block_m) - first_m_block(range, block_m);
  }
  return count;
}

// Columns [0, result) of the tile are visible to packed row `row`; 0 for a row outside the range.
DUALKV_HD int visible_columns(const KvTile& tile, const QueryRange& range, int row) {
  if (row < range.row_begin || row >= range.row_end) return 0;
  return row >= range.full_row ? tile.valid : row + range.pos_offset - tile.kv_pos + 1;
}

DUALKV_HD bool needs_mask(const KvTile& tile, const QueryRange& range, int m_block, int block_m, int block_n) {
  const int row = m_block * block_m;
  return tile.valid < block_n || row < range.row_begin || row < range.full_row || row + block_m > range.row_end;
}

// Of a query tile on the grid, rows [first_own_row, end_own_row) belong to the range; all others are foreign. Rows are
// counted from the first of the tile.
DUALKV_HD int first_own_row(const QueryRange& range, int m_block, int block_m) {
  return max_int(range.row_begin - m_block * block_m, 0);
}
DUALKV_HD int end_own_row(const QueryRange& range, int m_block, int block_m) {
  return min_int(range.row_end - m_block * block_m, block_m);
}
DUALKV_HD bool has_foreign_rows(const QueryRange& range, int m_block, int block_m) {
  return m_block * block_m < range.row_begin || (m_block + 1) * block_m > range.row_end;
}

// The walk of an owner over its steps: query tiles in packed order, or in reverse, and for each of them the query heads
// of the KV group. A step is one (query tile, head).
struct QueryWalk {
  GroupLayout layout;
  KvTile tile;
  QueryRange range;
  SegmentCursor cursor;
  int block_m, heads;
  int m_block, head;
  int remaining;  // steps left, the current one included
  bool causal;

  // Puts the walk on step `first_step` of those over all queries of `segments`; it ends after `num_steps` steps.
  DUALKV_HD void start(const SegmentCursor& segments, int first_step, int num_steps) {
    cursor = segments;
    remaining = num_steps;
    head = first_step % heads;
    int skip = first_step / heads;
    next_range();
    while (remaining > 0 && skip >= tiles_left()) {
      skip -= tiles_left();
      next_range();
    }
    m_block += cursor.reversed ? -skip : skip;
  }

  DUALKV_HD bool done() const { return remaining <= 0; }

  DUALKV_HD void next() {
    --remaining;
    if (++head < heads) return;
    head = 0;
    const bool last = tiles_left() == 1;
    m_block += cursor.reversed ? -1 : 1;
    if (last && remaining > 0) next_range();
  }

  // Query tiles of the range from the current one on.
  DUALKV_HD int tiles_left() const {
    return cursor.reversed ? m_block - first_m_block(range, block_m) + 1 : end_m_block(range, block_m) - m_block;
  }

  DUALKV_HD void next_range() {
    range = next_query_range(layout, cursor, tile, causal);
    m_block = cursor.reversed ? end_m_block(range, block_m) - 1 : first_m_block(range, block_m);
    if (range.empty()) remaining = 0;
  }
};

}  // namespace dualkv
