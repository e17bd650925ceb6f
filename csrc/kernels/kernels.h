// SPDX-License-Identifier: BSD-3-Clause
// Launches of the kernels that belong to no architecture.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace dualkv {

// Device pointers. The contexts of groups come first among the rows of keys, then the keys of the
// sequences.
struct SequenceNodesArgs {
  const int* cu_seqlens_q;        // (num_sequences + 1)
  const int* cu_seqlens_k;        // (num_sequences + 1)
  const int* cu_seqlens_context;  // (num_groups + 1); null: one group with all rows of the context, if there is one
  const int* cu_seqs_per_context; // (num_groups + 1)
  int num_sequences, num_groups;  // no group: sequences without a context
  int context_rows;
  int* nodes;  // (num_groups + num_sequences, kNodeColumns)
};
void build_sequence_nodes(const SequenceNodesArgs& args, cudaStream_t stream);

struct TreeNodesArgs {
  const int* cu_seqlens;  // (num_nodes + 1)
  const int* parents;     // (num_nodes)
  int num_nodes;
  int* nodes;  // (num_nodes, kNodeColumns)
};
void build_tree_nodes(const TreeNodesArgs& args, cudaStream_t stream);

// Contiguous rows of a tensor. The launch that builds a work list also clears the rows that are in
// no item of it: a memset of all of them costs the forward 1.5% of its time. Offsets that
// contradict each other may leave rows as they were allocated: wrong numbers, as everywhere.
struct ClearedRows {
  void* data;
  int64_t row_bytes;  // a multiple of 16
};

// Capacities and scratch of a work list, known from shapes alone.
struct ForwardListArgs {
  NodeTable nodes;
  int block_m, block_n;
  Visibility sees;
  int slice_queries;  // of the slices by which siblings share query tiles; 0: they share none
  int least_tiles;    // of the list; siblings share none where there are fewer
  int capacity;       // items
  int* tile_offsets;  // (num_nodes + 1) scratch
  int* last_tiles;    // (num_nodes) scratch: what stands for the last tile of a node that siblings share
  ForwardItem* items;
  int* count;
  int* next;  // set to zero
  ClearedRows rows;  // of the queries: O or dQ
  float* lse;        // (num_heads, q_rows), set to -inf in the cleared rows; or null
  int num_heads;
};
void prepare_forward(const ForwardListArgs& args, cudaStream_t stream);

struct BackwardListArgs {
  NodeTable nodes;  // `runs` points into run_counts and run_begins
  int* run_counts;     // (num_nodes + 1), found here
  int* run_begins;     // (num_nodes + 1)
  int block_m, block_n;
  Visibility sees;
  int num_kv_heads, packs_per_group;
  int num_sms;
  int tile_capacity, slot_capacity;  // cap the tiles, and the slots of split ones
  int query_capacity;                // rows of the queries
  bool orders_dq;                    // whether blocks wait for those before them on the path (core/block_order.h)
  int *tile_offsets, *query_offsets, *node_sums;  // (num_nodes + 1) scratch
  int* tile_begins;                               // as large: the number of each node's first tile
  int *tile_nodes, *tile_steps, *part_offsets;    // (tile_capacity + 1) scratch
  int* first_borders;                             // as large: where a tile's second part begins
  int* part_places;                               // scratch for the parts behind the first of their tile
  int *border_parts, *tiles_before, *parts_before;  // scratch for the borders of slices: tiles of queries and parts
  BackwardItem* in_raster_order;                  // scratch for the items
  int* item_bins;                                 // as many
  BackwardItem* items;
  int* in_local_order;
  BackwardOrder* order;
  SplitTile* splits;
  int* split_count;
  ClearedRows keys[2], decoded[2];  // dK and dV
  ClearedRows dq_sum;                  // all of it, and what its adders wait for: one "row"
};

// The list, the cleared rows and the row statistics.
template <typename T>
void prepare_backward(const BackwardListArgs& args, const RowStatisticsParams<T>& rows, cudaStream_t stream);

}  // namespace dualkv
