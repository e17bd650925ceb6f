// SPDX-License-Identifier: BSD-3-Clause
// Decode over pages. A block takes items in the order of the list, in which an item comes after all
// that it waits for: whoever has the first open item can finish it. An item is 64 rows of queries,
// 16 a warp: the queries and heads of all requests that share its keys.
//
//   S = Q K^T;  P = exp(S - max);  O += P V     (as in sm80/forward.h, in its order: the same bits)
//
// The state of a row (O, maximum, sums) passes from item to item through memory. While a block
// waits for states it loads its queries and its first keys. K_n+1 is loaded during softmax and P V,
// V_n during Q K^T; blocks that share a multiprocessor fill each other's waits.
//
// Latents hold their values, so that tiles of them are K and V, in two stages. Two groups of warps
// have the same rows: each computes their scores, and its half of the columns of O.
#pragma once

#include "decode/rows.h"
#include "sm80/config.h"

namespace dualkv::sm80 {

template <typename T, class Config>
struct DecodeBlock {
  using TileQ = typename Config::TileQ;
  using TileKv = typename Config::TileKv;
  static constexpr int kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  using Rows = DecodeRows<T, Config::kHeadDimV, Arch::sm80, Config::kThreads, Config::kSharers>;

  const DecodeParams<T>& p;
  const uint32_t s_q, s_k = s_q + TileQ::kBytes, s_v = s_k + TileKv::kBytes;
  const PagedRows<T, TileQ, TileKv> loads{p};
  Rows rows{p};

  static __device__ __forceinline__ void meet() { __syncthreads(); }
  // True of threads that order copies.
  static __device__ __forceinline__ bool is_loader() {
    return Config::kThreads == kDecodeThreads || threadIdx.x < kDecodeThreads;
  }

  __device__ __forceinline__ uint32_t k_tile(int step) const {
    return Config::kLatents ? s_k + step % 2 * TileKv::kBytes : s_k;
  }
  __device__ __forceinline__ void start_k(int step, const FetchedPages& at, const DecodeItem& item, int kv_head) const {
    if (is_loader()) loads.copy_k(k_tile(step), loads.locate(at), kv_head, loads.policy_of(item));
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void start_v(const FetchedPages& at, const DecodeItem& item, int kv_head) const {
    loads.copy_v(s_v, loads.locate(at), kv_head, loads.policy_of(item));
    ptx::cp_async_commit();
  }

  // Both are in shared memory, where they are read at each use, and the walk is made anew: for want
  // of registers.
  __device__ __forceinline__ void attend(const DecodeItem& item, const int& kv_head) {
    const auto walk = [&] { return DecodeWalk(item, kBlockN, p.shape.sees); };
    const int tiles = walk().tiles();
    FetchedPages now{};
    if (tiles > 0) {
      if (is_loader()) {
        int queries[decltype(loads)::kQuerySteps];
        loads.find_queries(item, queries);
        loads.copy_queries(s_q, item, kv_head, queries);
      }
      now = loads.fetch(item.request, walk().tile(0));
      start_k(0, now, item, kv_head);
    }
    rows.find(item, kv_head);
    OnlineSoftmax<1> softmax;
    typename Rows::Output o;
    clear(o);
    if (item.waits >= 0) rows.take(item, kv_head, o, softmax, meet);
    for (int step = 0; step < tiles; ++step) {
      const bool last = step + 1 == tiles;
      ptx::cp_async_wait<0>();
      __syncthreads();  // K_n is loaded, and all warps are done with V_n-1
      if constexpr (!Config::kLatents) start_v(now, item, kv_head);
      FetchedPages next{};
      if (!last) next = loads.fetch(item.request, walk().tile(step + 1));
      float s[1][kBlockN / 8][4];
      multiply_keys(s, k_tile(step));
      if constexpr (!Config::kLatents) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // V_n is loaded, and all warps are done with K_n
      }
      if (!last) {
        now = next;
        start_k(step + 1, now, item, kv_head);
      }
      cap_scores(s, p.shape.softcap);
      rows.mask(s, item, walk().tile(step));
      const float scale_log2 = p.shape.softmax_scale * kLog2e;
      float rescale[1][2];
      if (softmax.raise_maximum(s, scale_log2, rescale)) {
        softmax.rescale_sum(rescale);
        scale_rows(o, rescale);
      }
      softmax.exponentiate(s, scale_log2);
      multiply_values(o, s, Config::kLatents ? k_tile(step) : s_v);
    }
    rows.finish(item, kv_head, o, softmax, meet);
  }

