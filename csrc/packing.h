// Packing of prompts with their responses, compiled: 64K tokens in 64 samples on a GPU take the host a third of a
// millisecond, with Python and PyTorch's operators six times as long. What it must give, bit by bit, is what
// flash_attn_dualkv/data (samples.py, batch.py) gives without it.
#pragma once

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "kernels/kernels.h"
#include "problem.h"

namespace dualkv {

using Ints = std::vector<int64_t>;

// Runs `body(T{})` for an integer type of tokens.
template <class Body>
void with_token_type(at::ScalarType type, Body body) {
  if (type == at::kLong) return body(int64_t{});
  if (type == at::kInt) return body(int32_t{});
  if (type == at::kShort) return body(int16_t{});
  if (type == at::kChar) return body(int8_t{});
  TORCH_INTERNAL_ASSERT(type == at::kByte);
  body(uint8_t{});
}

// 1-D integer tensors of one type and GPU, as they are; an empty list if any is something else.
inline std::vector<const Tensor*> plain_tokens(const pybind11::list& prompts, const pybind11::list& responses) {
  std::vector<const Tensor*> found;
  found.reserve(2 * prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (PyObject* one : {PyList_GET_ITEM(prompts.ptr(), i), PyList_GET_ITEM(responses.ptr(), i)}) {
      if (!THPVariable_CheckExact(one)) return {};
      const Tensor& t = THPVariable_Unpack(one);
      const Tensor& beside = found.empty() ? t : *found[0];
      const bool is_integer = at::isIntegralType(t.scalar_type(), false) && t.scalar_type() <= at::kLong;
      if (!is_integer || t.scalar_type() != beside.scalar_type() || !t.is_cuda() || t.device() != beside.device() ||
          t.layout() != at::kStrided || t.dim() != 1 || !t.is_contiguous()) {
        return {};
      }
      found.push_back(&t);
    }
  }
  return found;
}

// Which runs of tokens are equal: lists of their indices, in the order of the first of each.
//
// Most often a run is that before it: `is_as_before`, where given, says of which that is known. Others with the same
// tokens at some places are compared with the first of them; only those that differ are hashed whole, for that takes
// several times as long as to compare.
inline std::vector<Ints> group_runs(const int64_t* tokens, const Ints& begins, const Ints& lengths,
                                    const std::vector<bool>& is_as_before = {}) {
  constexpr int64_t kPlacesApart = 8;
  std::vector<Ints> groups;
  std::unordered_map<uint64_t, size_t> of_some_tokens;
  std::unordered_map<std::string_view, size_t> of_all_tokens;
  size_t group = 0;
  for (size_t index = 0; index < lengths.size(); ++index) {
    const int64_t length = lengths[index];
    const int64_t* const run = tokens + begins[index];
    const std::string_view bytes(reinterpret_cast<const char*>(run), length * sizeof(int64_t));
    const auto is_in = [&](size_t one) {
      const int64_t other = groups[one][0];
      return lengths[other] == length && std::memcmp(tokens + begins[other], run, bytes.size()) == 0;
    };
    const bool stays = !is_as_before.empty() && is_as_before[index];
    if (!stays && (groups.empty() || !is_in(group))) {
      uint64_t hash = length;
      for (int64_t i = 0; i < length; i += kPlacesApart) {
        hash = (hash ^ run[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
      }
      group = of_some_tokens.try_emplace(hash, groups.size()).first->second;
      if (group < groups.size() && !is_in(group)) group = of_all_tokens.try_emplace(bytes, groups.size()).first->second;
      if (group == groups.size()) groups.emplace_back();
    }
    groups[group].push_back(index);
  }
  return groups;
}

// `group_runs` of int64 tokens on the host.
inline std::vector<Ints> equal_runs(const Tensor& tokens, const Ints& begins, const Ints& lengths) {
  check_argument(tokens.device().is_cpu() && tokens.scalar_type() == at::kLong && tokens.is_contiguous(), "tokens",
                 tokens.toString(), "contiguous int64 on the host");
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t begin = begins.at(i), length = lengths[i];
    const bool is_run = begin >= 0 && length >= 0 && length <= tokens.numel() - begin;
    check_argument(is_run, "begins", begin, "runs of the tokens");
  }
  return group_runs(tokens.const_data_ptr<int64_t>(), begins, lengths);
}

// Samples whose tokens have been looked at.
struct Samples {
  Tensor tokens;  // int64, of a prompt and its response behind each other
  Ints prompt_lens, response_lens;
  int64_t smallest = INT64_MAX, largest = INT64_MIN;  // of the tokens
  std::vector<Ints> groups;                           // the samples of each prompt
};

// By one copy to the host, which waits for it.
inline Samples join_samples(const std::vector<const Tensor*>& given) {
  const Tensor& beside = *given[0];
  Samples samples;
  std::vector<TokenParts> launches;
  Ints prompt_begins;
  int64_t count = 0, blocks = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    if (i % TokenParts::kMost == 0) launches.emplace_back(), launches.back().begins[0] = count;
    TokenParts& parts = launches.back();
    const int64_t length = given[i]->numel();
    if (i % 2 == 0) prompt_begins.push_back(count);
    (i % 2 == 0 ? samples.prompt_lens : samples.response_lens).push_back(length);
    parts.tokens[parts.count++] = given[i]->const_data_ptr();
    parts.begins[parts.count] = count += length;
  }
  for (const TokenParts& parts : launches) blocks += join_blocks(parts);
  static_assert(sizeof(TokenNews) == 3 * sizeof(int64_t));
  const int64_t size = count + 3 * blocks;
  const Tensor all = uninitialised(beside, {size}, at::kLong);
  const bool pinned = beside.device().type() == at::kCUDA;
  const Tensor host = at::empty({size}, at::TensorOptions().dtype(at::kLong).pinned_memory(pinned));
  int64_t *const joined = all.data_ptr<int64_t>(), *const fetched = host.data_ptr<int64_t>();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  with_token_type(beside.scalar_type(), [&](auto type) {
    TokenNews* news = reinterpret_cast<TokenNews*>(joined + count);
    for (const TokenParts& parts : launches) {
      join_tokens<decltype(type)>(parts, joined, news, stream);
      count_launch("dualkv_join_tokens");
      news += join_blocks(parts);
    }
  });
  {
    const pybind11::gil_scoped_release others_may_run;  // the GPU may be busy with what came before
    c10::cuda::memcpy_and_sync(fetched, joined, size * sizeof(int64_t), cudaMemcpyDeviceToHost, stream);
  }
  const TokenNews* news = reinterpret_cast<const TokenNews*>(fetched + count);
  std::vector<bool> is_as_before;
  for (const TokenParts& parts : launches) {
    std::vector<bool> differs(parts.count);
    for (int block = 0, end = join_blocks(parts); block < end; ++block, ++news) {
      samples.smallest = std::min(samples.smallest, news->smallest);
      samples.largest = std::max(samples.largest, news->largest);
      if (news->differs) differs[block % parts.count] = true;
    }
    for (int i = 0; i < parts.count; i += 2) is_as_before.push_back(!differs[i]);
  }
  samples.groups = group_runs(fetched, prompt_begins, samples.prompt_lens, is_as_before);
  samples.tokens = all.narrow(0, 0, count);
  return samples;
}

// Where everything lies in a packed micro-batch.
struct PackedPlan {
  std::vector<PackedRun> runs;  // contexts, responses, padding
  Ints node_lens, node_parents, order;  // of the layout
  int64_t rows = 0, scored = 0, tokens = 0, longest_path = 0, longest_response = 0;
  int64_t mean_keys = 0;  // that a row sees, rounded up

