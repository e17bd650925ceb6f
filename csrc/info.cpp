// SPDX-License-Identifier: BSD-3-Clause
// What the library says of itself: errors, plans in words, the build, launches.
#include <sstream>

#include "guarded.h"
#include "problem.h"

namespace dualkv {
namespace {

std::string explain_call(Call asked, const DualkvOptions& options, int device, const char* name) {
  const char* const seen = std::getenv("DUALKV_GPU");
  const bool is_named = name || (seen && *seen);
  const Gpu card = name ? gpu_named("gpu", name) : seen_by_policy(is_named ? Gpu{} : Device::select(device).gpu);
  asked.sees = {options.causal != 0, window_of(options)};
  asked.mean_keys = options.mean_keys, asked.has_softcap = options.softcap > 0;
  asked.deterministic = options.deterministic != 0, asked.wants_portable = wants_portable_kernels();
  const auto make = [&](const Call& call) {
    return explain(card, plan_forward(call, built<ForwardKernel>(), card),
                   plan_backward(call, built<BackwardKernel>(), built<BackwardDqKernel>(), card));
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
    list("head_dims", built<ForwardKernel>());
    list("backward_head_dims", built<BackwardKernel>());
  }
  return text.str();
}

// Outlives the call that returns it, until the next.
const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace
}  // namespace dualkv

using namespace dualkv;

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
