// SPDX-License-Identifier: BSD-3-Clause
// What the policy knows of a kernel, for which head dims it is built, its tiles and what it can do,
// and of a card.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace dualkv {

// Families of kernels, by the oldest GPU that runs them.
enum class Arch : int { sm80, sm90 };

inline const char* name_of(Arch arch) { return arch == Arch::sm80 ? "sm80" : "sm90"; }

// The head dim of q and k, and that of v.
struct HeadDims {
  int qk = 0, v = 0;

  bool hold(const HeadDims& wanted) const { return qk >= wanted.qk && v >= wanted.v; }
  bool operator==(const HeadDims&) const = default;
  bool operator<(const HeadDims& other) const {
    return std::pair(qk + v, qk) < std::pair(other.qk + other.v, other.qk);
  }
};

// The row of a table of tiles that is `of` these head dims, or else `otherwise`. Without either it
// does not compile.
template <class Row, size_t kRows>
consteval Row row_of(const Row (&table)[kRows], decltype(Row::of) of, const Row* otherwise = nullptr) {
  for (const Row& row : table) {
    if (row.of == of) return row;
  }
  return *otherwise;
}

// Tile sizes, which work lists are made of, and the footprint of a block.
struct TileInfo {
  int block_m, block_n;
  int shared_bytes;
  bool packs_heads = false;  // a tile may hold several query heads of a KV head
  int column_blocks = 1;     // blocks that share a KV tile, each with some columns of its gradients
};

struct KernelTraits {
  Arch arch;
  HeadDims dims;
  TileInfo tiles;
  TileInfo narrow{};     // the same kernel with narrow KV tiles; block_n is 0 where there is none
  bool sums_dq = false;  // a backward that adds up dQ in fp32, if asked to
  // It can do so in an order that is the same from run to run, where there is no window.
  bool orders_dq = false;
  int siblings = 1;  // nodes that may share a query tile, in slices of as many equal parts
  bool has_every_step = false;  // sums of dQ have an instance that leaves out no steps, too

  bool has_narrow() const { return narrow.block_n > 0; }
};

// What the policy knows of a card.
struct Gpu {
  int capability;  // the major number of its compute capability
  int num_sms;
  int shared_bytes;  // the most that a block may have
  double gigabytes_per_s;

  double bandwidth_per_sm() const { return gigabytes_per_s / num_sms; }
};

// Head dims of q, k and v alike that a family has kernels for, divided by spaces.
inline std::string equal_head_dims(const std::vector<KernelTraits>& kernels, Arch arch) {
  std::string found;
  int last = 0;
  for (const KernelTraits& kernel : kernels) {
    if (kernel.arch != arch || kernel.dims.qk != kernel.dims.v || kernel.dims.qk == last) continue;
    last = kernel.dims.qk;
    found += (found.empty() ? "" : " ") + std::to_string(last);
  }
  return found;
}

}  // namespace dualkv
