// SPDX-License-Identifier: BSD-3-Clause
// Which kernels a call runs, and how: the one place that decides. A plan is a pure function of the
// call, the kernels that there are and the card. Everything else only launches it, or prints it
// (core/explain.h). Decoding has its own (core/plan_decode.h).
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "core/schedule.h"
#include "core/tuning.h"

namespace dualkv {

// What is asked for, as shapes.
struct Call {
  HeadDims dims;
  int num_heads, num_kv_heads;
  int q_rows, key_rows, num_nodes;
  int64_t mean_keys;  // that a row sees on average without its window, as the caller says
  Visibility sees;
  bool has_softcap = false, deterministic = false;
  bool wants_portable = false;  // the sm80 kernels on any GPU

  int heads_per_group() const { return num_heads / num_kv_heads; }
};

// The reason of a choice: words, and where they compare two numbers these. No text is made unless
// somebody reads it.
struct Why {
  const char* text = "";
  int64_t value = 0;
  const char* relation = nullptr;  // null: no numbers
  int64_t bound = 0;
};

// A kernel, one of those of its direction, and its tiles.
struct KernelChoice {
  int index = -1;  // among the kernels of the direction; -1: none is launched
  Arch arch{};
  HeadDims dims;  // those that it is built for
  TileInfo tiles{};
  bool narrow = false;
  Pack pack;  // query heads that share a tile
  Why family_why, tiles_why, pack_why;
};

struct ForwardPlan {
  KernelChoice kernel;
  int pack = 1;  // query heads that share a tile: any number
  int siblings = 1;     // the most nodes that share a query tile
  int least_tiles = 0;  // they share one where a pack of heads has so many tiles
  Why siblings_why{"query tiles of this kernel are of one node"};
};

// How a backward makes dQ: in its own kernel, or summed beside dK and dV in whatever order blocks
// come, or in one that is the same from run to run.
enum class DqSums { none, in_any_order, in_order };

struct BackwardPlan {
  KernelChoice kernel;  // of dK, dV and, unless `sums` is none, dQ
  DqSums sums = DqSums::none;
  Why sums_why;
  bool every_step = false;  // beside sums of dQ, steps that a warpgroup does not see are not left out
  Why steps_why;
  KernelChoice dq;            // of dQ alone
  int tiles_at_a_time = 0;    // KV tiles that run at the same time
  BackwardCapacities capacities{};  // of the work list and of the slots for parts of split tiles

