// Segment tables and work lists, built on the device from device values: no host synchronisation, and a captured
// graph follows new contents of cu_seqlens. The lists are small (thousands of items), so one block sorts each by
// counting, longest first; the other blocks of the launch clear what no item of the list will write.
#include <math_constants.h>

#include "core/schedule.h"
#include "dispatch.h"
#include "kernels/kernels.h"

namespace dualkv {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 1024;  // of the forward list
// Bins of the backward list: of every class one for every 32 tiles, a warp's. With more than 16 K tiles (2 M keys) warps
// share a bin, and the order of items within it is left to chance.
constexpr int kTileBins = 512;

__global__ void dualkv_segment_tables(const SegmentTableArgs a) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < a.num_groups) {
    int* row = a.group_table + static_cast<int64_t>(index) * kGroupColumns;
    const int begin = a.cu_seqlens_context ? a.cu_seqlens_context[index] : 0;
    const int end = a.cu_seqlens_context ? a.cu_seqlens_context[index + 1] : a.total_context;
    row[0] = begin;
    row[1] = static_cast<int>(static_cast<unsigned>(end) - static_cast<unsigned>(begin));
    row[2] = a.cu_seqs_per_context ? a.cu_seqs_per_context[index] : 0;
    row[3] = a.cu_seqs_per_context ? a.cu_seqs_per_context[index + 1] : a.num_segments;
  }
  if (index >= a.num_segments) return;
  int group = 0;
  if (a.cu_seqs_per_context) {
    // The last group that starts at or before this sequence.
    int low = 0, high = a.num_groups;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (a.cu_seqs_per_context[middle] <= index ? low : high) = middle;
    }
    group = low;
  }
  const int context_begin = a.cu_seqlens_context ? a.cu_seqlens_context[group] : 0;
  const int context_end = a.cu_seqlens_context ? a.cu_seqlens_context[group + 1] : a.total_context;
  // Unsigned: hostile offsets may wrap, but not be undefined. Every reader clamps them.
  const unsigned q_begin = a.cu_seqlens_q[index], q_len = a.cu_seqlens_q[index + 1] - q_begin;
  const unsigned decoded_begin = a.cu_seqlens_k_decoded[index];
  const unsigned decoded_len = a.cu_seqlens_k_decoded[index + 1] - decoded_begin;
  const unsigned context_len = static_cast<unsigned>(context_end) - static_cast<unsigned>(context_begin);
  int* row = a.segment_table + static_cast<int64_t>(index) * kSegmentColumns;
  row[0] = static_cast<int>(q_begin);
  row[1] = static_cast<int>(q_len);
  row[2] = static_cast<int>(context_len + decoded_len - q_len);
  row[3] = context_begin;
  row[4] = static_cast<int>(context_len);
  row[5] = static_cast<int>(decoded_begin);
  row[6] = static_cast<int>(decoded_len);
  row[7] = group;
}

// Inclusive sum over the threads of a block. `scratch` holds one value a warp. 64 bits: with hostile offsets every
// sequence may span all rows.
__device__ int64_t block_inclusive_sum(int64_t value, int64_t* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t left = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += left;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int64_t total = scratch[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total += left;
    }
    scratch[lane] = total;
  }
  __syncthreads();
  const int64_t result = value + (warp > 0 ? scratch[warp - 1] : 0);
  __syncthreads();
  return result;
}

// Shared state of a block that builds a list.
struct ListBlock {
  int64_t warp_sums[32];
  int bins[max_int(kBins, kCostClasses * kTileBins)];
  int carry, emitted, used_slots, alternating;
  int long_tiles, longest_tile, shortest_tile;     // of the tiles that would be split
  int longest, longest_decoded, shortest;          // of the parts; the last of the first class
  int widest, fewest_parts, most_parts;            // of the first class: tiles of an owner, parts of a tile
  unsigned long long total_steps, long_steps, shared_slots, class_steps[kCostClasses];
};

