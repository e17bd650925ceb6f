// SPDX-License-Identifier: BSD-3-Clause
// The plan of a decoding step, made on the device from the block table alone.
#pragma once

#include <cuda_runtime_api.h>

#include "decode/kernel_params.h"

namespace dualkv {

struct DecodePlanArgs {
  DecodeRequests requests;
  int block_m, block_n;  // most rows of an item, and keys of a tile
  int heads_per_group;   // query heads of a KV head
  int blocks;            // that walk at a time, of each KV head
  DecodeSplits splits;
  // (pages): the first request and column with a page, of the step in the upper half. Entries of
  // earlier steps are smaller, so that nothing is cleared.
  unsigned long long* owners;
  unsigned* step;  // how many are done
  // (requests): whose first pages a request has too (-1: nobody's), and how many of them, as found
  int *parents, *shared_columns;
  int* forest;  // (kForestInts * requests)
  DecodeLists lists;

  // As given or found: an earlier request, or -1.
  DUALKV_HD int parent(int request) const {
    return clamp_int((requests.parents ? requests.parents : parents)[request], -1, request - 1);
  }
  DUALKV_HD int shared_pages(int request) const {
    const int* const found = requests.shared_pages ? requests.shared_pages : shared_columns;
    return clamp_int(found[request], 0, requests.table.columns);
  }
};

constexpr int kMostRequests = 4096;
constexpr int kForestInts = 18;  // numbers of each request of a forest

// Fills the lists. Three launches, one where parents are given, that overlap where the GPU can;
// no synchronisation, capturable.
void plan_decode(const DecodePlanArgs& args, cudaStream_t stream);

}  // namespace dualkv
