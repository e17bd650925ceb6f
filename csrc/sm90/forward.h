// SPDX-License-Identifier: BSD-3-Clause
// Hopper forward. One thread walks along the path of a query tile and two load its K and V tiles
// by bulk copies; two or three consumer warpgroups of 64 query rows each multiply. At d = 512 two
// share 64 rows, and each has half of the columns of O.
//
//   S = Q K^T;  P = exp(S - max);  O += P V        (online; O is normalised and rounded once)
//
// Within a warpgroup the softmax of tile n overlaps O += P V of tile n-1; while one warpgroup is in
// softmax, the others multiply. Blocks are persistent: the next item is loaded while the consumers
// finish theirs.
#pragma once

#include <type_traits>

#include "core/border_tiles.h"
#include "sm90/config.h"
#include "sm90/maps.h"
#include "sm90/query_work.h"
#include "sm90/tile.h"
#include "tile/mask.h"
#include "tile/online_softmax.h"

namespace dualkv::sm90 {

struct ForwardMaps {
  CUtensorMap q;
  RegionMaps kv, slabs;
};

constexpr int kSlabRows = 16;
using ForwardBorders = BorderTiles<kSlabRows>;

// Loads a border tile slab by slab. `which` picks K or V.
template <class Tile>
__device__ __forceinline__ void load_border_tile(uint32_t tile, const RegionMaps& slab_maps,
                                                 CUtensorMap KvMaps::* which, uint32_t barrier, int kv_head,
                                                 const ForwardBorders& borders, int place, const Extents& rows) {
  constexpr int kSlabs = Tile::kRows / kSlabRows;
  int row[kSlabs];  // read before the first copy: the compiler moves no read across one
#pragma unroll
  for (int i = 0; i < kSlabs; ++i) row[i] = borders.at(place + i).row;
#pragma unroll
  for (int i = 0; i < kSlabs; ++i) {
    const CUtensorMap& map = slab_maps.of(rows.region_of(row[i])).*which;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      ptx::tma_load_3d(tile + panel * Tile::kPanelBytes + i * kSlabRows * Tile::kRowBytes, map, barrier,
                       panel * Tile::kPanelCols, kv_head, rows.row_in_region(row[i]));
    }
  }
}

// Shared state that is passed along with the tiles.
template <class Config>
struct ForwardSteps {
  KvStep steps[Config::kStagesK];
  // Key masks of border tiles. A mask is read after its K stage is released, up to one tile later,
  // so that there are twice as many as stages.
  KeyBits key_bits[2 * Config::kStagesK];
  WalkStep ring[kWalkSlots];
  BorderSlab slabs[ForwardBorders::kPlaces];  // from the walker to the loaders
  static_assert(ForwardBorders::has_place_for(Config::kBlockN, kWalkSlots));
};

// The threads that walk and load.
template <typename T, class Config>
struct ForwardProducer {
  const QueryShared<Config>& shared;
  const ForwardParams<T>& p;
  const ForwardMaps& maps;
  ForwardSteps<Config>& steps;
  const ForwardBorders borders{steps.slabs};

  template <class Block>
  __device__ __forceinline__ void walk(const QueryWork<Block> (&works)[kWorkSlots]) const {
    // Queries of a warpgroup; with packs that do not divide 64 it may hold parts of two more.
    const int group = 63 / p.packed_heads + 2;
    walk_works<Config>(shared, works, steps.ring, PathWalk<ForwardBorders>{borders}, p.nodes, group, p.shape.sees);
  }

  __device__ __forceinline__ void load_k() const {
    load_keys<Config>(shared, steps.ring, steps.steps,
                      [&](const auto& state, uint32_t k, uint32_t barrier, const KvTile& tile, int kv_head) {
      load<typename Config::TileK>(k, &KvMaps::k, barrier, tile, kv_head);
      if (tile.valid != kScattered) return;
      steps.key_bits[state.template place<2 * Config::kStagesK>()] = borders.key_bits(tile.row, Config::kBlockN);
    });
  }

  __device__ __forceinline__ void load_v() const {
    load_values<Config>(shared, steps.ring, [&](uint32_t v, uint32_t barrier, const KvTile& tile, int kv_head) {
      load<typename Config::TileV>(v, &KvMaps::v, barrier, tile, kv_head);
    });
  }

