// Tensor maps of keys and values.
#pragma once

#include <cuda.h>

#include "core/kv_regions.h"

namespace dualkv::sm90 {

struct KvMaps {
  CUtensorMap k, v;
};

// The one place where a region picks a map.
struct RegionMaps {
  KvMaps context, decoded;

  __device__ __forceinline__ const KvMaps& of(Region region) const {
    return region == Region::context ? context : decoded;
  }
};

}  // namespace dualkv::sm90
