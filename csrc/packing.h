// Packing of prompts with their responses, compiled: the host's share of it for tokens on a GPU is a third of a
// millisecond, where PyTorch's operators and Python take one and a half. What it must give, bit by bit, is what
// flash_attn_dualkv/data (samples.py, batch.py) gives without it.
#pragma once

#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

#include "kernels/kernels.h"
#include "problem.h"

namespace dualkv {

using Ints = std::vector<int64_t>;

inline at::Tensor host_tensor(int64_t size, at::ScalarType type, const at::Device& device) {
  return at::empty({size}, at::TensorOptions().dtype(type).pinned_memory(device.type() == at::kCUDA));
}

// Integer tensors of one device as one int64 tensor there, the same on the host, and the smallest and the largest of
// them. One copy, for which the host waits.
inline std::tuple<Tensor, Tensor, int64_t, int64_t> join_tokens(const std::vector<Tensor>& parts) {
  int64_t count = 0;
  for (const Tensor& part : parts) count += part.numel();
  const Tensor& beside = parts.at(0);
  const c10::cuda::CUDAGuard guard(beside.device());
  const Tensor all = uninitialised(beside, {count + 2}, at::kLong);
  Tensor tokens = all.narrow(0, 0, count), smallest = all.select(0, count), largest = all.select(0, count + 1);
  if (count > 0) {
    at::cat_out(tokens, parts);
    at::aminmax_out(smallest, largest, tokens);
  } else {
    fill_zeros(all);
  }
  const Tensor host = host_tensor(count + 2, at::kLong, beside.device());
  host.copy_(all);
  const int64_t* found = host.const_data_ptr<int64_t>() + count;
  return {tokens, host.narrow(0, 0, count), found[0], found[1]};
}

// The runs of tokens that are equal: lists of their indices, in the order of the first of each.
//
// Runs with the same tokens at some places are compared with the first of them; only those that differ are hashed, for
// that takes several times as long as to compare.
inline std::vector<Ints> equal_runs(const Tensor& tokens, const Ints& begins, const Ints& lengths) {
  check_argument(tokens.device().is_cpu() && tokens.scalar_type() == at::kLong && tokens.is_contiguous(), "tokens",
                 tokens.toString(), "contiguous int64 on the host");
  const int64_t* const first_token = tokens.const_data_ptr<int64_t>();
  constexpr int64_t kPlacesApart = 8;
  std::vector<Ints> groups;
  std::unordered_map<uint64_t, size_t> of_some_tokens;
  std::unordered_map<std::string_view, size_t> of_all_tokens;
  for (size_t index = 0; index < lengths.size(); ++index) {
    const int64_t begin = begins.at(index), length = lengths[index];
    check_argument(begin >= 0 && length >= 0 && begin + length <= tokens.numel(), "begins", begin,
                   "runs of the tokens");
    const int64_t* const run = first_token + begin;
    const std::string_view bytes(reinterpret_cast<const char*>(run), length * sizeof(int64_t));
    uint64_t hash = length;
    for (int64_t i = 0; i < length; i += kPlacesApart) hash = (hash ^ run[i]) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    const auto same_run = [&](size_t group) {
      const int64_t other = groups[group][0];
      return lengths[other] == length && std::memcmp(first_token + begins[other], run, bytes.size()) == 0;
    };
    size_t group = of_some_tokens.try_emplace(hash, groups.size()).first->second;
    if (group < groups.size() && !same_run(group)) group = of_all_tokens.try_emplace(bytes, groups.size()).first->second;
    if (group == groups.size()) groups.emplace_back();
    groups[group].push_back(index);
  }
  return groups;
}

// Where everything lies in a packed micro-batch.
struct PackedPlan {
  std::vector<PackedRun> runs;  // contexts, responses, padding
  Ints node_lens, node_parents, order;  // of the layout
  int64_t rows = 0, scored = 0, longest_path = 0, longest_run = 0;

