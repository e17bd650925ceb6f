// SPDX-License-Identifier: BSD-3-Clause
// Where a decoding plan's memory holds what, the steps of its items, and their tiles.
#define DUALKV_BUILD_ARCHS "90"
#define DUALKV_BUILD_PTX "90"
#include "decode/memory.h"

using namespace dualkv;

extern "C" {

// Bytes from the beginning to the lists (shared, alone), their counts, the order of queries and
// their splits; then the capacities of the lists.
void read_decode_layout(const DualkvDecodePlan* plan, int block_m, int block_n, int64_t* out) {
  const DecodeMemory memory(*plan, TileInfo{block_m, block_n}, 0);
  const DecodeLists& lists = memory.plan.lists;
  const auto offset = [](const void* address) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)); };
  const int64_t found[] = {offset(lists.shared), offset(lists.alone),  offset(lists.counts), offset(lists.queries),
                           offset(lists.splits), lists.shared_capacity, lists.alone_capacity};
  for (const int64_t one : found) *out++ = one;
}

// Position and number of keys of each tile, up to `most` of them; returns how many there are.
int read_decode_walk(const DecodeItem* item, int block_n, int most, int* out) {
  const DecodeWalk walk(*item, block_n, {true, kNoWindow});
  for (int step = 0; step < min_int(walk.tiles(), most); ++step) {
    const DecodeTile tile = walk.tile(step);
    *out++ = tile.position, *out++ = tile.valid;
  }
  return walk.tiles();
}

// What an item that folds walks in a step.
void read_decode_step(const DecodeItem* item, int split_tiles, int block_n, int step, DecodeItem* out) {
  *out = DecodeSplits{split_tiles}.step(*item, step, block_n);
}

}  // extern "C"
