// SPDX-License-Identifier: BSD-3-Clause
// A plan in words: what a call runs and why. For explain_plan(), and the names of launches.
#pragma once

#include <string>
#include <vector>

#include "core/plan.h"

namespace dualkv {

// `choice` and `value` are what programs read; `why` is for people.
struct Explained {
  std::string choice, value, why;
};

inline std::string describe(const Why& why) {
  if (!why.relation) return why.text;
  const auto number = [](int64_t one) { return one == kNoWindow ? std::string("none") : std::to_string(one); };
  return std::string(why.text) + " " + number(why.value) + " " + why.relation + " " + number(why.bound);
}

// The name of a launch, such as "dualkv_sm90_backward_dq_narrow".
inline std::string launch_name(const KernelChoice& kernel, const std::string& direction) {
  return std::string("dualkv_") + name_of(kernel.arch) + "_" + direction + (kernel.narrow ? "_narrow" : "");
}

inline std::string forward_name(const ForwardPlan& plan) {
  return std::string("dualkv_") + name_of(plan.kernel.arch) + "_forward";
}
inline std::string backward_name(const BackwardPlan& plan) {
  return launch_name(plan.kernel, plan.sums == DqSums::in_order ? "backward_in_order" : "backward");
}
inline std::string dq_name(const BackwardPlan& plan) { return launch_name(plan.dq, "backward_dq"); }

inline const char* describe(DqSums sums) {
  return sums == DqSums::none ? "own kernel" : sums == DqSums::in_order ? "summed in a fixed order" : "summed in any order";
}

namespace explain_steps {

inline void add_kernel(std::vector<Explained>& all, const std::string& direction, const std::string& name,
                       const KernelChoice& kernel, int pack) {
  all.push_back({direction + " kernel", name,
                 "head dim " + describe(kernel.dims) + ", the smallest built that holds the call's"});
  const TileInfo& tiles = kernel.tiles;
  all.push_back({direction + " tiles", std::to_string(tiles.block_m) + " x " + std::to_string(tiles.block_n),
                 describe(kernel.tiles_why)});
  all.push_back({direction + " heads", std::to_string(pack), describe(kernel.pack_why)});
}

}  // namespace explain_steps

inline std::vector<Explained> explain(const Gpu& gpu, const ForwardPlan& forward, const BackwardPlan& backward) {
  using explain_steps::add_kernel;
  std::vector<Explained> all;
  const int bandwidth = static_cast<int>(gpu.bandwidth_per_sm());
  all.push_back({"gpu", tuning_of(gpu).name,
                 "the row with the nearest bandwidth for each of " + std::to_string(gpu.num_sms) +
                     " multiprocessors, " + std::to_string(bandwidth) + " GB/s"});
  all.push_back({"family", name_of(backward.kernel.arch), describe(backward.kernel.family_why)});
  add_kernel(all, "forward", forward_name(forward), forward.kernel, forward.pack);
  all.push_back({"forward nodes", std::to_string(forward.siblings), describe(forward.siblings_why)});
  add_kernel(all, "backward", backward_name(backward), backward.kernel, backward.kernel.pack.heads());
  all.push_back({"dq", describe(backward.sums), describe(backward.sums_why)});
  if (backward.sums == DqSums::none) {
    add_kernel(all, "dq", dq_name(backward), backward.dq, backward.dq.pack.heads());
  }
  if (backward.steps_why.relation) {
    all.push_back({"steps", backward.every_step ? "all" : "hidden ones left out", describe(backward.steps_why)});
  }
  const std::string share = std::to_string(kPartsPerSm * backward.tiles_at_a_time);
  all.push_back({"split parts", std::to_string(backward.capacities.slots),
                 "the most, over all KV heads; the device splits KV tiles that take more than 1/" + share +
                     " of all steps, unless they end in time whole"});
  return all;
}

}  // namespace dualkv
