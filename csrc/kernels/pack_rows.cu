// The launch that writes a packed micro-batch.
#include "dispatch.h"
#include "kernels/pack_rows.h"

namespace dualkv {
namespace {

// Blocks of a run are `num_runs` apart: all runs have begun before the rest of a long one is taken up.
__global__ void __launch_bounds__(kPackThreads) dualkv_pack_rows(const PackRowsArgs a, int chunks) {
  const int run = blockIdx.x % a.num_runs, chunk = blockIdx.x / a.num_runs;
  write_packed_run(a, a.runs[run], int64_t{chunk} * kPackThreads + threadIdx.x, int64_t{chunks} * kPackThreads);
}

}  // namespace

void pack_rows(const PackRowsArgs& args, int longest, cudaStream_t stream) {
  constexpr int kRowsPerThread = 4, kMostChunks = 64;
  const int chunks = clamp_int(ceil_div(longest, kPackThreads * kRowsPerThread), 1, kMostChunks);
  dualkv_pack_rows<<<args.num_runs * chunks, kPackThreads, 0, stream>>>(args, chunks);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
