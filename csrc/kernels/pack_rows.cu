// The launch that writes a packed micro-batch.
#include "dispatch.h"
#include "kernels/pack_rows.h"

namespace dualkv {
namespace {

// Blocks of a run are `num_runs` apart: all runs have begun before the rest of a long one is taken up.
__global__ void __launch_bounds__(kPackThreads) dualkv_pack_rows(const __grid_constant__ PackRowsArgs a) {
  const int run = blockIdx.x % a.num_runs, chunk = blockIdx.x / a.num_runs, chunks = gridDim.x / a.num_runs;
  write_packed_run(a, a.runs[run], chunk * kPackThreads + threadIdx.x, chunks * kPackThreads);
}

}  // namespace

void pack_rows(const PackRowsArgs& args, cudaStream_t stream) {
  constexpr int kRowsPerThread = 4, kMostChunks = 64;
  int longest = 0;
  for (int i = 0; i < args.num_runs; ++i) {
    longest = max_int(longest, max_int(args.runs[i].length, args.runs[i].scored_len));
  }
  const int chunks = clamp_int(ceil_div(longest, kPackThreads * kRowsPerThread), 1, kMostChunks);
  dualkv_pack_rows<<<args.num_runs * chunks, kPackThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