// offsets[i] = sum of count(0 .. i-1), capped at `capacity`: with hostile offsets segments may overlap and have more
// tiles than the tensors.
template <class Count>
__device__ void exclusive_offsets(ListBlock& block, int n, int capacity, int* offsets, Count count) {
  if (threadIdx.x == 0) block.carry = 0;
  __syncthreads();
  for (int first = 0; first < n; first += kThreads) {
    const int index = first + threadIdx.x;
    const int64_t sum = block.carry + block_inclusive_sum(index < n ? count(index) : 0, block.warp_sums);
    const int offset = static_cast<int>(min(sum, static_cast<int64_t>(capacity)));
    __syncthreads();
    if (index < n) offsets[index + 1] = offset;
    if (threadIdx.x == kThreads - 1) block.carry = offset;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[0] = 0;
  __syncthreads();
}

// The entry whose run of `offsets` contains `index`.
__device__ int find_owner(const int* offsets, int n, int index) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= index ? low : high) = middle;
  }
  return low;
}

// Longest first: bin 0 holds the longest.
__device__ int bin_of(int cost, int longest) {
  return kBins - 1 - static_cast<int>(static_cast<int64_t>(cost) * (kBins - 1) / max(longest, 1));
}

// Turns counts per bin into first places.
template <int kCount>
__device__ void bins_to_places(ListBlock& block) {
  static_assert(kCount % kThreads == 0, "every thread takes as many bins");
  constexpr int kOwn = kCount / kThreads;
  int* own = block.bins + threadIdx.x * kOwn;
  int sum = 0;
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  int place = static_cast<int>(block_inclusive_sum(sum, block.warp_sums)) - sum;
  for (int i = 0; i < kOwn; ++i) {
    const int count = own[i];
    own[i] = place;
    place += count;
  }
  __syncthreads();
}

// What a block that clears looks after. Every row asks every sequence whether it owns it.
constexpr int kClearedRows = 256;
int clearing_blocks(int rows) { return ceil_div(rows, kClearedRows); }

// Calls clear(row) for those of rows [first, first + kClearedRows) that are in owned_by(segment) of no segment. A warp
// takes a row.
template <class OwnedBy, class Clear>
__device__ void clear_unowned(const GroupLayout& layout, int first, int rows, OwnedBy owned_by, Clear clear) {
  __shared__ bool owned[kClearedRows];
  for (int i = threadIdx.x; i < kClearedRows; i += kThreads) owned[i] = false;
  __syncthreads();
  for (int i = threadIdx.x; i < layout.num_segments; i += kThreads) {
    const RowRun run = owned_by(layout.segment(i));
    for (int row = max(run.begin, first); row < min(run.end, first + kClearedRows); ++row) owned[row - first] = true;
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < min(kClearedRows, rows - first); i += kThreads / 32) {
    if (!owned[i]) clear(first + i);
  }
}

// By `threads` threads, of which this is number `thread`.
__device__ void clear_row(const ClearedRows& rows, int row, int64_t thread, int64_t threads) {
  uint4* data = reinterpret_cast<uint4*>(static_cast<char*>(rows.data) + row * rows.row_bytes);
  for (int64_t i = thread; i < rows.row_bytes / 16; i += threads) data[i] = make_uint4(0, 0, 0, 0);
}

__device__ void clear_queries(const ForwardListArgs& a, int first) {
  const auto owned_by = [&](const Segment& s) { return seeing_queries(s, a.causal); };
  const int rows = a.layout.extents.q_rows;
  clear_unowned(a.layout, first, rows, owned_by, [&](int row) {
    clear_row(a.rows, row, threadIdx.x % 32, 32);
    if (!a.lse) return;
    for (int head = threadIdx.x % 32; head < a.num_heads; head += 32) {
      a.lse[static_cast<int64_t>(head) * rows + row] = -CUDART_INF_F;
    }
  });
}

__device__ void clear_keys(const BackwardListArgs& a, Region region, int first) {
  const bool context = region == Region::context;
  const auto owned_by = [&](const Segment& s) { return seen_keys(s, region, a.causal); };
  const int rows = context ? a.layout.extents.context_rows : a.layout.extents.decoded_rows;
  clear_unowned(a.layout, first, rows, owned_by, [&](int row) {
    for (const ClearedRows& cleared : context ? a.context : a.decoded) clear_row(cleared, row, threadIdx.x % 32, 32);
  });
}

