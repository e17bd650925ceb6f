// SPDX-License-Identifier: BSD-3-Clause
// Calls of attention, forward and backward: plan, lay out the scratch memory, fill the parameter
// structs, launch.
#include <optional>

#include "guarded.h"
#include "kernels/sink_gradient.h"
#include "work_lists.h"

namespace dualkv {
namespace {

// A forward that is ready to be launched, but for its tensors.
struct Forward {
  Problem problem;
  ForwardPlan plan;
  Scratch scratch;
  ForwardList list;

  Forward(const DualkvCall& call, void* memory)
      : problem(call), plan(make_plan(problem)), scratch(memory),
        // Narrow tiles have the list of wide ones, which are as many queries.
        list(problem, tiles().block_m / plan.pack, tiles().block_n, scratch, plan.siblings, plan.least_tiles) {}

  template <typename T>
  void launch(const DualkvForward& tensors) {
    const WorkList<ForwardItem> work = list.prepare(tensors.out, tensors.lse);
    const ForwardKernel<T>& kernel = registry<ForwardKernel<T>>().kernels[plan.kernel.index];
    (plan.kernel.narrow ? kernel.narrow : kernel.wide)(
        {problem.shape, problem.nodes, work, problem.q<T>(), problem.kv<T>(), view_of<T>(tensors.out), tensors.lse,
         tensors.sinks, plan.pack},
        problem.stream);
    count_launch(forward_name(plan));
  }

 private:
  static ForwardPlan make_plan(const Problem& problem) {
    return planned(problem.call(),
                   [&](const Call& call) { return plan_forward(call, built<ForwardKernel>(), problem.gpu); });
  }
  const TileInfo& tiles() const { return built<ForwardKernel>()[plan.kernel.index].tiles; }
};

// The same for a backward.
struct Backward {
  Problem problem;
  BackwardPlan plan;
  Scratch scratch;
  BackwardList list;
  std::optional<ForwardList> dq_list;  // of a kernel for dQ alone

  Backward(const DualkvCall& call, void* memory)
      : problem(call), plan(make_plan(problem)), scratch(memory), list(problem, plan, scratch) {
    if (plan.sums != DqSums::none) return;
    const TileInfo& tiles = plan.dq.tiles;
    dq_list.emplace(problem, plan.dq.pack.queries(tiles.block_m), tiles.block_n, scratch);
  }

  template <typename T>
  void launch(const DualkvBackward& tensors) {
    list.prepare<T>(problem, tensors);
    const BackwardKernel<T>& kernel = registry<BackwardKernel<T>>().kernels[plan.kernel.index];
    const KvRegions<T> dkv = regions_of<T>(tensors.dk, tensors.dv, tensors.dk_decoded, tensors.dv_decoded);
    (plan.every_step ? kernel.every_step : kernel.launch)(
        {problem.shape, list.nodes, list.work, problem.q<T>(), view_of<const T>(tensors.dout), problem.kv<T>(), dkv,
         list.statistics, list.dq_sum, list.dkv_slots, list.dq_semaphores},
        problem.stream);
    count_launch(backward_name(plan));
    kernel.convert({problem.shape, list.nodes, list.dq_sum, view_of<T>(tensors.dq), list.splits, list.dkv_slots, dkv,
                    plan.kernel.tiles.block_n, plan.padded_head_dim(), plan.kernel.pack},
                   problem.stream);
    count_launch("dualkv_convert");
    if (dq_list) launch_dq<T>(tensors);
    if (tensors.dsinks) launch_dsinks(tensors);
  }

 private:
  static BackwardPlan make_plan(const Problem& problem) {
    return planned(problem.call(), [&](const Call& call) {
      return plan_backward(call, built<BackwardKernel>(), built<BackwardDqKernel>(), problem.gpu);
    });
  }

  template <typename T>
  void launch_dq(const DualkvBackward& tensors) {
    const WorkList<ForwardItem> work = dq_list->prepare(tensors.dq, nullptr);
    const BackwardDqKernel<T>& kernel = registry<BackwardDqKernel<T>>().kernels[plan.dq.index];
    (plan.dq.narrow ? kernel.narrow : kernel.wide)(
        {problem.shape, problem.nodes, work, problem.q<T>(), view_of<const T>(tensors.dout), problem.kv<T>(),
         list.statistics, view_of<T>(tensors.dq), plan.dq.pack},
        problem.stream);
    count_launch(dq_name(plan));
  }

  void launch_dsinks(const DualkvBackward& tensors) {
    const ProblemShape& shape = problem.shape;
    sink_gradient({shape.num_heads, shape.q_rows, list.statistics, tensors.lse, tensors.sinks, tensors.dsinks},
                  problem.stream);
    count_launch("dualkv_sink_gradient");
  }
};

}  // namespace
}  // namespace dualkv

using namespace dualkv;

int dualkv_forward_scratch(const DualkvCall* call, int64_t* bytes) {
  return guarded([&] { *bytes = Forward(*call, nullptr).scratch.used(); });
}

int dualkv_backward_scratch(const DualkvCall* call, int64_t* bytes) {
  return guarded([&] { *bytes = Backward(*call, nullptr).scratch.used(); });
}

int dualkv_forward(const DualkvCall* call, const DualkvForward* tensors, void* scratch) {
  return guarded([&] {
    Forward forward(*call, scratch);
    with_element_type(*call, [&](auto element) { forward.launch<decltype(element)>(*tensors); });
  });
}

int dualkv_backward(const DualkvCall* call, const DualkvBackward* tensors, void* scratch) {
  return guarded([&] {
    Backward backward(*call, scratch);
    with_element_type(*call, [&](auto element) { backward.launch<decltype(element)>(*tensors); });
  });
}

int dualkv_sequence_nodes(int32_t device, void* stream, const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k,
                          const int32_t* cu_seqlens_context, const int32_t* cu_seqs_per_context,
                          int64_t num_sequences, int64_t num_groups, int64_t context_rows, int32_t* nodes) {
  return guarded([&] {
    Device::select(device).check();
    build_sequence_nodes({cu_seqlens_q, cu_seqlens_k, cu_seqlens_context, cu_seqs_per_context,
                          static_cast<int>(num_sequences), static_cast<int>(num_groups),
                          static_cast<int>(context_rows), nodes},
                         static_cast<cudaStream_t>(stream));
    count_launch("dualkv_nodes");
  });
}

int dualkv_tree_nodes(int32_t device, void* stream, const int32_t* cu_seqlens, const int32_t* parents,
                      int64_t num_nodes, int32_t* nodes) {
  return guarded([&] {
    Device::select(device).check();
    build_tree_nodes({cu_seqlens, parents, static_cast<int>(num_nodes), nodes}, static_cast<cudaStream_t>(stream));
    count_launch("dualkv_nodes");
  });
}
