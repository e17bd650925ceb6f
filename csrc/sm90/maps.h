// SPDX-License-Identifier: BSD-3-Clause
// Tensor maps of keys and values, for boxes of a whole tile or of a slab of a border tile.
#pragma once

#include <cuda.h>

#include "core/nodes.h"

namespace dualkv::sm90 {

struct KvMaps {
  CUtensorMap k, v;
};

// Maps of both regions; the only place that picks one.
struct RegionMaps {
  KvMaps keys, decoded;

  __device__ __forceinline__ const KvMaps& of(Region region) const {
    return region == Region::keys ? keys : decoded;
  }
};

}  // namespace dualkv::sm90