__global__ void __launch_bounds__(kThreads) dualkv_work_list_forward(const ForwardListArgs a) {
  if (blockIdx.x > 0) return clear_queries(a, (blockIdx.x - 1) * kClearedRows);
  __shared__ ListBlock block;
  const int segments = a.layout.num_segments;
  exclusive_offsets(block, segments, a.capacity, a.tile_offsets,
                    [&](int i) { return ceil_div(a.layout.segment(i).q_len, a.block_m); });
  const int tiles = a.tile_offsets[segments];
  const auto item_at = [&](int index) {
    const int segment = find_owner(a.tile_offsets, segments, index);
    return ForwardItem{segment, index - a.tile_offsets[segment]};
  };
  const auto cost_of = [&](const ForwardItem& item) {
    return forward_cost(a.layout.segment(item.segment), item.m_block, a.block_m, a.block_n, a.causal);
  };

  block.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) block.longest = 0, block.emitted = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kThreads) atomicMax(&block.longest, cost_of(item_at(i)));
  __syncthreads();
  for (int i = threadIdx.x; i < tiles; i += kThreads) {
    const int cost = cost_of(item_at(i));
    if (cost > 0) {
      atomicAdd(&block.bins[bin_of(cost, block.longest)], 1);
      atomicAdd(&block.emitted, 1);
    }
  }
  __syncthreads();
  bins_to_places<kBins>(block);
  for (int i = threadIdx.x; i < tiles; i += kThreads) {
    const ForwardItem item = item_at(i);
    const int cost = cost_of(item);
    if (cost > 0) a.items[atomicAdd(&block.bins[bin_of(cost, block.longest)], 1)] = item;
  }
  if (threadIdx.x == 0) *a.count = block.emitted, *a.next = 0;
}

// The runs of segments, before anything walks along them.
__device__ void find_runs(const BackwardListArgs& a, ListBlock& block) {
  const int segments = a.layout.num_segments;
  const auto begins_run = [&](int i) {
    return i == 0 || !continues_run(a.layout.segment(i - 1), a.layout.segment(i));
  };
  exclusive_offsets(block, segments, segments, a.run_counts, begins_run);
  for (int i = threadIdx.x; i < segments; i += kThreads) {
    if (a.run_counts[i + 1] > a.run_counts[i]) a.run_begins[a.run_counts[i]] = i;
  }
  if (threadIdx.x == 0) a.run_begins[a.run_counts[segments]] = segments;
  __syncthreads();
}

struct OwnedTile {
  Region region;
  int owner, n_block, owner_tiles;
};

// The tiles of all owners, and the stages in which a block makes the backward list of them.
struct BackwardTiles {
  const BackwardListArgs& a;
  ListBlock& block;
  int groups, owners, tiles;
  int limit;   // steps of a part
  bool alike;  // whether the tiles of a context are split as the first of them is

  __device__ OwnedTile at(int index) const {
    const int owner = find_owner(a.tile_offsets, owners, index), n_block = index - a.tile_offsets[owner];
    const int owner_tiles = a.tile_offsets[owner + 1] - a.tile_offsets[owner];
    return owner < groups ? OwnedTile{Region::context, owner, n_block, owner_tiles}
                          : OwnedTile{Region::decoded, owner - groups, n_block, owner_tiles};
  }

  __device__ int leading_steps(const OwnedTile& t, int index) const {
    return a.tile_steps[t.region == Region::context ? index - t.n_block : index];
  }

  __device__ Share share_at(const OwnedTile& t, int index) const {
    const int steps = a.tile_steps[index];
    return share_of(steps, alike ? leading_steps(t, index) : steps, limit);
  }

  __device__ int bin_of(const OwnedTile& t, int cost, int index) const {
    const int tiles_a_bin = 32 * max(1, ceil_div(tiles, 32 * kTileBins));
    const int longest_here = t.region == Region::decoded ? block.longest_decoded : block.longest;
    return cost_class_within(cost, longest_here, block.longest) * kTileBins + index / tiles_a_bin;
  }

  __device__ void clear_sums() const {
    for (int i = threadIdx.x; i < kCostClasses * kTileBins; i += kThreads) block.bins[i] = 0;
    if (threadIdx.x < kCostClasses) block.class_steps[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      block.long_tiles = 0, block.longest_tile = 0, block.shortest_tile = kMaxSteps, block.long_steps = 0;
      block.longest = 0, block.longest_decoded = 0, block.shortest = kMaxSteps, block.alternating = 0;
      block.widest = 0, block.fewest_parts = kMaxSteps, block.most_parts = 1;
      block.used_slots = 0, block.shared_slots = 0, block.total_steps = 0;
    }
    __syncthreads();
  }

