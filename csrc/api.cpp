// SPDX-License-Identifier: BSD-3-Clause
// The C interface: plan, lay out the scratch memory, fill the parameter structs, launch.
#include "api.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <optional>
#include <sstream>

#include "decode/combine.h"
#include "decode/memory.h"
#include "kernels/scores.h"
#include "kernels/sink_gradient.h"
#include "work_lists.h"

namespace dualkv {
namespace {

// What `make` plans for a call. Where no kernel serves its head dims, the error names the argument
// that has the larger one: `qk` or `v`.
template <class Make>
auto planned(const Call& call, Make make, const char* qk = "q", const char* v = "v") {
  try {
    return make(call);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(call.dims.v > call.dims.qk ? v : qk) + ": " + error.what());
  }
}

// Runs `body(T{})` for the element type of a call.
template <class Call, class Body>
auto with_element_type(const Call& call, Body body) {
  return call.is_half ? body(__half{}) : body(__nv_bfloat16{});
}

// All element types have the same kernels.
using AnyElement = __nv_bfloat16;

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
    registry<ForwardKernel<T>>().kernels[plan.kernel.index].run(
        plan.kernel.narrow,
        {problem.shape, problem.nodes, work, problem.q<T>(), problem.kv<T>(), view_of<T>(tensors.out), tensors.lse,
         tensors.sinks, plan.pack},
        problem.stream);
    count_launch(forward_name(plan));
  }

 private:
  static const std::vector<KernelTraits>& traits() { return registry<ForwardKernel<AnyElement>>().traits; }
  static ForwardPlan make_plan(const Problem& problem) {
    return planned(problem.call(), [&](const Call& call) { return plan_forward(call, traits(), problem.gpu); });
  }
  const TileInfo& tiles() const { return traits()[plan.kernel.index].tiles; }
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
    kernel.run(plan.every_step,
               {problem.shape, list.nodes, list.work, problem.q<T>(), view_of<const T>(tensors.dout), problem.kv<T>(),
                dkv, list.statistics, list.dq_sum, list.dkv_slots, list.dq_semaphores},
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
      return plan_backward(call, registry<BackwardKernel<AnyElement>>().traits,
                           registry<BackwardDqKernel<AnyElement>>().traits, problem.gpu);
    });
  }

  template <typename T>
  void launch_dq(const DualkvBackward& tensors) {
    const WorkList<ForwardItem> work = dq_list->prepare(tensors.dq, nullptr);
    registry<BackwardDqKernel<T>>().kernels[plan.dq.index].run(
        plan.dq.narrow,
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

std::string explain_call(Call asked, const DualkvOptions& options, int device, const char* name) {
  const char* const seen = std::getenv("DUALKV_GPU");
  const bool is_named = name || (seen && *seen);
  const Gpu card = name ? gpu_named("gpu", name) : seen_by_policy(is_named ? Gpu{} : Device::select(device).gpu);
  asked.sees = {options.causal != 0, window_of(options)};
  asked.mean_keys = options.mean_keys, asked.has_softcap = options.softcap > 0;
  asked.deterministic = options.deterministic != 0, asked.wants_portable = wants_portable_kernels();
  const auto make = [&](const Call& call) {
    return explain(card, plan_forward(call, registry<ForwardKernel<AnyElement>>().traits, card),
                   plan_backward(call, registry<BackwardKernel<AnyElement>>().traits,
                                 registry<BackwardDqKernel<AnyElement>>().traits, card));
  };
  std::ostringstream text;
  for (const Explained& one : planned(asked, make, "head_dim", "head_dim_v")) {
    text << one.choice << '\t' << one.value << '\t' << one.why << '\n';
  }
  return text.str();
}

std::string describe_build() {
  std::ostringstream text;
  text << "archs\t" DUALKV_BUILD_ARCHS "\nptx\t" DUALKV_BUILD_PTX "\ncuda\t" << CUDART_VERSION / 1000 << '.'
       << CUDART_VERSION % 1000 / 10 << '\n';
  for (Arch arch : {Arch::sm80, Arch::sm90}) {
    const auto list = [&](const char* direction, const std::vector<KernelTraits>& kernels) {
      text << direction << ' ' << name_of(arch) << '\t' << equal_head_dims(kernels, arch) << '\n';
    };
    list("head_dims", registry<ForwardKernel<AnyElement>>().traits);
    list("backward_head_dims", registry<BackwardKernel<AnyElement>>().traits);
  }
  return text.str();
}

// By element type the same index.
int find_decode(const DualkvDecodePlan& plan, const Gpu& gpu) {
  return choose_decode_kernel(registry<DecodeKernel<AnyElement>>().traits, static_cast<int>(plan.head_dim), gpu,
                              wants_portable_kernels());
}

// A device that has kernels, as the policy sees it.
Gpu checked_gpu(int index) {
  const Device& device = Device::select(index);
  device.check();
  return seen_by_policy(device);
}

DecodeMemory decode_memory(const DualkvDecodePlan& plan, const Gpu& gpu) {
  const Registry<DecodeKernel<AnyElement>>& all = registry<DecodeKernel<AnyElement>>();
  const int kernel = find_decode(plan, gpu);
  return DecodeMemory(plan, all.traits[kernel].tiles.block_n, all.kernels[kernel].blocks_per_sm * gpu.num_sms);
}

template <typename T>
PagedTensor<const T> pages_of(const DualkvPages& pages) {
  return {static_cast<const T*>(pages.data), pages.page_stride, pages.row_stride, pages.head_stride};
}

template <typename T>
void launch_decode(const Gpu& gpu, cudaStream_t stream, const DualkvDecodePlan& plan, const DualkvDecode& call) {
  const int kernel = find_decode(plan, gpu);
  const DecodeMemory memory = decode_memory(plan, gpu);
  const DualkvOptions& options = call.options;
  const int head_dim = static_cast<int>(plan.head_dim);
  const ProblemShape shape{static_cast<int>(call.q.rows), static_cast<int>(plan.num_heads),
                           static_cast<int>(plan.num_kv_heads), head_dim, head_dim,
                           static_cast<float>(options.softmax_scale), {true, window_of(options)},
                           {options.softmax_scale, options.softcap}, gpu.num_sms};
  const bool alone = shape.sees.has_window();  // rows of a branch have windows of their own
  const DecodeLists& lists = memory.plan.lists;
  registry<DecodeKernel<T>>().kernels[kernel].launch(
      {shape, memory.plan.requests.table, view_of<const T>(call.q), pages_of<T>(call.k), pages_of<T>(call.v),
       view_of<T>(call.out), call.lse, call.sinks, alone ? lists.alone : lists.shared, lists.counts + alone,
       lists.queries, memory.progress, memory.states, memory.plan.splits},
      stream);
  const Arch arch = registry<DecodeKernel<T>>().traits[kernel].arch;
  count_launch(std::string("dualkv_") + name_of(arch) + "_decode");
  if (alone || !memory.plan.splits.divide()) return;
  combine_splits<T>({shape, memory.states, state_pairs(arch), lists.splits, view_of<T>(call.out), call.lse, call.sinks},
                    stream);
  count_launch("dualkv_decode_combine");
}

// Runs `body` for logits of their element type.
template <class Body>
void with_logits(const DualkvLogits& given, Body body) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    body(Logits<T>{static_cast<const T*>(given.data), given.rows, given.columns, given.row_stride});
  };
  switch (given.element) {
    case DUALKV_BFLOAT16: return run(__nv_bfloat16{});
    case DUALKV_FLOAT16: return run(__half{});
    case DUALKV_FLOAT32: return run(float{});
  }
  throw std::invalid_argument("logits: expected bfloat16, float16 or float32");
}

