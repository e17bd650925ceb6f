// SPDX-License-Identifier: BSD-3-Clause
// A block scores a row: each thread reads the same columns of every row, 16 bytes at a time where
// the row's address allows, and keeps a running maximum, as the softmax of attention does.
#include "kernels/scores.h"

#include <math_constants.h>

#include <climits>

#include "core/platform.h"
#include "dispatch.h"
#include "tile/numerics.h"

namespace dualkv {
namespace {

constexpr int kScoreThreads = 512, kGradientThreads = 256;
constexpr int kLoads = 4;  // reads of a thread in flight
constexpr float kLn2 = 0.6931471805599453f;
// 2^x and e^x are 0 from here on: what stands in for -inf where a factor of 0 would make it NaN.
constexpr float kVanishes = -200.f;

template <typename T>
constexpr int kOf16Bytes = 16 / static_cast<int>(sizeof(T));

// Elements as the bits of a 32-bit word, and back: two of 16 bits, or a float.
template <typename T>
struct Word {
  static constexpr int kElements = 2;
  static __device__ __forceinline__ void unpack(uint32_t word, float* to) {
    const float2 pair = unpack2<T>(word);
    to[0] = pair.x, to[1] = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float* from) { return pack2<T>(from[0], from[1]); }
};
template <>
struct Word<float> {
  static constexpr int kElements = 1;
  static __device__ __forceinline__ void unpack(uint32_t word, float* to) { std::memcpy(to, &word, sizeof(word)); }
  static __device__ __forceinline__ uint32_t pack(const float* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
  }
};

template <typename T>
__device__ __forceinline__ void unpack(const uint4& bits, float (&to)[kOf16Bytes<T>]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) Word<T>::unpack(words[i], to + i * Word<T>::kElements);
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&from)[kOf16Bytes<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = Word<T>::pack(from + i * Word<T>::kElements);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// One element.
template <typename T>
__device__ __forceinline__ float load(const T* from) {
  uint32_t word = 0;
  std::memcpy(&word, from, sizeof(T));
  float value[Word<T>::kElements];
  Word<T>::unpack(word, value);
  return value[0];
}
template <typename T>
__device__ __forceinline__ void store(T* to, float value) {
  const float values[2] = {value, value};
  const uint32_t word = Word<T>::pack(values);
  std::memcpy(to, &word, sizeof(T));
}

// The elements from a column on, one by one; -inf behind the last.
template <typename T>
__device__ __forceinline__ uint4 load_elements(const T* row, int column, int columns) {
  float values[kOf16Bytes<T>];
#pragma unroll
  for (int i = 0; i < kOf16Bytes<T>; ++i) values[i] = column + i < columns ? load(row + column + i) : -CUDART_INF_F;
  return pack<T>(values);
}

// Sums over a row relative to its maximum, with d = (z - max) log2(e).
struct RowSums {
  float top;       // of the logits
  float sum;       // of 2^d
  float weighted;  // of 2^d d, where the entropy is asked for

  // What is subtracted: a row of -inf has sums of 0.
  static __device__ __forceinline__ float finite(float top) { return top == -CUDART_INF_F ? 0.f : top; }

  template <bool kWithEntropy>
  __device__ __forceinline__ void raise(float next, float factor) {
    const float distance = __fmul_rn(__fsub_rn(top, finite(next)), factor), share = exp2_approx(distance);
    if (kWithEntropy) weighted = __fmul_rn(__fmaf_rn(sum, fmaxf(distance, kVanishes), weighted), share);
    sum = __fmul_rn(sum, share);
    top = next;
  }

  template <bool kWithEntropy, int kCount>
  __device__ __forceinline__ void add(const float (&logits)[kCount], float factor) {
    const float base = finite(top);
    float of_these = 0.f, weighted_ones = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // The difference first: its error is smaller than that of products with large logits.
      const float distance = __fmul_rn(__fsub_rn(logits[i], base), factor), share = exp2_approx(distance);
      of_these = __fadd_rn(of_these, share);
      if (kWithEntropy) weighted_ones = __fmaf_rn(share, fmaxf(distance, kVanishes), weighted_ones);
    }
    sum = __fadd_rn(sum, of_these);
    if (kWithEntropy) weighted = __fadd_rn(weighted, weighted_ones);
  }
};

// What `join` makes of a value of every thread, in a fixed order; for all threads.
template <class Join>
__device__ __forceinline__ float over_block(float value, float (&of_warps)[kScoreThreads / 32], Join join) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = join(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kScoreThreads / 32; ++warp) value = join(value, of_warps[warp]);
  return value;
}