  __device__ void count_steps() const {
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const OwnedTile t = at(i);
      const Owner owner = owner_of(a.layout, t.region, t.owner, t.n_block, a.block_n);
      const int steps = owner_steps(a.layout, owner, a.block_m, a.heads_per_group, a.causal);
      a.tile_steps[i] = steps;
      atomicAdd(&block.total_steps, static_cast<unsigned long long>(steps) * a.num_kv_heads);
    }
    __syncthreads();
  }

  __device__ void choose_parts() {
    const int first_limit = part_limit(static_cast<int64_t>(block.total_steps), a.num_sms);
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const int steps = a.tile_steps[i], most = max(steps, leading_steps(at(i), i));
      if (most > first_limit) {
        atomicAdd(&block.long_tiles, 1);
        atomicAdd(&block.long_steps, static_cast<unsigned long long>(steps));
        atomicMax(&block.longest_tile, most);
        atomicMin(&block.shortest_tile, steps);
      }
    }
    __syncthreads();
    const int64_t heads = a.num_kv_heads, long_steps = static_cast<int64_t>(block.long_steps);
    const LongTiles long_tiles{block.long_tiles * heads, long_steps * heads, block.longest_tile, block.shortest_tile};
    limit = final_part_limit(first_limit, long_tiles, a.num_sms);
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const int parts = share_of(a.tile_steps[i], leading_steps(at(i), i), limit).parts;
      if (parts > 1) atomicAdd(&block.shared_slots, static_cast<unsigned long long>(parts) * a.num_kv_heads);
    }
    __syncthreads();
    // Where few queries see most tiles of a context this may take more slots than there are: then every tile is its own.
    alike = block.shared_slots <= static_cast<unsigned long long>(a.slot_capacity);
  }

  // Where each bin of each class begins.
  __device__ void sort() const {
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const OwnedTile t = at(i);
      const int cost = share_at(t, i).cost;
      atomicMax(&block.longest, cost);
      if (t.region == Region::decoded) atomicMax(&block.longest_decoded, cost);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const int steps = a.tile_steps[i];
      if (steps == 0) continue;
      const OwnedTile t = at(i);
      const Share share = share_at(t, i);
      const int bin = bin_of(t, share.cost, i), index = bin / kTileBins;
      atomicAdd(&block.bins[bin], share.parts);
      atomicAdd(&block.class_steps[index], static_cast<unsigned long long>(steps));
      if (index == 0) {
        atomicMin(&block.shortest, steps / share.parts);
        atomicMax(&block.widest, t.owner_tiles);
        atomicMin(&block.fewest_parts, share.parts);
        atomicMax(&block.most_parts, share.parts);
      } else if (begins_in_waves(t.owner_tiles * share.parts, a.num_sms)) {
        atomicOr(&block.alternating, 1 << index);
      }
    }
    __syncthreads();
    bins_to_places<kCostClasses * kTileBins>(block);
    if (threadIdx.x < kCostClasses) a.order->begin[threadIdx.x] = block.bins[threadIdx.x * kTileBins];
    if (threadIdx.x == 0) *a.split_count = 0;
    __syncthreads();
  }

  // A warp takes 32 tiles in a row, so that those of a class keep their order.
  __device__ void write_items() const {
    for (int first = 0; first < tiles; first += kThreads) {
      const int i = first + threadIdx.x, lane = threadIdx.x % 32;
      const int steps = i < tiles ? a.tile_steps[i] : 0;
      const OwnedTile t = at(min(i, tiles - 1));
      const Share share = steps > 0 ? share_at(t, i) : Share{0, 0};
      const int bin = steps > 0 ? bin_of(t, share.cost, i) : -1;
      const unsigned peers = __match_any_sync(0xffffffffu, bin);
      int before = 0, together = 0;
      for (unsigned rest = peers; rest; rest &= rest - 1) {
        const int peer = __ffs(rest) - 1, parts = __shfl_sync(peers, share.parts, peer);
        if (peer < lane) before += parts;
        together += parts;
      }
      int place = 0;
      if (steps > 0 && before == 0) place = atomicAdd(&block.bins[bin], together);
      place = __shfl_sync(peers, place, __ffs(peers) - 1) + before;
      if (steps == 0) continue;
      int slot = -1;
      if (share.parts > 1) {
        slot = atomicAdd(&block.used_slots, share.parts * a.num_kv_heads);
        a.splits[atomicAdd(a.split_count, 1)] = SplitTile{t.region, t.owner, t.n_block, slot, share.parts};
      }
      for (int part = 0; part < share.parts; ++part) {
        const int begin = part_begin(steps, share.parts, part), end = part_begin(steps, share.parts, part + 1);
        a.items[place + part] = BackwardItem{
            t.region, t.owner, t.n_block, begin, end - begin, slot < 0 ? -1 : slot + part * a.num_kv_heads};
      }
    }
    __syncthreads();
  }

  __device__ void finish_order() const {
    if (threadIdx.x > 0) return;
    BackwardOrder& order = *a.order;
    // Behind the last bin stands the end of the list.
    const int items = block.bins[kCostClasses * kTileBins - 1];
    order.begin[kCostClasses] = items;
    const int parts = block.most_parts;
    const bool by_parts = block.fewest_parts == parts &&
                          rounds_fit(order.begin[1] / parts, a.num_kv_heads * parts, block.longest,
                                     static_cast<int64_t>(block.total_steps), a.num_sms);
    order.parts = by_parts ? parts : 1;
    const int tiles_of_first = order.begin[1] / order.parts, walks = a.num_kv_heads * order.parts;
    order.alternating = block.alternating | first_class_alternates(tiles_of_first, block.widest, parts > 1, walks,
                                                                   a.num_sms);
    int second = 1;  // the class that the fillers come from
    while (second < kCostClasses - 1 && block.class_steps[second] == 0) ++second;
    const int second_end = second + 1 < kCostClasses ? order.begin[second + 1] : items;
    const int mean = static_cast<int>(block.class_steps[second] / max(1, second_end - order.begin[second]));
    const int64_t supply = static_cast<int64_t>(items - order.begin[1]) * a.num_kv_heads;
    order.fillers = fillers_of(tiles_of_first, block.shortest, mean, supply, walks, a.num_sms);
  }
};

