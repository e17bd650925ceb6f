// SPDX-License-Identifier: BSD-3-Clause
// The C interface of the kernel library: addresses, sizes and strides, no torch and no Python. The
// caller owns all memory, scratch included, and has checked shapes, element types and alignment;
// every function returns a status, and dualkv_error() says what went wrong.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DUALKV_API __attribute__((visibility("default")))

enum DualkvStatus { DUALKV_SUCCESS, DUALKV_INVALID_VALUE, DUALKV_FAILURE };

// 16-bit (rows, heads, head_dim) in device memory, the base on 16 bytes. Strides are in elements,
// multiples of 8 where the dimension is larger than 1; the last dimension is contiguous. Without
// rows nothing is read.
typedef struct {
  void* data;
  int64_t rows, heads, head_dim, row_stride, head_stride;
} DualkvTensor;

// flash_attn_dualkv/calls.py says what they mean.
typedef struct {
  double softmax_scale, softcap;
  int64_t window_left, mean_keys;
  int32_t causal, deterministic;
} DualkvOptions;

// A call of either direction. Some query and some key exist; `device` is the current one.
typedef struct {
  int32_t device, is_half;  // float16, or bfloat16
  void* stream;
  DualkvTensor q, k, v, k_decoded, v_decoded;  // the last two without rows where there are none
  const int32_t* nodes;                        // (num_nodes, 8), contiguous
  int64_t num_nodes;
  DualkvOptions options;
} DualkvCall;

typedef struct {
  DualkvTensor out;    // (rows, heads, head_dim of v), contiguous
  float* lse;          // (heads, rows)
  const float* sinks;  // (heads), or null
} DualkvForward;

typedef struct {
  DualkvTensor dout, out;
  const float* lse;   // (heads, rows)
  const float* dlse;  // the same, or null
  DualkvTensor dq, dk, dv, dk_decoded, dv_decoded;  // contiguous
  const float* sinks;  // (heads), where their gradient is wanted
  float* dsinks;       // the same, or null
} DualkvBackward;

// Bytes of scratch of a call; contents need not outlive it.
DUALKV_API int dualkv_forward_scratch(const DualkvCall* call, int64_t* bytes);
DUALKV_API int dualkv_backward_scratch(const DualkvCall* call, int64_t* bytes);

// Launch the kernels of a call on its stream.
DUALKV_API int dualkv_forward(const DualkvCall* call, const DualkvForward* tensors, void* scratch);
DUALKV_API int dualkv_backward(const DualkvCall* call, const DualkvBackward* tensors, void* scratch);

// Node tables, (rows, 8) each; csrc/kernels/kernels.h describes the offsets.
DUALKV_API int dualkv_sequence_nodes(int32_t device, void* stream, const int32_t* cu_seqlens_q,
                                     const int32_t* cu_seqlens_k, const int32_t* cu_seqlens_context,
                                     const int32_t* cu_seqs_per_context, int64_t num_sequences, int64_t num_groups,
                                     int64_t context_rows, int32_t* nodes);
DUALKV_API int dualkv_tree_nodes(int32_t device, void* stream, const int32_t* cu_seqlens, const int32_t* parents,
                                 int64_t num_nodes, int32_t* nodes);

// Decoding over pages. A plan's memory belongs to the caller, starts as zeros and stays where it
// is; max_* and all that follow them are fixed for its life, the rest is of one step. Pointers in
// device memory; cu_seqlens_q (null: one query each), boundaries, and parents with shared_pages
// (null: the plan looks for them) may be null.
typedef struct {
  const int32_t* block_table;  // (requests, columns): pages of a request, in order
  int64_t table_stride, requests, columns, queries;  // queries: rows of q
  const int32_t* seqlens;       // (requests): keys, those of the queries included
  const int32_t* cu_seqlens_q;  // (requests + 1)
  const int32_t* boundaries;    // (requests): where each request's keys are cut into two nodes
  // (requests): an earlier request or -1, and how many of its first pages the request has, too.
  const int32_t *parents, *shared_pages;
  // max_keys: of a request. split_keys: whole tiles of so many make a split; 0: nothing is divided,
  // -1: core/plan_decode.h says how many. head_dim_v: below head_dim, values are the first columns
  // of the keys, of one KV head.
  int64_t max_requests, max_keys, max_queries, num_pages, page_size, num_heads, num_kv_heads, head_dim, head_dim_v,
      split_keys;
  void* memory;
} DualkvDecodePlan;

