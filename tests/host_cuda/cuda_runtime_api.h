// Enough of CUDA to run one block of a kernel on the host, for tests: a context for each of its threads, which take turns at
// the barriers and shuffles of the kernel. Stands in for the toolkit's header of this name.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one block at a time
#define __launch_bounds__(...)
#define __forceinline__ inline

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct HostIndex {
  unsigned x = 0, y = 0, z = 0;
};
inline HostIndex threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

constexpr int kStackBytes = 1 << 16;
inline ucontext_t scheduler;
inline std::vector<ucontext_t> contexts;
inline std::vector<bool> done;
inline const std::function<void()>* body;

// Lets the others run: whoever comes back has all of them behind it that do not wait.
inline void give_way() { swapcontext(&contexts[threadIdx.x], &scheduler); }

struct Meeting {
  unsigned arrived = 0, round = 0;

  void wait_for(unsigned count) {
    const unsigned now = round;
    if (++arrived == count) {
      arrived = 0;
      ++round;
    }
    while (round == now) give_way();
  }
};
inline Meeting block_meeting;
inline std::unordered_map<unsigned, Meeting> meetings[32];  // of a warp, several masks may be in flight together
inline int64_t lane_values[32][32];

inline int warp() { return threadIdx.x / 32; }
inline int lane() { return threadIdx.x % 32; }
inline void meet(unsigned mask) { meetings[warp()][mask].wait_for(__builtin_popcount(mask)); }

inline void run_thread() {
  (*body)();
  done[threadIdx.x] = true;
}

// Runs `kernel` as the only block, of `threads` threads. They take turns, forwards and backwards, so that one which does
// not wait for another reads before that has written, or the other way round.
inline void run_block(int threads, const std::function<void()>& kernel) {
  std::vector<char> stacks(size_t{kStackBytes} * threads);
  body = &kernel, blockDim = {static_cast<unsigned>(threads), 1, 1};
  contexts.assign(threads, {}), done.assign(threads, false);
  for (int i = 0; i < threads; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[size_t{kStackBytes} * i], contexts[i].uc_stack.ss_size = kStackBytes;
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], run_thread, 0);
  }
  for (bool forwards = true; std::count(done.begin(), done.end(), false); forwards = !forwards) {
    for (int turn = 0; turn < threads; ++turn) {
      threadIdx.x = forwards ? turn : threads - 1 - turn;
      if (!done[threadIdx.x]) swapcontext(&scheduler, &contexts[threadIdx.x]);
    }
  }
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::block_meeting.wait_for(blockDim.x); }

inline bool __syncthreads_or(bool value) {
  static unsigned votes = 0;
  votes += value;
  __syncthreads();
  const bool result = votes > 0;
  __syncthreads();
  votes -= value;  // others may have voted again
  return result;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  host_cuda::lane_values[host_cuda::warp()][host_cuda::lane()] = static_cast<int64_t>(value);
  host_cuda::meet(mask);
  const T result = static_cast<T>(host_cuda::lane_values[host_cuda::warp()][source]);
  host_cuda::meet(mask);
  return result;
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int source = host_cuda::lane() - distance;
  return __shfl_sync(mask, value, source < 0 ? host_cuda::lane() : source);
}

inline unsigned __match_any_sync(unsigned mask, int value) {
  host_cuda::lane_values[host_cuda::warp()][host_cuda::lane()] = value;
  host_cuda::meet(mask);
  unsigned equal = 0;
  for (int i = 0; i < 32; ++i) equal |= static_cast<unsigned>(host_cuda::lane_values[host_cuda::warp()][i] == value) << i;
  host_cuda::meet(mask);
  return equal & mask;
}

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename T, typename U>
T atomicAdd(T* address, U value) {
  return std::exchange(*address, *address + static_cast<T>(value));
}

template <typename T, typename U>
T atomicOr(T* address, U value) {
  return std::exchange(*address, *address | static_cast<T>(value));
}

template <typename T, typename U>
T atomicMax(T* address, U value) {
  return std::exchange(*address, std::max(*address, static_cast<T>(value)));
}

template <typename T, typename U>
T atomicMin(T* address, U value) {
  return std::exchange(*address, std::min(*address, static_cast<T>(value)));
}

using std::max;
using std::min;
