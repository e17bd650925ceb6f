#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure shared-prompt attention against its peers, on the same tokens and in the same process.

    python benchmarks/bench_kernel.py                            # the shapes of the README, and their like
    python benchmarks/bench_kernel.py --preset responses         # where responses are longer than their prompts
    python benchmarks/bench_kernel.py --preset trees             # prefix trees, those of shapes.py
    python benchmarks/bench_kernel.py --shape 28x16Kx2K --impls cudnn_flex deterministic

The work of every implementation is prompt self-attention and all responses. Of trees,

    dualkv      every node stored once, one launch
    cudnn_flex  cuDNN Flex Attention with the tree's mask
    flex        FlexAttention with the tree's mask, on FlashAttention-4's kernels and on its own
    gathered    TRL's way: the keys and values of every node's path copied side by side by index_select, queries once
    flattened   the path of every leaf as a sequence of its own, in micro-batches of at most as many tokens as the tree
                has (256K where it has fewer); times are added, and the memory is that of the largest

TFLOP/s count visible (query, key) pairs of the deduplicated micro-batch, 4 H d operations per pair forward and 2.5
times that backward, whatever an implementation computes. Times are medians of CUDA events. What compiles may take half
a minute a shape before it is measured.
"""

import sys

import command
from peers import kernel_implementations
from shapes import TREES

PRESETS = {
    "shared": ("28x16Kx2K", "28x4Kx2K", "16x8Kx131-2048", "32x5059x131-2048", "32x8Kx32-256", "8x16Kx131-2048"),
    "responses": (
        "4-groups-of-8x200x4K-16K", "8-groups-of-1x2Kx2K", "16-groups-of-8x256x131-2048", "8x1Kx131-2048",
        "16-groups-of-8x128x64-512", "32-groups-of-4x64x8-64",
    ),
    "causal": ("causal-1x16K", "causal-32x4K-16K", "causal-8x4K", "causal-128x387-2304"),
    "heads": (
        "28x4Kx2K-H8-Hk2", "28x4Kx2K-H4-Hk1", "28x16Kx2K-d64", "28x16Kx2K-H16-Hk4-d256", "causal-1x16K-H32-Hk32",
        "28x4Kx2K-H16-Hk16-d256",
    ),
    # gpt-oss, Gemma 3 and 2, DeepSeek-V3; and a long prompt with a window.
    "options": (
        "causal-8x8K-H64-Hk8-d64-sinks", "causal-8x8K-H64-Hk8-d64-w128-sinks", "causal-8x8K-H32-Hk16-w1K",
        "causal-8x8K-H16-Hk8-d256-c50", "causal-8x8K-H16-Hk8-d256-w4K-c50", "causal-8x8K-c50", "28x16Kx2K-w1K",
        "causal-8x8K-H16-Hk16-d192v128", "28x4Kx2K-H16-Hk16-d192v128",
    ),
    # Where launches, and the begin and end of blocks, are a large part.
    "small": (
        "causal-64x128-256", "causal-256x128-512", "causal-64x512-768", "causal-32x512-1K", "causal-8x2K",
        "32-groups-of-4x64x8-64-d64",
    ),
    "trees": tuple(f"tree-{name}" for name in TREES if name != "tiny"),
    "scaling": ("28x64Kx2K", "28x128Kx2K"),
    "tiny": (
        "4x96x24-H4-Hk2-d16", "2-groups-of-3x70x1-90-H4-Hk1-d16", "causal-1x128-H4-Hk4-d16", "tree-tiny-H4-Hk2-d16",
    ),
}  # fmt: skip
BENCHMARK = command.Benchmark("kernel", __doc__ or "", PRESETS, kernel_implementations)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