template <typename T, bool kWithEntropy>
__global__ void __launch_bounds__(kScoreThreads, 2) dualkv_score_rows(const ScoreArgs<T> a) {
  constexpr int kVector = kOf16Bytes<T>, kStep = kScoreThreads * kVector;
  __shared__ float tops[kScoreThreads / 32], sums[kScoreThreads / 32], weighted_ones[kScoreThreads / 32];
  const int64_t row = blockIdx.x;
  const T* const logits = a.logits.data + row * a.logits.row_stride;
  const int columns = static_cast<int>(a.logits.columns);
  // How far a thread may read 16 bytes. It has the same columns where it may not.
  const int whole = reinterpret_cast<uintptr_t>(logits) % 16 == 0 ? columns - columns % kVector : 0;

  RowSums found{-CUDART_INF_F, 0.f, 0.f};
  for (int first = static_cast<int>(threadIdx.x) * kVector; first < columns; first += kLoads * kStep) {
    uint4 bits[kLoads];
    if (first + (kLoads - 1) * kStep < whole) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) bits[i] = *reinterpret_cast<const uint4*>(logits + first + i * kStep);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = first + i * kStep;
        bits[i] = column < whole ? *reinterpret_cast<const uint4*>(logits + column)
                                 : load_elements(logits, column, columns);
      }
    }
    float values[kLoads][kVector], top = found.top;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      unpack<T>(bits[i], values[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) top = fmaxf(top, values[i][j]);  // NaN is left to the sums
    }
    found.raise<kWithEntropy>(top, a.factor);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) found.add<kWithEntropy>(values[i], a.factor);
  }

  found.raise<kWithEntropy>(over_block(found.top, tops, [](float x, float y) { return fmaxf(x, y); }), a.factor);
  const auto add = [](float x, float y) { return __fadd_rn(x, y); };
  const float sum = over_block(found.sum, sums, add);
  const float weighted = kWithEntropy ? over_block(found.weighted, weighted_ones, add) : 0.f;
  if (threadIdx.x != 0) return;
  const float log_sum = logf(sum);
  const int64_t target = a.targets[row];
  a.normalizer[row] = __fadd_rn(found.top / a.temperature, log_sum);
  a.chosen[row] = target >= 0 && target < columns ? load(logits + target) / a.temperature : a.elsewhere;
  if (kWithEntropy) a.entropy[row] = __fsub_rn(log_sum, __fmul_rn(weighted / sum, kLn2));
}

