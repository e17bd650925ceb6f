// SPDX-License-Identifier: BSD-3-Clause
// Launches that make the plan of a decoding step.
#include "dispatch.h"
#include "kernels/decode_list.h"

namespace dualkv {
namespace {

constexpr int kClaimThreads = 256;
// Of up to so many requests the forest is in shared memory, of more in the plan's.
constexpr int kMostInSharedMemory = 1024;

int shared_bytes(int requests) {
  const int ints = requests <= kMostInSharedMemory ? kForestInts * requests : 0;
  return sorted_size(2 * requests) * static_cast<int>(sizeof(uint64_t)) + ints * static_cast<int>(sizeof(int));
}
const int kMostSharedBytes = std::max(shared_bytes(kMostInSharedMemory), shared_bytes(kMostRequests));

__global__ void __launch_bounds__(kClaimThreads) dualkv_decode_claims(const DecodePlanArgs a, int blocks_a_request) {
  claim_page(a, blockIdx.x / blocks_a_request, blockIdx.x % blocks_a_request * kClaimThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kPrefixThreads) dualkv_decode_prefixes(const DecodePlanArgs a) {
  find_prefix(a, blockIdx.x);
}

__global__ void __launch_bounds__(kListThreads) dualkv_decode_lists(const DecodePlanArgs a, int keys) {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  uint64_t* const sorted = reinterpret_cast<uint64_t*>(shared_memory);
  const bool is_small = a.requests.count() <= kMostInSharedMemory;
  build_decode_lists(a, sorted, is_small ? reinterpret_cast<int*>(sorted + keys) : a.forest);
}

}  // namespace

void plan_decode(const DecodePlanArgs& args, cudaStream_t stream) {
  const int requests = args.requests.count(), blocks = ceil_div(args.requests.table.columns, kClaimThreads);
  if (requests > 0 && blocks > 0) {
    dualkv_decode_claims<<<requests * blocks, kClaimThreads, 0, stream>>>(args, blocks);
    check_cuda(cudaGetLastError());
  }
  if (requests > 0) {
    dualkv_decode_prefixes<<<requests, kPrefixThreads, 0, stream>>>(args);
    check_cuda(cudaGetLastError());
  }
  allow_shared_bytes(reinterpret_cast<const void*>(&dualkv_decode_lists), kMostSharedBytes);
  const int bytes = shared_bytes(requests);
  dualkv_decode_lists<<<1, kListThreads, bytes, stream>>>(args, sorted_size(2 * requests));
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