  int padded_head_dim() const { return kernel.dims.qk; }
};

// Such as "64" or, where v has another, "192 (v: 128)".
inline std::string describe(const HeadDims& dims) {
  const std::string qk = std::to_string(dims.qk);
  return dims.qk == dims.v ? qk : qk + " (v: " + std::to_string(dims.v) + ")";
}

namespace plan_steps {

inline std::string describe_built(const std::vector<KernelTraits>& kernels, Arch arch) {
  std::string text;
  HeadDims last;
  for (const KernelTraits& one : kernels) {
    if (one.arch != arch || one.dims == last) continue;
    text += (text.empty() ? "" : ", ") + describe(one.dims);
    last = one.dims;
  }
  return text.empty() ? "none" : text;
}

// A shared tile takes about twice as long as one of its slices alone, so that a list of fewer tiles
// than two for every multiprocessor would end later.
inline void choose_siblings(ForwardPlan& plan, const KernelTraits& kernel, const Call& call, const Gpu& gpu) {
  constexpr int kSliceRows = 64, kTilesPerSm = 2;
  if (kernel.siblings == 1) return;
  plan.siblings_why = {"a slice of 64 rows is no whole number of packs: rows left over", kSliceRows % plan.pack, "of",
                       kSliceRows};
  if (kSliceRows % plan.pack > 0) return;
  plan.siblings = kernel.siblings;
  plan.least_tiles = ceil_div(kTilesPerSm * gpu.num_sms, call.num_heads / plan.pack);
  plan.siblings_why = {"the last slices of siblings join where a pack of heads has as many tiles:", plan.least_tiles,
                       "of", kernel.tiles.block_m / plan.pack};
}

// What is wrong where no kernel of a family holds head dims.
inline std::string too_wide(const std::vector<KernelTraits>& kernels, Arch arch, const HeadDims& wanted) {
  constexpr HeadDims kPortable{256, 256};
  const std::string of_build = "head dim " + describe(wanted) + " is larger than every one in this build (" +
                               describe_built(kernels, arch) + ")";
  if (arch == Arch::sm80 && !kPortable.hold(wanted)) {
    return of_build +
           " of the portable kernels, which this call takes: above 256 there are kernels for Hopper alone, up to "
           "512, in builds whose DUALKV_ARCHS has 90 and whose DUALKV_HEAD_DIMS has 512";
  }
  return of_build + "; reinstall with DUALKV_HEAD_DIMS covering it";
}

// The first kernel of the smallest head dims that hold `wanted`; -1: there is none. Kernels come in
// this order.
inline int find_kernel(const std::vector<KernelTraits>& kernels, Arch arch, const HeadDims& wanted) {
  for (int i = 0; i < static_cast<int>(kernels.size()); ++i) {
    if (kernels[i].arch == arch && kernels[i].dims.hold(wanted)) return i;
  }
  return -1;
}

// The preferred kernel of the smallest head dims that hold those of the call, among those that fit
// what the card grants a block. Throws std::invalid_argument where there is none.
inline KernelChoice choose_kernel(const std::vector<KernelTraits>& kernels, const Call& call, const Gpu& gpu) {
  KernelChoice choice;
  choice.family_why = {"the portable kernels: compute capability", gpu.capability, "!=", 9};
  int first = -1;
  if (gpu.capability == 9 && call.wants_portable) {
    choice.family_why = {"asked for by DUALKV_KERNELS"};
  } else if (gpu.capability == 9) {
    first = find_kernel(kernels, Arch::sm90, call.dims);
    choice.family_why = first < 0 ? Why{"no Hopper kernel of these head dims in this build"}
                                  : Why{"compute capability 9"};
  }
  choice.arch = first < 0 ? Arch::sm80 : Arch::sm90;
  if (first < 0) first = find_kernel(kernels, Arch::sm80, call.dims);
  if (first < 0) throw std::invalid_argument(too_wide(kernels, choice.arch, call.dims));
  choice.dims = kernels[first].dims;
  int least_bytes = 0;
  for (int i = first; i < static_cast<int>(kernels.size()); ++i) {
    const KernelTraits& kernel = kernels[i];
    if (kernel.arch != choice.arch || !(kernel.dims == choice.dims)) break;
    least_bytes = kernel.tiles.shared_bytes;
    if (least_bytes > gpu.shared_bytes) continue;
    choice.index = i, choice.tiles = kernel.tiles;
    choice.tiles_why = {i == first ? "the preferred ones fit a block: bytes" : "the compact ones fit a block: bytes",
                        least_bytes, "<=", gpu.shared_bytes};
    return choice;
  }
  throw std::invalid_argument("head dim " + describe(call.dims) + " needs at least " + std::to_string(least_bytes) +
                              " bytes of shared memory a block in this direction; this GPU grants " +
                              std::to_string(gpu.shared_bytes));
}

// Takes the narrow tiles of a kernel where a row sees few keys.
inline void choose_narrow(KernelChoice& choice, const KernelTraits& kernel, const Call& call, int keys, int window) {
  if (!kernel.has_narrow()) return;
  choice.narrow = true;
  if (call.mean_keys <= keys) {
    choice.tiles_why = {"narrow: mean keys", call.mean_keys, "<=", keys};
  } else if (call.sees.window < window) {
    choice.tiles_why = {"narrow: window", call.sees.window, "<", window};
  } else {
    choice.narrow = false;
    choice.tiles_why = {"wide: mean keys", call.mean_keys, ">", keys};
  }
  if (choice.narrow) choice.tiles = kernel.narrow;
}

inline void pack_all_heads(KernelChoice& choice, const Call& call) {
  if (!choice.tiles.packs_heads) {
    choice.pack_why = {"this kernel packs no heads"};
    return;
  }
  choice.pack = largest_pack(call.heads_per_group());
  choice.pack_why = {"the largest power of two up to 16 that divides a KV head's query heads:", choice.pack.heads(), "of",
                     call.heads_per_group()};
}

inline void choose_backward_pack(BackwardPlan& plan, const Call& call, const Tuning& tuning) {
  pack_all_heads(plan.kernel, call);
  const int least = tuning.pack_window;
  if (!plan.kernel.tiles.packs_heads || !call.sees.has_window() || call.sees.window < least) return;
  plan.kernel.pack = {};
  plan.kernel.pack_why = {"all heads at a time would not stay in L2: window", call.sees.window, ">=", least};
}

inline void choose_sums(BackwardPlan& plan, const KernelTraits& kernel, const Call& call, const Tuning& tuning,
                        const BackwardTuning& limits) {
  const auto none = [&](const Why& why) { plan.sums = DqSums::none, plan.sums_why = why; };
  if (!kernel.sums_dq) return none({"the kernel of dK and dV has no room for dQ"});
  if (call.sees.window < limits.dq_window) return none({"window", call.sees.window, "<", limits.dq_window});
  if (call.deterministic && (!kernel.orders_dq || call.sees.has_window())) {
    return none({kernel.orders_dq ? "deterministic, and sums with a window have no order"
                                  : "deterministic, and this kernel's sums have no order"});
  }
  const int keys = call.deterministic ? limits.dq_keys_ordered : limits.dq_keys;
  const int node = call.deterministic ? limits.dq_node_ordered : 0;
  if (call.q_rows >= tuning.dq_rows) {
    if (call.mean_keys <= keys) return none({"mean keys", call.mean_keys, "<=", keys});
    if (call.q_rows < int64_t{node} * call.num_nodes) {
      return none({"deterministic, and tokens a node", call.q_rows / call.num_nodes, "<", node});
    }
    plan.sums_why = keys > 0 ? Why{"mean keys", call.mean_keys, ">", keys} : Why{"however many keys a row sees"};
  } else {
    plan.sums_why = {"too few rows for another launch:", call.q_rows, "<", tuning.dq_rows};
  }
  plan.sums = call.deterministic ? DqSums::in_order : DqSums::in_any_order;
  if (!kernel.has_every_step || call.has_softcap || call.sees.has_window()) return;
  plan.every_step = call.q_rows >= int64_t{limits.every_step_node} * call.num_nodes;
  plan.steps_why = {"tokens a node", call.q_rows / max_int(call.num_nodes, 1), plan.every_step ? ">=" : "<",
                    limits.every_step_node};
}

}  // namespace plan_steps

// O and LSE. A narrow forward has the query tiles of the wide one.
inline ForwardPlan plan_forward(const Call& call, const std::vector<KernelTraits>& kernels, const Gpu& gpu) {
  ForwardPlan plan;
  plan.kernel = plan_steps::choose_kernel(kernels, call, gpu);
  const KernelTraits& kernel = kernels[plan.kernel.index];
  plan.kernel.pack_why = {"this kernel packs no heads"};
  if (kernel.tiles.packs_heads) {
    plan.pack = packed_heads(call.heads_per_group(), kernel.tiles.block_m);
    plan.kernel.pack_why = {"the most up to 16 that divide a KV head's query heads and waste 1/8 of a tile or less:",
                            plan.pack, "of", call.heads_per_group()};
  }
  plan_steps::choose_siblings(plan, kernel, call, gpu);
  if (!kernel.has_narrow() || call.has_softcap || !call.sees.has_window()) return plan;
  const int percent = tuning_of(gpu).narrow_forward_percent, queries = kernel.tiles.block_m / plan.pack;
  const int64_t narrow = window_columns(call.sees, queries, kernel.narrow.block_n);
  const int64_t wide = window_columns(call.sees, queries, kernel.tiles.block_n);
  plan.kernel.narrow = 100 * narrow <= percent * wide;
  plan.kernel.tiles_why = {plan.kernel.narrow ? "narrow: of the wide tiles' columns, percent"
                                              : "wide: the narrow ones need of their columns, percent",
                           100 * narrow / wide, plan.kernel.narrow ? "<=" : ">", percent};
  if (plan.kernel.narrow) plan.kernel.tiles = kernel.narrow;
  return plan;
}

// `kernels` of dK and dV, `dq_kernels` of dQ alone.
inline BackwardPlan plan_backward(const Call& call, const std::vector<KernelTraits>& kernels,
                                  const std::vector<KernelTraits>& dq_kernels, const Gpu& gpu) {
  using namespace plan_steps;
  BackwardPlan plan;
  plan.kernel = choose_kernel(kernels, call, gpu);
  const KernelTraits& kernel = kernels[plan.kernel.index];
  const Tuning& tuning = tuning_of(gpu);
  const BackwardTuning limits = backward_tuning(tuning, kernel.arch, kernel.dims);
  choose_sums(plan, kernel, call, tuning, limits);
  if (plan.sums == DqSums::none) {
    plan.dq = choose_kernel(dq_kernels, call, gpu);
    const KernelTraits& dq = dq_kernels[plan.dq.index];
    const BackwardTuning dq_limits = backward_tuning(tuning, dq.arch, dq.dims);
    choose_narrow(plan.dq, dq, call, dq_limits.narrow_dq_keys, dq_limits.narrow_dq_window);
    pack_all_heads(plan.dq, call);
  }
  choose_backward_pack(plan, call, tuning);
  const KernelChoice& chosen = plan.kernel;
  plan.tiles_at_a_time = tiles_at_a_time(gpu.num_sms, chosen.tiles.column_blocks);
  const NodeTable shapes{nullptr, call.num_nodes, {call.q_rows, call.key_rows, 0}};
  plan.capacities = backward_capacities(shapes, chosen.pack.queries(chosen.tiles.block_m), chosen.tiles.block_n,
                                        chosen.pack.queries(call.num_heads), call.num_kv_heads, plan.tiles_at_a_time);
  return plan;
}

}  // namespace dualkv
