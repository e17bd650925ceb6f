// SPDX-License-Identifier: BSD-3-Clause
// Shared parts of the backward kernels that own a KV tile: the producer that walks the queries, and
// the operations of a consumer warpgroup on 64 keys in the transposed form, whose rows are keys and
// whose columns are queries.
#pragma once

#include "kernels/kv_block.h"
#include "sm90/config.h"
#include "sm90/maps.h"
#include "sm90/tile.h"
#include "tile/mask.h"

namespace dualkv::sm90 {

struct BackwardMaps {
  CUtensorMap q, dout;
  RegionMaps kv;
};

// Shared-memory addresses and barriers.
template <class Config>
struct KvShared {
  using TileQ = typename Config::TileQ;
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return base + Config::kOffsetV; }
  __device__ __forceinline__ uint32_t q(int stage) const { return base + Config::kOffsetQ + stage * TileQ::kBytes; }
  __device__ __forceinline__ uint32_t dout(int stage) const {
    return base + Config::kOffsetDo + stage * Config::TileDo::kBytes;
  }
  __device__ __forceinline__ uint32_t lse(int stage) const {
    return base + Config::kOffsetLse + stage * Config::kBlockM * 4;
  }
  __device__ __forceinline__ uint32_t delta(int stage) const {
    return base + Config::kOffsetDelta + stage * Config::kBlockM * 4;
  }
  __device__ __forceinline__ uint32_t barrier(int index) const { return base + Config::kOffsetBarriers + index * 8; }
  __device__ __forceinline__ PipelineBarrier kv_ready() const { return {barrier(0)}; }
  __device__ __forceinline__ PipelineBarrier q_ready(int stage) const { return {barrier(2 + 2 * stage)}; }
  __device__ __forceinline__ PipelineBarrier dout_ready(int stage) const {
    return {barrier(2 + 2 * (Config::kStagesQ + stage))};
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4;
    kv_ready().init(kConsumerWarps);
    for (int stage = 0; stage < Config::kStagesQ; ++stage) q_ready(stage).init(kConsumerWarps);
    for (int stage = 0; stage < Config::kStagesDo; ++stage) dout_ready(stage).init(kConsumerWarps);
    ptx::mbarrier_init_fence();
  }
};

// Named barriers of the consumers; 0 is __syncthreads.
constexpr int kBarrierStaged = 1;  // and 2: dQ of a warpgroup is staged
constexpr int kBarrierZeroed = 3;  // foreign rows are zero
constexpr int kBarrierStored = 4;  // and 5: a gradient of a warpgroup is staged, or has left

// Step as the consumers read it. `flags` holds what most steps need in one word, loaded long before
// its use: shared memory is busy with operands, and waiting for a load from it costs 3% of the
// loop. Flags about the next step save the wait for that step's own word.
struct alignas(16) FlaggedStep : BackwardStep {
  static constexpr uint32_t kLast = 1, kForeign = 2, kNextForeign = 4, kNextMasked = 8;
  // Shifted by the index of a warpgroup that sees nothing of the first step, or of the next one.
  static constexpr uint32_t kHidden = 16, kNextHidden = 64;
  static constexpr uint32_t kMasked = 256;  // of the first step
  uint32_t flags;
  int dq_tile;
  int own_begin, own_end;  // rows of the tile inside the range; all others are foreign
};

// Producer thread: loads K and V, Q_0, then dO_m before Q_m+1. The geometry of a step is passed
// along with its Q. kFlagsHidden: compute which steps a warpgroup of 64 keys may skip.
template <typename T, class Config, bool kFlagsHidden = false>
struct BackwardProducer {
  using TileQ = typename Config::TileQ;
  using TileDo = typename Config::TileDo;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kBlockM = Config::kBlockM, kLog2BlockM = kBlockM == 32 ? 5 : kBlockM == 64 ? 6 : 7;
  static_assert(1 << kLog2BlockM == kBlockM);

  const KvShared<Config>& shared;
  const BackwardParams<T>& p;
  const BackwardMaps& maps;
  KvBlock& block;
  FlaggedStep (&steps)[Config::kSteps];
  PipelineState<Config::kStagesQ> q_state;
  PipelineState<Config::kStagesDo> dout_state;

  // Completes a step with what the walk does not know; the walk is already at the next step.
  __device__ __forceinline__ void flag(FlaggedStep& step) const {
    const QueryWalk& next = block.walk;
    const Pack heads = p.statistics.heads;
    const int queries = heads.queries(kBlockM);
    step.dq_tile = step.pack * ((p.shape.q_rows + queries - 1) >> (kLog2BlockM - heads.log2)) + step.m_block;
    step.own_begin = step.first_row(queries, heads);
    step.own_end = step.end_row(queries, heads);
    step.flags = step.own_end - step.own_begin < kBlockM ? FlaggedStep::kForeign : 0;
    if (step.last) {
      step.flags |= FlaggedStep::kLast;
      return;
    }
    if (has_foreign_rows(next.range, next.m_block, queries)) step.flags |= FlaggedStep::kNextForeign;
    if (is_masked(next)) {
      step.flags |= FlaggedStep::kNextMasked;
      if (kFlagsHidden) step.flags |= hidden(next) * FlaggedStep::kNextHidden;
    }
  }

