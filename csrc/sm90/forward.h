// Forward on Hopper: one producer thread feeds K and V tiles by bulk copies, two or three warpgroups of 64 query rows
// each consume them.
//
//   S = Q K^T;  P = exp(S - max);  O += P V        (online softmax; O is normalised and rounded once)
//
// Inside a warpgroup the softmax of tile n runs beside O += P V of tile n-1, and while one warpgroup is in softmax the
// others multiply. Blocks are persistent: the producer takes the next item from a counter and starts loading it while
// the consumers finish theirs.
#pragma once

#include "core/mask.h"
#include "core/online_softmax.h"
#include "sm90/config.h"
#include "sm90/maps.h"
#include "sm90/query_work.h"
#include "sm90/tile.h"

namespace dualkv::sm90 {

struct ForwardMaps {
  CUtensorMap q;
  RegionMaps kv;
};

// The producer thread. For each item it loads K_0 and Q, then K_n before V_n-1: scores are one tile ahead of values.
template <typename T, class Config>
struct ForwardProducer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;

  const QueryShared<Config>& shared;
  const ForwardParams<T>& p;
  const ForwardMaps& maps;
  PipelineState<Config::kStagesK> k_state, v_state;
  PipelineState<1> q_state;
  PipelineState<2> work_state;

  __device__ __forceinline__ void load_k(const QueryBlock& work, int n) {
    const KvTile tile = kv_tile(work.segment, n, Config::kBlockN);
    load_kv_tile<TileKv>(shared.k(k_state.stage), maps.kv.of(tile.region).k, shared.k_ready(k_state.stage), k_state,
                         work.kv_head, tile.row);
  }

  __device__ __forceinline__ void load_v(const QueryBlock& work, int n) {
    const KvTile tile = kv_tile(work.segment, n, Config::kBlockN);
    load_kv_tile<TileKv>(shared.v(v_state.stage), maps.kv.of(tile.region).v, shared.v_ready(v_state.stage), v_state,
                         work.kv_head, tile.row);
  }

  __device__ __forceinline__ void load_q(const QueryBlock& work) {
    const Handshake ready = shared.queries_ready();
    ready.wait_empty(q_state.phase);
    const int rows = Config::kBlockM / p.packed_heads * p.packed_heads;
    ready.expect(rows * Config::kHeadDim * static_cast<int>(sizeof(T)));
    load_tile<TileQ>(shared.q(), maps.q, ready.full(), work.head, work.q_tile.row);
    q_state.advance();
  }

  __device__ __forceinline__ const QueryBlock* hand_out(QueryWork (&works)[2], int index, int items) {
    const QueryTiling tiling{Config::kBlockM / p.packed_heads, p.packed_heads};
    return hand_out_work<Config>(shared, p, works, work_state, index, items, tiling);
  }

  __device__ __forceinline__ void run(QueryWork (&works)[2]) {
    const int items = *p.work.count;
    const QueryBlock* next = hand_out(works, blockIdx.x, items);
    while (const QueryBlock* work = next) {
      load_k(*work, 0);
      load_q(*work);
      // Taking the next item costs three dependent reads: early, while the consumers have tiles to work on.
      next = hand_out(works, gridDim.x + atomicAdd(p.work.next, 1), items);
      for (int n = 1; n < work->kv_tiles; ++n) {
        load_k(*work, n);
        load_v(*work, n - 1);
      }
      load_v(*work, work->kv_tiles - 1);
    }
  }
};

// One consumer warpgroup: 64 rows of each query tile.
template <typename T, class Config>
struct ForwardConsumer {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  static constexpr int kSteps = kHeadDim / 16;
  using Softmax = OnlineSoftmax<1, 8>;

  const QueryShared<Config>& shared;
  const ForwardParams<T>& p;
  // Number of the warpgroup. Broadcast, so that the compiler knows it to be uniform.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup - 1, 0);
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % 32;
  const int row0 = thread / 32 * 16 + lane / 4;  // this thread's first row in the warpgroup's 64

  PipelineState<Config::kStagesK> k_state, v_state;
  PipelineState<1> q_state;
  MaskedTiles masked;
  float s[1][kBlockN / 8][4];
  float o[1][kHeadDim / 8][4];
  uint32_t probabilities[kBlockN / 16][4];

