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

BENCHMARK = command.Benchmark("kernel", __doc__ or "", kernel_implementations)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
