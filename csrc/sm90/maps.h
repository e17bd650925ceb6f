// Tensor maps of keys and values: of boxes of a whole tile, or of a slab of a border tile.
#pragma once

#include <cuda.h>

#include "core/nodes.h"

namespace dualkv::sm90 {

struct KvMaps {
  CUtensorMap k, v;
};

// The one place where a region picks a map.
struct RegionMaps {
  KvMaps keys, decoded;

  __device__ __forceinline__ const KvMaps& of(Region region) const {
    return region == Region::keys ? keys : decoded;
  }
};

}  // namespace dualkv::sm90