  // What row `row` of this warpgroup's 64 holds: a query, counted from the first of the tile, and a head of the pack.
  __device__ __forceinline__ int query_of(int row) const { return (group * 64 + row) / p.packed_heads; }
  __device__ __forceinline__ int head_of(int row) const { return (group * 64 + row) % p.packed_heads; }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t q = shared.q() + group * 64 * TileQ::kRowBytes, k = shared.k(k_state.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::Wgmma<T, kBlockN>::template ss<0, 0>(s[0], along_columns<TileQ>(q, step), along_columns<TileKv>(k, step),
                                                step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(bool accumulate) {
    const uint32_t v = shared.v(v_state.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<T, kHeadDim>::template rs<1>(o[0], probabilities[step], along_rows<TileKv>(v, step),
                                              accumulate || step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void wait_k() const { shared.k_ready(k_state.stage).wait_full(k_state.phase); }
  __device__ __forceinline__ void release_k() {
    shared.k_ready(k_state.stage).release(lane);
    k_state.advance();
  }

  // Waits for V of tile n, and zeroes its foreign rows.
  __device__ __forceinline__ void wait_v(const QueryBlock& work, int n) const {
    shared.v_ready(v_state.stage).wait_full(v_state.phase);
    if (!masked.is_tail(n)) return;
    zero_tail<TileKv, kBlockN>(shared.v(v_state.stage), kv_tile(work.segment, n, kBlockN).valid, group, thread);
  }
  __device__ __forceinline__ void release_v() {
    shared.v_ready(v_state.stage).release(lane);
    v_state.advance();
  }

  __device__ __forceinline__ void mask(const QueryBlock& work, int n) {
    if (!masked.needs_mask(n)) return;
    const KvTile tile = kv_tile(work.segment, n, kBlockN);
    mask_fragment(s, row0, lane % 4 * 2, -CUDART_INF_F, [&](int row) {
      return visible_columns(tile, work.q_tile.q_pos + query_of(row), p.shape.causal);
    });
  }

  // Rounds P into the A fragments of the next product; the scores are free for the next tile.
  __device__ __forceinline__ void pack_probabilities() {
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step)
      accumulator_to_a<T>(s[0][2 * step], s[0][2 * step + 1], probabilities[step]);
  }

  // Releases tiles n, n + 1, ... of the block unread, because no row of this warpgroup sees them. The producer loads
  // them for the other warpgroups, and it reuses a stage only when every consumer has released it.
  __device__ __forceinline__ void skip_tiles(const QueryBlock& work, int n) {
    for (; n < work.kv_tiles; ++n) {
      wait_k();
      release_k();
      shared.v_ready(v_state.stage).wait_full(v_state.phase);
      release_v();
    }
  }

  // How many tiles the rows of this warpgroup see, but at least one. Later queries of the block may see more: kv_tiles.
  __device__ __forceinline__ int own_kv_tiles(const QueryBlock& work) const {
    QueryTile own = work.q_tile;
    own.rows = min_int(own.rows, query_of(63) + 1);
    return max_int(visible_kv_tiles(work.segment, own, kBlockN, p.shape.causal), 1);
  }

  __device__ __forceinline__ void attend(const QueryBlock& work) {
    if (query_of(0) >= work.q_tile.rows) {
      // The last tile of a sequence may leave a warpgroup without a query.
      shared.queries_ready().wait_full(q_state.phase);
      shared.queries_ready().release(lane);
      q_state.advance();
      return skip_tiles(work, 0);
    }
    const float scale_log2 = p.shape.softmax_scale * kLog2e;
    const int kv_tiles = own_kv_tiles(work);
    Softmax softmax;
    float rescale[1][2];
    QueryTile first = work.q_tile;
    first.q_pos += query_of(0);
    masked = masked_tiles(work.segment, first, kBlockN, p.shape.causal);
    shared.queries_ready().wait_full(q_state.phase);
    wait_k();
    issue_scores();
    ptx::wgmma_wait<0>();
    ptx::pin(s[0]);
    release_k();
    mask(work, 0);
    softmax.raise_maximum(s, scale_log2, rescale);
    softmax.exponentiate(s, scale_log2);
    pack_probabilities();

    if (kv_tiles > 1) wait_k();
    for (int n = 1; n < kv_tiles; ++n) {
      wait_v(work, n - 1);
      issue_scores();
      issue_output(n > 1);
      ptx::wgmma_wait<1>();
      ptx::pin(s[0]);
      release_k();
      mask(work, n);
      const bool moved = softmax.raise_maximum(s, scale_log2, rescale);
      softmax.rescale_sum(rescale);
      softmax.exponentiate(s, scale_log2);
      ptx::pin(s[0]);
      // The next scores need this wait; it stands here because of its loop, across which the compiler moves nothing:
      // else it would move the softmax behind the wait for P V, and the two would no longer run at the same time.
      if (n + 1 < kv_tiles) wait_k();
      ptx::wgmma_wait<0>();
      ptx::pin(o[0]);
      release_v();
      if (moved) scale_rows(o, rescale);
      pack_probabilities();
    }
    shared.queries_ready().release(lane);
    q_state.advance();
    wait_v(work, kv_tiles - 1);
    issue_output(kv_tiles > 1);
    ptx::wgmma_wait<0>();
    ptx::pin(o[0]);
    release_v();
    skip_tiles(work, kv_tiles);
    store(work, softmax);
  }

  // Straight from registers: a copy through shared memory would hold up the next item's Q.
  __device__ __forceinline__ void store(const QueryBlock& work, Softmax& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = query_of(row0 + half * 8), head = work.head + head_of(row0 + half * 8);
      float lse;
      const float inverse_sum = softmax.finish(0, half, p.shape.softmax_scale, p.sink(head), lse);
      if (query >= work.q_tile.rows) continue;
      if (lane % 4 == 0) p.lse[static_cast<int64_t>(head) * p.shape.q_rows + work.q_tile.row + query] = lse;
      T* out = p.out.at(work.q_tile.row + query, head) + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        if (j * 8 < p.shape.head_dim) {
          *reinterpret_cast<uint32_t*>(out + j * 8) =
              pack2<T>(o[0][j][2 * half] * inverse_sum, o[0][j][2 * half + 1] * inverse_sum);
        }
      }
    }
  }

  __device__ __forceinline__ void run(const QueryWork (&works)[2]) {
    for_each_work(shared, works, lane, [&](const QueryBlock& work) { attend(work); });
  }
};

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    dualkv_sm90_forward(const __grid_constant__ ForwardParams<T> p, const __grid_constant__ ForwardMaps maps) {
  __shared__ QueryWork works[2];
  extern __shared__ uint8_t bytes[];
  const QueryShared<Config> shared{(ptx::shared_address(bytes) + 1023) & ~1023u};
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();

  if (threadIdx.x < kWarpgroup) {
    ptx::give_registers<Config::Registers::kProducer>();
    if (threadIdx.x == 0) ForwardProducer<T, Config>{shared, p, maps}.run(works);
  } else {
    ptx::take_registers<Config::Registers::kConsumer>();
    ForwardConsumer<T, Config>{shared, p}.run(works);
  }
}

}  // namespace dualkv::sm90