  PackedPlan(const std::vector<Ints>& groups, const Ints& prompt_lens, const Ints& response_lens, int shift,
             bool drop_last, int64_t multiple) {
    const size_t samples = prompt_lens.size();
    Ints begins(samples), scored_begins(samples);  // of each sample: its first token, and its first scored one
    int64_t tokens = 0, longest_response = 0;
    for (size_t i = 0; i < samples; ++i) {
      begins[i] = tokens, scored_begins[i] = scored;
      tokens += prompt_lens[i] + response_lens.at(i), scored += response_lens[i];
      longest_response = std::max(longest_response, response_lens[i]);
    }
    int64_t context_row = 0;
    for (const Ints& members : groups) rows += prompt_lens.at(members.at(0)) - shift;
    runs.reserve(groups.size() + samples + 1);
    runs.resize(groups.size());
    int node = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      const Ints& members = groups[g];
      const int64_t context_len = prompt_lens[members[0]] - shift;
      const int root = node++;
      PackedRun& context = runs[g];
      context = {.row = context_row, .length = context_len, .source = begins[members[0]]};
      context.multiplicity = static_cast<int>(members.size()), context.sample = -1;
      context.node = root, context.parent = -1, context.subtree_end = static_cast<int>(node + members.size());
      context_row += context_len;
      add_node(context_len, -1, context_len);
      for (const int64_t sample : members) {
        const int64_t response = response_lens.at(sample), kept = drop_last ? shift - 1 : shift;
        PackedRun run{.row = rows, .length = std::max<int64_t>(response + kept, 0)};
        run.position = prompt_lens.at(sample) - shift, run.source = begins[sample] + run.position;
        run.labelled = run.length > 0 && !drop_last ? run.length - 1 : run.length;
        run.scored = scored_begins[sample], run.scored_len = response;
        run.first_row = shift ? rows : context_row - 1;
        run.target = begins[sample] + prompt_lens[sample], run.padded = sample * longest_response;
        run.multiplicity = 1, run.shift = shift, run.sample = static_cast<int>(sample);
        run.node = node++, run.parent = root, run.subtree_end = node;
        runs.push_back(run);
        order.push_back(sample), rows += run.length;
        add_node(run.length, root, context_len + run.length);
        longest_run = std::max(longest_run, response);
      }
    }
    if (order.size() != samples) throw std::invalid_argument("groups: expected each sample once");
    if (const int64_t pad = (multiple - rows % multiple) % multiple) {
      runs.push_back({.row = rows, .length = pad, .sample = -1, .node = -1});
      rows += pad, longest_run = std::max(longest_run, pad);
    }
    if (rows >= std::numeric_limits<int>::max()) throw std::overflow_error("int too big to convert");
  }

 private:
  void add_node(int64_t length, int64_t parent, int64_t path) {
    node_lens.push_back(length), node_parents.push_back(parent);
    longest_path = std::max(longest_path, path), longest_run = std::max(longest_run, length);
  }
};

inline pybind11::tuple as_tuple(const Ints& values) {
  pybind11::tuple made(values.size());
  for (size_t i = 0; i < values.size(); ++i) made[i] = pybind11::int_(values[i]);
  return made;
}

// The tensors of a SharedPromptBatch, in the order of PackRowsArgs, and the numbers of its layout: node_lens,
// node_parents, order, the most rows of a path.
inline pybind11::tuple pack(const Tensor& tokens_in, const std::vector<Ints>& groups, const Ints& prompt_lens,
                            const Ints& response_lens, int shift, bool drop_last, int64_t multiple) {
  check_argument(tokens_in.is_cuda() && tokens_in.dim() == 1, "tokens", tokens_in.device(), "a CUDA tensor");
  const c10::cuda::CUDAGuard guard(tokens_in.device());
  const PackedPlan plan(groups, prompt_lens, response_lens, shift, drop_last, multiple);
  const Tensor tokens = tokens_in.to(at::kLong).contiguous();
  const int64_t samples = prompt_lens.size(), bytes = plan.runs.size() * sizeof(PackedRun);
  const int64_t given = std::accumulate(prompt_lens.begin(), prompt_lens.end(), plan.scored);
  check_argument(tokens.numel() == given, "tokens", tokens.numel(), "those of all samples, ", given);

  const auto numbers = [&](int64_t size) { return uninitialised(tokens, {size}, at::kLong); };
  Tensor found[9];
  for (int i = 0; i < 9; ++i) found[i] = numbers(i < 4 ? plan.rows : i < 8 ? plan.scored : samples + 1);
  const int64_t num_nodes = plan.node_lens.size();
  const Tensor nodes = uninitialised(tokens, {num_nodes, kNodeColumns}, at::kInt);
  const Tensor start = host_tensor(bytes, at::kByte, tokens.device());
  std::memcpy(start.data_ptr(), plan.runs.data(), bytes);
  const Tensor runs = uninitialised(tokens, {bytes}, at::kByte);
  runs.copy_(start, /*non_blocking=*/true);
  const auto pointer = [&](int i) { return found[i].data_ptr<int64_t>(); };
  pack_rows({tokens.data_ptr<int64_t>(), static_cast<const PackedRun*>(runs.data_ptr()),
             static_cast<int>(plan.runs.size()), pointer(0), pointer(1), pointer(2), pointer(3), pointer(4), pointer(5),
             pointer(6), pointer(7), pointer(8), int_pointer(nodes)},
            static_cast<int>(plan.longest_run), c10::cuda::getCurrentCUDAStream());
  count_launch("dualkv_pack_rows");
  return pybind11::make_tuple(found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], found[8],
                              nodes, as_tuple(plan.node_lens), as_tuple(plan.node_parents), as_tuple(plan.order),
                              plan.longest_path);
}

}  // namespace dualkv
