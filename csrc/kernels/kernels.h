// Launches of the kernels that belong to no architecture.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace dualkv {

// Device pointers. The contexts of groups come first among the rows of keys, then the keys of the sequences.
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

// Contiguous rows of a tensor. The launch that builds a work list also clears the rows that are in no item of it: a
// memset of all of them costs the forward 1.5% of its time. Offsets that contradict each other may leave rows as they
// were allocated: wrong numbers, as everywhere.
struct ClearedRows {
  void* data;
  int64_t row_bytes;  // a multiple of 16
};

// Capacities and scratch of a work list, known from shapes alone.
struct ForwardListArgs {
  NodeTable nodes;
  int block_m, block_n;
  Visibility sees;
  int capacity;       // items
  int* tile_offsets;  // (num_nodes + 1) scratch
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

// Prompts and responses of samples in turns, integers of one type, to be joined.
struct TokenParts {
  static constexpr int kMost = 128;  // of a launch: they come as its parameters, of which there may be 4 KB
  const void* tokens[kMost];
  const void* like[kMost];    // as many tokens that a part is compared with, or nullptr
  int64_t begins[kMost + 1];  // where each begins among all tokens, and where the last one ends
  int count;
};

// What is known of a part, or of a block's tokens of it.
struct TokenNews {
  int64_t smallest, largest;
  uint64_t hash;     // the sum of `hash_token` of its tokens
  uint64_t differs;  // 0: they are those of `like`; else they are not, or there is none

  DUALKV_HD void add(const TokenNews& other) {
    smallest = other.smallest < smallest ? other.smallest : smallest;
    largest = other.largest > largest ? other.largest : largest;
    hash += other.hash;
    differs |= other.differs;
  }
};
constexpr TokenNews kNoNews{INT64_MAX, INT64_MIN, 0, 0};

// Block `i` writes tokens of part `i % count` to `joined`, as int64, and what it says of them to `news[i]`.
int join_blocks(const TokenParts& parts);
template <typename T>
void join_tokens(const TokenParts& parts, int64_t* joined, TokenNews* news, cudaStream_t stream);

constexpr int64_t kPaddingToken = 0, kIgnoredLabel = -100;  // as in flash_attn_dualkv/data/batch.py

// A context, a response or the padding of a packed micro-batch.
struct PackedRun {
  int row, length;         // its rows
  int source;              // the token of the first of them, among those of all samples; the others follow it
  int position;            // of the first row in its sequence
  int multiplicity;        // sequences that each row stands for
  int node, parent;        // of the table; node is -1 for padding
  int sample;              // of a response; else -1
  int scored, scored_len;  // of a response: its place among the tokens of all responses in original order
  int first_row;           // of a response: the row that scores its first token
};

struct PackRowsArgs {
  static constexpr int kMostRuns = 88;  // of a launch
  const int64_t* tokens;                // of all samples, a prompt and then its response
  int64_t *input_ids, *position_ids, *labels, *multiplicity;     // (rows)
  int64_t *token_index, *targets, *padded_index, *jagged_index;  // (scored tokens)
  int64_t* jagged_offsets;                                       // (samples + 1)
  int* nodes;                                                    // (contexts and responses, kNodeColumns)
  int shift;             // prompt tokens in front of each response
  int unlabelled;        // last rows of a response without a label
  int longest_response;  // tokens
  int num_runs;
  PackedRun runs[kMostRuns];
};
static_assert(sizeof(TokenParts) <= 4000 && sizeof(PackRowsArgs) <= 4096);

void pack_rows(const PackRowsArgs& args, cudaStream_t stream);

}  // namespace dualkv