  PackedPlan(const std::vector<Ints>& groups, const Ints& prompt_lens, const Ints& response_lens, int shift,
             bool drop_last, int64_t multiple) {
    const size_t samples = prompt_lens.size();
    Ints begins(samples), scored_begins(samples);  // of each sample: its first token, and its first scored one
    for (size_t i = 0; i < samples; ++i) {
      begins[i] = tokens, scored_begins[i] = scored;
      tokens += prompt_lens[i] + response_lens.at(i), scored += response_lens[i];
      longest_response = std::max(longest_response, response_lens[i]);
    }
    for (const Ints& members : groups) rows += prompt_lens.at(members.at(0)) - shift;
    TORCH_CHECK_VALUE(tokens < kMostTokens, "prompts and responses: expected fewer than 2^30 tokens, got ", tokens);
    int64_t pairs = 0;
    const auto add = [&](const PackedRun& run) {
      runs.push_back(run);
      const int64_t path = int64_t{run.position} + run.length;
      longest_path = std::max(longest_path, path);
      pairs += run.length * (run.position + path + 1) / 2;
    };
    int64_t context_row = 0;
    int node = 0;
    for (const Ints& members : groups) {  // contexts come first
      const int64_t length = prompt_lens[members[0]] - shift;
      const int count = static_cast<int>(members.size());
      add({as_int(context_row), as_int(length), as_int(begins[members[0]]), 0, count, node, -1, -1});
      context_row += length, node += 1 + count;
    }
    for (size_t g = 0; g < groups.size(); ++g) {
      const PackedRun context = runs[g];
      node_lens.push_back(context.length), node_parents.push_back(-1);
      for (const int64_t sample : groups[g]) {
        const int64_t response = response_lens.at(sample), position = prompt_lens.at(sample) - shift;
        const int64_t length = std::max<int64_t>(response + shift - (drop_last ? 1 : 0), 0);
        const int64_t first_row = shift ? rows : int64_t{context.row} + context.length - 1;
        const int own = static_cast<int>(node_lens.size());
        add({as_int(rows), as_int(length), as_int(begins[sample] + position), as_int(position), 1, own, context.node,
             as_int(sample), as_int(scored_begins[sample]), as_int(response), as_int(first_row)});
        node_lens.push_back(length), node_parents.push_back(context.node);
        order.push_back(sample), rows += length;
      }
    }
    check_argument(order.size() == samples, "groups", order.size(), "each of ", samples, " samples once");
    mean_keys = rows > 0 ? ceil_div(pairs, rows) : 0;
    const int64_t pad = (multiple - rows % multiple) % multiple;
    TORCH_CHECK_VALUE(rows + pad < kMostTokens, "pad_to_multiple_of: expected fewer than 2^30 rows, got ", rows + pad);
    if (pad > 0) runs.push_back({as_int(rows), as_int(pad), 0, 0, 0, -1, -1, -1});
    rows += pad;
  }

