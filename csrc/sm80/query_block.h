// What forward and dQ share: loading the KV tiles of a block's sequence.
#pragma once

#include "core/query_block.h"
#include "sm80/config.h"

namespace dualkv::sm80 {

// Starts loading the n-th K or V tile of the block's sequence.
template <class Config, typename T>
__device__ __forceinline__ void start_kv(uint32_t shared, const KvRegions<const T>& kv, const QueryBlock& work, int n,
                                         int head_dim, TensorView<const T> KvPair<const T>::* which) {
  const KvTile tile = kv_tile(work.segment, n, Config::kBlockN);
  const TensorView<const T>& view = kv.of(tile.region).*which;
  load_rows<typename Config::TileKv, Config::kBlockN, Config::kThreads>(shared, view.at(tile.row, work.kv_head),
                                                                        view.row_stride, 0, tile.valid, head_dim);
  ptx::cp_async_commit();
}

}  // namespace dualkv::sm80
