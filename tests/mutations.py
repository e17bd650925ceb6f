"""A mutant, and those of the geometry, which tests must catch on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GEOMETRY = "tests/test_geometry.py"
BLOCK_ORDER = "tests/test_block_order.py"
WORK_LIST = "tests/test_work_list.py"
SCORES = "tests/test_scores.py"
REFUSED = "tests/test_transformers_refused.py"
PACKING = "tests/test_packing.py"
PACKED_ATTENTION = "tests/test_shared_prompt_attention.py"
ANY_MACHINE = (GEOMETRY, BLOCK_ORDER, WORK_LIST, SCORES, REFUSED, PACKING, PACKED_ATTENTION)

REGIONS, SCHEDULE = "csrc/core/kv_regions.h", "csrc/core/schedule.h"
ORDER, LIST = "csrc/core/block_order.h", "csrc/kernels/backward_list.h"


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in `file`, becomes `new`; then the tests selected in `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # a file
    select: str = ""  # pytest's -k
    head_dim: int = 64  # the one that is built, for a mutant that needs a build

    @property
    def needs_gpu(self) -> bool:
        return self.tests not in ANY_MACHINE

    @property
    def needs_hopper(self) -> bool:
        return "sm90" in self.select

    def broken(self, root: Path) -> str:
        """The file's text with the change. ValueError unless the old text stands there exactly once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file} have the text, expected 1")
        return text.replace(self.old, self.new)


