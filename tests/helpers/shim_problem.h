// SPDX-License-Identifier: BSD-3-Clause
// A problem as the tests pass it to the shims.
#pragma once

#include "core/schedule.h"

struct Problem {
  const int* nodes;
  int num_nodes;
  int q_rows, key_rows, decoded_rows;
  int causal, window;  // window: negative for none
  int block_m, block_n;
  int heads;  // query heads of a KV head
  int num_kv_heads, num_sms;  // for the split into parts
  int reversed, head_major;  // direction and order of the walks
  const int *run_counts, *run_begins;  // or null
  int orders_dq;  // the list of blocks that wait for one another

  dualkv::NodeTable table() const {
    return {nodes, num_nodes, {q_rows, key_rows, decoded_rows}, {run_counts, run_begins}};
  }

  dualkv::Visibility sees() const { return {causal != 0, window < 0 ? dualkv::kNoWindow : window}; }

  dualkv::BackwardCapacities capacities() const {
    return dualkv::backward_capacities(table(), block_m, block_n, heads * num_kv_heads, num_kv_heads, num_sms);
  }
};
