// SPDX-License-Identifier: BSD-3-Clause
// The plan of a decoding step, made on the device from the block table alone.
#pragma once

#include <cuda_runtime_api.h>

#include "decode_params.h"

namespace dualkv {

struct DecodePlanArgs {
  DecodeRequests requests;
  int block_n;          // keys of a tile
  int heads_per_group;  // query heads of a KV head
  // (pages): the first request and column with a page, of the step in the upper half. Entries of
  // earlier steps are smaller, so that nothing is cleared.
  unsigned long long* owners;
  unsigned* step;
  // (requests), scratch of one update
  int *parents, *shared_tiles, *places;
  int* scratch;  // (8 * requests)
  DecodeLists lists;
};

// Fills the lists. Four launches at most, no synchronisation, capturable.
void plan_decode(const DecodePlanArgs& args, cudaStream_t stream);

}  // namespace dualkv