// K or V of a cache, (pages, page_size, num_kv_heads, head_dim) in any order of memory but for the
// last dimension, which is contiguous; the base on 16 bytes, strides in elements, multiples of 8.
// Values in the keys are not read by themselves.
typedef struct {
  const void* data;
  int64_t page_stride, row_stride, head_stride;
} DualkvPages;

typedef struct {
  DualkvTensor q, out;  // (queries, num_heads, head_dim or head_dim_v)
  DualkvPages k, v;
  float* lse;          // (num_heads, queries)
  const float* sinks;  // (num_heads), or null
  int32_t is_half;
  DualkvOptions options;
} DualkvDecode;

DUALKV_API int dualkv_decode_plan_bytes(int32_t device, const DualkvDecodePlan* plan, int64_t* bytes);
// Makes the plan of a step on the stream.
DUALKV_API int dualkv_decode_plan(int32_t device, void* stream, const DualkvDecodePlan* plan);
// Attention of a layer.
DUALKV_API int dualkv_decode(int32_t device, void* stream, const DualkvDecodePlan* plan, const DualkvDecode* call);

// Scores of rows of logits, (rows, columns) in device memory, on any address of an element, strides
// in elements; the columns are contiguous. Whatever else there is has one number a row.
enum DualkvElement { DUALKV_BFLOAT16, DUALKV_FLOAT16, DUALKV_FLOAT32 };
typedef struct {
  const void* data;
  int64_t rows, columns, row_stride;
  int32_t element;         // DualkvElement
  const int64_t* targets;  // columns
  double temperature;      // above 0: the logits are divided by it
} DualkvLogits;

typedef struct {
  float *normalizer, *chosen, *entropy;  // logsumexp, logit of the target, and entropy; the last may be null
  double elsewhere;                      // `chosen` of a target that is none of the columns
} DualkvScores;

// Gradients of chosen - normalizer and of entropy, as gradients of the logits. normalizer and
// entropy may be those of a vocabulary of which the columns are a part.
typedef struct {
  const float *normalizer, *d_logps;
  const float *entropy, *d_entropy;  // the second may be null, then nobody reads the first
  void* d_logits;                    // contiguous, elements as of the logits
} DualkvScoreGradient;

DUALKV_API int dualkv_score_rows(int32_t device, void* stream, const DualkvLogits* logits, const DualkvScores* scores);
DUALKV_API int dualkv_score_rows_gradient(int32_t device, void* stream, const DualkvLogits* logits,
                                          const DualkvScoreGradient* gradient);

// Texts, valid until the thread's next call of a function that gives one.
DUALKV_API const char* dualkv_error(void);    // of the thread's last failure
DUALKV_API const char* dualkv_version(void);  // of the package that the library was built with
// What a call of these shapes runs and why: lines of choice, value and reason, divided by tabs.
// `gpu`: a row of core/tuning.h; null: what DUALKV_GPU names, or the device.
DUALKV_API int dualkv_explain_plan(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v,
                                   int64_t rows, int64_t num_nodes, const DualkvOptions* options, int32_t device,
                                   const char* gpu, const char** text);
// Lines of name and value, divided by tabs: archs, ptx, cuda, and head dims by family.
DUALKV_API const char* dualkv_build_info(void);
// Lines of a kernel's name and how often it was launched, divided by tabs.
DUALKV_API const char* dualkv_launch_counts(void);

#ifdef __cplusplus
}
#endif