  __device__ __forceinline__ bool is_masked(const QueryWalk& at) const {
    return needs_mask(at.tile, at.range, at.m_block, p.statistics.heads.queries(kBlockM), Config::kBlockN);
  }

  // Bit mask of the warpgroups that see nothing of a query tile.
  __device__ __forceinline__ uint32_t hidden(const QueryWalk& at) const {
    uint32_t groups = 0;
    for (int group = 0; group < Config::kBlockN / 64; ++group) {
      const int queries = p.statistics.heads.queries(kBlockM);
      if (is_hidden(at.tile, at.range, at.m_block, queries, group * 64, 64, p.shape.sees)) groups |= 1u << group;
    }
    return groups;
  }

  // Publishes the next step with its Q and LSE, once the consumers have released the stage.
  __device__ __forceinline__ const BackwardStep& load_q(uint32_t more_flags = 0) {
    const PipelineBarrier ready = shared.q_ready(q_state.stage);
    ready.wait_empty(q_state.phase);
    FlaggedStep& step = steps[q_state.template place<Config::kSteps>()];
    block.take_step(step);
    flag(step);
    step.flags |= more_flags;
    if (!step.valid) {
      ptx::mbarrier_arrive(ready.full());
      return step;
    }
    ready.expect(TileQ::kBytes + kBlockM * 4);
    load_queries<TileQ>(shared.q(q_state.stage), maps.q, ready.full(), step);
    ptx::bulk_load(shared.lse(q_state.stage), p.statistics.lse_log2 + first_statistic(step), kBlockM * 4, ready.full());
    q_state.advance();
    return step;
  }

  __device__ __forceinline__ void load_dout(const BackwardStep& step) {
    const PipelineBarrier ready = shared.dout_ready(dout_state.stage);
    ready.wait_empty(dout_state.phase);
    ready.expect(TileDo::kBytes + kBlockM * 4);
    load_queries<TileDo>(shared.dout(dout_state.stage), maps.dout, ready.full(), step);
    ptx::bulk_load(shared.delta(dout_state.stage), p.statistics.delta + first_statistic(step), kBlockM * 4, ready.full());
    dout_state.advance();
  }

  template <class Tile>
  __device__ __forceinline__ void load_queries(uint32_t tile, const CUtensorMap& map, uint32_t barrier,
                                               const BackwardStep& step) const {
    const Pack heads = p.statistics.heads;
    load_tile<Tile>(tile, map, barrier, heads.rows(step.pack), step.m_block * heads.queries(kBlockM));
  }
  __device__ __forceinline__ int64_t first_statistic(const BackwardStep& step) const {
    return p.statistics.index_in_pack(step.pack, int64_t{step.m_block} * kBlockM);
  }

  __device__ __forceinline__ void load_kv() {
    const KvMaps& kv = maps.kv.of(block.tile.region);
    shared.kv_ready().expect(TileK::kBytes + TileV::kBytes);
    load_tile<TileK>(shared.k(), kv.k, shared.kv_ready().full(), block.kv_head, block.tile.row);
    load_tile<TileV>(shared.v(), kv.v, shared.kv_ready().full(), block.kv_head, block.tile.row);
  }

  __device__ __forceinline__ void run() {
    load_kv();
    block.start_walk();
    uint32_t first_flags = 0;
    if (kFlagsHidden) {
      first_flags = hidden(block.walk) * FlaggedStep::kHidden + (is_masked(block.walk) ? FlaggedStep::kMasked : 0);
    }
    const BackwardStep* step = &load_q(first_flags);
    while (step->valid) {
      load_dout(*step);
      if (step->last) return;
      step = &load_q();
    }
  }
};

// Start of every block that owns keys. False if the grid is larger than the list.
template <class Config, class Shared, typename T>
__device__ __forceinline__ bool start_block(const Shared& shared, KvBlock& block, const BackwardParams<T>& p) {
  bool exists = false;
  if (threadIdx.x == 0) {
    shared.init_barriers();
    exists = block.load(p.work, p.nodes, p.shape, p.statistics.heads, Config::kBlockM, Config::kBlockN,
                        Config::kColumnBlocks);
  }
  return __syncthreads_or(exists);
}

