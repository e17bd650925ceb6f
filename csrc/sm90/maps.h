// Tensor maps of keys and values.
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