 private:
  template <class Tile>
  __device__ __forceinline__ void load(uint32_t address, CUtensorMap KvMaps::* which, uint32_t barrier,
                                       const KvTile& tile, int kv_head) const {
    if (tile.region == Region::borders) {
      load_border_tile<Tile>(address, maps.slabs, which, barrier, kv_head, borders, tile.row, p.nodes.extents);
    } else {
      load_tile<Tile>(address, maps.kv.of(tile.region).*which, barrier, kv_head, tile.row);
    }
  }
};

// A block whose tiles may be of siblings has room for them.
template <class Config>
using ForwardBlock = std::conditional_t<(Config::kSiblings > 1), SiblingBlock<Config::kSiblings>, QueryBlock>;

// Queries of a tile. A warpgroup's own 64 rows are a slice, unless a pack does not divide them.
template <class Config>
DUALKV_HD QueryTiling query_tiling(int packed_heads) {
  return {Config::kBlockM / packed_heads, packed_heads, 64 % packed_heads == 0 ? Config::kSlices : 1};
}

// One consumer warpgroup: 64 rows of each query tile, and all or half of the columns of their O.
// kSoftcap is a template parameter as in backward.h, where an untaken branch cost 2 to 3%.
template <typename T, class Config, bool kSoftcap>
struct ForwardConsumer {
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kSharers = Config::kSharers, kColumns = Config::kHeadDimV / kSharers;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr bool kSiblings = Config::kSiblings > 1;
  using Softmax = OnlineSoftmax<1, 8>;

  const QueryShared<Config>& shared;
  const ForwardParams<T>& p;
  const ForwardSteps<Config>& steps;
  // Index of the warpgroup. Broadcast, so that the compiler knows it to be warp-uniform.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int group_row = group / kSharers * 64, group_column = group % kSharers * kColumns;
  const int row0 = thread / 32 * 16 + lane / 4;  // this thread's first row in the warpgroup's 64
  const int slice = query_tiling<Config>(p.packed_heads).slices > 1 ? group / kSharers : 0;
  const int slice_bit = 1 << slice;

  PipelineState<Config::kStagesK> k_state;
  PipelineState<Config::kStagesV> v_state;
  PipelineState<Config::kStagesQ> q_state;
  float s[1][kBlockN / 8][4];
  RowProducts<T, TileQ, TileK, kBlockN / 8, 1> scores;
  float o[1][kColumns / 8][4];
  uint32_t probabilities[kBlockN / 16][4];

