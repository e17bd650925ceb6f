// Packing of prompts with their responses, compiled: 64K tokens in 64 samples on a GPU take the host a quarter of a
// millisecond, with Python and PyTorch's operators eight times as long. What it must give, bit by bit, is what
// flash_attn_dualkv/data (samples.py, batch.py) gives without it.
#pragma once

#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstring>
#include <map>
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

// 1-D integer tensors of one type and GPU, prompts and responses in turns; an empty list if any is something else, or a
// prompt is empty.
inline std::vector<Tensor> plain_tokens(const pybind11::list& prompts, const pybind11::list& responses) {
  if (prompts.size() != responses.size()) return {};
  std::vector<Tensor> found;
  found.reserve(2 * prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (const pybind11::list* list : {&prompts, &responses}) {
      PyObject* const one = PyList_GET_ITEM(list->ptr(), i);
      if (!THPVariable_CheckExact(one)) return {};
      const Tensor& t = THPVariable_Unpack(one);
      const Tensor& beside = found.empty() ? t : found[0];
      const bool is_integer = at::isIntegralType(t.scalar_type(), false) && t.scalar_type() <= at::kLong;
      if (!is_integer || t.scalar_type() != beside.scalar_type() || !t.is_cuda() || t.device() != beside.device() ||
          t.layout() != at::kStrided || t.dim() != 1 || !t.is_contiguous() || (list == &prompts && t.numel() == 0)) {
        return {};
      }
      found.push_back(t);
    }
  }
  return found;
}

