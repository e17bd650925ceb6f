// SPDX-License-Identifier: BSD-3-Clause
// The Python module: check, allocate, fill the parameter structs, launch. Nothing but this file and
// the headers beside it that it includes (check.h, problem.h, work_lists.h, autograd_node.h)
// sees torch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "autograd_node.h"
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
    TORCH_CHECK_VALUE(false, call.dims.v > call.dims.qk ? v : qk, ": ", error.what());
  }
}

// Runs `body(T{})` for the element type of q.
template <class Body>
auto with_element_type(const Tensor& q, Body body) {
  return q.scalar_type() == at::kHalf ? body(__half{}) : body(__nv_bfloat16{});
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k, const Tensor& v,
                                   const std::optional<Tensor>& k_decoded, const std::optional<Tensor>& v_decoded,
                                   const std::optional<Tensor>& sinks_in, const Tensor& nodes,
                                   const Options& options) {
  const auto guard = device_guard(q_in);
  const Problem problem(q_in, {k, v, k_decoded, v_decoded}, nodes, options);
  const Tensor& q = problem.q;
  if (sinks_in) {
    check_argument(sinks_in->device() == q.device(), "sinks", sinks_in->device(), "a tensor on the device of q");
    TORCH_CHECK_TYPE(sinks_in->is_floating_point(), "sinks: expected floating point, got ", sinks_in->scalar_type());
    check_argument(sinks_in->dim() == 1 && sinks_in->size(0) == q.size(1), "sinks", sinks_in->sizes(),
                   "one for each of ", q.size(1), " heads");
  }
  const Tensor sinks = sinks_in ? sinks_in->to(at::kFloat).contiguous() : Tensor();
  const std::array<int64_t, 3> sizes{q.size(0), q.size(1), v.size(2)};
  const std::array<int64_t, 2> lse_sizes{q.size(1), q.size(0)};
  if (problem.is_empty()) {
    return {zeros(q, sizes, q.scalar_type()),
            at::full(lse_sizes, -std::numeric_limits<float>::infinity(), q.options().dtype(at::kFloat))};
  }
  const Tensor out = uninitialised(q, sizes, q.scalar_type()), lse = uninitialised(q, lse_sizes, at::kFloat);

  with_element_type(q, [&](auto element) {
    using T = decltype(element);
    const auto& built = registry<ForwardKernel<T>>();
    const ForwardPlan plan = planned(problem.call(options), [&](const Call& call) {
      return plan_forward(call, built.traits, problem.gpu);
    });
    // Narrow tiles have the list of wide ones, which are as many queries.
    const TileInfo& tiles = built.traits[plan.kernel.index].tiles;
    const ForwardList list(problem, tiles.block_m / plan.pack, tiles.block_n, out, lse);
    built.kernels[plan.kernel.index].run(plan.kernel.narrow,
                                         {problem.shape, problem.table(), list.work, view_of<const T>(problem.q),
                                          problem.kv.regions<const T>(), view_of<T>(out), lse.data_ptr<float>(),
                                          sinks.defined() ? sinks.data_ptr<float>() : nullptr, plan.pack},
                                         problem.stream);
    count_launch(forward_name(plan));
  });
  return {out, lse};
}

template <typename T>
void backward_dq(const Problem& problem, const BackwardPlan& plan, const Tensor& dout, const RowStatistics& statistics,
                 const Tensor& dq) {
  const TileInfo& tiles = plan.dq.tiles;
  const Pack pack = plan.dq.pack;
  const ForwardList list(problem, pack.queries(tiles.block_m), tiles.block_n, dq, Tensor());
  registry<BackwardDqKernel<T>>().kernels[plan.dq.index].run(
      plan.dq.narrow,
      {problem.shape, problem.table(), list.work, view_of<const T>(problem.q), view_of<const T>(dout),
       problem.kv.regions<const T>(), statistics, view_of<T>(dq), pack},
      problem.stream);
  count_launch(dq_name(plan));
}

