// Launches of the sm90 kernels, and the macros by which an instance file builds and registers one of them.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.h"
#include "sm90/forward.h"
#include "sm90/tensor_map.h"

namespace dualkv::sm90 {

template <typename T>
KvMaps kv_maps(const KvPair<const T>& kv, int rows, const ProblemShape& shape, int block_n) {
  return {make_tensor_map(kv.k, rows, shape.num_kv_heads, shape.head_dim, block_n),
          make_tensor_map(kv.v, rows, shape.num_kv_heads, shape.head_dim, block_n)};
}

template <typename T, class Config>
void launch_forward(const ForwardParams<T>& p, cudaStream_t stream) {
  const Extents& rows = p.layout.extents;
  const ForwardMaps maps{make_tensor_map(p.q, rows.q_rows, p.shape.num_heads, p.shape.head_dim,
                                         Config::kBlockM / p.packed_heads, p.packed_heads),
                         kv_maps(p.kv.context, rows.context_rows, p.shape, Config::kBlockN),
                         kv_maps(p.kv.decoded, rows.decoded_rows, p.shape, Config::kBlockN)};
  const auto kernel = dualkv_sm90_forward<T, Config>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  const int64_t items = int64_t{p.work.capacity} * (p.shape.num_heads / p.packed_heads);
  const int blocks = static_cast<int>(items < p.shape.num_sms ? items : p.shape.num_sms);
  kernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(p, maps);
  check_cuda(cudaGetLastError());
}

template <typename T, int kHeadDim>
bool register_forward() {
  using Config = ForwardConfig<kHeadDim>;
  const TileInfo tiles{Config::kBlockM, Config::kBlockN, Config::kSharedBytes, true};
  add_kernel<ForwardKernel<T>>(Arch::sm90, kHeadDim, {tiles, launch_forward<T, Config>});
  return true;
}

}  // namespace dualkv::sm90

#define DUALKV_SM90_FORWARD(head_dim, type) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_forward<type, head_dim>()
