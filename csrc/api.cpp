// The Python module: check, allocate, fill the parameter structs, launch. Nothing but this file and the headers beside
// it that it includes (check.h, problem.h, work_lists.h, packed_node.h) sees torch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "packed_node.h"
#include "work_lists.h"

namespace dualkv {
namespace {

// Whether the kernels written for Hopper may run: on compute capability 9.x, unless DUALKV_KERNELS=sm80 asks for the
// portable ones (for tests and benchmarks).
bool may_use_sm90(const Problem& problem) {
  const char* wanted = std::getenv("DUALKV_KERNELS");
  const bool portable = wanted && std::string(wanted) == "sm80";
  TORCH_CHECK_VALUE(!wanted || portable || std::string(wanted) == "sm90", "DUALKV_KERNELS: expected sm80 or sm90, got ",
                    wanted);
  return problem.capability == 9 && !portable;
}

template <class Kernel>
Selected<Kernel> select_for(const Problem& problem) {
  try {
    if (may_use_sm90(problem) && find_kernels<Kernel>(Arch::sm90, problem.shape.head_dim)) {
      return select<Kernel>(Arch::sm90, problem.shape.head_dim, problem.shared_limit);
    }
    return select<Kernel>(Arch::sm80, problem.shape.head_dim, problem.shared_limit);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "q: ", error.what());
  }
}

template <class Kernel>
std::string kernel_name(const Selected<Kernel>& selected, const char* direction) {
  return std::string("dualkv_") + name_of(selected.arch) + "_" + direction;
}

// Runs `body(T{})` for the element type of q.
template <class Body>
auto with_element_type(const Tensor& q, Body body) {
  return q.scalar_type() == at::kHalf ? body(__half{}) : body(__nv_bfloat16{});
}

std::tuple<Tensor, Tensor> forward_of(const Problem& problem, const std::optional<Tensor>& sinks_in) {
  const Tensor& q = problem.q;
  if (sinks_in) {
    check_argument(sinks_in->device() == q.device(), "sinks", sinks_in->device(), "a tensor on the device of q");
    TORCH_CHECK_TYPE(sinks_in->is_floating_point(), "sinks: expected floating point, got ", sinks_in->scalar_type());
    check_argument(sinks_in->dim() == 1 && sinks_in->size(0) == q.size(1), "sinks", sinks_in->sizes(),
                   "one for each of ", q.size(1), " heads");
  }
  const Tensor sinks = sinks_in ? sinks_in->to(at::kFloat).contiguous() : Tensor();
  const at::IntArrayRef sizes = q.sizes();
  const std::array<int64_t, 2> lse_sizes{q.size(1), q.size(0)};
  if (problem.is_empty()) {
    return {zeros(q, sizes, q.scalar_type()),
            at::full(lse_sizes, -std::numeric_limits<float>::infinity(), q.options().dtype(at::kFloat))};
  }
  const Tensor out = uninitialised(q, sizes, q.scalar_type()), lse = uninitialised(q, lse_sizes, at::kFloat);

  with_element_type(q, [&](auto element) {
    using T = decltype(element);
    const auto selected = select_for<ForwardKernel<T>>(problem);
    const TileInfo& tiles = selected.kernel.tiles;
    const int pack = tiles.packs_heads ? packed_heads(problem.shape.heads_per_group(), tiles.block_m) : 1;
    const ForwardList list(problem, tiles.block_m / pack, tiles.block_n, out, lse);
    selected.kernel.launch({problem.shape, problem.layout(), list.work, view_of<const T>(problem.q),
                            problem.kv.regions<const T>(), view_of<T>(out), lse.data_ptr<float>(),
                            sinks.defined() ? sinks.data_ptr<float>() : nullptr, pack},
                           problem.stream);
    count_launch(kernel_name(selected, "forward"));
  });
  return {out, lse};
}

template <typename T>
void backward_dq(const Problem& problem, const Tensor& dout, const RowStatistics& statistics, const Tensor& dq) {
  const auto selected = select_for<BackwardDqKernel<T>>(problem);
  const ForwardList list(problem, selected.kernel.tiles.block_m, selected.kernel.tiles.block_n, dq, Tensor());
  selected.kernel.launch({problem.shape, problem.layout(), list.work, view_of<const T>(problem.q),
                          view_of<const T>(dout), problem.kv.regions<const T>(), statistics, view_of<T>(dq)},
                         problem.stream);
  count_launch(kernel_name(selected, "backward_dq"));
}

// Returns dq. The gradients of keys and values go to `gradients`, of contiguous rows.
Tensor backward_into(const Problem& problem, const Keys& gradients, const Tensor& dout_in,
                     const std::optional<Tensor>& dlse_in, const Tensor& out_in, const Tensor& lse_in,
                     bool deterministic) {
  const Tensor& q = problem.q;
  check_packed(dout_in, "dout", q, q.size(0), q.size(1));
  check_packed(out_in, "out", q, q.size(0), q.size(1));
  check_statistics(lse_in, "lse", q);
  if (dlse_in) check_statistics(*dlse_in, "dlse", q);

  if (problem.is_empty()) {
    for (const Rows* rows : {&gradients.k_context, &gradients.v_context, &gradients.k_decoded, &gradients.v_decoded}) {
      fill_zeros(rows->tensor);
    }
    return zeros(q, q.sizes(), q.scalar_type());
  }

  const Tensor dout = aligned(dout_in), out = aligned(out_in), lse = lse_in.contiguous();
  const Tensor dlse = dlse_in ? dlse_in->contiguous() : Tensor();
  const Tensor dq = uninitialised(q, q.sizes(), q.scalar_type());
  with_element_type(q, [&](auto element) {
    using T = decltype(element);
    const auto selected = select_for<BackwardKernel<T>>(problem);
    const bool separate_dq = deterministic || !selected.kernel.sums_dq;
    const TileInfo& tiles = selected.kernel.tiles;
    BackwardList list(problem, tiles, selected.padded_head_dim, !separate_dq);
    list.prepare<T>(problem, gradients, out, dout, lse, dlse);
    selected.kernel.launch({problem.shape, list.layout, list.work, view_of<const T>(problem.q),
                            view_of<const T>(dout), problem.kv.regions<const T>(), gradients.regions<T>(),
                            list.statistics, list.dq_sum, list.dkv_slots},
                           problem.stream);
    count_launch(kernel_name(selected, "backward"));
    selected.kernel.convert({problem.shape, list.layout, list.dq_sum, view_of<T>(dq), list.splits, list.dkv_slots,
                             gradients.regions<T>(), tiles.block_n, selected.padded_head_dim},
                            problem.stream);
    count_launch("dualkv_convert");
    if (separate_dq) backward_dq<T>(problem, dout, list.statistics, dq);
  });
  return dq;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k_context, const Tensor& v_context,
                                   const Tensor& k_decoded, const Tensor& v_decoded, const Tensor& segments,
                                   const Tensor& groups, double softmax_scale, bool causal) {
  const auto guard = device_guard(q);
  return forward_of({q, {k_context, v_context, k_decoded, v_decoded}, segments, groups, softmax_scale, causal},
                    std::nullopt);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q, const Tensor& k_context,
    const Tensor& v_context, const Tensor& k_decoded, const Tensor& v_decoded, const Tensor& out, const Tensor& lse,
    const Tensor& segments, const Tensor& groups, double softmax_scale, bool causal, bool deterministic) {
  const auto guard = device_guard(q);
  const Problem problem(q, {k_context, v_context, k_decoded, v_decoded}, segments, groups, softmax_scale, causal);
  const auto like = [&](const Tensor& t) { return uninitialised(q, t.sizes(), q.scalar_type()); };
  const Tensor dk_context = like(k_context), dv_context = like(v_context);
  const Tensor dk_decoded = like(k_decoded), dv_decoded = like(v_decoded);
  const Tensor dq = backward_into(problem, {dk_context, dv_context, dk_decoded, dv_decoded}, dout, dlse, out, lse,
                                  deterministic);
  return {dq, dk_context, dv_context, dk_decoded, dv_decoded};
}

// Prompts and responses in one tensor each of keys and values, of which the first `context_rows` rows are the contexts.
Keys split_rows(const Tensor& k, const Tensor& v, int64_t context_rows) {
  const int64_t decoded_rows = k.size(0) - context_rows;
  return {{k, 0, context_rows}, {v, 0, context_rows}, {k, context_rows, decoded_rows}, {v, context_rows, decoded_rows}};
}

// The same of a caller's tensors: checked, and copied where they are not aligned, once for both parts.
Keys packed_keys(const Tensor& q, const Tensor& k, const Tensor& v, int64_t context_rows) {
  check_beside(k, "k", q);
  check_beside(v, "v", q);
  check_argument(v.sizes() == k.sizes(), "v", v.sizes(), "the shape of k, ", k.sizes());
  check_argument(context_rows >= 0 && context_rows <= k.size(0), "context_rows", context_rows, "0 to the rows of k, ",
                 k.size(0));
  return split_rows(aligned(k), aligned(v), context_rows);
}

std::tuple<Tensor, Tensor> packed_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const std::optional<Tensor>& sinks, const Tensor& segments,
                                          const Tensor& groups, int64_t context_rows, double softmax_scale) {
  const auto guard = device_guard(q);
  return forward_of({q, packed_keys(q, k, v, context_rows), segments, groups, softmax_scale, true}, sinks);
}