  // Scores of more than 256 columns are three shorter sums, as in sm90/tile.h.
  __device__ __forceinline__ void multiply_keys(float (&s)[1][kBlockN / 8][4], uint32_t k_tile) const {
    constexpr int kSums = kHeadDim > 256 ? 3 : 1, kSteps = kHeadDim / 16 / kSums;
    static_assert(kSums * kSteps * 16 == kHeadDim, "sums are equally long");
    const int warp_row = rows.thread_of_rows / 32 * 16;
    const uint32_t q_address = rows_first_address<TileQ>(s_q + warp_row * TileQ::kRowBytes, rows.lane);
    const uint32_t k_address = columns_first_address<TileKv>(k_tile, rows.lane);
    const auto sum_from = [&](int first, float(&sum)[1][kBlockN / 8][4]) {
      clear(sum);
      warp_matmul<T, kSteps>(
          sum, [&](int k, int i, uint32_t(&a)[4]) { ptx::ldmatrix_x4(a, TileQ::at(q_address, i, first + k)); },
          [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4(b, TileKv::at(k_address, j, first + k)); });
    };
    sum_from(0, s);
#pragma unroll
    for (int i = 1; i < kSums; ++i) {
      float more[1][kBlockN / 8][4];
      sum_from(i * kSteps, more);
#pragma unroll
      for (int j = 0; j < kBlockN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][j][e] += more[0][j][e];
    }
  }
  __device__ __forceinline__ void multiply_values(typename Rows::Output& o, const float (&s)[1][kBlockN / 8][4],
                                                  uint32_t v_tile) const {
    const uint32_t first_panel = v_tile + rows.column0 / TileKv::kPanelCols * TileKv::kPanelBytes;
    const uint32_t v_address = rows_first_address<TileKv>(first_panel, rows.lane);
    warp_matmul<T, kBlockN / 16>(
        o, [&](int k, int i, uint32_t(&a)[4]) { accumulator_to_a<T>(s[i][2 * k], s[i][2 * k + 1], a); },
        [&](int k, int j, uint32_t(&b)[4]) { ptx::ldmatrix_x4_trans(b, TileKv::at(v_address, k, j)); });
  }
};

template <typename T, class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    dualkv_sm80_decode(const __grid_constant__ DecodeParams<T> p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ DecodeItem item;
  __shared__ int kv_head;
  __shared__ unsigned taken;
  DecodeBlock<T, Config> block{p, ptx::shared_address(shared)};
  const unsigned kv_heads = p.shape.num_kv_heads, works = *p.count * kv_heads;
  if (threadIdx.x == 0) item.folds = 0;
  while (true) {
    // A split of an item that folds is walked as an item of its own.
    if (threadIdx.x == 0) {
      const bool goes_on = item.folds > 0 && item.folded + 1 < item.folds;
      const int step = goes_on ? item.folded + 1 : 0;
      if (!goes_on) taken = atomicAdd(p.progress.next, 1);
      if (taken < works) item = p.items[taken / kv_heads], kv_head = static_cast<int>(taken % kv_heads);
      if (taken < works && item.folds > 0) item = p.splits.step(item, step, Config::kBlockN);
    }
    __syncthreads();
    if (taken >= works) break;
    block.attend(item, kv_head);
    __syncthreads();  // all are done with the item, and with its last tile
  }
  block.rows.leave(block.s_q, DecodeBlock<T, Config>::meet);
}

}  // namespace dualkv::sm80