template <typename T>
ScoreArgs<T> score_args(const Logits<T>& logits, const DualkvLogits& given, const DualkvScores& scores) {
  return {logits, given.targets, static_cast<float>(given.temperature),
          static_cast<float>(1.4426950408889634 / given.temperature), static_cast<float>(scores.elsewhere),
          scores.normalizer, scores.chosen, scores.entropy};
}

template <typename T>
ScoreGradientArgs<T> score_gradient_args(const Logits<T>& logits, const DualkvLogits& given,
                                         const DualkvScoreGradient& gradient) {
  return {logits, given.targets, static_cast<float>(given.temperature), static_cast<float>(1.0 / given.temperature),
          gradient.normalizer, gradient.d_logps, gradient.entropy, gradient.d_entropy,
          static_cast<T*>(gradient.d_logits)};
}

// Texts that outlive the call that returns them.
std::string& last_error() {
  thread_local std::string text;
  return text;
}
const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

// No exception crosses the interface: it may have been made by another C++ library.
template <class Body>
int guarded(Body body) {
  try {
    body();
    return DUALKV_SUCCESS;
  } catch (const std::invalid_argument& error) {
    last_error() = error.what();
    return DUALKV_INVALID_VALUE;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return DUALKV_FAILURE;
  }
}

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