std::tuple<Tensor, Tensor, Tensor> packed_backward(const Tensor& dout, const std::optional<Tensor>& dlse,
                                                   const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& out, const Tensor& lse, const Tensor& segments,
                                                   const Tensor& groups, int64_t context_rows, double softmax_scale,
                                                   bool deterministic) {
  const auto guard = device_guard(q);
  const Problem problem(q, packed_keys(q, k, v, context_rows), segments, groups, softmax_scale, true);
  const Tensor dk = uninitialised(q, k.sizes(), q.scalar_type()), dv = uninitialised(q, v.sizes(), q.scalar_type());
  const Tensor dq = backward_into(problem, split_rows(dk, dv, context_rows), dout, dlse, out, lse, deterministic);
  return {dq, dk, dv};
}

// packed_forward without sinks, differentiable where a gradient is wanted.
std::tuple<Tensor, Tensor> packed_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& segments,
                                            const Tensor& groups, int64_t context_rows, double softmax_scale,
                                            bool deterministic) {
  if (!at::GradMode::is_enabled() || !(q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    return packed_forward(q, k, v, std::nullopt, segments, groups, context_rows, softmax_scale);
  }
  const auto results = PackedNode<packed_forward, packed_backward>::apply(q, k, v, segments, groups, context_rows,
                                                                          softmax_scale, deterministic);
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor> segment_tables(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k_decoded,
                                          const std::optional<Tensor>& cu_seqlens_context,
                                          const std::optional<Tensor>& cu_seqs_per_context, int64_t total_context) {
  const auto check_offsets = [&](const Tensor& t, const char* name, int64_t length) {
    check_argument(t.is_cuda() && t.device() == cu_seqlens_q.device(), name, t.device(),
                   "a CUDA tensor beside cu_seqlens_q");
    TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, name, ": expected int32, got ", t.scalar_type());
    check_argument(t.dim() == 1 && t.is_contiguous() && t.size(0) >= 1, name, t.sizes(), "a contiguous vector");
    check_argument(length < 0 || t.size(0) == length, name, t.size(0), length, " entries");
  };
  check_offsets(cu_seqlens_q, "cu_seqlens_q", -1);
  check_offsets(cu_seqlens_k_decoded, "cu_seqlens_k_decoded", cu_seqlens_q.size(0));
  TORCH_CHECK_VALUE(cu_seqlens_context.has_value() == cu_seqs_per_context.has_value(),
                    "cu_seqs_per_context: expected together with cu_seqlens_context, got only one of them");
  if (cu_seqlens_context) {
    check_offsets(*cu_seqlens_context, "cu_seqlens_context", -1);
    check_offsets(*cu_seqs_per_context, "cu_seqs_per_context", cu_seqlens_context->size(0));
  }
  const c10::cuda::CUDAGuard guard(cu_seqlens_q.device());
  const int64_t num_segments = cu_seqlens_q.size(0) - 1;
  const int64_t num_groups = cu_seqlens_context ? cu_seqlens_context->size(0) - 1 : 1;
  check_argument(num_groups >= 1 || num_segments == 0, "cu_seqlens_context", num_groups,
                 "at least one group for the sequences");
  const Tensor segments = uninitialised(cu_seqlens_q, {num_segments, kSegmentColumns}, at::kInt);
  const Tensor groups = uninitialised(cu_seqlens_q, {num_groups, kGroupColumns}, at::kInt);
  build_segment_tables({int_pointer(cu_seqlens_q), int_pointer(cu_seqlens_k_decoded),
                        cu_seqlens_context ? int_pointer(*cu_seqlens_context) : nullptr,
                        cu_seqs_per_context ? int_pointer(*cu_seqs_per_context) : nullptr,
                        static_cast<int>(num_segments), static_cast<int>(num_groups), static_cast<int>(total_context),
                        int_pointer(segments), int_pointer(groups)},
                       c10::cuda::getCurrentCUDAStream());
  count_launch("dualkv_segment_tables");
  return {segments, groups};
}

pybind11::dict build_info() {
  pybind11::dict info, head_dims, backward_head_dims;
  for (Arch arch : {Arch::sm80, Arch::sm90}) {
    head_dims[name_of(arch)] = built_head_dims<ForwardKernel<__nv_bfloat16>>(arch);
    backward_head_dims[name_of(arch)] = built_head_dims<BackwardKernel<__nv_bfloat16>>(arch);
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
  m.doc() = "CUDA kernels of flash_attn_dualkv";
  m.def("segment_tables", &dualkv::segment_tables);
  m.def("forward", &dualkv::forward);
  m.def("backward", &dualkv::backward);
  m.def("packed_attention", &dualkv::packed_attention);
  m.def("packed_forward", &dualkv::packed_forward);
  m.def("packed_backward", &dualkv::packed_backward);
  m.def("build_info", &dualkv::build_info);
  m.def("launch_counts", &dualkv::launch_counts);
}
