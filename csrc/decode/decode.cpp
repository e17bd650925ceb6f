// SPDX-License-Identifier: BSD-3-Clause
// Calls of decoding: the plan of a step, and attention of a layer.
#include "decode/combine.h"
#include "decode/memory.h"
#include "guarded.h"

namespace dualkv {
namespace {

// A plan on a device: its kernel, by element type the same index, and where its memory has what.
struct Plan {
  Gpu gpu;  // as the policy sees it
  int kernel;
  DecodeMemory memory;

  Plan(int device, const DualkvDecodePlan& asked)
      : gpu(checked(device)), kernel(choose_decode_kernel(built<DecodeKernel>(), DecodeMemory::dims_of(asked), gpu,
                                                          wants_portable_kernels())),
        memory(asked, built<DecodeKernel>()[kernel].tiles,
               registry<DecodeKernel<__half>>().kernels[kernel].blocks_per_sm * gpu.num_sms) {}

 private:
  static Gpu checked(int index) {
    const Device& device = Device::select(index);
    device.check();
    return seen_by_policy(device);
  }
};

template <typename T>
PagedTensor<const T> pages_of(const DualkvPages& pages) {
  return {static_cast<const T*>(pages.data), pages.page_stride, pages.row_stride, pages.head_stride};
}

template <typename T>
void launch_decode(const Plan& plan, cudaStream_t stream, const DualkvDecodePlan& asked, const DualkvDecode& call) {
  const DecodeMemory& memory = plan.memory;
  const DualkvOptions& options = call.options;
  const HeadDims dims = DecodeMemory::dims_of(asked);
  const ProblemShape shape{static_cast<int>(call.q.rows), static_cast<int>(asked.num_heads),
                           static_cast<int>(asked.num_kv_heads), dims.qk, dims.v,
                           static_cast<float>(options.softmax_scale), {true, window_of(options)},
                           {options.softmax_scale, options.softcap}, plan.gpu.num_sms};
  const bool alone = shape.sees.has_window();  // rows of a branch have windows of their own
  const DecodeLists& lists = memory.plan.lists;
  registry<DecodeKernel<T>>().kernels[plan.kernel].launch(
      {shape, memory.plan.requests.table, view_of<const T>(call.q), pages_of<T>(call.k), pages_of<T>(call.v),
       view_of<T>(call.out), call.lse, call.sinks, alone ? lists.alone : lists.shared, lists.counts + alone,
       lists.queries, memory.progress, memory.states, memory.plan.splits},
      stream);
  const Arch arch = built<DecodeKernel>()[plan.kernel].arch;
  count_launch(std::string("dualkv_") + name_of(arch) + "_decode");
  if (alone || !memory.plan.splits.divide()) return;
  combine_splits<T>({shape, memory.states, state_pairs(arch, dims.v), lists.splits, view_of<T>(call.out), call.lse,
                     call.sinks},
                    stream);
  count_launch("dualkv_decode_combine");
}

}  // namespace
}  // namespace dualkv

using namespace dualkv;

int dualkv_decode_plan_bytes(int32_t device, const DualkvDecodePlan* plan, int64_t* bytes) {
  return guarded([&] { *bytes = Plan(device, *plan).memory.bytes; });
}

int dualkv_decode_plan(int32_t device, void* stream, const DualkvDecodePlan* plan) {
  return guarded([&] {
    plan_decode(Plan(device, *plan).memory.plan, static_cast<cudaStream_t>(stream));
    count_launch("dualkv_decode_plan");
  });
}

int dualkv_decode(int32_t device, void* stream, const DualkvDecodePlan* plan, const DualkvDecode* call) {
  return guarded([&] {
    const Plan found(device, *plan);
    with_element_type(*call, [&](auto element) {
      launch_decode<decltype(element)>(found, static_cast<cudaStream_t>(stream), *plan, *call);
    });
  });
}
