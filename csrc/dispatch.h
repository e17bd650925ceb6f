// (arch, element type, head dims) -> kernel. Every instance file registers itself when the library is loaded, so the
// registry holds exactly what was built.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "params.h"

namespace dualkv {

enum class Arch : int { sm80, sm90 };

inline const char* name_of(Arch arch) { return arch == Arch::sm80 ? "sm80" : "sm90"; }

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(status));
}

// What the host needs to know of a kernel: the tile sizes that its work list is made of, and its footprint.
struct TileInfo {
  int block_m, block_n;
  int shared_bytes;
  bool packs_heads = false;  // a tile may hold several query heads of a KV head
  int column_blocks = 1;     // blocks that share a KV tile, each with some columns of its gradients
};

template <typename T>
struct ForwardKernel {
  TileInfo tiles;
  void (*launch)(const ForwardParams<T>&, cudaStream_t);
};

// Where dQ by itself takes less time than its sums, which travel through memory three times in fp32. On average a query sees
// no more keys than `in_any_order`; of a deterministic dQ, than `in_order`, or nodes are shorter than `short_node`.
struct FewKeys {
  int in_any_order = 0, in_order = 0, short_node = 0, short_node_of_one_head = 0;  // one KV head
};

// Walks that narrow tiles are for: a query sees no more than `most_keys` on average (of a GPU whose memory is slow
// `most_keys_slow_memory`), or the window is shorter than `short_window`.
struct ShortWalks {
  int most_keys = 0, most_keys_slow_memory = 0, short_window = 0;
};

// A kernel of one tile size.
template <class Params>
struct TileKernel {
  TileInfo tiles;
  void (*launch)(const Params&, cudaStream_t);
};

// And the same of narrow tiles, without a launch where there are none.
template <class Params>
struct WalkKernel : TileKernel<Params> {
  TileKernel<Params> narrow{};
  ShortWalks short_walks{};

  bool takes_narrow(Visibility sees, int64_t mean_keys, bool slow_memory) const {
    const int most_keys = slow_memory ? short_walks.most_keys_slow_memory : short_walks.most_keys;
    return narrow.launch && (mean_keys <= most_keys || sees.window < short_walks.short_window);
  }
};

// dK and dV. A kernel with `sums_dq` also adds up dQ in fp32, if asked to; else dQ is left to the BackwardDqKernel.
// `convert` comes behind it and rounds what is left in fp32: the sums of dQ, and the parts of split tiles. Narrow tiles are
// for dK and dV alone.
template <typename T>
struct BackwardKernel : WalkKernel<BackwardParams<T>> {
  void (*convert)(const ConvertParams<T>&, cudaStream_t);
  bool sums_dq;
  bool orders_dq = false;  // it can add up dQ in an order that is the same from run to run, where there is no window
  int short_window = 0;  // with one that is shorter, dQ by itself takes less time than its sums do
  FewKeys few_keys{}, few_keys_slow_memory{};
};

template <typename T>
struct BackwardDqKernel : WalkKernel<BackwardDqParams<T>> {};

// The head dim of q and k, and that of v.
struct HeadDims {
  int qk, v;

  bool hold(const HeadDims& wanted) const { return qk >= wanted.qk && v >= wanted.v; }
  bool operator<(const HeadDims& other) const {
    return std::pair(qk + v, qk) < std::pair(other.qk + other.v, other.qk);
  }
};

// Kernels of one kind by (arch, head dims), the preferred one first; small head dims come before large ones.
template <class Kernel>
std::map<std::pair<Arch, HeadDims>, std::vector<Kernel>>& registry() {
  static std::map<std::pair<Arch, HeadDims>, std::vector<Kernel>> kernels;
  return kernels;
}

template <class Kernel>
void add_kernel(Arch arch, const HeadDims& dims, const Kernel& kernel) {
  registry<Kernel>()[{arch, dims}].push_back(kernel);
}

template <class Kernel>
struct Selected {
  Kernel kernel;
  Arch arch;
  HeadDims padded;  // the built head dims that serve those asked for
};

// Head dims built for an architecture, ascending.
template <class Kernel>
std::vector<HeadDims> built_head_dims(Arch arch) {
  std::vector<HeadDims> dims;
  for (const auto& [key, kernels] : registry<Kernel>()) {
    if (key.first == arch) dims.push_back(key.second);
  }
  return dims;
}

// The entry of the smallest built head dims that hold `wanted`; null if there are none.
template <class Kernel>
const std::pair<const std::pair<Arch, HeadDims>, std::vector<Kernel>>* find_kernels(Arch arch, const HeadDims& wanted) {
  for (const auto& entry : registry<Kernel>()) {
    if (entry.first.first == arch && entry.first.second.hold(wanted)) return &entry;
  }
  return nullptr;
}

// Calls add(T()) for every element type T.
template <class Add>
bool for_element_types(Add add) {
  add(__half());
  add(__nv_bfloat16());
  return true;
}

// Such as "64" or, where v has another, "192 (v: 128)".
std::string describe(const HeadDims& dims);
std::string describe(const std::vector<HeadDims>& dims);

// How often each kernel was launched, so that tests can tell that it was ours that ran.
void count_launch(const std::string& kernel);
std::map<std::string, int64_t> launch_counts();

// Lets a kernel take `bytes` of dynamic shared memory a block on the current device. The driver is asked once.
void allow_shared_bytes(const void* kernel, int bytes);

// What is wrong where no kernel of an architecture holds head dims.
std::string too_wide(Arch arch, const HeadDims& wanted, const std::vector<HeadDims>& built);

// The preferred kernel of the smallest built head dims that hold `wanted`, among those that fit `shared_limit`, what the
// device grants a block.
template <class Kernel>
Selected<Kernel> select(Arch arch, const HeadDims& wanted, int shared_limit) {
  const auto* found = find_kernels<Kernel>(arch, wanted);
  if (!found) throw std::invalid_argument(too_wide(arch, wanted, built_head_dims<Kernel>(arch)));
  for (const Kernel& kernel : found->second) {
    if (kernel.tiles.shared_bytes <= shared_limit) return {kernel, arch, found->first.second};
  }
  throw std::invalid_argument("head dim " + describe(wanted) + " needs at least " +
                              std::to_string(found->second.back().tiles.shared_bytes) +
                              " bytes of shared memory a block in this direction; this GPU grants " +
                              std::to_string(shared_limit));
}

}  // namespace dualkv
