// Tensor maps: how the copy engine finds a box of a packed (rows, heads, head_dim) tensor.
#pragma once

#include <cuda.h>

#include "params.h"

namespace dualkv::sm90 {

constexpr int kPanelCols = 64;  // one 128-byte swizzled row of 16-bit elements

// The map of boxes of `box_rows` rows by `box_heads` heads by kPanelCols columns, 128-byte swizzled. A tensor without
// rows has no map: an empty one is returned, never to be used.
template <typename T>
CUtensorMap make_tensor_map(const TensorView<const T>& view, int rows, int heads, int head_dim, int box_rows,
                            int box_heads = 1);

}  // namespace dualkv::sm90