GEOMETRY_MUTANTS = [
    Mutant(
        "forward: no causal mask within a tile",
        REGIONS,
        "return causal ? min_int(tile.valid, q_pos - tile.kv_pos + 1) : tile.valid;",
        "return tile.valid;",
        GEOMETRY,
    ),
    Mutant(
        "forward: the diagonal tile is taken for a full one",
        REGIONS,
        "(causal && tile.kv_pos + block_n - 1 > q.q_pos)",
        "(causal && tile.kv_pos > q.q_pos)",
        GEOMETRY,
    ),
    Mutant(
        "forward: the tail tile is taken for a full one",
        REGIONS,
        "return tile.valid < block_n || (causal",
        "return (causal",
        GEOMETRY,
    ),
    Mutant(
        "forward: the last key is not visited",
        REGIONS,
        "clamp_int(q.q_pos + q.rows, 0, keys)",
        "clamp_int(q.q_pos + q.rows - 1, 0, keys)",
        GEOMETRY,
    ),
    Mutant(
        "decoded keys stand at positions from 0",
        REGIONS,
        "s.decoded_begin, s.decoded_len, s.context_len, n_block, block_n)",
        "s.decoded_begin, s.decoded_len, 0, n_block, block_n)",
        GEOMETRY,
    ),
    Mutant("backward: the diagonal tile is taken for a full one", REGIONS, "row < range.full_row || ", "", GEOMETRY),
    Mutant(
        "backward: a foreign row behind a sequence is taken for its own",
        REGIONS,
        " || row + block_m > range.row_end",
        "",
        GEOMETRY,
    ),
    Mutant(
        "backward: one key too many before the diagonal",
        REGIONS,
        "row + range.pos_offset - tile.kv_pos + 1;",
        "row + range.pos_offset - tile.kv_pos + 2;",
        GEOMETRY,
    ),
    Mutant(
        "ranges that see a part of the tile are merged",
        REGIONS,
        "next.row_begin != range.row_end || next.full_row != next.row_begin",
        "next.row_begin != range.row_end",
        GEOMETRY,
    ),
    Mutant(
        "ranges with a gap between them are merged",
        REGIONS,
        "next.row_begin != range.row_end || next.full_row != next.row_begin",
        "next.full_row != next.row_begin",
        GEOMETRY,
    ),
    Mutant(
        "backwards: ranges that see a part of the tile are merged",
        REGIONS,
        "next.row_end != range.row_begin || range.full_row != range.row_begin",
        "next.row_end != range.row_begin",
        GEOMETRY,
    ),
    Mutant(
        "backwards: ranges with a gap between them are merged",
        REGIONS,
        "next.row_end != range.row_begin || range.full_row != range.row_begin",
        "range.full_row != range.row_begin",
        GEOMETRY,
    ),
    Mutant(
        "backwards: a merged range begins where its last sequence does",
        REGIONS,
        "QueryRange{next.row_begin, range.row_end, next.full_row, next.pos_offset};",
        "QueryRange{range.row_begin, range.row_end, next.full_row, next.pos_offset};",
        GEOMETRY,
    ),
    Mutant(
        "backwards: a merged range has the positions of its last sequence",
        REGIONS,
        "range.row_end, next.full_row, next.pos_offset};",
        "range.row_end, next.full_row, range.pos_offset};",
        GEOMETRY,
    ),
    Mutant(
        "backwards: a range begins with its first query tile",
        REGIONS,
        "m_block = cursor.reversed ? end_m_block(range, block_m) - 1 : first_m_block(range, block_m);",
        "m_block = first_m_block(range, block_m);",
        GEOMETRY,
    ),
    Mutant(
        "backwards: the next query tile is the one behind",
        REGIONS,
        "m_block += cursor.reversed ? -1 : 1;",
        "m_block += 1;",
        GEOMETRY,
    ),
    Mutant(
        "backwards: a part skips query tiles in the other direction",
        REGIONS,
        "m_block += cursor.reversed ? -skip : skip;",
        "m_block += skip;",
        GEOMETRY,
    ),
    Mutant(
        "backwards: one query tile too few is left",
        REGIONS,
        "m_block - first_m_block(range, block_m) + 1",
        "m_block - first_m_block(range, block_m)",
        GEOMETRY,
    ),
    Mutant(
        "backwards: the sequences come from the front",
        REGIONS,
        "return reversed ? end - 1 : begin;",
        "return begin;",
        GEOMETRY,
    ),
    Mutant(
        "a part starts with the first head",
        REGIONS,
        "head = first_step % heads;",
        "head = 0;",
        GEOMETRY,
    ),
    Mutant(
        "query offsets are not clamped",
        REGIONS,
        "    clamp_run(s.q_begin, s.q_len, extents.q_rows);\n",
        "",
        GEOMETRY,
        "clamped",
    ),
    Mutant(
        "an owner skips the first sequence of its group",
        SCHEDULE,
        "group.segment_begin, group.segment_end};",
        "group.segment_begin + 1, group.segment_end};",
        GEOMETRY,
    ),
    Mutant(
        "the heads of an item lie side by side",
        ORDER,
        "return BackwardPlace{begin + index % items, kv_head,",
        "return BackwardPlace{begin + index / items, index % items,",
        BLOCK_ORDER,
        "one_block_a_head",
    ),
    Mutant(
        "a head's items are walked in both directions",
        ORDER,
        "is_reversed(order, c, (kv_head * items + items / 2) / num_sms)",
        "is_reversed(order, c, index / num_sms)",
        BLOCK_ORDER,
        "direction_of_walks",
    ),
    Mutant(
        "all owners walk in one direction",
        ORDER,
        "|| wave % 2 == 0;",
        "|| true;",
        BLOCK_ORDER,
        "direction_of_walks",
    ),
    Mutant(
        "the last round has fillers too, and blocks are left over",
        ORDER,
        "this_round * order.fillers + index - walks * tiles;",
        "(this_round + 1) * order.fillers + index - walks * tiles;",
        BLOCK_ORDER,
        "one_block_a_head",
    ),
    Mutant(
        "fillers run out before the last round",
        ORDER,
        "fillers * ceil_div(num_walks, round.walks) <= supply",
        "fillers <= supply",
        BLOCK_ORDER,
        "rounds_and_their_fillers",
    ),
    Mutant(
        "the last multiprocessor gets a tile less",
        SCHEDULE,
        "waves = ceil_div<int64_t>(tiles.count, num_sms),",
        "waves = tiles.count / num_sms,",
        GEOMETRY,
        "fit_their_multiprocessors",
    ),
    Mutant(
        "long tiles are thought to follow short ones, of which there are few",
        SCHEDULE,
        "even = 2 * tiles.steps <= about(pair * tiles.count);",
        "even = true;",
        GEOMETRY,
        "fit_their_multiprocessors",
    ),
    Mutant(
        "a run of segments goes on behind its group",
        REGIONS,
        "cursor.reversed ? index + 1 : cursor.end)",
        "layout.num_segments)",
        GEOMETRY,
    ),
    Mutant(
        "a run of segments begins before its group",
        REGIONS,
        "cursor.reversed ? cursor.begin : index)",
        "0)",
        GEOMETRY,
    ),
    Mutant(
        "segments at several positions are a run",
        REGIONS,
        "return s.q_begin == before.q_begin + before.q_len && s.q_pos0 == before.q_pos0;",
        "return s.q_begin == before.q_begin + before.q_len;",
        GEOMETRY,
    ),
    Mutant(
        "a tile that the first queries of a run do not see is taken by the whole run",
        REGIONS,
        "|| (causal && tile.kv_pos + tile.valid - 1 > s.q_pos0)) return",
        "|| (causal && tile.kv_pos + tile.valid - 2 > s.q_pos0)) return",
        GEOMETRY,
    ),
    Mutant(
        "the walks of a round come one after another",
        ORDER,
        "const int walk = walks_before + index % walks;",
        "const int walk = walks_before + index / tiles;",
        BLOCK_ORDER,
        "one_block_a_head",
    ),
    Mutant(
        "the parts of a tile are walked in both directions",
        ORDER,
        "return !split && begins_in_waves(",
        "return begins_in_waves(",
        BLOCK_ORDER,
        "walked_in_one_direction",
    ),
    Mutant(
        "the list of split tiles is ordered as if they were whole",
        LIST,
        "block.widest, parts > 1, walks,",
        "block.widest, false, walks,",
        WORK_LIST,
        "long_shapes",
    ),
    Mutant(
        "all parts of a tile write to the slot of the first",
        LIST,
        "slot < 0 ? -1 : slot + part * a.num_kv_heads",
        "slot < 0 ? -1 : slot",
        WORK_LIST,
        "walk_is_complete",
    ),
    Mutant(
        "tiles of one bin lie upon each other",
        LIST,
        "if (peer < lane) before += parts;",
        "if (peer < lane) before += 1;",
        WORK_LIST,
        "walk_is_complete",
    ),
    Mutant(
        "a run ends where the next begins but one",
        LIST,
        "a.run_begins[a.run_counts[i]] = i;",
        "a.run_begins[a.run_counts[i]] = i + (i > 0);",
        WORK_LIST,
        "walk_is_complete",
    ),
    Mutant(
        "a tile is split by fewer steps than it has",
        SCHEDULE,
        "  leading = max_int(leading, steps);",
        "  if (leading == 0) leading = steps;",
        GEOMETRY,
    ),
    Mutant(
        "surplus blocks take the last class",
        ORDER,
        "if (block >= order.begin[kCostClasses] * num_kv_heads) return",
        "if (order.begin[kCostClasses] == 0) return",
        BLOCK_ORDER,
        "one_block_a_head",
    ),
    Mutant(
        "queries that see no key are thought to see one",
        REGIONS,
        "(causal ? clamp_int(-s.q_pos0, 0, s.q_len) : 0), end};",
        "0, end};",
        GEOMETRY,
        "rows_that_take_part",
    ),
    Mutant(
        "keys behind the last query are thought to be seen",
        REGIONS,
        "causal ? clamp_int(s.q_pos0 + s.q_len, 0, keys) : keys;",
        "keys;",
        GEOMETRY,
        "rows_that_take_part",
    ),
    Mutant(
        "parts overlap by a step",
        SCHEDULE,
        "return static_cast<int>(static_cast<int64_t>(steps) * part / parts);",
        "return static_cast<int>(static_cast<int64_t>(steps) * part / parts) - (part > 0 && part < parts);",
        GEOMETRY,
    ),
    Mutant(
        "fewer slots than parts",
        SCHEDULE,
        "by_balance = 2.0 * kPartsPerSm * num_sms",
        "by_balance = 0.2 * kPartsPerSm * num_sms",
        GEOMETRY,
        "capacities",
    ),
    Mutant(
        "the list of the backward holds no parts",
        SCHEDULE,
        "BackwardCapacities{tiles, tiles + slots / num_kv_heads,",
        "BackwardCapacities{tiles, tiles,",
        WORK_LIST,
    ),
]