// The gradients of q, k and v and, where these are given, of k_decoded and v_decoded.
std::vector<Tensor> backward(const Tensor& dout_in, const std::optional<Tensor>& dlse_in, const Tensor& q_in,
                             const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_decoded,
                             const std::optional<Tensor>& v_decoded, const Tensor& out_in, const Tensor& lse_in,
                             const Tensor& nodes, const Options& options) {
  const auto guard = device_guard(q_in);
  const Problem problem(q_in, {k, v, k_decoded, v_decoded}, nodes, options);
  const Tensor& q = problem.q;
  check_packed(dout_in, "dout", q, q.size(0), q.size(1), v.size(2));
  check_packed(out_in, "out", q, q.size(0), q.size(1), v.size(2));
  check_statistics(lse_in, "lse", q);
  if (dlse_in) check_statistics(*dlse_in, "dlse", q);

  const auto like = [&](const Tensor& t) {
    return problem.is_empty() ? zeros(q, t.sizes(), q.scalar_type()) : uninitialised(q, t.sizes(), q.scalar_type());
  };
  const Tensor dq = like(q);
  const Keys gradients = problem.kv.each(like);
  std::vector<Tensor> results{dq, gradients.k, gradients.v};
  if (k_decoded) results.insert(results.end(), {*gradients.k_decoded, *gradients.v_decoded});
  if (problem.is_empty()) return results;

  const Tensor dout = aligned(dout_in), out = aligned(out_in), lse = lse_in.contiguous();
  const Tensor dlse = dlse_in ? dlse_in->contiguous() : Tensor();
  with_element_type(q, [&](auto element) {
    using T = decltype(element);
    const auto& built = registry<BackwardKernel<T>>();
    const BackwardPlan plan = planned(problem.call(options), [&](const Call& call) {
      return plan_backward(call, built.traits, registry<BackwardDqKernel<T>>().traits, problem.gpu);
    });
    const BackwardKernel<T>& kernel = built.kernels[plan.kernel.index];
    BackwardList list(problem, plan);
    list.prepare<T>(problem, gradients, out, dout, lse, dlse);
    kernel.run(plan.every_step,
               {problem.shape, list.nodes, list.work, view_of<const T>(problem.q), view_of<const T>(dout),
                problem.kv.regions<const T>(), gradients.regions<T>(), list.statistics, list.dq_sum, list.dkv_slots,
                list.dq_semaphores},
               problem.stream);
    count_launch(backward_name(plan));
    kernel.convert({problem.shape, list.nodes, list.dq_sum, view_of<T>(dq), list.splits, list.dkv_slots,
                    gradients.regions<T>(), plan.kernel.tiles.block_n, plan.padded_head_dim(), plan.kernel.pack},
                   problem.stream);
    count_launch("dualkv_convert");
    if (plan.sums == DqSums::none) backward_dq<T>(problem, plan, dout, list.statistics, dq);
  });
  return results;
}

// `forward`, differentiable where a gradient is wanted.
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const std::optional<Tensor>& k_decoded, const std::optional<Tensor>& v_decoded,
                                     const std::optional<Tensor>& sinks, const Tensor& nodes, const Options& options) {
  bool is_recorded = false;
  for (const auto& t : {std::optional(q), std::optional(k), std::optional(v), k_decoded, v_decoded, sinks}) {
    is_recorded |= t && t->requires_grad();
  }
  if (!at::GradMode::is_enabled() || !is_recorded) {
    return forward(q, k, v, k_decoded, v_decoded, sinks, nodes, options);
  }
  using Node = AttentionNode<forward, backward>;
  const auto results = Node::apply(q, k, v, k_decoded, v_decoded, sinks, nodes, options);
  return {results[0], results[1]};
}

void check_indices(const Tensor& t, const char* name, const Tensor& beside, int64_t length) {
  check_argument(t.is_cuda() && t.device() == beside.device(), name, t.device(), "a CUDA tensor beside the other offsets");
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, ": expected int32, got ", t.scalar_type());
  check_argument(t.dim() == 1 && t.is_contiguous(), name, t.sizes(), "a contiguous vector");
  check_argument(length < 0 ? t.size(0) >= 1 : t.size(0) == length, name, t.size(0),
                 length < 0 ? "one entry or more" : std::to_string(length) + " entries");
}

const int* int_pointer_or_null(const std::optional<Tensor>& t) { return t ? int_pointer(*t) : nullptr; }

Tensor sequence_nodes(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                      const std::optional<Tensor>& cu_seqlens_context,
                      const std::optional<Tensor>& cu_seqs_per_context, std::optional<int64_t> total_context) {
  check_indices(cu_seqlens_q, "cu_seqlens_q", cu_seqlens_q, -1);
  check_indices(cu_seqlens_k, "cu_seqlens_k", cu_seqlens_q, cu_seqlens_q.size(0));
  TORCH_CHECK_VALUE(cu_seqlens_context.has_value() == cu_seqs_per_context.has_value(),
                    "cu_seqs_per_context: expected together with cu_seqlens_context, got only one of them");
  TORCH_CHECK_VALUE(total_context || !cu_seqlens_context, "total_context: expected with cu_seqlens_context, got None");
  if (cu_seqlens_context) {
    check_indices(*cu_seqlens_context, "cu_seqlens_context", cu_seqlens_q, -1);
    check_indices(*cu_seqs_per_context, "cu_seqs_per_context", cu_seqlens_q, cu_seqlens_context->size(0));
  }
  const c10::cuda::CUDAGuard guard(cu_seqlens_q.device());
  const int64_t sequences = cu_seqlens_q.size(0) - 1;
  const int64_t groups = cu_seqlens_context ? cu_seqlens_context->size(0) - 1 : total_context ? 1 : 0;
  check_argument(groups >= 1 || sequences == 0 || !total_context, "cu_seqlens_context", groups,
                 "at least one group for the sequences");
  const Tensor nodes = uninitialised(cu_seqlens_q, {sequences + groups, kNodeColumns}, at::kInt);
  build_sequence_nodes({int_pointer(cu_seqlens_q), int_pointer(cu_seqlens_k), int_pointer_or_null(cu_seqlens_context),
                        int_pointer_or_null(cu_seqs_per_context), static_cast<int>(sequences),
                        static_cast<int>(groups), static_cast<int>(total_context.value_or(0)), int_pointer(nodes)},
                       c10::cuda::getCurrentCUDAStream());
  count_launch("dualkv_nodes");
  return nodes;
}

