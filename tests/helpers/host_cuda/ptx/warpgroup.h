// SPDX-License-Identifier: BSD-3-Clause
// csrc/ptx/warpgroup.h on the host. Products of a warpgroup happen when its last thread orders
// them, or when the first one waits for them, as is drawn: accumulators hold their old values until
// then, and operands must still be there.
#pragma once

#include <deque>

#include "shared_memory.h"

namespace dualkv::ptx {

constexpr int kGroupThreads = 128;

// A product that threads of the warpgroup have ordered.
struct OrderedProduct {
  int ordered = 0;  // threads
  std::function<void(const OrderedProduct&)> compute;
  float* d[kGroupThreads];
  uint32_t a[kGroupThreads][4];
  uint64_t descriptors[2];
  bool accumulate;
};

struct WarpgroupProducts {
  uint64_t computed = 0;               // products that are over
  std::deque<OrderedProduct> open;     // the others, in their order
  uint64_t ordered[kGroupThreads] = {};  // by each thread
  std::deque<uint64_t> committed[kGroupThreads];  // how many were ordered before the end of each group

  OrderedProduct& at(uint64_t number) {
    while (computed + open.size() <= number) open.emplace_back();
    return open[number - computed];
  }
  bool is_ordered(uint64_t number) { return number < computed || at(number).ordered == kGroupThreads; }
  void compute_before(uint64_t end) {
    for (; computed < end; ++computed) {
      open.front().compute(open.front());
      open.pop_front();
    }
  }
};
inline std::map<unsigned, WarpgroupProducts> warpgroup_products;
inline const bool resets_products = host_cuda::reset_between_blocks([] { warpgroup_products.clear(); });
inline WarpgroupProducts& own_products() { return warpgroup_products[threadIdx.x / kGroupThreads]; }

inline void wgmma_fence() {}
inline void wgmma_commit() {
  WarpgroupProducts& products = own_products();
  const unsigned thread = threadIdx.x % kGroupThreads;
  products.committed[thread].push_back(products.ordered[thread]);
}
template <int kPending>
void wgmma_wait() {
  WarpgroupProducts& products = own_products();
  std::deque<uint64_t>& committed = products.committed[threadIdx.x % kGroupThreads];
  if (committed.size() <= kPending) return;
  const uint64_t end = committed[committed.size() - 1 - kPending];
  committed.erase(committed.begin(), committed.end() - kPending);
  if (end == 0) return;
  host_cuda::wait_until("products of its warpgroup", [&products, end] { return products.is_ordered(end - 1); });
  products.compute_before(end);
}

template <int kN8>
void pin(float (&)[kN8][4]) {}

inline int thread_index() { return static_cast<int>(threadIdx.x); }

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

inline void named_barrier_sync(int id, int threads) { host_cuda::block_barriers[id].wait_for("a named barrier", threads); }
inline void named_barrier_arrive(int id, int threads) { host_cuda::block_barriers[id].arrive(threads); }
[[noreturn]] inline void exit_thread() { host_cuda::exit_thread(); }
inline void fence_async_proxy() { host_cuda::fence_own_writes(); }

}  // namespace dualkv::ptx
