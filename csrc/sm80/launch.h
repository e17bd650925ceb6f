// Launches of the sm80 kernels, and the macros by which an instance file builds and registers one of them.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.h"
#include "sm80/backward.h"
#include "sm80/backward_dq.h"
#include "sm80/convert_dq.h"
#include "sm80/forward.h"

namespace dualkv::sm80 {

template <typename Params>
void launch(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, const Params& params,
            cudaStream_t stream) {
  if (blocks == 0) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params);
  check_cuda(cudaGetLastError());
}

template <typename T, int kHeadDim>
struct Launch {
  using Forward = ForwardConfig<kHeadDim>;
  using Backward = BackwardConfig<kHeadDim>;
  using BackwardDq = BackwardDqConfig<kHeadDim>;

  static void forward(const ForwardParams<T>& p, cudaStream_t stream) {
    launch(dualkv_sm80_forward<T, Forward>, int64_t{p.work.capacity} * p.shape.num_heads, Forward::kThreads,
           Forward::kSharedBytes, p, stream);
  }
  static void backward(const BackwardParams<T>& p, cudaStream_t stream) {
    const auto kernel =
        p.dq_sum ? dualkv_sm80_backward<T, Backward, true> : dualkv_sm80_backward<T, Backward, false>;
    launch(kernel, int64_t{p.work.capacity} * p.shape.num_kv_heads, Backward::kThreads, Backward::kSharedBytes, p,
           stream);
  }
  static void convert_dq(const ConvertDqParams<T>& p, cudaStream_t stream) {
    launch(dualkv_convert_dq_sm80<T, Backward>,
           int64_t{p.shape.num_heads} * ceil_div(p.shape.q_rows, Backward::kBlockM), Backward::kThreads,
           Backward::TileQ::kBytes, p, stream);
  }
  static void backward_dq(const BackwardDqParams<T>& p, cudaStream_t stream) {
    launch(dualkv_sm80_backward_dq<T, BackwardDq>, int64_t{p.work.capacity} * p.shape.num_heads,
           BackwardDq::kThreads, BackwardDq::kSharedBytes, p, stream);
  }
};

template <typename T, int kHeadDim>
ForwardKernel<T> forward_kernel() {
  using Config = ForwardConfig<kHeadDim>;
  return {{Config::kBlockM, Config::kBlockN, Config::kSharedBytes + kStaticSharedBytes},
          Launch<T, kHeadDim>::forward};
}

template <typename T, int kHeadDim>
BackwardKernel<T> backward_kernel() {
  using Config = BackwardConfig<kHeadDim>;
  return {{Config::kBlockM, Config::kBlockN, Config::kSharedBytes + kStaticSharedBytes},
          Launch<T, kHeadDim>::backward,
          Launch<T, kHeadDim>::convert_dq};
}

template <typename T, int kHeadDim>
BackwardDqKernel<T> backward_dq_kernel() {
  using Config = BackwardDqConfig<kHeadDim>;
  return {{Config::kBlockM, Config::kBlockN, Config::kSharedBytes + kStaticSharedBytes},
          Launch<T, kHeadDim>::backward_dq};
}

}  // namespace dualkv::sm80

#define DUALKV_SM80_FORWARD(head_dim, type)                                     \
  static const dualkv::Registration<dualkv::ForwardKernel<type>> registration(  \
      dualkv::Arch::sm80, head_dim, dualkv::sm80::forward_kernel<type, head_dim>())
#define DUALKV_SM80_BACKWARD(head_dim, type)                                    \
  static const dualkv::Registration<dualkv::BackwardKernel<type>> registration( \
      dualkv::Arch::sm80, head_dim, dualkv::sm80::backward_kernel<type, head_dim>())
#define DUALKV_SM80_BACKWARD_DQ(head_dim, type)                                   \
  static const dualkv::Registration<dualkv::BackwardDqKernel<type>> registration( \
      dualkv::Arch::sm80, head_dim, dualkv::sm80::backward_dq_kernel<type, head_dim>())