int dualkv_decode_plan_bytes(int32_t device, const DualkvDecodePlan* plan, int64_t* bytes) {
  return guarded([&] { *bytes = decode_memory(*plan, checked_gpu(device)).bytes; });
}

int dualkv_decode_plan(int32_t device, void* stream, const DualkvDecodePlan* plan) {
  return guarded([&] {
    const DecodeMemory memory = decode_memory(*plan, checked_gpu(device));
    plan_decode(memory.plan, static_cast<cudaStream_t>(stream));
    count_launch("dualkv_decode_plan");
  });
}

int dualkv_decode(int32_t device, void* stream, const DualkvDecodePlan* plan, const DualkvDecode* call) {
  return guarded([&] {
    const Gpu gpu = checked_gpu(device);
    with_element_type(*call, [&](auto element) {
      launch_decode<decltype(element)>(gpu, static_cast<cudaStream_t>(stream), *plan, *call);
    });
  });
}

int dualkv_score_rows(int32_t device, void* stream, const DualkvLogits* logits, const DualkvScores* scores) {
  return guarded([&] {
    Device::select(device).check();
    with_logits(*logits, [&](const auto& rows) {
      score_rows(score_args(rows, *logits, *scores), static_cast<cudaStream_t>(stream));
    });
    count_launch("dualkv_score_rows");
  });
}

int dualkv_score_rows_gradient(int32_t device, void* stream, const DualkvLogits* logits,
                               const DualkvScoreGradient* gradient) {
  return guarded([&] {
    Device::select(device).check();
    with_logits(*logits, [&](const auto& rows) {
      score_rows_gradient(score_gradient_args(rows, *logits, *gradient), static_cast<cudaStream_t>(stream));
    });
    count_launch("dualkv_score_gradient");
  });
}

const char* dualkv_error(void) { return last_error().c_str(); }

const char* dualkv_version(void) { return DUALKV_VERSION; }

int dualkv_explain_plan(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v, int64_t rows,
                        int64_t num_nodes, const DualkvOptions* options, int32_t device, const char* gpu,
                        const char** text) {
  const auto narrow = [](int64_t one) { return static_cast<int>(one); };
  const Call call{{narrow(head_dim), narrow(head_dim_v)}, narrow(num_heads), narrow(num_kv_heads), narrow(rows),
                  narrow(rows), narrow(num_nodes), 0, {}};
  return guarded([&] { *text = kept(explain_call(call, *options, device, gpu)); });
}

const char* dualkv_build_info(void) { return kept(describe_build()); }

const char* dualkv_launch_counts(void) {
  std::ostringstream text;
  for (const auto& [kernel, count] : launch_counts()) text << kernel << '\t' << count << '\n';
  return kept(text.str());
}