 private:
  static constexpr int64_t kMostTokens = int64_t{1} << 30;
  static int as_int(int64_t value) { return static_cast<int>(value); }
};

inline pybind11::tuple as_tuple(const Ints& values) {
  pybind11::tuple made(values.size());
  for (size_t i = 0; i < values.size(); ++i) made[i] = pybind11::int_(values[i]);
  return made;
}

// The tensors of a SharedPromptBatch, in the order of PackRowsArgs, and the numbers of its layout: node_lens,
// node_parents, order, the most rows of a path, mean_keys. The tensors share one buffer, but are no views of each
// other: to write to one does not spoil what autograd has saved of another.
inline pybind11::tuple pack(const Tensor& tokens_in, const std::vector<Ints>& groups, const Ints& prompt_lens,
                            const Ints& response_lens, int shift, bool drop_last, int64_t multiple) {
  check_argument(tokens_in.is_cuda() && tokens_in.dim() == 1, "tokens", tokens_in.device(), "a CUDA tensor");
  const c10::cuda::CUDAGuard guard(tokens_in.device());
  const c10::InferenceMode not_inference(false);  // its tensors could not be saved for a later backward
  const PackedPlan plan(groups, prompt_lens, response_lens, shift, drop_last, multiple);
  const Tensor tokens = tokens_in.to(at::kLong).contiguous();
  check_argument(tokens.numel() == plan.tokens, "tokens", tokens.numel(), "those of all samples, ", plan.tokens);

  const int64_t samples = prompt_lens.size(), num_nodes = plan.node_lens.size();
  const int64_t table = num_nodes * kNodeColumns * sizeof(int) / sizeof(int64_t);
  const Tensor all = uninitialised(tokens, {4 * plan.rows + 4 * plan.scored + samples + 1 + table}, at::kLong);
  int64_t taken = 0;
  const auto take = [&](at::IntArrayRef sizes, at::ScalarType type) {
    Tensor part = at::detail::make_tensor<at::TensorImpl>(c10::Storage(all.storage()), all.key_set(),
                                                          c10::scalarTypeToTypeMeta(type));
    part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    const int64_t size = c10::elementSize(type);
    part.unsafeGetTensorImpl()->set_storage_offset(taken / size);
    taken += part.numel() * size;
    return part;
  };
  Tensor found[9];
  for (int i = 0; i < 9; ++i) found[i] = take({i < 4 ? plan.rows : i < 8 ? plan.scored : samples + 1}, at::kLong);
  const Tensor nodes = take({num_nodes, kNodeColumns}, at::kInt);

  const auto pointer = [&](int i) { return found[i].data_ptr<int64_t>(); };
  PackRowsArgs args{tokens.const_data_ptr<int64_t>(), pointer(0), pointer(1), pointer(2), pointer(3), pointer(4),
                    pointer(5), pointer(6), pointer(7), pointer(8), int_pointer(nodes), shift, drop_last ? 0 : 1,
                    static_cast<int>(plan.longest_response)};
  for (size_t first = 0; first < plan.runs.size(); first += PackRowsArgs::kMostRuns) {
    args.num_runs = static_cast<int>(std::min<size_t>(plan.runs.size() - first, PackRowsArgs::kMostRuns));
    std::copy_n(plan.runs.begin() + first, args.num_runs, args.runs);
    pack_rows(args, c10::cuda::getCurrentCUDAStream());
    count_launch("dualkv_pack_rows");
  }
  return pybind11::make_tuple(found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7], found[8],
                              nodes, as_tuple(plan.node_lens), as_tuple(plan.node_parents), as_tuple(plan.order),
                              plan.longest_path, plan.mean_keys);
}