// Starts the block and runs the producer on the first warpgroup. True for consumers, false for the
// producer and where there is no block.
template <class Config, class Shared, typename T>
__device__ __forceinline__ bool feed_consumers(const Shared& shared, KvBlock& block, FlaggedStep (&steps)[Config::kSteps],
                                               const BackwardParams<T>& p, const BackwardMaps& maps) {
  if (!start_block<Config>(shared, block, p)) return false;
  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::kRegisters.producer>();
    if (threadIdx.x == 0) BackwardProducer<T, Config>{shared, p, maps, block, steps}.run();
    return false;
  }
  ptx::take_registers<Config::kRegisters.consumer>();
  return true;
}

// Consumer warpgroup of 64 keys. kSoftcap: whether there may be a softcap; if not, no loop tests
// it.
template <typename T, class Config, class Shared, bool kSoftcap = true>
struct KvWarpgroup {
  using TileQ = typename Config::TileQ;
  using TileDo = typename Config::TileDo;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kConsumerThreads = Config::kConsumers * kWarpgroup;
  using Scores = float[kBlockM / 8][4];
  using Operand = uint32_t[kBlockM / 16][4];  // scores as the A operand of a product
  template <int kCols>
  using Gradient = float[kCols / 8][4];

  const Shared& shared;
  const BackwardParams<T>& p;
  const KvBlock& block;
  const FlaggedStep (&steps)[Config::kSteps];
  const int first_key;  // first key of the warpgroup in the tile
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int row0 = first_key + thread / 32 * 16 + lane / 4;  // this thread's first key
  const int col0 = lane % 4 * 2;                             // and its first query

  int steps_done = 0;
  __device__ __forceinline__ uint32_t k_tile() const { return varying(shared.k(), steps_done); }
  __device__ __forceinline__ uint32_t v_tile() const { return varying(shared.v(), steps_done); }

