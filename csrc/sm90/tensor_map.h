// SPDX-License-Identifier: BSD-3-Clause
// Tensor maps: how TMA finds a box of a packed (rows, heads, head_dim) tensor.
#pragma once

#include <cuda.h>

#include "params.h"

namespace dualkv::sm90 {

constexpr int kPanelCols = 64;  // one 128-byte swizzled row of 16-bit elements

// Map with boxes of `box_rows` rows by `box_heads` heads by kPanelCols columns, 128-byte swizzled.
// For a tensor without rows an empty map is returned, which must not be used.
template <typename T>
CUtensorMap make_tensor_map(const TensorView<const T>& view, int rows, int heads, int head_dim, int box_rows,
                            int box_heads = 1);

}  // namespace dualkv::sm90