  // Query (relative to the tile) and head (of the pack) of a row of this warpgroup.
  __device__ __forceinline__ int query_of(int row) const { return (group_row + row) / p.packed_heads; }
  __device__ __forceinline__ int head_of(int row) const { return (group_row + row) % p.packed_heads; }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t tile = shared.q(q_state.stage), queries = kSharers > 1 ? varying(tile, k_state.stage) : tile;
    const uint32_t q = queries + group_row * TileQ::kRowBytes, k = shared.k(k_state.stage);
    ptx::wgmma_fence();
    scores.issue(s[0], q, k);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(bool accumulate) {
    const uint32_t v = from_column<TileV>(shared.v(v_state.stage), group_column);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, kColumns>::template rs<1>(o[0], probabilities[step], along_rows<TileV>(v, step),
                                              accumulate || step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void wait_queries() const {
    shared.queries_ready(q_state.stage, slice).wait_full(q_state.phase);
  }
  __device__ __forceinline__ void release_queries() {
    shared.queries_ready(q_state.stage, slice).release(lane);
    q_state.advance();
  }

  // Waits for the next K. step() must be read before the stage is released, which is then
  // rewritten.
  __device__ __forceinline__ void wait_k() const { shared.k_ready(k_state.stage).wait_full(k_state.phase); }
  __device__ __forceinline__ KvStep step() const { return steps.steps[k_state.stage]; }
  __device__ __forceinline__ void release_k() {
    shared.k_ready(k_state.stage).release(lane);
    k_state.advance();
  }

  // Whether a step is the last of the walk, whether this warpgroup does not see it, and whether it
  // does not see the next one.
  __device__ __forceinline__ bool is_last(const KvStep& step) const {
    return kSiblings ? step.last & slice_flags::kLast : step.last;
  }
  __device__ __forceinline__ bool is_hidden(const KvStep& step) const {
    return kSiblings && step.last & slice_flags::hidden(slice_bit);
  }
  __device__ __forceinline__ bool ends(const KvStep& step) const {
    return kSiblings ? step.last & slice_flags::ends(slice_bit) : step.last;
  }

  // Key mask of the tile whose K was released last.
  __device__ __forceinline__ const KeyBits& key_bits() const {
    return steps.key_bits[k_state.previous().template place<2 * Config::kStagesK>()];
  }

  // Waits for V of this tile of `valid` keys and zeroes its foreign rows.
  __device__ __forceinline__ void wait_v(int valid) const {
    shared.v_ready(v_state.stage).wait_full(v_state.phase);
    if (valid == kBlockN) return;
    const uint32_t v = shared.v(v_state.stage);
    if (valid != kScattered) return zero_tail<TileV, kBlockN>(v, valid, group, thread);
    const KeyBits& keys = key_bits();
    zero_rows<TileV, kBlockN>(v, 0, group, thread, [&](int row) { return !keys.has(row); });
  }
  __device__ __forceinline__ void release_v() {
    shared.v_ready(v_state.stage).release(lane);
    v_state.advance();
  }

  // Applies softcap and mask. `q_pos` is the position of this warpgroup's first query.
  template <class Work>
  __device__ __forceinline__ void mask(const Work& work, const KvStep& step, int q_pos) {
    if constexpr (kSoftcap) cap_scores(s[0], p.shape.softcap);
    if (!needs_mask(step, q_pos)) return;
    const KvTile tile = step.tile;
    if (tile.valid == kScattered) return mask_columns(s, lane % 4 * 2, -CUDART_INF_F, key_bits());
    const Visibility sees = p.shape.sees;
    const auto position = [&](int row) { return work.q_tile.q_pos + query_of(row); };
    const auto first = [&](int row) { return first_column(tile, position(row), sees); };
    const auto end = [&](int row) { return end_column(tile, position(row), sees); };
    // Two passes, because most tiles at the ends of a window have one of its limits only.
    if (sees.has_window() && first_column(tile, position(63), sees) > 0) {
      mask_front(s, row0, lane % 4 * 2, -CUDART_INF_F, first);
    }
    if (end_column(tile, q_pos, sees) < kBlockN) mask_fragment(s, row0, lane % 4 * 2, -CUDART_INF_F, end);
  }

  // Rounds P into the A fragments of the next product, which frees the scores.
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], probabilities[step]);
  }

  // Releases a tile of which no row of this warpgroup sees a key. Its loader reuses a stage only
  // when every consumer has released it.
  __device__ __forceinline__ void skip_tile() {
    release_k();
    shared.v_ready(v_state.stage).wait_full(v_state.phase);
    release_v();
  }

  // Skips an item of which this warpgroup has no query, as the last tile of a node may.
  __device__ __forceinline__ void skip_work() {
    wait_queries();
    release_queries();
    for (bool last = false; !last;) {
      wait_k();
      last = is_last(step());
      skip_tile();
    }
  }

  // Returns the next tile of which a query up to `q_pos` sees a key, or the last one of the walk.
  __device__ __forceinline__ KvStep first_step(int q_pos) {
    while (true) {
      wait_k();
      const KvStep first = step();
      if (is_last(first) || (!is_hidden(first) && sees_keys(first.tile, q_pos, p.shape.sees))) return first;
      skip_tile();
    }
  }

  // The tiles that a warpgroup sees are neighbours on the walk, except where the keys of siblings
  // stand between its own and those of the ancestors. Then the loop below ends and begins again, so
  // that nothing in it knows of siblings.
  template <class Work>
  __device__ __forceinline__ void attend(const Work& work) {
    if (query_of(0) >= work.q_tile.rows) return skip_work();
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    const int q_pos = work.q_tile.q_pos + query_of(0);
    Softmax softmax;
    float rescale[1][2];
    wait_queries();
    bool accumulate = false;
    while (true) {
      KvStep now = first_step(work.q_tile.q_pos + min_int(work.q_tile.rows - 1, query_of(63)));
      issue_scores();
      ptx::wgmma_wait<0>();
      scores.take(s[0]);
      release_k();
      mask(work, now, q_pos);
      bool moved = softmax.raise_maximum(s, scale_log2, rescale);
      if (!accumulate) rescale[0][0] = rescale[0][1] = 1.f;
      softmax.exponentiate(s, scale_log2, rescale);
      if (accumulate && moved) scale_rows(o, rescale);
      pack_probabilities();

      if (!ends(now)) wait_k();
      while (!ends(now)) {
        if (Config::kStagesV > 1) wait_v(now.tile.valid);
        issue_scores();
        if (Config::kStagesV == 1) wait_v(now.tile.valid);  // its only stage
        issue_output(accumulate);
        now = step();
        accumulate = true;
        ptx::wgmma_wait<1>();
        scores.take(s[0]);
        release_k();
        mask(work, now, q_pos);
        moved = softmax.raise_maximum(s, scale_log2, rescale);
        softmax.exponentiate(s, scale_log2, rescale);
        ptx::pin(s[0]);
        // Needed by the next scores. It is here because the compiler moves nothing across its loop:
        // otherwise it moves the softmax after the wait for P V, and the two no longer overlap.
        if (!ends(now)) wait_k();
        ptx::wgmma_wait<0>();
        ptx::pin(o[0]);
        release_v();
        if (moved) scale_rows(o, rescale);
        pack_probabilities();
      }
      const bool is_over = is_last(now);
      if (is_over) release_queries();
      wait_v(now.tile.valid);
      issue_output(accumulate);
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      release_v();
      if (is_over) break;
      accumulate = true;
    }
    store(work, softmax);
  }

  // Stores O straight from registers: staging in shared memory would delay the next item's Q.
  template <class Work>
  __device__ __forceinline__ void store(const Work& work, Softmax& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query_of(row0 + half * 8), head = work.head + head_of(row0 + half * 8);
      float lse;
      const float inverse_sum = softmax.finish(0, half, p.shape.softmax_scale, p.sink(head), lse);
      if (group_column == 0 && lane % 4 == 0 && query < work.q_tile.rows) {
        p.lse[static_cast<int64_t>(head) * p.shape.q_rows + work.q_tile.row + query] = lse;
      }
      store_row<T>(o[0], half, inverse_sum, p.out.at(work.q_tile.row + query, head), group_column,
                   query < work.q_tile.rows ? p.shape.head_dim_v : 0, lane);
    }
  }

};