__global__ void __launch_bounds__(kThreads) dualkv_work_list_backward(const BackwardListArgs a, int context_blocks,
                                                                      int decoded_blocks) {
  if (blockIdx.x > 0) {
    const int index = blockIdx.x - 1;
    if (index < context_blocks) {
      clear_keys(a, Region::context, index * kClearedRows);
    } else if (index < context_blocks + decoded_blocks) {
      clear_keys(a, Region::decoded, (index - context_blocks) * kClearedRows);
    }
    return clear_row(a.dq_sum, 0, int64_t{index} * kThreads + threadIdx.x, int64_t{gridDim.x - 1} * kThreads);
  }
  __shared__ ListBlock block;
  const int groups = a.layout.num_groups, owners = groups + a.layout.num_segments;
  find_runs(a, block);
  exclusive_offsets(block, owners, a.tile_capacity, a.tile_offsets,
                    [&](int i) { return owned_tiles(a.layout, i, a.block_n); });
  BackwardTiles list{a, block, groups, owners, a.tile_offsets[owners]};
  list.clear_sums();
  list.count_steps();
  list.choose_parts();
  list.sort();
  list.write_items();
  list.finish_order();
}

}  // namespace

void build_segment_tables(const SegmentTableArgs& args, cudaStream_t stream) {
  const int rows = max_int(args.num_segments, args.num_groups);
  if (rows == 0) return;
  dualkv_segment_tables<<<ceil_div(rows, 128), 128, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

void build_forward_list(const ForwardListArgs& args, cudaStream_t stream) {
  dualkv_work_list_forward<<<1 + clearing_blocks(args.layout.extents.q_rows), kThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError());
}

void build_backward_list(const BackwardListArgs& args, cudaStream_t stream) {
  const int context_blocks = clearing_blocks(args.layout.extents.context_rows);
  const int decoded_blocks = clearing_blocks(args.layout.extents.decoded_rows);
  // Enough for dq_sum to be written at the speed of the memory.
  const int blocks = max_int(context_blocks + decoded_blocks, args.dq_sum.row_bytes > 0 ? 4 * args.num_sms : 0);
  dualkv_work_list_backward<<<1 + blocks, kThreads, 0, stream>>>(args, context_blocks, decoded_blocks);
  check_cuda(cudaGetLastError());
}

}  // namespace dualkv