// A block has some columns of one row; kVector elements at a time, 16 bytes or one.
template <typename T, int kVector, bool kWithEntropy>
__global__ void __launch_bounds__(kGradientThreads, 4) dualkv_score_gradient(const ScoreGradientArgs<T> a, int tiles) {
  constexpr int kStep = kGradientThreads * kVector;
  const int64_t row = blockIdx.x / tiles;
  const int columns = static_cast<int>(a.logits.columns);
  const int first = static_cast<int>(blockIdx.x % tiles) * (kLoads * kStep) + static_cast<int>(threadIdx.x) * kVector;
  const T* const logits = a.logits.data + row * a.logits.row_stride;
  T* const to = a.d_logits + row * columns;

  float values[kLoads][kVector] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first + i * kStep;
    if (column >= columns) continue;
    if constexpr (kVector == 1) {
      values[i][0] = load(logits + column);
    } else {
      unpack<T>(*reinterpret_cast<const uint4*>(logits + column), values[i]);
    }
  }
  const float normalizer = a.normalizer[row], d_logp = a.d_logps[row] / a.temperature;
  const float d_entropy = kWithEntropy ? a.d_entropy[row] / a.temperature : 0.f;
  const float entropy = kWithEntropy ? a.entropy[row] : 0.f;
  const int64_t wanted = a.targets[row];
  const int target = wanted >= 0 && wanted < columns ? static_cast<int>(wanted) : -1;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first + i * kStep;
    if (column >= columns) continue;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      // z - normalizer; a product with 1 / temperature is as exact here as a quotient.
      const float log_p = __fmaf_rn(values[i][j], a.inverse, -normalizer), p = exp2_approx(__fmul_rn(log_p, kLog2e));
      const float slope =
          kWithEntropy ? __fmaf_rn(d_entropy, __fadd_rn(fmaxf(log_p, kVanishes), entropy), d_logp) : d_logp;
      // Rounded once: the two parts of a target's gradient are of one size where its p is near 1.
      values[i][j] = __fmaf_rn(-p, slope, target - column == j ? d_logp : 0.f);
    }
    if constexpr (kVector == 1) {
      store(to + column, values[i][0]);
    } else {
      *reinterpret_cast<uint4*>(to + column) = pack<T>(values[i]);
    }
  }
}

// Columns are counted in 32 bits, up to a block's reads behind the last.
template <typename T>
void check_columns(const Logits<T>& logits) {
  if (logits.columns > INT_MAX / 2) throw std::invalid_argument("logits: expected at most 2^30 columns");
}

template <typename T, int kVector>
void launch_gradient(const ScoreGradientArgs<T>& args, cudaStream_t stream) {
  const int64_t tiles = ceil_div(args.logits.columns, int64_t{kLoads * kGradientThreads * kVector});
  const int64_t blocks = args.logits.rows * tiles;
  if (blocks > INT_MAX) throw std::invalid_argument("logits: too many for one launch");
  const auto kernel =
      args.d_entropy ? &dualkv_score_gradient<T, kVector, true> : &dualkv_score_gradient<T, kVector, false>;
  kernel<<<static_cast<unsigned>(blocks), kGradientThreads, 0, stream>>>(args, static_cast<int>(tiles));
  check_cuda(cudaGetLastError());
}

}  // namespace

template <typename T>
void score_rows(const ScoreArgs<T>& args, cudaStream_t stream) {
  check_columns(args.logits);
  if (args.logits.rows == 0) return;
  if (args.logits.rows > INT_MAX) throw std::invalid_argument("logits: too many rows for one launch");
  const auto kernel = args.entropy ? &dualkv_score_rows<T, true> : &dualkv_score_rows<T, false>;
  kernel<<<static_cast<unsigned>(args.logits.rows), kScoreThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

template <typename T>
void score_rows_gradient(const ScoreGradientArgs<T>& args, cudaStream_t stream) {
  check_columns(args.logits);
  const Logits<T>& logits = args.logits;
  if (logits.rows == 0 || logits.columns == 0) return;
  constexpr int kVector = kOf16Bytes<T>;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(logits.data) | reinterpret_cast<uintptr_t>(args.d_logits);
  const bool is_aligned = addresses % 16 == 0 && logits.columns % kVector == 0 &&
                          (logits.rows == 1 || logits.row_stride % kVector == 0);
  return is_aligned ? launch_gradient<T, kVector>(args, stream) : launch_gradient<T, 1>(args, stream);
}

#define DUALKV_SCORES(T)                                       \
  template void score_rows(const ScoreArgs<T>&, cudaStream_t); \
  template void score_rows_gradient(const ScoreGradientArgs<T>&, cudaStream_t);
DUALKV_SCORES(__nv_bfloat16)
DUALKV_SCORES(__half)
DUALKV_SCORES(float)

}  // namespace dualkv
