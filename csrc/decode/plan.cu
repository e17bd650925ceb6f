// SPDX-License-Identifier: BSD-3-Clause
// Launches that make the plan of a decoding step. Where the GPU can, each is let in when the one
// before has begun, reads what does not depend on it, and waits for its end.
#include "decode/early_launch.h"
#include "decode/list.h"

namespace dualkv {
namespace {

constexpr int kClaimThreads = 256;
// Forests of up to so many requests are in shared memory, larger ones in the plan's.
constexpr int kMostInSharedMemory = 1024;

int shared_bytes(int requests) {
  const int ints = requests <= kMostInSharedMemory ? kForestInts * requests : 0;
  return kSortedKeys * requests * static_cast<int>(sizeof(uint64_t)) + ints * static_cast<int>(sizeof(int));
}
const int kMostSharedBytes = std::max(shared_bytes(kMostInSharedMemory), shared_bytes(kMostRequests));

__global__ void __launch_bounds__(kClaimThreads) dualkv_decode_claims(const DecodePlanArgs a, int blocks_a_request) {
  let_next_launch_in();
  claim_page(a, blockIdx.x / blocks_a_request, blockIdx.x % blocks_a_request * kClaimThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kPrefixThreads) dualkv_decode_prefixes(const DecodePlanArgs a) {
  let_next_launch_in();
  find_prefix(a, blockIdx.x, [] { wait_for_last_launch(); });
}

template <bool kIsSmall>
__global__ void __launch_bounds__(kListThreads, 1) dualkv_decode_lists(const DecodePlanArgs a) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  uint64_t* const keys = reinterpret_cast<uint64_t*>(shared_memory);
  int* const forest = kIsSmall ? reinterpret_cast<int*>(keys + kSortedKeys * a.requests.count()) : a.forest;
  build_decode_lists(a, keys, forest, [] { wait_for_last_launch(); });
}

}  // namespace

void plan_decode(const DecodePlanArgs& args, cudaStream_t stream) {
  const int requests = args.requests.count();
  const auto lists = requests <= kMostInSharedMemory ? &dualkv_decode_lists<true> : &dualkv_decode_lists<false>;
  allow_shared_bytes(reinterpret_cast<const void*>(lists), kMostSharedBytes);
  if (args.requests.parents) {
    lists<<<1, kListThreads, shared_bytes(requests), stream>>>(args);
    return check_cuda(cudaGetLastError());
  }
  // The first launch is made without claims, too: it waits for all before the plan.
  const int blocks = max_int(ceil_div(args.requests.table.columns, kClaimThreads), 1);
  dualkv_decode_claims<<<max_int(requests, 1) * blocks, kClaimThreads, 0, stream>>>(args, blocks);
  check_cuda(cudaGetLastError());
  if (requests > 0) launch_early(dualkv_decode_prefixes, requests, kPrefixThreads, 0, args, stream);
  launch_early(lists, 1, kListThreads, shared_bytes(requests), args, stream);
}

}  // namespace dualkv