  // S^T and dP^T of this warpgroup's keys.
  RowProducts<T, TileK, TileQ, kBlockM / 8> score_products;
  RowProducts<T, TileV, TileDo, kBlockM / 8> dp_products;
  __device__ __forceinline__ void issue_scores(Scores& s, uint32_t q_tile) {
    ptx::wgmma_fence();
    score_products.issue(s, k_tile() + first_key * TileK::kRowBytes, q_tile);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void issue_dp(Scores& dp, uint32_t dout_tile) { issue_dp(dp, dout_tile, v_tile()); }
  __device__ __forceinline__ void issue_dp(Scores& dp, uint32_t dout_tile, uint32_t v) {
    ptx::wgmma_fence();
    dp_products.issue(dp, v + first_key * TileV::kRowBytes, dout_tile);
    ptx::wgmma_commit();
  }

  // acc += A Y, where A is P^T or dS^T and Y is dO or Q.
  template <int kN8>
  __device__ __forceinline__ void issue_accumulate(float (&acc)[kN8][4], const Operand& a, uint32_t q_tile) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
      ptx::Wgmma<T, kN8 * 8>::template rs<1>(acc, a[step], along_rows<SmemTile<kBlockM, kN8 * 8>>(q_tile, step), true);
    }
    ptx::wgmma_commit();
  }

  // Row statistic of this thread's queries: x[j][e] belongs to queries 16 j + {0, 1, 8, 9} + col0.
  // Loaded before the wait for the scores, whose products keep shared memory busy.
  using Statistic = float[kBlockM / 16][4];
  __device__ __forceinline__ void load_statistic(Statistic& x, uint32_t address) const {
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j) load_statistic_piece(x[j], address, j);
  }
  __device__ __forceinline__ void load_statistic_piece(float (&x)[4], uint32_t address, int piece) const {
    ptx::load_shared_float4(x, address + piece * 64 + col0 * 8);
  }

  // Computes P^T = exp2(S^T * scale - LSE), of capped scores.
  __device__ __forceinline__ void exponentiate(Scores& s, const Statistic& lse) const {
    if (kSoftcap) cap_scores(s, p.shape.softcap);
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = exp2_approx(s[j][e] * scale_log2 - lse[j / 2][j % 2 * 2 + e % 2]);
  }

  // Multiplies x by 1 - tanh^2 of the scores, the derivative of the softcap.
  __device__ __forceinline__ void multiply_by_slope(Scores& x, const Scores& probabilities, const Statistic& lse) const {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[j][e] *= softcap_slope(p.shape.softcap, probabilities[j][e], lse[j / 2][j % 2 * 2 + e % 2]);
      }
  }
  // Variant that reloads the LSE from shared memory, if there is a softcap: no registers to keep
  // it.
  __device__ __forceinline__ void multiply_by_slope(Scores& x, const Scores& probabilities, uint32_t lse_address) const {
    if (!kSoftcap || !p.shape.softcap.exists()) return;
    Statistic lse;
    load_statistic(lse, lse_address);
    multiply_by_slope(x, probabilities, lse);
  }

  // Computes dS^T = P^T * (dP^T - delta) for the 16 queries of one operand fragment.
  __device__ __forceinline__ void multiply_by_probabilities(Scores& x, int piece, const uint32_t (&packed)[4],
                                                            const float (&delta)[4]) const {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float2 probability = unpack2<T>(packed[pair]);
      float(&row)[4] = x[2 * piece + pair / 2];
      const int e = pair % 2 * 2;
      row[e] = probability.x * (row[e] - delta[pair / 2 * 2]);
      row[e + 1] = probability.y * (row[e + 1] - delta[pair / 2 * 2 + 1]);
    }
  }

  __device__ __forceinline__ void mask(Scores& x, const BackwardStep& step) const {
    const QueryRange range = step.range;
    const KvTile tile = block.tile;
    const Pack heads = p.statistics.heads;
    const int queries = heads.queries(kBlockM), first_row = step.m_block * queries;
    const Visibility sees = p.shape.sees;
    mask_transposed(x, row0, col0, [&](int key) {
      const RowsOfKey rows = rows_of_key(tile, range, key, sees);
      return RowsOfKey{heads.rows(clamp_int(rows.begin - first_row, 0, queries)),
                       heads.rows(clamp_int(rows.end - first_row, 0, queries))};
    });
  }

  // Zeroes the rows of a tile outside [first, end), by all consumer threads.
  template <class Tile, int kRows>
  __device__ __forceinline__ void zero_rows(uint32_t tile, int first, int end) const {
    constexpr int kPanelChunks = kRows * Tile::kPanelChunks;
#pragma unroll 1
    for (int index = threadIdx.x - kWarpgroup; index < Tile::kPanels * kPanelChunks; index += kConsumerThreads) {
      const int row = index % kPanelChunks / Tile::kPanelChunks;
      if (row < first || row >= end) ptx::store_shared_128(tile + index * 16, make_uint4(0, 0, 0, 0));
    }
  }

  // Zeroes foreign rows of Q and dO: they are operands of dK and dV, and 0 * NaN is NaN.
  __device__ __forceinline__ void zero_foreign_rows(const FlaggedStep& step, int q_stage, int dout_stage,
                                                    int dout_phase) const {
    shared.dout_ready(dout_stage).wait_full(dout_phase);
    zero_rows<TileQ, kBlockM>(shared.q(q_stage), step.own_begin, step.own_end);
    zero_rows<TileDo, kBlockM>(shared.dout(dout_stage), step.own_begin, step.own_end);
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kBarrierZeroed, kConsumerThreads);
  }

  // Stores dK (`index` 0, scaled) or dV (`index` 1) of this warpgroup's keys; for a split tile,
  // this block's part. Staged in `staging`, a tile whose rows of these keys are no longer read, and
  // written in whole rows: straight from registers a store writes half sectors, 5 us a block
  // instead of 2.5. `column` is the column of the gradient at which `acc` starts.
  template <int kN8>
  __device__ __forceinline__ void store(const float (&acc)[kN8][4], int index, float scale, const TensorView<T>& view,
                                        uint32_t staging, int column = 0) const {
    using Tile = SmemTile<kBlockN, kN8 * 8>;
    if (block.slot >= 0) return store_part(acc, index, column);
    // Read again: otherwise the compiler computes what depends on it before the loop and keeps it
    // in registers.
    const int index_in_block = ptx::thread_index(), thread = index_in_block % kWarpgroup;
    const int barrier = kBarrierStored + index_in_block / kWarpgroup - 1;
    store_accumulator<Tile, T>(staging, first_key + thread / 32 * 16, 0,
                               reinterpret_cast<const float(&)[1][kN8][4]>(acc), scale, thread % 32);
    ptx::named_barrier_sync(barrier, kWarpgroup);
    store_rows<Tile, 64, kWarpgroup>(view.at(block.tile.row + first_key, block.kv_head) + column, view.row_stride,
                                     staging + first_key * Tile::kRowBytes, block.tile.valid - first_key,
                                     (index == 0 ? p.shape.head_dim : p.shape.head_dim_v) - column, thread);
    ptx::named_barrier_sync(barrier, kWarpgroup);
  }

  // Stores straight from registers: a thread holds two neighbouring columns of two rows.
  template <int kN8>
  __device__ __forceinline__ void store_part(const float (&acc)[kN8][4], int index, int column) const {
    float* slot = p.dkv_slots + (int64_t{block.slot} * 2 + index) * (Config::kBlockN * kHeadDim) + column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kN8; ++j) {
        *reinterpret_cast<float2*>(slot + (row0 + half * 8) * kHeadDim + col0 + j * 8) =
            make_float2(acc[j][2 * half], acc[j][2 * half + 1]);
      }
  }
};

}  // namespace dualkv::sm90
