// Enough of CUDA to run one block of a kernel on the host, for tests: a thread for each of its threads, which the barriers,
// shuffles and atomics of the kernel synchronise as on the device. Stands in for the toolkit's header of this name.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
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
inline thread_local HostIndex threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

inline std::barrier<>* block_barrier;

// The lanes of a mask meet. Disjoint masks of a warp may be in flight together: the lowest lane tells them apart.
struct Meeting {
  std::atomic<int> arrived{0}, round{0};
};
inline Meeting meetings[32][32];
inline int64_t lane_values[32][32];

inline int warp() { return threadIdx.x / 32; }
inline int lane() { return threadIdx.x % 32; }

inline void meet(unsigned mask) {
  Meeting& meeting = meetings[warp()][__builtin_ctz(mask)];
  const int round = meeting.round.load();
  if (meeting.arrived.fetch_add(1) + 1 == __builtin_popcount(mask)) {
    meeting.arrived = 0;
    ++meeting.round;
    meeting.round.notify_all();
  } else {
    meeting.round.wait(round);
  }
}

// Runs `kernel` as the only block, of `threads` threads.
inline void run_block(int threads, const std::function<void()>& kernel) {
  std::barrier<> all(threads);
  block_barrier = &all;
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      threadIdx = {static_cast<unsigned>(i)}, blockIdx = {}, gridDim = {1, 1, 1};
      blockDim = {static_cast<unsigned>(threads), 1, 1};
      kernel();
    });
  }
  for (std::thread& thread : running) thread.join();
}

}  // namespace host_cuda

inline void __syncthreads() { host_cuda::block_barrier->arrive_and_wait(); }

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
  return std::atomic_ref<T>(*address).fetch_add(static_cast<T>(value));
}

template <typename T, typename U>
T atomicOr(T* address, U value) {
  return std::atomic_ref<T>(*address).fetch_or(static_cast<T>(value));
}

template <typename T, class Better>
T host_cuda_replace(T* address, T value, Better better) {
  std::atomic_ref<T> target(*address);
  T old = target.load();
  while (better(value, old) && !target.compare_exchange_weak(old, value)) {
  }
  return old;
}

template <typename T, typename U>
T atomicMax(T* address, U value) {
  return host_cuda_replace(address, static_cast<T>(value), std::greater<T>());
}

template <typename T, typename U>
T atomicMin(T* address, U value) {
  return host_cuda_replace(address, static_cast<T>(value), std::less<T>());
}

using std::max;
using std::min;
