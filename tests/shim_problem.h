// A problem as the tests pass it to the shims.
#pragma once

#include "core/schedule.h"

struct Problem {
  const int* segments;
  const int* groups;
  int num_segments, num_groups;
  int q_rows, context_rows, decoded_rows;
  int causal;
  int block_m, block_n;
  int heads;  // query heads of a KV head
  int num_kv_heads, num_sms;  // for the split into parts
  int reversed;  // direction of the walks
  const int *run_counts, *run_begins;  // or null

  dualkv::GroupLayout layout() const {
    return {segments,         groups, num_segments, num_groups, {q_rows, context_rows, decoded_rows},
            {run_counts, run_begins}};
  }

  dualkv::BackwardCapacities capacities() const {
    return dualkv::backward_capacities(layout(), block_m, block_n, heads * num_kv_heads, num_kv_heads, num_sms);
  }
};
