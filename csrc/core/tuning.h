// SPDX-License-Identifier: BSD-3-Clause
// One row of thresholds for each card that kernels were timed on. docs/notes/dq.md and windows.md
// have the times.
#pragma once

#include <cmath>
#include <stdexcept>
#include <string>

#include "core/kernel_traits.h"

namespace dualkv {

// Where a kernel pair of one choice of head dims changes its way. Averages are over all rows,
// without their window. A threshold of 0 is reached by nothing but an average of 0 keys.
//
// Sums of dQ travel through memory three times in fp32. For few keys it is less work to compute S
// and dP once more, in a kernel for dQ alone, and the fewer bytes a card has for each
// multiprocessor, the sooner. Narrow tiles waste fewer columns.
struct BackwardTuning {
  HeadDims dims{};
  int dq_window = 0;        // dQ has a kernel of its own with a shorter window,
  int dq_keys = 0;          // where a row sees no more keys,
  int dq_keys_ordered = 0;  // with deterministic gradients, where it sees no more keys than these
  int dq_node_ordered = 0;  // or nodes have fewer tokens
  int narrow_dq_keys = 0;    // dQ alone has narrow tiles where a row sees no more keys,
  int narrow_dq_window = 0;  // or with a shorter window
  // Hidden steps, which lie at the ends of nodes, are left out of sums of dQ unless nodes have so
  // many tokens on average: the loop that asks takes 1% longer at 28 x 16K and wins 2% in trees.
  int every_step_node = 0;
};

struct Tuning {
  const char* name;
  Gpu gpu;
  int dq_rows = 1024;  // fewer rows take less time than another launch for dQ
  // The backward packs all query heads of a KV head into one query tile unless its window is as
  // long. Packed, few rows of a tile are foreign: a quarter less time where nodes are short, 2 to
  // 15% with a window of 128. With a long window all heads at a time are more than the L2 cache
  // holds until the next KV tile needs them: at 1024 keys 16% more time.
  int pack_window = 256;
  // The forward has narrow tiles where these have at most so many of the wide ones' columns.
  int narrow_forward_percent = 75;
  BackwardTuning backward[3] = {};
};

inline constexpr Tuning kTunings[] = {
    {.name = "h200",
     .gpu = {.capability = 9, .num_sms = 132, .shared_bytes = 227 * 1024, .gigabytes_per_s = 4917},
     .backward = {{.dims = {64, 64},
                   .dq_window = 256,
                   .dq_keys = 100,
                   .dq_keys_ordered = 320,
                   .narrow_dq_keys = 128,
                   .narrow_dq_window = 256},
                  {.dims = {128, 128},
                   .dq_window = 256,
                   .dq_keys = 320,
                   .dq_keys_ordered = 512,
                   .narrow_dq_keys = 640,
                   .narrow_dq_window = 1024,
                   .every_step_node = 1280},
                  {.dims = {192, 128}, .dq_window = 1024}}},
    {.name = "h100",
     .gpu = {.capability = 9, .num_sms = 132, .shared_bytes = 227 * 1024, .gigabytes_per_s = 3352},
     .backward = {{.dims = {64, 64},
                   .dq_window = 256,
                   .dq_keys = 512,
                   .dq_keys_ordered = 1280,
                   .narrow_dq_keys = 128,
                   .narrow_dq_window = 256},
                  {.dims = {128, 128},
                   .dq_window = 256,
                   .dq_keys = 600,
                   .dq_keys_ordered = 1280,
                   .dq_node_ordered = 1280,
                   .narrow_dq_keys = 640,
                   .narrow_dq_window = 1024,
                   .every_step_node = 1280},
                  {.dims = {192, 128}, .dq_window = 1024}}},
    {.name = "a100",
     .gpu = {.capability = 8, .num_sms = 108, .shared_bytes = 163 * 1024, .gigabytes_per_s = 2039}},
};

// The row of a card: of those with its compute capability, the one whose memory has the nearest
// bytes a second for each multiprocessor, which is what the thresholds depend on. Without one of
// its capability it runs the portable kernels, as an A100 does, which have no thresholds of their
// own.
inline const Tuning& tuning_of(const Gpu& gpu) {
  const auto distance = [&](const Tuning& row) {
    return std::abs(row.gpu.bandwidth_per_sm() - gpu.bandwidth_per_sm());
  };
  const Tuning* nearest = nullptr;
  for (const Tuning& row : kTunings) {
    if (row.gpu.capability != gpu.capability) continue;
    if (!nearest || distance(row) < distance(*nearest)) nearest = &row;
  }
  return nearest ? *nearest : kTunings[std::size(kTunings) - 1];
}

// The row of that name. Throws std::invalid_argument where there is none.
inline const Tuning& tuning_named(const std::string& name) {
  std::string known;
  for (const Tuning& row : kTunings) {
    if (name == row.name) return row;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw std::invalid_argument("expected one of " + known + ", got " + name);
}

// The thresholds of a kernel of that family and those head dims.
inline BackwardTuning backward_tuning(const Tuning& tuning, Arch arch, const HeadDims& dims) {
  for (const BackwardTuning& row : tuning.backward) {
    if (arch == Arch::sm90 && row.dims == dims) return row;
  }
  return {};
}

// Calls visit(field, head dims, value) for every threshold of a row that can be reached. Tests take
// the borders from here.
template <class Visit>
void each_threshold(const Tuning& tuning, Visit visit) {
  if (tuning.backward[0].dims.qk == 0) return;  // the portable kernels have no such choice
  visit("dq_rows", HeadDims{128, 128}, tuning.dq_rows);
  visit("pack_window", HeadDims{192, 128}, tuning.pack_window);
  visit("narrow_forward_percent", HeadDims{64, 64}, tuning.narrow_forward_percent);
  for (const BackwardTuning& row : tuning.backward) {
    const auto visit_one = [&](const char* field, int value) {
      if (value > 0) visit(field, row.dims, value);
    };
    visit_one("dq_window", row.dq_window);
    visit_one("dq_keys", row.dq_keys);
    visit_one("dq_keys_ordered", row.dq_keys_ordered);
    visit_one("dq_node_ordered", row.dq_node_ordered);
    visit_one("narrow_dq_keys", row.narrow_dq_keys);
    visit_one("narrow_dq_window", row.narrow_dq_window);
    visit_one("every_step_node", row.every_step_node);
  }
  static_assert(sizeof(BackwardTuning) == 9 * sizeof(int), "a new threshold must be visited, too");
}

}  // namespace dualkv
