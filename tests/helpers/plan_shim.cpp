// SPDX-License-Identifier: BSD-3-Clause
// The policy for the tests: plans of the kernels that csrc/instances builds, and the thresholds of
// the table. The traits are those of the kernels' own configurations.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>

#include "cuda_runtime.h"

#include "core/explain.h"
#include "core/plan_decode.h"
#include "sm80/config.h"
#include "sm90/config.h"

using namespace dualkv;

namespace {

struct Kernels {
  std::vector<KernelTraits> forward, backward, backward_dq;

  template <int kHeadDim, int kHeadDimV = kHeadDim>
  void add_sm90() {
    using namespace sm90;
    using DqConfig = BackwardDqConfig<kHeadDim, kHeadDimV>;
    forward.push_back(query_traits<ForwardConfig<kHeadDim, kHeadDimV>, NarrowForwardConfig<kHeadDim, kHeadDimV>>());
    backward.push_back(backward_traits<BackwardConfig<kHeadDim, kHeadDimV>>());
    backward_dq.push_back(query_traits<DqConfig, NarrowBackwardDqConfig<kHeadDim, kHeadDimV>>());
  }
  template <int kHeadDim>
  void add_sm80() {
    const auto append = [](auto& kernels, const auto& more) { kernels.insert(kernels.end(), more.begin(), more.end()); };
    append(forward, sm80::all_traits<sm80::ForwardConfig, kHeadDim>());
    append(backward, sm80::all_traits<sm80::BackwardConfig, kHeadDim>());
    append(backward_dq, sm80::all_traits<sm80::BackwardDqConfig, kHeadDim>());
  }

  Kernels() {
    add_sm80<64>(), add_sm80<96>(), add_sm80<128>(), add_sm80<192>(), add_sm80<256>();
    add_sm90<64>(), add_sm90<128>(), add_sm90<192, 128>(), add_sm90<192>(), add_sm90<256>(), add_sm90<512>();
  }
};

const Kernels kKernels;

struct Asked {
  Call call;
  Gpu gpu;
};

// A call as the tests pass it; 0 in a field of the card is that of the row.
struct Problem {
  int64_t rows, key_rows, nodes, mean_keys;
  int64_t heads, kv_heads, head_dim, head_dim_v;
  int64_t window, softcap, deterministic, portable;  // window: negative for none
  int64_t capability, num_sms, shared_bytes, gigabytes_per_s;

  Asked read(const char* gpu) const {
    const auto narrow = [](int64_t one) { return static_cast<int>(one); };
    Call call{{narrow(head_dim), narrow(head_dim_v)}, narrow(heads), narrow(kv_heads), narrow(rows), narrow(key_rows),
              narrow(nodes), mean_keys, {true, window < 0 ? kNoWindow : narrow(window)}};
    call.has_softcap = softcap, call.deterministic = deterministic, call.wants_portable = portable;
    Gpu card = tuning_named(gpu).gpu;
    if (capability) card.capability = narrow(capability);
    if (num_sms) card.num_sms = narrow(num_sms);
    if (shared_bytes) card.shared_bytes = narrow(shared_bytes);
    if (gigabytes_per_s) card.gigabytes_per_s = static_cast<double>(gigabytes_per_s);
    return {call, card};
  }
};

int put(const std::string& text, char* out, int size) {
  if (static_cast<int>(text.size()) >= size) return -1;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return static_cast<int>(text.size());
}


}  // namespace

extern "C" {

// The lines of explain(), fields divided by tabs; what is wrong with the call, behind an "!".
int explain_call(const char* gpu, const Problem* problem, char* out, int size) {
  std::ostringstream text;
  try {
    const auto [call, card] = problem->read(gpu);
    for (const Explained& one : explain(card, plan_forward(call, kKernels.forward, card),
                                        plan_backward(call, kKernels.backward, kKernels.backward_dq, card))) {
      text << one.choice << '\t' << one.value << '\t' << one.why << '\n';
    }
  } catch (const std::invalid_argument& error) {
    text.str("!");
    text.seekp(1);
    text << error.what();
  }
  return put(text.str(), out, size);
}

// Every threshold of every card: card, field, head dims, value.
int read_thresholds(char* out, int size) {
  std::ostringstream text;
  for (const Tuning& row : kTunings) {
    each_threshold(row, [&](const char* field, const HeadDims& dims, int value) {
      text << row.name << '\t' << field << '\t' << dims.qk << '\t' << dims.v << '\t' << value << '\n';
    });
  }
  return put(text.str(), out, size);
}

int64_t read_split_keys(int64_t max_keys, int qk, int v) { return decode_split_keys(max_keys, {qk, v}); }

// Family of the decode kernel for head dims, where there are those of 64 and 128 and, portable
// alone, of 256 and of latents, which take 147 KB of shared memory; -1: none.
int read_decode_family(int head_dim, int head_dim_v, int capability, int kilobytes, bool wants_portable) {
  std::vector<KernelTraits> kernels;
  for (const int dim : {64, 128, 256}) kernels.push_back({Arch::sm80, {dim, dim}});
  kernels.push_back({Arch::sm80, {576, 512}, {64, 32, 147 * 1024}});
  for (const int dim : {64, 128}) kernels.push_back({Arch::sm90, {dim, dim}});
  const Gpu gpu{.capability = capability, .num_sms = 1, .shared_bytes = kilobytes * 1024, .gigabytes_per_s = 1};
  try {
    const HeadDims dims{head_dim, head_dim_v};
    return static_cast<int>(kernels[choose_decode_kernel(kernels, dims, gpu, wants_portable)].arch);
  } catch (const std::invalid_argument&) {
    return -1;
  }
}

}  // extern "C"