Tensor tree_nodes(const Tensor& cu_seqlens, const Tensor& parents) {
  check_indices(cu_seqlens, "cu_seqlens", cu_seqlens, -1);
  check_indices(parents, "parents", cu_seqlens, cu_seqlens.size(0) - 1);
  const c10::cuda::CUDAGuard guard(cu_seqlens.device());
  const Tensor nodes = uninitialised(cu_seqlens, {parents.size(0), kNodeColumns}, at::kInt);
  build_tree_nodes({int_pointer(cu_seqlens), int_pointer(parents), static_cast<int>(parents.size(0)),
                    int_pointer(nodes)},
                   c10::cuda::getCurrentCUDAStream());
  count_launch("dualkv_nodes");
  return nodes;
}

// What a call of these shapes runs and why, as (choice, value, reason). `gpu`: a row of
// core/tuning.h; none: the card that there is, or DUALKV_GPU.
std::vector<std::tuple<std::string, std::string, std::string>> explain_plan(
    int num_heads, int num_kv_heads, int head_dim, int head_dim_v, int rows, int nodes, const Options& options,
    const std::optional<std::string>& gpu) {
  const char* const seen = std::getenv("DUALKV_GPU");
  const bool is_named = gpu || (seen && *seen);
  const Gpu card = gpu ? gpu_named("gpu", *gpu) : seen_by_policy(is_named ? Gpu{} : Device::current().gpu);
  const Call asked{{head_dim, head_dim_v}, num_heads, num_kv_heads, rows, rows, nodes, options.mean_keys,
                   {options.causal, options.window()}, options.softcap > 0, options.deterministic,
                   wants_portable_kernels()};
  using Any = __nv_bfloat16;  // all element types have the same kernels
  const auto make = [&](const Call& call) {
    return explain(card, plan_forward(call, registry<ForwardKernel<Any>>().traits, card),
                   plan_backward(call, registry<BackwardKernel<Any>>().traits, registry<BackwardDqKernel<Any>>().traits,
                                 card));
  };
  const auto explained = planned(asked, make, "head_dim", "head_dim_v");
  std::vector<std::tuple<std::string, std::string, std::string>> lines;
  for (const Explained& one : explained) lines.emplace_back(one.choice, one.value, one.why);
  return lines;
}

// Those built for q, k and v of one head dim.
template <class Kernel>
std::vector<int> equal_head_dims(Arch arch) {
  std::vector<int> found;
  for (const KernelTraits& kernel : registry<Kernel>().traits) {
    const bool is_first = found.empty() || found.back() != kernel.dims.qk;
    if (kernel.arch == arch && kernel.dims.qk == kernel.dims.v && is_first) found.push_back(kernel.dims.qk);
  }
  return found;
}

pybind11::dict build_info() {
  pybind11::dict info, head_dims, backward_head_dims;
  for (Arch arch : {Arch::sm80, Arch::sm90}) {
    head_dims[name_of(arch)] = equal_head_dims<ForwardKernel<__nv_bfloat16>>(arch);
    backward_head_dims[name_of(arch)] = equal_head_dims<BackwardKernel<__nv_bfloat16>>(arch);
  }
  info["archs"] = pybind11::str(DUALKV_BUILD_ARCHS).attr("split")(";");
  info["ptx"] = DUALKV_BUILD_PTX;
  info["head_dims"] = head_dims;
  info["backward_head_dims"] = backward_head_dims;
  info["dtypes"] = std::vector<std::string>{"float16", "bfloat16"};
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  return info;
}

}  // namespace
}  // namespace dualkv

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using dualkv::Options;
  m.doc() = "CUDA kernels of flash_attn_dualkv";
  const auto make_options = [](double softmax_scale, bool causal, int64_t window_left, double softcap, int64_t mean_keys,
                               bool deterministic) {
    return Options{softmax_scale, causal, window_left, softcap, mean_keys, deterministic};
  };
  py::class_<Options>(m, "Options")
      .def(py::init(make_options), py::kw_only(), py::arg("softmax_scale"), py::arg("causal"), py::arg("window_left"),
           py::arg("softcap"), py::arg("mean_keys"), py::arg("deterministic"));
  m.def("sequence_nodes", &dualkv::sequence_nodes);
  m.def("tree_nodes", &dualkv::tree_nodes);
  m.def("forward", &dualkv::forward);
  m.def("backward", &dualkv::backward);
  m.def("attention", &dualkv::attention);
  m.def("build_info", &dualkv::build_info);
  m.def("explain_plan", &dualkv::explain_plan);
  m.def("launch_counts", &dualkv::launch_counts);
}
