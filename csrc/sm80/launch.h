// SPDX-License-Identifier: BSD-3-Clause
// Launches of the sm80 kernels, and the macros by which an instance file builds and registers one
// of them.
#pragma once

#include "kernels/launch.h"
#include "sm80/backward.h"
#include "sm80/backward_dq.h"
#include "sm80/convert.h"
#include "sm80/forward.h"

namespace dualkv::sm80 {

template <typename T, class Config>
ForwardKernel<T> forward_kernel() {
  const auto run = [](const ForwardParams<T>& p, cudaStream_t stream) {
    launch(dualkv_sm80_forward<T, Config>, int64_t{p.work.capacity} * p.shape.num_heads, Config::kThreads,
           Config::kSharedBytes, stream, p);
  };
  return {run};
}

template <typename T, class Config>
BackwardKernel<T> backward_kernel() {
  const auto run = [](const BackwardParams<T>& p, cudaStream_t stream) {
    const auto kernel = p.dq_sum ? dualkv_sm80_backward<T, Config, true> : dualkv_sm80_backward<T, Config, false>;
    launch(kernel, int64_t{p.work.capacity} * p.shape.num_kv_heads, Config::kThreads, Config::kSharedBytes, stream, p);
  };
  const auto convert = [](const ConvertParams<T>& p, cudaStream_t stream) {
    const int dkv_blocks = convert_dkv_blocks(p, Config::kThreads);
    const int64_t dq_blocks = p.dq_sum ? int64_t{p.shape.num_heads} * ceil_div(p.shape.q_rows, Config::kBlockM) : 0;
    launch(dualkv_convert_sm80<T, Config>, dkv_blocks + dq_blocks, Config::kThreads, Config::TileQ::kBytes, stream, p,
           dkv_blocks);
  };
  return {run, convert};
}

template <typename T, class Config>
BackwardDqKernel<T> backward_dq_kernel() {
  const auto run = [](const BackwardDqParams<T>& p, cudaStream_t stream) {
    launch(dualkv_sm80_backward_dq<T, Config>, int64_t{p.work.capacity} * p.shape.num_heads, Config::kThreads,
           Config::kSharedBytes, stream, p);
  };
  return {run};
}

// Registers the kernels of all footprints for each element type. `make(element, config)` makes one
// of them.
template <template <typename> class Kernel, template <int, Footprint> class Config, int kHeadDim, class Make>
bool register_kernels(Make make) {
  return for_element_types([&](auto element) {
    each_footprint<Config, kHeadDim>([&](auto config) {
      add_kernel<Kernel<decltype(element)>>(traits_of<decltype(config)>(), make(element, config));
    });
  });
}

}  // namespace dualkv::sm80

#define DUALKV_SM80_REGISTER(Kernel, Config, head_dim, make)                                                    \
  [[maybe_unused]] static const bool registered =                                                               \
      dualkv::sm80::register_kernels<dualkv::Kernel, dualkv::sm80::Config, head_dim>(                           \
          [](auto element, auto config) { return dualkv::sm80::make<decltype(element), decltype(config)>(); })
#define DUALKV_SM80_FORWARD(head_dim) DUALKV_SM80_REGISTER(ForwardKernel, ForwardConfig, head_dim, forward_kernel)
#define DUALKV_SM80_BACKWARD(head_dim) DUALKV_SM80_REGISTER(BackwardKernel, BackwardConfig, head_dim, backward_kernel)
#define DUALKV_SM80_BACKWARD_DQ(head_dim) \
  DUALKV_SM80_REGISTER(BackwardDqKernel, BackwardDqConfig, head_dim, backward_dq_kernel)
