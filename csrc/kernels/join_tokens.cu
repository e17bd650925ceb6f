// The launch that joins tokens.
#include "dispatch.h"
#include "kernels/join_tokens.h"

namespace dualkv {
namespace {

template <typename T>
__global__ void __launch_bounds__(kJoinThreads)
    dualkv_join_tokens(const __grid_constant__ TokenParts parts, int64_t* joined, TokenNews* news) {
  const int part = blockIdx.x % parts.count, chunk = blockIdx.x / parts.count, chunks = gridDim.x / parts.count;
  join_part<T>(parts, part, chunk * kJoinThreads + threadIdx.x, chunks * kJoinThreads, joined, news + blockIdx.x);
}

}  // namespace

int join_blocks(const TokenParts& parts) {
  constexpr int kTokensPerThread = 4, kMostChunks = 64;
  int64_t longest = 0;
  for (int i = 0; i < parts.count; ++i) {
    const int64_t length = parts.begins[i + 1] - parts.begins[i];
    longest = length > longest ? length : longest;
  }
  const int64_t chunks = ceil_div<int64_t>(longest, kJoinThreads * kTokensPerThread);
  return parts.count * static_cast<int>(chunks < 1 ? 1 : chunks > kMostChunks ? kMostChunks : chunks);
}

template <typename T>
void join_tokens(const TokenParts& parts, int64_t* joined, TokenNews* news, cudaStream_t stream) {
  dualkv_join_tokens<T><<<join_blocks(parts), kJoinThreads, 0, stream>>>(parts, joined, news);
  check_cuda(cudaGetLastError());
}

template void join_tokens<uint8_t>(const TokenParts&, int64_t*, TokenNews*, cudaStream_t);
template void join_tokens<int8_t>(const TokenParts&, int64_t*, TokenNews*, cudaStream_t);
template void join_tokens<int16_t>(const TokenParts&, int64_t*, TokenNews*, cudaStream_t);
template void join_tokens<int32_t>(const TokenParts&, int64_t*, TokenNews*, cudaStream_t);
template void join_tokens<int64_t>(const TokenParts&, int64_t*, TokenNews*, cudaStream_t);

}  // namespace dualkv
