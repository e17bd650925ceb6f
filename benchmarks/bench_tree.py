#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure attention over prefix trees against its peers, on the same tokens and in the same process.

    python benchmarks/bench_tree.py                                  # five trees of shapes.py
    python benchmarks/bench_tree.py --shape tree-comb --impls cudnn_flex flex_fa4
    python benchmarks/bench_layer.py --preset tree                   # the agentic tree through a layer of Qwen3-8B
    python benchmarks/trainers/bench_model.py --preset tree --rounds 1        # and through Qwen3-1.7B

    dualkv      every node stored once, one launch
    cudnn_flex  cuDNN Flex Attention with the tree's mask
    flex        FlexAttention with the tree's mask, on FlashAttention-4's kernels and on its own
    gathered    TRL's way: the keys and values of every node's path copied side by side by index_select, queries once
    flattened   the path of every leaf as a sequence of its own, in micro-batches of at most as many tokens as the tree
                has (256K where it has fewer); times are added, and the memory is that of the largest

TFLOP/s count visible (query, key) pairs of the tree, 4 H d operations per pair forward and 2.5 times that backward,
whatever an implementation computes. Times are medians of CUDA events.
"""

import sys

import command
from peers import kernel_implementations
from shapes import TREES

PRESETS = {
    "trees": tuple(f"tree-{name}" for name in TREES if name != "tiny"),
    "tiny": ("tree-tiny-H4-Hk2-d16",),
}
BENCHMARK = command.Benchmark("tree", __doc__ or "", PRESETS, kernel_implementations)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
