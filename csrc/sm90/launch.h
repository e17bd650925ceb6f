// SPDX-License-Identifier: BSD-3-Clause
// Launches of the sm90 kernels, and the macros by which an instance file builds and registers one
// of them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/launch.h"
#include "sm90/backward.h"
#include "sm90/backward_columns.h"
#include "sm90/backward_dq.h"
#include "sm90/backward_mla.h"
#include "sm90/backward_wide.h"
#include "sm90/convert.h"
#include "sm90/forward.h"
#include "sm90/tensor_map.h"

namespace dualkv::sm90 {

template <typename T>
KvMaps kv_maps(const KvPair<const T>& kv, int rows, const ProblemShape& shape, int block_n) {
  return {make_tensor_map(kv.k, rows, shape.num_kv_heads, shape.head_dim, block_n),
          make_tensor_map(kv.v, rows, shape.num_kv_heads, shape.head_dim_v, block_n)};
}

template <typename T>
RegionMaps region_maps(const KvRegions<const T>& kv, const Extents& rows, const ProblemShape& shape, int block_n) {
  return {kv_maps(kv.keys, rows.key_rows, shape, block_n),
          kv_maps(kv.decoded, rows.decoded_rows, shape, block_n)};
}

// kTakesSoftcap: whether there is an instance for calls with a softcap, whose tiles are wide.
template <typename T, class Config, bool kTakesSoftcap>
void launch_forward(const ForwardParams<T>& p, cudaStream_t stream) {
  auto kernel = dualkv_sm90_forward<T, Config, false>;
  if constexpr (kTakesSoftcap) {
    if (p.shape.softcap.exists()) kernel = dualkv_sm90_forward<T, Config, true>;
  }
  const QueryTiling tiling = query_tiling<Config>(p.packed_heads);
  const ForwardMaps maps{make_tensor_map(p.q, p.shape.q_rows, p.shape.num_heads, p.shape.head_dim,
                                         tiling.slice_queries(), p.packed_heads),
                         region_maps(p.kv, p.nodes.extents, p.shape, Config::kBlockN),
                         region_maps(p.kv, p.nodes.extents, p.shape, kSlabRows)};
  const int64_t items = int64_t{p.work.capacity} * (p.shape.num_heads / p.packed_heads);
  launch(kernel, std::min<int64_t>(items, p.shape.num_sms), Config::kThreads, Config::kSharedBytes, stream, p, maps);
}

template <typename T>
CUtensorMap query_map(const TensorView<const T>& view, const ProblemShape& shape, int head_dim, QueryTiling tiling) {
  return make_tensor_map(view, shape.q_rows, shape.num_heads, head_dim, tiling.queries, tiling.heads);
}

// The instance for a call. Steps of which a warpgroup sees nothing are left out, but not beside
// sums of dQ with a softcap, whose registers leave no room for that.
template <typename T, class Config>
auto pick_backward(const BackwardParams<T>& p) {
  const auto pick = [&](auto has_softcap) {
    constexpr bool kSoftcap = decltype(has_softcap)::value;
    if constexpr (Config::kColumnBlocks > 1) {
      return dualkv_sm90_backward_columns<T, Config>;
    } else if constexpr (!Config::kSumsDq) {
      return dualkv_sm90_backward_wide<T, Config>;
    } else if constexpr (Config::kStagesDq > 0) {
      return p.dq_sum ? dualkv_sm90_backward<T, Config, true, !kSoftcap, kSoftcap>
                      : dualkv_sm90_backward<T, Config, false, true, kSoftcap>;
    } else {
      return p.dq_sum ? dualkv_sm90_backward_mla<T, Config, true, kSoftcap>
                      : dualkv_sm90_backward_mla<T, Config, false, kSoftcap>;
    }
  };
  return p.shape.softcap.exists() ? pick(std::true_type()) : pick(std::false_type());
}

template <typename T, class Config, bool kEveryStep>
void launch_backward(const BackwardParams<T>& p, cudaStream_t stream) {
  auto kernel = pick_backward<T, Config>(p);
  if constexpr (kEveryStep) kernel = dualkv_sm90_backward<T, Config, true, false, false>;
  const Pack heads = p.statistics.heads;
  const QueryTiling tiling{heads.queries(Config::kBlockM), heads.heads()};
  const BackwardMaps maps{query_map(p.q, p.shape, p.shape.head_dim, tiling),
                          query_map(p.dout, p.shape, p.shape.head_dim_v, tiling),
                          region_maps(p.kv, p.nodes.extents, p.shape, Config::kBlockN)};
  launch(kernel, int64_t{p.work.capacity} * p.shape.num_kv_heads * Config::kColumnBlocks, Config::kThreads,
         Config::kSharedBytes, stream, p, maps);
}

template <typename T, class Config>
void launch_backward_dq(const BackwardDqParams<T>& p, cudaStream_t stream) {
  const QueryTiling tiling{p.heads.queries(Config::kBlockM), p.heads.heads()};
  const BackwardDqMaps maps{query_map(p.q, p.shape, p.shape.head_dim, tiling),
                            query_map(p.dout, p.shape, p.shape.head_dim_v, tiling),
                            region_maps(p.kv, p.nodes.extents, p.shape, Config::kBlockN)};
  const int64_t items = int64_t{p.work.capacity} * p.heads.queries(p.shape.num_heads);
  launch(dualkv_sm90_backward_dq<T, Config>, std::min<int64_t>(items, p.shape.num_sms), Config::kThreads,
         Config::kSharedBytes, stream, p, maps);
}

template <typename T, class Config>
void launch_convert(const ConvertParams<T>& p, cudaStream_t stream) {
  constexpr int kThreads = Config::kConsumers * kWarpgroup;
  const int dkv_blocks = convert_dkv_blocks(p, kThreads);
  const int packs = p.heads.queries(p.shape.num_heads);
  const int m_blocks = ceil_div(p.shape.q_rows, p.heads.queries(Config::kBlockM));
  const int64_t dq_blocks = p.dq_sum ? int64_t{packs} * m_blocks : 0;
  launch(dualkv_convert_sm90<T, Config>, dkv_blocks + dq_blocks, kThreads, Config::kSumsDq ? Config::TileQ::kBytes : 0,
         stream, p, dkv_blocks);
}

template <int kHeadDim, int kHeadDimV = kHeadDim>
bool register_forward() {
  using Config = ForwardConfig<kHeadDim, kHeadDimV>;
  using Narrow = NarrowForwardConfig<kHeadDim, kHeadDimV>;
  return for_element_types([](auto element) {
    using T = decltype(element);
    ForwardKernel<T> kernel{launch_forward<T, Config, true>};
    if constexpr (Narrow::kBlockN < Config::kBlockN) kernel.narrow = launch_forward<T, Narrow, false>;
    add_kernel<ForwardKernel<T>>(query_traits<Config, Narrow>(), kernel);
  });
}

template <int kHeadDim, int kHeadDimV = kHeadDim>
bool register_backward() {
  using Config = BackwardConfig<kHeadDim, kHeadDimV>;
  return for_element_types([](auto element) {
    using T = decltype(element);
    BackwardKernel<T> kernel{launch_backward<T, Config, false>, launch_convert<T, Config>};
    if constexpr (Config::kTiles.has_every_step) kernel.every_step = launch_backward<T, Config, true>;
    add_kernel<BackwardKernel<T>>(backward_traits<Config>(), kernel);
  });
}

template <int kHeadDim, int kHeadDimV = kHeadDim>
bool register_backward_dq() {
  using Config = BackwardDqConfig<kHeadDim, kHeadDimV>;
  using Narrow = NarrowBackwardDqConfig<kHeadDim, kHeadDimV>;
  return for_element_types([](auto element) {
    using T = decltype(element);
    BackwardDqKernel<T> kernel{launch_backward_dq<T, Config>};
    if constexpr (Narrow::kBlockN < Config::kBlockN) kernel.narrow = launch_backward_dq<T, Narrow>;
    add_kernel<BackwardDqKernel<T>>(query_traits<Config, Narrow>(), kernel);
  });
}

}  // namespace dualkv::sm90

// (head dim), or (head dim of q and k, head dim of v)
#define DUALKV_SM90_FORWARD(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_forward<__VA_ARGS__>()
#define DUALKV_SM90_BACKWARD(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_backward<__VA_ARGS__>()
#define DUALKV_SM90_BACKWARD_DQ(...) \
  [[maybe_unused]] static const bool registered = dualkv::sm90::register_backward_dq<__VA_ARGS__>()