template <typename T, class Config, bool kSoftcap>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_forward(const __grid_constant__ ForwardParams<T> p, const __grid_constant__ ForwardMaps maps) {
  __shared__ QueryWork<ForwardBlock<Config>> works[kWorkSlots];
  __shared__ ForwardSteps<Config> steps;
  extern __shared__ uint8_t bytes[];
  const QueryShared<Config> shared{(ptx::shared_address(bytes) + 1023) & ~1023u};
  const QueryTiling tiling = query_tiling<Config>(p.packed_heads);
  if (threadIdx.x == 0) shared.init_barriers(tiling.slices);
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::kRegisters.producer>();
    const QueryRole role = query_role();
    if (threadIdx.x % 32 > 0) return;
    const ForwardProducer<T, Config> producer{shared, p, maps, steps};
    if (role == QueryRole::walk) {
      producer.walk(works);
    } else if (role == QueryRole::load_k) {
      producer.load_k();
    } else if (role == QueryRole::load_v) {
      producer.load_v();
    } else {
      using TileQ = typename Config::TileQ;
      const int queries = tiling.slice_queries();
      const int bytes = queries * tiling.heads * Config::kHeadDim * static_cast<int>(sizeof(T));
      const auto load = [&](int stage, int slice, const PipelineBarrier& ready, const ForwardBlock<Config>& block) {
        const auto& work = block.of_slice(slice);
        ready.expect(bytes);
        load_tile<TileQ>(shared.q(stage) + slice * 64 * TileQ::kRowBytes, maps.q, ready.full(), work.head,
                         work.q_tile.row + slice * queries);
      };
      hand_out_works<Config>(shared, p, works, tiling, load);
    }
  } else {
    ptx::take_registers<Config::kRegisters.consumer>();
    ForwardConsumer<T, Config, kSoftcap> consumer{shared, p, steps};
    consume_works(shared, works, consumer.lane,
                  [&](const ForwardBlock<Config>& block) { consumer.attend(block.of_slice(consumer.slice)); });
  }
}

}  // namespace dualkv::sm90