// Which runs of tokens are equal: lists of their indices, in the order of the first of each.
//
// Most often a run is that before it. Others with the same tokens at some places are compared with the first of them; only
// those that differ are hashed whole, for that takes several times as long as to compare.
inline std::vector<Ints> group_runs(const int64_t* tokens, const Ints& begins, const Ints& lengths) {
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
    if (groups.empty() || !is_in(group)) {
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

// The tokens of samples, a prompt and its response behind each other, and what the GPU says of them. The tokens stay on the
// GPU: to fetch a megabyte of them and to hash the prompts would take the host 0.1 ms.
class JoinedSamples {
 public:
  // Prompts and responses in turns, as `plain_tokens` are.
  explicit JoinedSamples(const std::vector<Tensor>& given) : type_(given[0].scalar_type()) {
    int64_t count = 0, blocks = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      if (i % TokenParts::kMost == 0) launches_.emplace_back(), launches_.back().begins[0] = count;
      TokenParts& parts = launches_.back();
      const int64_t length = given[i].numel();
      if (i % 2 == 0) prompt_begins_.push_back(count);
      (i % 2 == 0 ? prompt_lens : response_lens).push_back(length);
      const bool may_be_as_before = i % 2 == 0 && i >= 2 && given[i - 2].numel() == length;
      parts.like[parts.count] = may_be_as_before ? given[i - 2].const_data_ptr() : nullptr;
      parts.tokens[parts.count++] = given[i].const_data_ptr();
      parts.begins[parts.count] = count += length;
    }
    for (const TokenParts& parts : launches_) blocks += join_blocks(parts);
    static_assert(sizeof(TokenNews) % sizeof(int64_t) == 0);
    const int64_t words = blocks * (sizeof(TokenNews) / sizeof(int64_t));
    all_ = uninitialised(given[0], {count + words}, at::kLong);
    const bool pinned = all_.device().type() == at::kCUDA;
    host_ = at::empty({words}, at::TensorOptions().dtype(at::kLong).pinned_memory(pinned));
    tokens = all_.narrow(0, 0, count);

    const std::vector<TokenNews> news = join();
    for (const TokenNews& one : news) of_all_.add(one);
    groups = group_prompts(news);
  }

  Tensor tokens;  // int64
  Ints prompt_lens, response_lens;
  std::vector<Ints> groups;  // the samples of each prompt
  int64_t smallest() const { return of_all_.smallest; }
  int64_t largest() const { return of_all_.largest; }

 private:
  // Of each part; by one copy to the host, which waits for it.
  std::vector<TokenNews> join() {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    int64_t* const joined = all_.data_ptr<int64_t>();
    TokenNews* of_blocks = reinterpret_cast<TokenNews*>(joined + tokens.numel());
    with_token_type(type_, [&](auto type) {
      for (const TokenParts& parts : launches_) {
        join_tokens<decltype(type)>(parts, joined, of_blocks, stream);
        count_launch("dualkv_join_tokens");
        of_blocks += join_blocks(parts);
      }
    });
    {
      const pybind11::gil_scoped_release others_may_run;  // the GPU may be busy with what came before
      c10::cuda::memcpy_and_sync(host_.data_ptr(), joined + tokens.numel(), host_.nbytes(), cudaMemcpyDeviceToHost,
                                 stream);
    }
    std::vector<TokenNews> news;
    const TokenNews* fetched = static_cast<const TokenNews*>(host_.const_data_ptr());
    for (const TokenParts& parts : launches_) {
      const size_t first = news.size();
      news.resize(first + parts.count, kNoNews);
      for (int block = 0, end = join_blocks(parts); block < end; ++block) news[first + block % parts.count].add(*fetched++);
    }
    return news;
  }

  // Most often a prompt is that before it, as the first launch has found. Others with the hash of an earlier one are
  // compared with that in a second launch.
  std::vector<Ints> group_prompts(const std::vector<TokenNews>& news) {
    std::vector<Ints> found;
    std::map<std::pair<uint64_t, int64_t>, size_t> of_hashes;  // and lengths
    Ints compared;
    size_t group = 0;
    for (size_t index = 0; index < prompt_lens.size(); ++index) {
      const TokenNews& prompt = news[2 * index];
      const void* like = nullptr;
      if (prompt.differs) {
        group = of_hashes.try_emplace({prompt.hash, prompt_lens[index]}, found.size()).first->second;
        if (group == found.size()) {
          found.emplace_back();
        } else {
          like = tokens_of(found[group][0]);
          compared.push_back(index);
        }
      }
      launch_of(index).like[place_of(index)] = like;
      found[group].push_back(index);
    }
    if (compared.empty()) return found;
    const std::vector<TokenNews> again = join();
    const auto is_as_said = [&](int64_t index) { return again[2 * index].differs == 0; };
    if (std::all_of(compared.begin(), compared.end(), is_as_said)) return found;
    const Tensor fetched = tokens.cpu();  // different prompts with one hash
    return group_runs(fetched.const_data_ptr<int64_t>(), prompt_begins_, prompt_lens);
  }

  // Where the prompt of a sample is.
  TokenParts& launch_of(int64_t sample) { return launches_[2 * sample / TokenParts::kMost]; }
  static int64_t place_of(int64_t sample) { return 2 * sample % TokenParts::kMost; }
  const void* tokens_of(int64_t sample) { return launch_of(sample).tokens[place_of(sample)]; }

  at::ScalarType type_;
  std::vector<TokenParts> launches_;
  Ints prompt_begins_;
  Tensor all_, host_;  // tokens and news; news
  TokenNews of_all_ = kNoNews;
};

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
  for (size_t i = 0; i < values.size(); ++i) PyTuple_SET_ITEM(made.ptr(), i, pybind11::int_(values[i]).release().ptr());
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

// A Python int of those bounds; `otherwise` for None.
inline std::optional<int64_t> plain_int(const pybind11::handle& value, int64_t least, int64_t most, int64_t otherwise) {
  if (value.is_none()) return otherwise;
  int overflows = 0;
  const int64_t number = PyLong_CheckExact(value.ptr()) ? PyLong_AsLongLongAndOverflow(value.ptr(), &overflows) : least - 1;
  return overflows || number < least || number > most ? std::nullopt : std::optional(number);
}

// `pack` of lists of tensors, from their grouping on; behind its results the lengths of prompts and of responses and
// the largest token. The options are those of pack_shared_prompts. None unless all are 1-D tensors of one integer type on
// one GPU, no prompt is empty, no token negative and every option as described: what is wrong others say.
inline pybind11::object pack_lists(const pybind11::list& prompts, const pybind11::list& responses, int shift,
                                   const pybind11::object& drop_last, const pybind11::object& most_responses,
                                   const pybind11::object& multiple) {
  const auto most = plain_int(most_responses, 1, INT64_MAX, INT64_MAX), pad_to = plain_int(multiple, 1, kMaxPosition, 1);
  if (!most || !pad_to || !PyBool_Check(drop_last.ptr())) return pybind11::none();
  const std::vector<Tensor> given = plain_tokens(prompts, responses);
  if (given.empty()) return pybind11::none();
  const c10::cuda::CUDAGuard guard(given[0].device());
  const JoinedSamples samples(given);
  if (samples.smallest() < 0) return pybind11::none();
  std::vector<Ints> groups;
  for (const Ints& members : samples.groups) {
    for (auto first = members.begin(); first != members.end();) {
      const auto end = first + std::min<int64_t>(members.end() - first, *most);
      groups.emplace_back(first, end);
      first = end;
    }
  }
  const Ints &prompt_lens = samples.prompt_lens, &response_lens = samples.response_lens;
  const bool drops_last = drop_last.ptr() == Py_True;
  return pack(samples.tokens, groups, prompt_lens, response_lens, shift, drops_last, *pad_to) +
         pybind11::make_tuple(as_tuple(prompt_lens), as_tuple(response_lens), samples.largest());
}

}  // namespace dualkv