// `pack` of lists of tensors, from their grouping on; behind its results the lengths of prompts and of responses and
// the largest token. None unless all are 1-D tensors of one integer type on one GPU, no prompt is empty and no token
// negative: what is wrong others say.
inline pybind11::object pack_lists(const pybind11::list& prompts, const pybind11::list& responses, int shift,
                                   bool drop_last, int64_t most_responses, int64_t multiple) {
  if (prompts.size() != responses.size() || prompts.empty()) return pybind11::none();
  const std::vector<const Tensor*> given = plain_tokens(prompts, responses);
  if (given.empty()) return pybind11::none();
  for (size_t i = 0; i < given.size(); i += 2) {
    if (given[i]->numel() == 0) return pybind11::none();
  }
  const c10::cuda::CUDAGuard guard(given[0]->device());
  Samples samples = join_samples(given);
  if (samples.smallest < 0) return pybind11::none();
  std::vector<Ints> groups;
  for (const Ints& members : samples.groups) {
    for (auto first = members.begin(); first != members.end();) {
      const auto end = first + std::min<int64_t>(members.end() - first, most_responses);
      groups.emplace_back(first, end);
      first = end;
    }
  }
  const Ints &prompt_lens = samples.prompt_lens, &response_lens = samples.response_lens;
  return pack(samples.tokens, groups, prompt_lens, response_lens, shift, drop_last, multiple) +
         pybind11::make_tuple(as_tuple(prompt_lens), as_tuple(response_lens), samples.largest);
}

}  // namespace dualkv
