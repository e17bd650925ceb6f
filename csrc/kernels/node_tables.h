// SPDX-License-Identifier: BSD-3-Clause
// Node table from the offsets that callers pass, built on the device: no host synchronisation, and
// a captured graph follows new contents of cu_seqlens and parents. Sums and differences are
// unsigned: hostile offsets may wrap, but must not be undefined. Every reader clamps them.
#pragma once

#include "kernels/kernels.h"

namespace dualkv {

__device__ inline void write_node(int* nodes, int index, const Node& n) {
  int* row = nodes + static_cast<int64_t>(index) * kNodeColumns;
  row[0] = n.q_begin, row[1] = n.q_len, row[2] = n.q_pos0, row[3] = n.kv_begin;
  row[4] = n.kv_len, row[5] = n.kv_pos0, row[6] = n.parent, row[7] = n.subtree_end;
}

__device__ inline int difference(int end, int begin) {
  return static_cast<int>(static_cast<unsigned>(end) - static_cast<unsigned>(begin));
}
__device__ inline int sum(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }

// Node table of sequences with contexts. A context is a node without queries, before the sequences
// that share it. One thread per sequence or group `index`.
__device__ inline void write_sequence_nodes(const SequenceNodesArgs& a, int index) {
  const auto first_sequence = [&](int group) { return a.cu_seqs_per_context ? a.cu_seqs_per_context[group] : 0; };
  const auto end_sequence = [&](int group) {
    return a.cu_seqs_per_context ? a.cu_seqs_per_context[group + 1] : a.num_sequences;
  };
  const auto context_begin = [&](int group) { return a.cu_seqlens_context ? a.cu_seqlens_context[group] : 0; };
  const auto context_len = [&](int group) {
    if (!a.cu_seqlens_context) return a.context_rows;
    return difference(a.cu_seqlens_context[group + 1], a.cu_seqlens_context[group]);
  };
  if (index < a.num_groups) {
    const int first = clamp_int(first_sequence(index), 0, a.num_sequences);
    const int end = clamp_int(end_sequence(index), first, a.num_sequences);
    write_node(a.nodes, first + index,
               {a.cu_seqlens_q[first], 0, 0, context_begin(index), context_len(index), 0, -1, end + index + 1});
  }
  if (index >= a.num_sequences) return;
  int group = 0;  // last group that starts at or before this sequence
  for (int end = a.num_groups; end - group > 1;) {
    const int middle = (group + end) / 2;
    (first_sequence(middle) <= index ? group : end) = middle;
  }
  const bool has_context = a.num_groups > 0;
  const int q_begin = a.cu_seqlens_q[index], q_len = difference(a.cu_seqlens_q[index + 1], q_begin);
  const int kv_begin = a.cu_seqlens_k[index], kv_len = difference(a.cu_seqlens_k[index + 1], kv_begin);
  const int kv_pos0 = has_context ? context_len(group) : 0, node = has_context ? index + group + 1 : index;
  const int parent = has_context ? clamp_int(first_sequence(group), 0, index) + group : -1;
  write_node(a.nodes, node,
             {q_begin, q_len, difference(sum(kv_pos0, kv_len), q_len), sum(kv_begin, a.context_rows), kv_len, kv_pos0,
              parent, node + 1});
}

constexpr int kTreeThreads = 1024;

// Node table of a tree, by pointer jumping: every iteration doubles how far a node looks, up its
// path and down its line of last children. Threads may read values that others have just advanced:
// any value is true, so that an iteration only gets further.
//
// Runs as one block. `above` packs (ancestor, keys between it and the node) in one word: kv_pos0 =
// keys + kv_pos0 of the ancestor.
__device__ inline void write_tree_nodes(const TreeNodesArgs& a) {
  const auto row = [&](int index) { return a.nodes + static_cast<int64_t>(index) * kNodeColumns; };
  const auto length = [&](int index) { return difference(a.cu_seqlens[index + 1], a.cu_seqlens[index]); };
  const auto parent_of = [&](int index) {
    const int parent = a.parents[index];
    return parent < index ? max_int(parent, -1) : -1;
  };
  const auto last = [&](int index) { return reinterpret_cast<volatile int*>(row(index) + 7); };
  const auto above = [&](int index) { return reinterpret_cast<volatile uint64_t*>(row(index) + 2); };
  const auto pack = [](int ancestor, int keys) {
    return uint64_t{static_cast<unsigned>(ancestor)} << 32 | static_cast<unsigned>(keys);
  };
  const auto ancestor_in = [](uint64_t word) { return static_cast<int>(word >> 32); };
  const auto keys_in = [](uint64_t word) { return static_cast<int>(word); };
  for (int i = threadIdx.x; i < a.num_nodes; i += kTreeThreads) *last(i) = i;
  __syncthreads();
  for (int i = threadIdx.x; i < a.num_nodes; i += kTreeThreads) {
    const int parent = parent_of(i);
    *above(i) = pack(parent, parent < 0 ? 0 : length(parent));
    if (parent >= 0) atomicMax(const_cast<int*>(last(parent)), i);
  }
  for (bool moved = true; __syncthreads_or(moved);) {
    moved = false;
    for (int i = threadIdx.x; i < a.num_nodes; i += kTreeThreads) {
      const uint64_t mine = *above(i);
      if (ancestor_in(mine) >= 0) {
        const uint64_t next = *above(ancestor_in(mine));
        *above(i) = pack(ancestor_in(next), sum(keys_in(mine), keys_in(next)));
        moved = true;
      }
      const int child = *last(i), end = *last(child);
      if (end > child) *last(i) = end, moved = true;
    }
  }
  for (int i = threadIdx.x; i < a.num_nodes; i += kTreeThreads) {
    const int begin = a.cu_seqlens[i], size = length(i), position = keys_in(*above(i)), end = *last(i) + 1;
    write_node(a.nodes, i, {begin, size, position, begin, size, position, parent_of(i), end});
  }
}

}  // namespace dualkv
